"""Find in which order a model uses its units: it runs once forward and backward, on tensors without memory.

The order in which modules are listed does not tell. LLaMA's norms run first and are listed last; modules below which
all is frozen have no backward; a block that is recomputed runs again before its backward.

[Note: values] A model may ask for values that are not there, as `model.family=moe` asks which experts tokens chose.
Then its units are taken to run in the order in which they are listed.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroexp.config.keys import Config
from zeroexp.config.vocabulary import words_of_data
from zeroexp.models.checkpointing import checkpoint_as_configured
from zeroexp.models.loss import loss_sum
from zeroexp.models.module import BuiltModel, allow_fake_tensors, build_model, materialize
from zeroexp.plan.alike_blocks import leave_out_alike, repeated
from zeroexp.plan.gather_counts import Event, Use, listed_order
from zeroexp.plan.no_data import NoData
from zeroexp.sharding.grouping import group_parameters
from zeroexp.sharding.hooks import tensors_in

_known: WeakKeyDictionary[nn.Module, dict[tuple[str, int], list[Use]]] = WeakKeyDictionary()


def uses_of(config: Config, model: BuiltModel, unit: str, names: Sequence[str]) -> list[Use]:
    """Return what happens to the units in one microbatch; it is found once for each `model`.

    unit: model | block | module, of which `names` are the units, the root's first.
    """
    known = _known.setdefault(model.module, {})
    train = config.train
    key = unit, train.activation_checkpointing and (train.recompute_every or 1)
    if key not in known:
        known[key] = _find(config, unit, names)
    return known[key]


def _find(config: Config, unit: str, names: Sequence[str]) -> list[Use]:
    """Run few blocks, or all where that fails or misses a unit."""
    index = {name: i for i, name in enumerate(names)}
    for leaves_out in (True, False) if config.train.recompute_every is None else (False,):
        try:
            found = _run(config, unit, leaves_out=leaves_out)
        except Exception:  # of code of others, see [Note: values]
            continue
        if not leaves_out or {name for _, name in found} == set(names):
            return [Use(event, index[name]) for event, name in found]
    return listed_order(len(names))


def _run(config: Config, unit: str, *, leaves_out: bool) -> list[tuple[Event, str]]:
    """Run one microbatch of the configured model and return what happens to its units."""
    model = build_model(config.model, seed=0, device="meta", vocab_size=words_of_data(config))
    module, recorder = model.module, _Recorder()
    for group in group_parameters(module, model.blocks, unit):
        recorder.attach(group.name, group.module)
    checkpoint_as_configured(module, model.blocks, config.train)
    alike = leave_out_alike(module, model.blocks) if leaves_out else []
    with allow_fake_tensors(config.model), FakeTensorMode():
        materialize(module, "cpu")
        microbatch = NoData(config).microbatch()
        loss = loss_sum(module(**microbatch.inputs), microbatch.labels, config.model.task)
        forward = recorder.take()
        loss.backward()
    return [*repeated(forward, alike), *repeated(recorder.take(), alike, backward=True)]


@dataclass
class _Progress:
    """How far a unit has come, as in `UnitProgress` of sharding/schedule.py."""

    first: int  # tick at which its first forward began
    # Ticks at which forwards began that still run, and at which the one began whose backward runs.
    running: list[int] = field(default_factory=list[int])
    began: int | None = None
    closed: bool = False


class _Recorder:
    """This object records when a schedule would gather units and free them; sharding/schedule.py says why then."""

    def __init__(self) -> None:
        self._uses: list[tuple[Event, str]] = []
        self._units: dict[str, _Progress] = {}
        self._tick = 0

    def take(self) -> list[tuple[Event, str]]:
        """Return what was recorded since the last call."""
        taken, self._uses = self._uses, []
        return taken

    def attach(self, name: str, module: nn.Module) -> None:
        def before(_module: nn.Module, _args: Any) -> None:
            self._before_forward(name)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            reached = partial(self._before_backward, name, *self._after_forward(name))
            for tensor in tensors_in(output):
                if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                    tensor.register_hook(reached)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)

    def _before_forward(self, name: str) -> None:
        self._tick += 1
        self._units.setdefault(name, _Progress(self._tick)).running.append(self._tick)
        self._record(Event.MAKE_READY, name)

    def _after_forward(self, name: str) -> tuple[int, int]:
        self._tick += 1
        unit = self._units[name]
        began = unit.running.pop()
        if not unit.running and unit.began is None:
            self._record(Event.AFTER_FORWARD, name)
        return began, self._tick

    def _before_backward(self, name: str, began: int, ended: int, _gradient: Tensor) -> None:
        for other, unit in self._units.items():
            closes = unit.first > ended and not unit.closed
            if closes or (unit.began is not None and unit.began > ended):
                self._record(Event.AFTER_BACKWARD, other)
                unit.began, unit.closed = None, unit.closed or closes
        unit = self._units[name]
        if unit.closed:
            return
        if unit.began is None:
            self._record(Event.MAKE_READY, name)
        unit.began = began

    def _record(self, event: Event, name: str) -> None:
        self._uses.append((event, name))
