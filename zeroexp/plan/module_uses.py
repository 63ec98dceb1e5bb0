"""How often a microbatch uses each module, and where its backward comes, by passes on the device `meta`.

A model may use one block several times (ALBERT), some of these without gradients (HRM), or recompute it by checkpoints
of its own or the config's: engines gather it for each use.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from zeroexp.config.keys import Config
from zeroexp.data.synthetic import width_of
from zeroexp.models.checkpointing import checkpoint_as_configured, recomputed_blocks
from zeroexp.models.module import BuiltModel, patched_for_fake_tensors, without_backward
from zeroexp.zero.backward_task import NO_TASK, current_task, has_ended
from zeroexp.zero.grouping import Group, outer_names
from zeroexp.zero.schedule import tensors_in

# Tokens by which short passes differ, and of the one that tells whether modules take chunks of more.
FEW_TOKENS, MANY_TOKENS = 4, 256


class Use(NamedTuple):
    """A use of a module by the model's forward."""

    name: str  # of the module, dotted
    has_graph: bool  # whether autograd recorded it
    has_backward: bool
    # Gathers of a module that is freed after each use: for its backward, and if backward runs it again before.
    in_backward: int


# By module, and what else decides: the length and kind of what it is given, and what recomputes.
_found: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], list[Use] | None]] = (
    WeakKeyDictionary()
)


def uses_in_forward(config: Config, model: BuiltModel, units: Sequence[Group]) -> list[Use]:
    """Return the uses of modules in the order in which they end; `model` is on the device `meta`.

    units: the root first. Of a model that asks for values each of these is used once, the root last.
    """
    recomputed = recomputed_blocks(model.blocks, config.train)
    found = _found.setdefault(model.module, {})
    given = (
        config.data.seq_len,
        config.data.task,
        *recomputed,
        None,
        *config.train.recompute_except,
    )
    if given not in found:
        with _recomputing(config, model, recomputed):
            found[given] = _uses_by_length(config, model.module)
    if (uses := found[given]) is not None:
        return uses
    return _listed(model, units, recomputed)


@contextmanager
def _recomputing(config: Config, model: BuiltModel, recomputed: Sequence[str]) -> Generator[None]:
    """Let blocks recompute as in a run."""
    blocks = [model.module.get_submodule(name) for name in recomputed]
    own = [vars(block).get("forward") for block in blocks]
    checkpoint_as_configured(model.module, model.blocks, config.train)
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


def _listed(model: BuiltModel, units: Sequence[Group], recomputed: Sequence[str]) -> list[Use]:
    """Return one use of each unit.

    The unit that a block uses last is there in its backward already, which is what makes the block recompute.
    """
    alone = without_backward(model.module)
    root, *others = units
    uses: list[Use] = []
    for unit, following in zip_longest(others, others[1:]):
        has_backward = not alone.issuperset(unit.parameters)
        inside = {*outer_names(unit.name)} & {*outer_names(following.name if following else "")}
        again = not inside.isdisjoint(recomputed)
        uses.append(Use(unit.name, True, has_backward, has_backward + again))
    return [*uses, Use(root.name, True, True, 1)]


def _uses_by_length(config: Config, module: nn.Module) -> list[Use] | None:
    """Return the uses by all tokens, by passes of few where these tell: those of a recurrent model would take minutes.

    Modules that take tokens one by one are used as often more for each few tokens more. Chunks of more than the many
    tokens are not seen.
    """
    most, uses_of = config.data.seq_len, partial(_uses_of, config, module)
    times, rest = divmod(most, FEW_TOKENS)
    if times > 3:
        few, more = (uses_of(num * FEW_TOKENS + rest) for num in (1, 2))
        if few == more:
            many = uses_of(min(most, MANY_TOKENS), has_backward=False)
            return few if _names(few) == _names(many) else uses_of(most)
        if few and more and _extended(few, more, 2) == uses_of(3 * FEW_TOKENS + rest):
            return _extended(few, more, times - 1)
    return uses_of(most)


