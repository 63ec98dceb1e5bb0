"""python -m benchmarks.gpu: one GPU, bf16 with fp32 master: ours against plain PyTorch and FSDP2.

Needs only torch and transformers beside this repository. Every case is a fork of a process that has imported them and
no more, so that none inherits memory or compiled code. Rank 0 of 8 and of 64 runs through a `fake` process group: what
it holds and what the host does are real, what it would wait for the others is not; its tokens/s are no claim about
many GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engines import Timed, build_engine, model_config
from zeroexp.config.keys import ModelConfig
from zeroexp.measure.peak_flops import datasheet
from zeroexp.models.loss import loss_sum
from zeroexp.models.module import build_model
from zeroexp.process import world as worlds
from zeroexp.process.world import World

RESULTS = Path("outputs/bench/gpu.json")
CASE_SECONDS = 600
NUM_WARMUP = 5
PRELOADED = ["benchmarks.engines", "transformers.models.llama.modeling_llama"]

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    engine: str  # plain, or a name of benchmarks.engines.ENGINES
    model: str  # of conf/model, or llama_8b: that shape with as many layers as fit
    device: str = "cuda"
    world_size: int = 1  # more than one: rank 0 of a fake group
    compiled: bool = False
    batch_size: int = 8
    seq_len: int = 1024
    num_steps: int = 20


def all_cases(device: str, model: str | None, num_steps: int) -> list[Case]:
    base = Case("plain", model or "smollm2_360m", device, num_steps=num_steps)
    if device == "cpu":
        base = replace(base, batch_size=1, seq_len=32)
    models = (
        [base] if model else [base, replace(base, model="llama_8b", batch_size=1, seq_len=4096)]
    )
    engines = ["plain", "fsdp2", "zero2_buffer", "zero3_buffer"]
    alone = [replace(case, engine=engine) for case in models for engine in engines]
    of_many = [
        replace(case, engine=engine, world_size=world_size)
        for case in models
        for world_size in (8, 64)
        for engine in engines[1:]
    ]
    compiled = [replace(case, compiled=True) for case in alone if device == "cuda"]
    return alone + of_many + compiled


def measure(case: Case) -> dict[str, Any]:
    """Tokens/s, MFU, peak bytes allocated, and the part of a step in which the host was launching work."""
    world = _join(case)
    config = _model(case)
    strategy = build_engine(
        case.engine, config, precision="bf16_master", world=world, compiled=case.compiled
    )
    words = config.hf_config["vocab_size"]
    tokens = torch.randint(words, (case.batch_size, case.seq_len + 1), device=world.device)
    for _ in range(min(NUM_WARMUP, case.num_steps)):
        _step(strategy, tokens)
    _synchronize(world)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, host_seconds = [], []
    for _ in range(case.num_steps):
        start = time.perf_counter()
        _step(strategy, tokens)
        host_seconds.append(time.perf_counter() - start)
        _synchronize(world)
        seconds.append(time.perf_counter() - start)
    worlds.leave_process_group()
    return _numbers(case, config, world, seconds, host_seconds)


def _numbers(
    case: Case, config: ModelConfig, world: World, seconds: list[float], host_seconds: list[float]
) -> dict[str, Any]:
    step_seconds = statistics.median(seconds)
    num_tokens = case.batch_size * case.seq_len
    peak_flops = _peak_flops() if world.device.type == "cuda" else None
    flops = num_tokens * flops_per_token(config, case.seq_len)
    return {
        "num_layers": config.hf_config["num_hidden_layers"],
        "step_seconds": step_seconds,
        "tokens_per_second": num_tokens / step_seconds,
        "mfu": flops / step_seconds / peak_flops if peak_flops else None,
        "host_share": statistics.median(host_seconds) / step_seconds,  # near 1: launch-bound
        "peak_bytes": torch.cuda.max_memory_allocated() if world.device.type == "cuda" else None,
    }


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Forward and backward: 6 per weight that multiplies, 12 per layer, width and position attended (PaLM, app. B)."""
    shape = config.hf_config
    module = build_model(config, seed=0, device="meta").module
    weights = sum(parameter.numel() for parameter in module.parameters())
    embedding = shape["vocab_size"] * shape["hidden_size"]
    multiplying = weights if shape["tie_word_embeddings"] else weights - embedding
    return 6 * multiplying + 12 * shape["num_hidden_layers"] * shape["hidden_size"] * seq_len


def _model(case: Case) -> ModelConfig:
    if case.model != "llama_8b":
        return model_config(case.model)
    whole = ModelConfig(name="llama_8b", hf_config=dict(LLAMA_8B))
    return replace(whole, hf_config={**LLAMA_8B, "num_hidden_layers": _layers_that_fit(whole)})


def _layers_that_fit(config: ModelConfig) -> int:
    """At 20 bytes a parameter (bf16 weight and gradient, fp32 master, moments and gradient), in 4/5 of the memory.

    At most 8: the weights are drawn on the CPU, 22 layers in more than a minute.
    """
    built = build_model(config, seed=0, device="meta")
    total = sum(parameter.numel() for parameter in built.module.parameters())
    layer = sum(p.numel() for p in built.module.get_submodule(built.blocks[0]).parameters())
    num_layers = config.hf_config["num_hidden_layers"]
    free = 0.8 * torch.cuda.get_device_properties(0).total_memory / 20 - (
        total - num_layers * layer
    )
    return min(8, num_layers, math.floor(free / layer))


def _join(case: Case) -> World:
    if case.world_size == 1:
        return worlds.join_process_group(device=case.device)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world_size)
    return World(0, case.world_size, torch.device(case.device), "fake")


def _step(strategy: Timed, tokens: torch.Tensor) -> None:
    with strategy.microbatch(last=True):
        strategy.backward(_loss(strategy, tokens))
    strategy.step(drain=True)
    strategy.zero_grad()


def _loss(strategy: Timed, tokens: torch.Tensor) -> torch.Tensor:
    labels = tokens[:, 1:]
    return loss_sum(strategy.model(input_ids=tokens[:, :-1]), labels, "causal") / labels.numel()


def _synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def _peak_flops() -> float | None:
    return datasheet(torch.cuda.get_device_name(), torch.bfloat16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", help="one of conf/model instead of the two")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "--device cuda: torch sees no GPU here; --device cpu --model tiny tries the code"
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for case in all_cases(args.device, args.model, args.steps):
        rows.append(_run_apart(case, context))
        print(json.dumps(rows[-1]), flush=True)
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if any("error" in row for row in rows) else 0


def _run_apart(case: Case, context: ForkServerContext) -> dict[str, Any]:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_and_send, args=(case, sender))
    process.start()
    sender.close()
    try:
        row = receiver.recv() if receiver.poll(CASE_SECONDS) else {"error": "no answer in time"}
    except EOFError:
        process.join()
        row = {"error": f"died with exit code {process.exitcode}"}
    process.kill()
    process.join()
    return {**asdict(case), **row}


def _measure_and_send(case: Case, sender: Connection) -> None:
    try:
        row = measure(case)
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    sender.send(row)


if __name__ == "__main__":
    sys.exit(main())
