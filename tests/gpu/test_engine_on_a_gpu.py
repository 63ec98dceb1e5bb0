"""The engine on a GPU: it never waits for it within a step, a step is one CUDA graph, and ranks that share it agree.

Ranks over NCCL need a GPU each. Two that share one send their tensors through gloo, by the same calls to the backend.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from zeroexp.config.keys import ModelConfig
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.models.loss import loss_sum
from zeroexp.models.module import build_model
from zeroexp.process.world import RankInfo, World, environment_of_rank, joined_process_group
from zeroexp.zero.options import Dtypes, Options

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no CUDA device"),
]

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
SAMPLES, SEQ_LEN, STEPS = 4, 33, 5
LAYOUTS = ("parameter", "tensor", "buffer")
CASES = list(product(STAGES, LAYOUTS))
FP32 = Dtypes(torch.float32, torch.float32, torch.float32)
BF16_MASTER = Dtypes(torch.bfloat16, torch.float32, torch.float32)


def alone(function: Callable[[World], Any]) -> Any:
    """Call it in a process of its own, the only rank of a world over NCCL."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_call_alone, (function,))


def _call_alone(function: Callable[[World], Any]) -> Any:
    with joined_process_group(device="cuda") as world:
        return function(world)


def on_a_shared_gpu(
    function: Callable[[World], Any], folder: Path, num_ranks: int = 2
) -> list[Any]:
    """Call it in `num_ranks` processes that share one GPU; return what each returned."""
    with multiprocessing.get_context("spawn").Pool(num_ranks) as pool:
        # Each waits for the others, so that no process takes two.
        calls = [(function, RankInfo(rank, num_ranks, 0), folder) for rank in range(num_ranks)]
        return pool.starmap(_call_on_a_shared_gpu, calls, chunksize=1)


def _call_on_a_shared_gpu(function: Callable[[World], Any], place: RankInfo, folder: Path) -> Any:
    os.environ |= environment_of_rank(place)
    os.environ["ZEROEXP_RENDEZVOUS"] = f"file://{folder}/meeting"
    torch.cuda.set_device(0)
    with joined_process_group() as world:
        return function(replace(world, device=torch.device("cuda", 0)))


def build(world: World, stage: str, layout: str, dtypes: Dtypes, **adamw: Any) -> Sharded:
    config = ModelConfig(name="llama", hf_config=dict(LLAMA))
    built = build_model(config, seed=0, device=world.device)
    return Sharded(
        built.module,
        blocks=built.blocks,
        stage=STAGES[stage],
        param_groups=[{"params": list(built.module.parameters())}],
        optimizer_factory=lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True, **adamw),
        world=world,
        dtypes=dtypes,
        max_grad_norm=1.0,
        options=Options(layout=layout, transport="native"),
    )


def samples_of(step: int) -> torch.Tensor:
    """Return tokens [samples, positions + 1] of a step, int64 on the GPU; they can be learnt."""
    start = torch.arange(SAMPLES).view(-1, 1) * 7 + step
    return ((start + 3 * torch.arange(SEQ_LEN + 1)) % LLAMA["vocab_size"]).cuda()


def share_of_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    labels = tokens[:, 1:]
    return loss_sum(model(input_ids=tokens[:, :-1]), labels, "causal") / (SAMPLES * SEQ_LEN)


def run_step(strategy: Sharded, microbatches: list[torch.Tensor]) -> torch.Tensor:
    """Train one step; return this rank's share of the loss, still on the GPU."""
    loss = torch.zeros((), device=microbatches[0].device)
    for index, tokens in enumerate(microbatches):
        with strategy.microbatch(last=index == len(microbatches) - 1):
            part = share_of_loss(strategy.model, tokens)
            strategy.backward(part)
        loss += part.detach()
    strategy.step()
    strategy.zero_grad()
    return loss


