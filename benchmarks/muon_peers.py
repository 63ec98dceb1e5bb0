"""python -m benchmarks.muon_peers [--model NAME] [--ranks N]: Muon beside the two ways that plain torch has for it.

fsdp2_gather    FSDP2; momentum rests in shards, and each rank has all of each matrix's update by `full_tensor()`, in
                bfloat16, and its step by torch.optim.Muon
layerwise       DDP; each rank has whole matrices (and whole parameters of AdamW), steps them by torch.optim.Muon and
                broadcasts them, as in Megatron's layer-wise distributed optimizer
ours            the three ways of `strategy.matrix_step` and the layouts, over the same sockets

Equality is that of weights with one process of torch's two optimizers, after NUM_STEPS steps on the same tokens. Bytes
are the payload of TCP, whoever sends it: gloo's reduce-scatter sends an all-reduce's. The times of a busy machine say
nothing and are not shown.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.engines import SEQ_LEN, Timed, model_config
from benchmarks.links import Link
from benchmarks.muon_loops import CONFIG, Fsdp2Gather, Layerwise, Peer
from benchmarks.ranks import Ranks, Spec, StepRunner, tokens_of
from zeroexp.config.keys import ModelConfig
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.models.loss import loss_sum
from zeroexp.models.module import BuiltModel, build_model
from zeroexp.process.world import World
from zeroexp.zero.options import Options

NUM_STEPS = 3


def ours(stage: str, options: Options, model: BuiltModel, world: World) -> Timed:
    return Sharded(
        model.module,
        blocks=model.blocks,
        stage=STAGES[stage],
        param_groups=parameter_groups(model.module, CONFIG, model.blocks),
        optimizer_factory=optimizer_factory(CONFIG),
        world=world,
        options=replace(options, transport="gloo"),
    )


WAYS: dict[str, Callable[[BuiltModel, World], Any]] = {
    "fsdp2_gather": Fsdp2Gather,
    "layerwise": Layerwise,
    "zero3 buffer, gather": partial(ours, "zero3", Options("buffer", matrix_step="gather")),
    "zero3 buffer, alltoall": partial(ours, "zero3", Options("buffer")),
    "zero3 parameter, owned": partial(ours, "zero3", Options("parameter")),
    "zero1 parameter, owned": partial(ours, "zero1", Options("parameter")),
}


def build_muon(name: str, model: ModelConfig, *, world: World, **_: Any) -> Any:
    return WAYS[name](build_model(model, seed=0, device=world.device), world)


class WeightsToo(StepRunner):
    """A turn answers what it cost, and on rank 0 the weights, as NumPy's."""

    def turn(self, order: int) -> Any:
        turn, strategy = super().turn(order), self._strategy
        shown = strategy.gathered() if isinstance(strategy, Sharded) else nullcontext()
        weights: dict[str, Any] = {}
        with shown:
            for name, p in strategy.model.named_parameters():
                whole = p.full_tensor() if isinstance(p, DTensor) else p
                weights[name.removeprefix("module.")] = whole.detach().numpy().copy()
        return turn, weights if self._world.rank == 0 else {}


def one_process(model: str, num_ranks: int) -> dict[str, Tensor]:
    """Return the weights after the same steps of torch's two optimizers on whole gradients, added in rank order."""
    alone = Peer(build_model(model_config(model), seed=0), World(0, 1, torch.device("cpu"), "gloo"))
    for _ in range(NUM_STEPS):
        for tokens in (tokens_of(model, rank) for rank in range(num_ranks)):
            output = alone.model(input_ids=tokens[:, :-1])
            alone.backward(loss_sum(output, tokens[:, 1:], "causal") / (SEQ_LEN * num_ranks))
        alone.step()
        alone.zero_grad()
    return {name: p.detach() for name, p in alone.inner.named_parameters()}


def measure(way: str, model: str, num_ranks: int, expected: dict[str, Tensor]) -> tuple[float, ...]:
    """Return how far the weights are at most, the MB sent in a step and the peak, of the rank that has most."""
    ranks = Ranks(
        Spec(way, model, "fp32", num_ranks), Link(), partial(WeightsToo, build=build_muon)
    )
    try:
        ranks.wait_until_ready()
        answers = ranks.turn(NUM_STEPS)
    finally:
        ranks.stop()
    turns, weights = [turn for turn, _ in answers], answers[0][1]
    apart = max(float((torch.from_numpy(weights[n]) - w).abs().max()) for n, w in expected.items())
    sent, peak = (max(t.wire_bytes or 0 for t in turns), max(t.peak_bytes or 0 for t in turns))
    return apart, sent / 1e6, peak / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small")
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    expected = one_process(arguments.model, arguments.ranks)
    today = datetime.datetime.now(datetime.UTC).date()
    print(f"{today}, {arguments.model}, {arguments.ranks} ranks, torch {torch.__version__}\n")
    print("| way | from one process | sent a step, MB | peak, MB |\n|---|---:|---:|---:|")
    for way in WAYS:
        apart, sent, peak = measure(way, arguments.model, arguments.ranks, expected)
        print(f"| {way} | {apart:.1e} | {sent:.1f} | {peak:.1f} |", flush=True)


if __name__ == "__main__":
    main()