def _extended(few: list[Use], more: list[Use], times: int) -> list[Use]:
    """Return the fewer uses, with what the longer pass has more of them so often."""
    at = next(
        (i for i, pair in enumerate(zip(few, more, strict=False)) if pair[0] != pair[1]), len(few)
    )
    return few[:at] + more[at : at + len(more) - len(few)] * times + few[at:]


def _names(uses: list[Use] | None) -> list[str] | None:
    return None if uses is None else [each.name for each in uses]


def _uses_of(
    config: Config, module: nn.Module, num_tokens: int, *, has_backward: bool = True
) -> list[Use] | None:
    shape = (1, num_tokens)
    if config.data.task == "regression":
        inputs = {"vectors": torch.empty(*shape, width_of(config.model), device="meta")}
    else:
        inputs = {"input_ids": torch.empty(shape, dtype=torch.int64, device="meta")}
    passed = _Pass(module)
    hooks = [
        register_module_forward_pre_hook(passed.before_forward),
        register_module_forward_hook(passed.after_forward, always_call=True),
    ]
    try:
        with warnings.catch_warnings(action="ignore"), patched_for_fake_tensors(config.model):
            with torch.set_grad_enabled(has_backward):
                output = module(**inputs)
            if has_backward:
                getattr(output, "logits", output).sum().backward()
    except Exception:  # whatever code of others does without values
        return None
    finally:
        for hook in hooks:
            hook.remove()
        module.zero_grad()
    return passed.uses


class _Pass:
    """A forward and backward in which each module counts as if it were gathered alone, see zero/schedule.py."""

    def __init__(self, module: nn.Module) -> None:
        modules = cast(Iterator[tuple[str, nn.Module]], module.named_modules())
        self._names = {each: name for name, each in modules}
        self.uses: list[Use] = []
        self._places: dict[str, list[int]] = {}  # of uses without a backward so far
        self._tick = 0
        self._began: dict[str, list[int]] = {}  # ticks of forwards that run
        self._gathered: dict[str, int] = {}  # in backward; by module, the backward that gathered it
        self._forward_of: dict[str, int] = {}  # tick at which the forward began whose backward runs

    def before_forward(self, module: nn.Module, _inputs: object) -> None:
        if (name := self._names.get(module)) is None:
            return
        self._tick += 1
        self._began.setdefault(name, []).append(self._tick)
        if current_task() != NO_TASK:
            self._free([each for each, task in self._gathered.items() if has_ended(task)])
            self._gather(name, self._last_place(name))

    def after_forward(self, module: nn.Module, _inputs: object, output: object) -> None:
        if (name := self._names.get(module)) is None:
            return
        self._tick += 1
        began, place = self._began[name].pop(), None
        if current_task() == NO_TASK:
            place = len(self.uses)
            self.uses.append(Use(name, torch.is_grad_enabled(), False, 0))
            self._places.setdefault(name, []).append(place)
        elif name not in self._forward_of:
            self._free([name])
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                report = partial(self._before_backward, name, place, began, self._tick)
                tensor.register_hook(report)  # pyright: ignore[reportUnknownMemberType]

    def _before_backward(
        self, name: str, place: int | None, began: int, ended: int, _gradient: torch.Tensor
    ) -> None:
        later = [each for each, tick in self._forward_of.items() if tick > ended]
        self._free(later)
        self._forward_of[name] = began
        place = self._last_place(name) if place is None else place
        self._gather(name, place)
        self.uses[place] = self.uses[place]._replace(has_backward=True)

    def _last_place(self, name: str) -> int:
        """Return the last use of forward that had no backward yet."""
        places = self._places[name]
        while len(places) > 1 and self.uses[places[-1]].has_backward:
            places.pop()
        return places[-1]

    def _gather(self, name: str, place: int) -> None:
        if name not in self._gathered:
            self._gathered[name] = current_task()
            use = self.uses[place]
            self.uses[place] = use._replace(in_backward=use.in_backward + 1)

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            self._gathered.pop(name, None)
            self._forward_of.pop(name, None)