def build_plain(world: World, stage: str, layout: str, dtypes: Dtypes) -> Sharded:
    """Return an engine of a model whose own code asks for no value, as some of transformers does."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 160), nn.GELU(), nn.Linear(160, 64)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(97, 64), *blocks, nn.Linear(64, 97)).to(world.device)
    return Sharded(
        model,
        blocks=["1", "2", "3"],
        stage=STAGES[stage],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
        world=world,
        dtypes=dtypes,
        max_grad_norm=1.0,
        options=Options(layout=layout, transport="native"),
    )


def waits_of_steps(world: World) -> dict[str, str]:
    """Return where steps waited for the GPU, by case."""
    waits = {}
    for (stage, layout), dtypes in product(CASES, (FP32, BF16_MASTER)):
        strategy = build_plain(world, stage, layout, dtypes)
        loss_of = partial(functional.cross_entropy, reduction="sum")
        tokens = samples_of(0)
        for step in range(5):
            # The first steps compare the ranks, and try what is refused.
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            try:
                for last in (False, True):
                    with strategy.microbatch(last=last):
                        logits = strategy.model(tokens[:, :-1])
                        strategy.backward(loss_of(logits.flatten(0, 1), tokens[:, 1:].flatten()))
                strategy.step()
                strategy.zero_grad()
            except RuntimeError:
                waits[f"{stage} {layout} {dtypes.compute}"] = traceback.format_exc()[-1500:]
                break
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return waits


def test_no_step_waits_for_the_gpu():
    assert alone(waits_of_steps) == {}


def captured_and_eager(world: World) -> dict[str, tuple[list[float], list[float]]]:
    """Return by stage the losses of steps replayed from a CUDA graph, and of the same steps run one by one."""
    return {
        stage: (losses_after_a_warm_up(world, stage, True), losses_after_a_warm_up(world, stage))
        for stage in STAGES
    }


def losses_after_a_warm_up(world: World, stage: str, captures: bool = False) -> list[float]:
    strategy = build(world, stage, "buffer", BF16_MASTER, capturable=True)
    tokens = samples_of(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            run_step(strategy, [tokens])
    torch.cuda.current_stream().wait_stream(stream)
    if not captures:
        return [run_step(strategy, [tokens]).item() for _ in range(STEPS)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run_step(strategy, [tokens])
    losses = []
    for _ in range(STEPS):
        graph.replay()
        losses.append(loss.item())
    return losses


def test_a_whole_step_is_one_cuda_graph():
    for stage, (captured, eager) in alone(captured_and_eager).items():
        assert captured == pytest.approx(eager, rel=1e-3), stage
        assert captured[-1] < captured[0], stage


def plain_losses(dtype: torch.dtype = torch.float32) -> list[float]:
    """Return the losses of one process without any engine."""
    built = build_model(
        ModelConfig(name="llama", hf_config=dict(LLAMA)), seed=0, device=torch.device("cuda")
    )
    module = built.module.to(dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(STEPS):
        loss = share_of_loss(module, samples_of(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_by_case(world: World) -> dict[tuple[str, str], list[float]]:
    """Return this rank's shares of the losses of every stage in every layout."""
    half = SAMPLES // world.size
    losses = {}
    for stage, layout in CASES:
        strategy = build(world, stage, layout, FP32)
        shares = []
        for step in range(STEPS):
            mine = samples_of(step)[world.rank * half :][:half]
            shares.append(run_step(strategy, list(mine.split(1))).item())
        losses[stage, layout] = shares
    return losses


def test_two_ranks_on_one_gpu_equal_one_process(tmp_path):
    plain = plain_losses()
    first, second = on_a_shared_gpu(losses_by_case, tmp_path)
    for case, shares in first.items():
        losses = [sum(both) for both in zip(shares, second[case], strict=True)]
        assert losses == pytest.approx(plain, rel=1e-4), case
    assert plain[-1] < 0.9 * plain[0]
