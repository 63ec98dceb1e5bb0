"""`python -m benchmarks.building llama_7b --ranks 64`: what one rank of many allocates to build its share of a model.

The rank is real and alone: its peers do not exist, and collectives return at once. It draws every weight, keeps its own
part, and, with `--step`, takes one step on a few tokens, after which gradients and moments of the optimizer exist.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from benchmarks.engines import model_config
from zeroexp.config.keys import OptimizerConfig
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.measure.memory import AllocationMeter, bytes_by_kind, count_cpu_allocations
from zeroexp.models.loss import loss_sum
from zeroexp.models.module import BuiltModel, build_deferred
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import Options

GIB = 2**30
NUM_TOKENS = 8


def main() -> None:
    arguments = parse_arguments()
    if told := count_cpu_allocations():
        raise SystemExit(told)
    with fake_world(arguments.rank, arguments.ranks) as world:
        tell_of(world, arguments)


def tell_of(world: World, arguments: argparse.Namespace) -> None:
    began, meter = time.perf_counter(), AllocationMeter(world.device)
    built = build_deferred(model_config(arguments.model), seed=0)
    num_bytes = sum(p.nbytes for p in built.module.parameters())
    strategy = build(built, world)
    tell("model, whole", num_bytes)
    tell("building, most at once", meter.peak_bytes() or 0)
    tell("at rest after it", sum(bytes_by_kind(strategy.model_states()).values()))
    print(f"{'built in':28}{time.perf_counter() - began:8.1f} s")
    if arguments.step:
        meter = AllocationMeter(world.device)
        step(strategy)
        tell("step, most at once", meter.peak_bytes() or 0)
        for kind, held in bytes_by_kind(strategy.model_states()).items():
            tell(f"{kind} after it", held)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a name of conf/model")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rank", type=int, default=0, help="the one that is real")
    parser.add_argument("--step", action="store_true", help=f"also train on {NUM_TOKENS} tokens")
    return parser.parse_args()


def build(built: BuiltModel, world: World) -> Sharded:
    """ZeRO-3 by buffer, in float32, over the backend's own collectives."""
    config = OptimizerConfig()
    return Sharded(
        built.module,
        blocks=built.blocks,
        stage=STAGES["zero3"],
        param_groups=parameter_groups(built.module, config, built.blocks),
        optimizer_factory=optimizer_factory(config),
        world=world,
        options=Options(transport="native"),
        values=built.values,
    )


def step(strategy: Sharded) -> None:
    tokens = torch.arange(NUM_TOKENS + 1).view(1, -1)
    with strategy.microbatch(last=True):
        output: Any = strategy.model(input_ids=tokens[:, :-1])
        strategy.backward(loss_sum(output, tokens[:, 1:], "causal") / NUM_TOKENS)
    strategy.step(drain=True)


def tell(what: str, num_bytes: int) -> None:
    print(f"{what:28}{num_bytes / GIB:8.3f} GiB", flush=True)


if __name__ == "__main__":
    main()
