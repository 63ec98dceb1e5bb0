"""python -m benchmarks.growth [--quick] [--plant leak|buffer]: what a step costs the host as work grows, beside FSDP2.

Layers, parameters and ranks grow one at a time, on one rank of a world whose other ranks do not exist. For each axis:

    milliseconds   of a core, median of the steps
    operations     that torch dispatches
    bytes          allocated at the fullest moment of a step beyond what rests
    objects        that Python holds more of after 300 steps, for each step

A cost c grows as c ~ n^e: e is fitted over all points, with its 95 % interval. Where a fixed cost hides the growth, or
everything grows as e = 1, what one more layer adds tells more: it is the rise between the last two points. The command
ends with exit code 1 where that is more than LIMITS times FSDP2's (and what EXPLAINED adds), where the interval of the
time's exponent lies above FSDP2's, or where objects stay. `--plant` puts in what it has to find: ten objects a step
that are never freed, or a copy of each gathered unit that stays until the step ends.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroexp.comm.collectives import Collectives
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.engines.torch_fsdp2 import TorchFSDP2
from zeroexp.interface.strategy import Strategy
from zeroexp.measure.memory import AllocationMeter, count_cpu_allocations
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import Dtypes, Options

FLOAT32 = Dtypes(torch.float32, torch.float32, torch.float32)
CPU = torch.device("cpu")
WIDTH = 16
LAYERS, LINEARS, RANKS = 16, 2, 8  # where another axis grows
# Points of each axis; those of --quick come first. A step of few layers is fullest in backward, where its largest unit
# is gathered, one of many in the update. FSDP2 goes from one to the other at 55 layers and our layout buffer at 46, so
# that a rise of bytes between 32 and 64 is no layer's: the last two points of --quick lie above.
AXES = {
    "layers": ([8, 64, 128], [512]),
    "parameters": ([32, 128, 512], [2048, 8192]),
    "ranks": ([8, 64, 512], [4096]),
}
NUM_STEPS, NUM_STEPS_OF_OBJECTS = 5, 300
# Most that a rise may be of FSDP2's; and objects a step, of which caches that fill late may make a few in all.
LIMITS = {"operations": 1.0, "bytes": 1.1}
MOST_OBJECTS = 0.5
# Operations that one more parameter costs beyond that: autograd detaches twice what a saved-tensor hook hands back, the
# hook detaches the activation, which would else hold its graph (zero/saved_views.py, [Note: saved tensors]), and in
# layout tensor the sum of each gradient is a tensor of its own. FSDP2 has none of these, and a view more.
EXPLAINED = {
    ("zero3_buffer", "parameters", "operations"): 1.0,
    ("zero3_parameter", "parameters", "operations"): 1.0,
    ("zero3_tensor", "parameters", "operations"): 3.2,
}
NOISE = 0.02  # of a cost: what moves it once, as another form of a message does, is no growth


@dataclass(frozen=True)
class Size:
    """What one engine trains. Each layer has as many linear maps, without bias."""

    layers: int = LAYERS
    linears: int = LINEARS
    ranks: int = RANKS

    @classmethod
    def of(cls, axis: str, value: int) -> Size:
        return {
            "layers": cls(layers=value),
            "parameters": cls(linears=value // LAYERS),
            "ranks": cls(ranks=value),
        }[axis]

    def make_model(self) -> nn.Sequential:
        torch.manual_seed(0)
        linears = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.layers * self.linears)]
        starts = range(0, len(linears), self.linears)
        return nn.Sequential(*(nn.Sequential(*linears[i : i + self.linears]) for i in starts))


Costs = dict[str, float]


class Dispatched(TorchDispatchMode):
    """Counts the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def num_collectives(self) -> int:
        return sum(num for name, num in self.counts.items() if name.startswith("c10d."))


