"""How often a step gathers each unit: the real engine runs on tensors without memory, and its gathers are counted.

The order in which modules are listed does not tell. Modules below which all is frozen have no backward, those of a
block that is recomputed run again, and one that nobody calls is never gathered. Sizes, layout and the number of ranks
change no count, so one rank of two tells for all.

[Note: depth] The blocks between the first and the last ones are used alike, so few of a deep model run:

    blocks of the model   0  1  2  3  ...  29  30  31
    blocks that run       0  1  2              3   4       what block 2 does, blocks 2 to 29 do

[Note: values] A model may ask for values that are not there, as `model.family=moe` asks which experts tokens chose.
Then closed_forms.py takes its units to be gathered as those of a plain model.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroexp.comm.base import GatherPart, Pending, ReducePart, Sent
from zeroexp.comm.collectives import TRANSPORTS
from zeroexp.comm.native import Native
from zeroexp.config.keys import Config
from zeroexp.config.vocabulary import words_of_data
from zeroexp.cut.chunk import Chunk
from zeroexp.engines.build import build_strategy
from zeroexp.models.checkpointing import checkpoint_as_configured
from zeroexp.models.loss import loss_sum
from zeroexp.models.module import BuiltModel, allow_fake_tensors, build_model, materialize
from zeroexp.plan.block_kinds import kinds_of
from zeroexp.plan.no_data import NoData
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World
from zeroexp.sharding.grouping import outer_names

# Parameter -> gathers in a step of one microbatch, and in one of two.
Counts = tuple[Counter[str], Counter[str]]
_counted: WeakKeyDictionary[nn.Module, dict[str, Counts | None]] = WeakKeyDictionary()


def gathers_of_step(
    config: Config, model: BuiltModel, units: Sequence[Sequence[Chunk]], accumulation: int
) -> list[int] | None:
    """Return the gathers of each unit in a step of `accumulation` microbatches, or None where they can not be counted.

    They are counted once for each `model` and schedule; the config names all that the engine would settle.
    """
    strategy, train = config.strategy, config.train
    schedule = (strategy.unit, strategy.keep, strategy.overlap, strategy.prefetch)
    key = repr((schedule, train.activation_checkpointing, train.recompute_every))
    of_model = _counted.setdefault(model.module, {})
    if key not in of_model:
        of_model[key] = _count(config)
    if (counts := of_model[key]) is None:
        return None
    one, two = counts
    names = (unit[0].members[0].name if unit else "" for unit in units)
    return [one[name] + (accumulation - 1) * (two[name] - one[name]) for name in names]


def _count(config: Config) -> Counts | None:
    """Count by few blocks, or by all where that fails; None where the model can not run without values."""
    turns = 1 + (config.strategy.prefetch or 0)
    for leaves_out in (config.train.recompute_every is None, False):
        model = build_model(config.model, seed=0, device="meta", vocab_size=words_of_data(config))
        ran = leave_out_alike(model, turns) if leaves_out else {}
        try:
            one, two = _run(config, model)
        except Exception:  # of code of others, see [Note: values]
            continue
        return _repeated(one, ran), _repeated(two, ran)
    return None


def _run(config: Config, model: BuiltModel) -> Counts:
    """Run steps of one microbatch and of two, after one that finds the order."""
    world = World(0, 2, torch.device("cpu"), "fake")
    counts: list[Counter[str]] = []
    with allow_fake_tensors(config.model), FakeTensorMode(), _counting() as gathers:
        materialize(model.module, "cpu")
        checkpoint_as_configured(model.module, model.blocks, config.train)
        strategy = build_strategy(config, model, world)
        for num_microbatches in (1, 1, 2):
            gathers.clear()
            for index in range(num_microbatches):
                with strategy.microbatch(last=index == num_microbatches - 1):
                    microbatch = NoData(config).microbatch()
                    output = strategy.model(**microbatch.inputs)
                    strategy.backward(loss_sum(output, microbatch.labels, config.model.task))
            strategy.step()
            strategy.zero_grad()
            counts.append(gathers.copy())
    _, one, two = counts
    return one, two


class MovesNothing(Native):
    """A transport that counts the gathers of each parameter. It needs no process group, so that a rank may use it."""

    def __init__(self, world: World, moves: Moves, gathers: Counter[str]) -> None:
        super().__init__(world, moves)
        self._gathers = gathers

    def all_gather(self, parts: Sequence[GatherPart], offer: int | None, what: str) -> Sent:
        self._gathers.update(member.name for part in parts for member in part.chunk.members)
        return Pending([]), 0

    def reduce_scatter(self, parts: Sequence[ReducePart], what: str) -> Sent:
        return Pending([]), 0

    def all_reduce(self, parts: Sequence[ReducePart], what: str) -> Sent:
        return Pending([]), 0

    def sum(self, value: Tensor, what: str) -> Pending:
        return Pending([])


@contextmanager
def _counting() -> Generator[Counter[str]]:
    """Let engines that are built inside use `MovesNothing`."""
    chosen, gathers = TRANSPORTS["auto"], Counter[str]()
    TRANSPORTS["auto"] = lambda world, moves: MovesNothing(world, moves, gathers)
    try:
        yield gathers
    finally:
        TRANSPORTS["auto"] = chosen


# -- [Note: depth] ---------------------------------------------------------------------------------


def leave_out_alike(model: BuiltModel, turns: int) -> dict[str, str]:
    """Leave most of the alike blocks out of the model: all but `1 + turns` at its start and `turns` at its end.

    Return, for each block of the whole model, the block that runs for it; nothing if all blocks are left. A multiple of
    `turns` is left out, so that the last units find what they would find in the whole model.
    """
    names = [*model.blocks]
    holder = names[0].rpartition(".")[0] if names else ""
    listed = model.module.get_submodule(holder)
    between = kinds_of(model.module, names)[turns:-turns]
    num_left_out = (len(between) - 1) // turns * turns
    if len({*between}) != 1 or num_left_out == 0 or not isinstance(listed, nn.ModuleList):
        return {}
    if [*listed] != [model.module.get_submodule(name) for name in names]:
        return {}
    outer, _, key = holder.rpartition(".")
    first = turns + 1
    left = [*listed[:first], *listed[first + num_left_out :]]
    setattr(model.module.get_submodule(outer), key, nn.ModuleList(left))
    del model.blocks[len(left) :]
    runs = [*range(first), *[turns] * num_left_out, *range(first, len(left))]
    return {name: names[index] for name, index in zip(names, runs, strict=True)}


def _repeated(counts: Counter[str], ran: Mapping[str, str]) -> Counter[str]:
    """Return the counts of the whole model, each block with those of the one that `ran` for it."""
    if not ran:
        return counts
    inside: dict[str, dict[str, int]] = {}
    for name, num in counts.items():
        block = next((outer for outer in outer_names(name) if outer in ran), "")
        inside.setdefault(block, {})[name.removeprefix(block)] = num
    found = Counter(inside.get("", {}))
    for block, other in ran.items():
        found.update({block + rest: num for rest, num in inside.get(other, {}).items()})
    return found