def common(model: nn.Module, world: World) -> dict[str, Any]:
    """What every engine is given. All children but the first and the last are blocks, and these two with the root."""
    return {
        "blocks": [str(index) for index in range(1, len(list(model.children())) - 1)],
        "param_groups": [{"params": list(model.parameters())}],
        "optimizer_factory": lambda groups: torch.optim.AdamW(groups, foreach=True),
        "max_grad_norm": 1.0,
        "world": world,
    }


def fsdp2(stage: str, model: nn.Module, world: World, dtypes: Dtypes = FLOAT32) -> Strategy:
    keeps = {"reshard_after_forward": stage == "zero3"}
    return TorchFSDP2(model, dtypes=dtypes, **keeps, **common(model, world))


def ours(
    stage: str,
    layout: str,
    model: nn.Module,
    world: World,
    dtypes: Dtypes = FLOAT32,
    **options: Any,
) -> Sharded:
    chosen = Options(layout=layout, **{"transport": "native", **options})
    settings = common(model, world)
    return Sharded(model, stage=STAGES[stage], options=chosen, dtypes=dtypes, **settings)


ENGINES: dict[str, Callable[[nn.Module, World], Strategy]] = {
    "fsdp2": lambda model, world: fsdp2("zero3", model, world),
    **{
        f"zero3_{layout}": lambda model, world, layout=layout: ours("zero3", layout, model, world)
        for layout in ("buffer", "tensor", "parameter")
    },
}


def take_step(strategy: Strategy, inputs: Tensor) -> None:
    with strategy.microbatch(last=True):
        strategy.backward(strategy.model(inputs).float().square().mean())
    strategy.step()
    strategy.zero_grad()


def costs_of(engine: str, size: Size) -> Costs:
    """What a step of this engine costs, once its caches are filled."""
    with fake_world(0, size.ranks) as world:
        strategy = ENGINES[engine](size.make_model(), world)
        inputs = torch.ones(2, WIDTH)
        for _ in range(3):
            take_step(strategy, inputs)
        gc.collect()
        allocations = AllocationMeter(CPU)
        resting = allocations.peak_bytes()
        take_step(strategy, inputs)
        most = allocations.peak_bytes()
        with Dispatched() as dispatched:
            take_step(strategy, inputs)
        seconds = [_core_seconds(strategy, inputs) for _ in range(NUM_STEPS)]
        assert most is not None and resting is not None
        return {
            "milliseconds": 1e3 * statistics.median(seconds),
            "operations": dispatched.counts.total(),
            "bytes": most - resting,
        }


def _core_seconds(strategy: Strategy, inputs: Tensor) -> float:
    began = time.process_time()
    take_step(strategy, inputs)
    return time.process_time() - began


def objects_a_step(engine: str, num_steps: int = NUM_STEPS_OF_OBJECTS) -> float:
    """How many more objects Python holds after each step."""
    with fake_world(0, RANKS) as world:
        strategy = ENGINES[engine](Size(layers=4).make_model(), world)
        inputs = torch.ones(2, WIDTH)
        for _ in range(20):
            take_step(strategy, inputs)
        before = _num_objects()
        for _ in range(num_steps):
            take_step(strategy, inputs)
        return (_num_objects() - before) / num_steps


def _num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@dataclass(frozen=True)
class Growth:
    """How one cost grows along an axis."""

    exponent: float
    interval: tuple[float, float]  # 95 %
    rise: float  # of the cost for one more of what grows, between the last two points
    rise_in_noise: float  # one that adds NOISE of the cost between these points


def growth_of(sizes: Sequence[int], costs: Sequence[float]) -> Growth:
    from scipy import stats  # half a second, and tests use what stands above

    fit: Any = stats.linregress([math.log(n) for n in sizes], [math.log(c) for c in costs])
    width = fit.stderr * float(stats.t.ppf(0.975, len(sizes) - 2))
    between = sizes[-1] - sizes[-2]
    rise, noise = (costs[-1] - costs[-2]) / between, NOISE * costs[-1] / between
    return Growth(fit.slope, (fit.slope - width, fit.slope + width), rise, noise)


def too_steep(
    axis: str, engine: str, mine: dict[str, Growth], theirs: dict[str, Growth]
) -> Iterator[str]:
    """Yield a line for each cost that rises more than LIMITS times FSDP2's, and for time of a larger exponent."""
    for cost, limit in LIMITS.items():
        allowed = limit * theirs[cost].rise + EXPLAINED.get((engine, axis, cost), 0.0)
        rise, bound = mine[cost].rise, allowed + mine[cost].rise_in_noise
        if rise > bound:
            its = f"FSDP2 {theirs[cost].rise:.1f}"
            yield f"{engine}: {rise:.1f} {cost} for one more of {axis}, {its}"
    one, other = mine["milliseconds"], theirs["milliseconds"]
    if one.interval[0] > other.interval[1]:
        grows = f"milliseconds grow as {axis}^{one.exponent:.2f}"
        yield f"{engine}: {grows}, FSDP2's as {axis}^{other.exponent:.2f}"


def plant(what: str) -> None:
    """Put in what has to be found."""
    kept: list[Any] = []
    if what == "leak":
        step = Sharded.step

        def leaking(self: Sharded, **options: Any) -> Tensor:
            kept.extend([] for _ in range(10))
            return step(self, **options)

        Sharded.step = leaking  # pyright: ignore[reportAttributeAccessIssue]
    else:
        gather, zero = Collectives.all_gather, Sharded.zero_grad

        def keeping(self: Collectives, parts: Any, *args: Any, **options: Any) -> Any:
            kept.extend(part.full.clone() for part in parts)
            return gather(self, parts, *args, **options)

        def forgetting(self: Sharded, set_to_none: bool = True) -> None:
            kept.clear()
            zero(self, set_to_none)

        Collectives.all_gather, Sharded.zero_grad = keeping, forgetting


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the smaller points alone")
    parser.add_argument("--plant", choices=["leak", "buffer"], help="put in what is to be found")
    parser.add_argument("--axis", choices=AXES, action="append", help="the default is all")
    parser.add_argument(
        "--engine", choices=ENGINES, action="append", help="beside FSDP2; the default is all"
    )
    chosen = parser.parse_args()
    if (problem := count_cpu_allocations()) is not None:
        raise SystemExit(problem)
    if chosen.plant:
        plant(chosen.plant)
    engines = list(dict.fromkeys(["fsdp2", *(chosen.engine or ENGINES)]))
    problems = [line for axis in chosen.axis or AXES for line in grow(axis, engines, chosen.quick)]
    for engine in engines:
        objects = objects_a_step(engine)
        print(f"{engine}: {objects:+.2f} objects a step")
        if objects > MOST_OBJECTS and engine != "fsdp2":
            problems.append(f"{engine}: {objects:.1f} objects more after each step")
    print("\n".join(problems) or "nothing grows faster than with FSDP2")
    return 1 if problems else 0


def grow(axis: str, engines: Sequence[str], quick: bool) -> Iterator[str]:
    """Print a table of this axis, and yield what grows too fast."""
    few, more = AXES[axis]
    sizes = few if quick else [*few, *more]
    print(f"| {axis} | cost | {' | '.join(map(str, sizes))} | exponent (95 %) | one more adds |")
    print("|---" * (len(sizes) + 4) + "|")
    found: dict[str, dict[str, Growth]] = {}
    for engine in engines:
        costs = [costs_of(engine, Size.of(axis, size)) for size in sizes]
        found[engine] = {
            cost: growth_of(sizes, [each[cost] for each in costs]) for cost in costs[0]
        }
        for cost, growth in found[engine].items():
            values = " | ".join(f"{each[cost]:,.4g}" for each in costs)
            low, high = growth.interval
            fitted = f"{growth.exponent:.2f} ({low:.2f} to {high:.2f})"
            print(f"| {engine} | {cost} | {values} | {fitted} | {growth.rise:,.3g} |", flush=True)
        yield from too_steep(axis, engine, found[engine], found["fsdp2"])


if __name__ == "__main__":
    sys.exit(main())
