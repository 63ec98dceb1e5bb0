"""A deep model costs what a line says: its blocks are alike, so two depths tell what each further block adds.

Whether it is a line is not assumed. A third depth is measured as well, and if a number misses the line (the owners of
whole parameters, for one, change with the depth), the model is measured at its own depth. So is one of which some
blocks are frozen, as blocks 20 to 29 are by `*layers.2?.*`: no other depth has as many of them. And so is one whose
deeper blocks are of other kinds than the first ones, as every tenth may be: a block's kind is what it is made of. So is
one of which every so-many-th block is recomputed (`train.recompute_every`).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import is_dataclass
from typing import Any, TypeVar

from torch import nn

from zeroexp.config.families import MODELS
from zeroexp.config.keys import Config
from zeroexp.plan.form_of_config import build_on_meta

Numbers = TypeVar("Numbers")
Kind = frozenset[tuple[str, Any]]  # of a block: what it is made of

LEAST_DEPTH = 4  # fewer blocks never fill what is in flight, beside those gathered ahead
PERIOD = 2  # blocks of two kinds may take turns
ROUNDING_BYTES = 1  # a rank's share of a sum over ranks is rounded down to whole bytes


def measure_at_depth(
    config: Config,
    measure: Callable[[Config], list[Numbers]],
    check: Callable[[Config], list[Numbers]] | None = None,
    choose: Callable[[Numbers, Numbers], Numbers] = lambda numbers, deep: numbers,
) -> tuple[list[Numbers], tuple[int, ...]]:
    """Return what `measure` finds for the config, and the depths at which it ran.

    check: measures the third depth, and may return fewer: the first ones of `measure`, or none. None: it measures all.
    choose: takes from the numbers of one depth those that count at the config's own, which it is given
    extrapolated.
    """
    depth = depth_of(config)
    first = LEAST_DEPTH + (config.strategy.prefetch or 0)
    first += (depth - first) % PERIOD
    near = (first, first + PERIOD, first + 2 * PERIOD)
    numbered = config.train.recompute_every is not None
    if depth <= sum(near) or numbered or _tells_blocks_apart(config.model.freeze):
        return measure(config), (depth,)
    times = (depth - first) // PERIOD
    if not _more_blocks_are_of_known_kinds(config, near, times):
        return measure(config), (depth,)
    one, two = (measure(with_depth(config, each)) for each in near[:2])
    three = (check or measure)(with_depth(config, near[2]))
    near = near if three else near[:2]
    deep = [_extrapolate(a, b, times) for a, b in zip(one, two, strict=True)]
    one, two, three = (
        [choose(each, d) for each, d in zip(numbers, deep, strict=False)]
        for numbers in (one, two, three)
    )
    expected = [_extrapolate(a, b, 2) for a, b in zip(one, two, strict=True)]
    if not all(_agree(a, b) for a, b in zip(expected, three, strict=False)):
        return measure(config), (*near, depth)
    return [_extrapolate(a, b, times) for a, b in zip(one, two, strict=True)], near


def _tells_blocks_apart(patterns: Sequence[str]) -> bool:
    """Tell whether patterns of names may match one block and not another, which differ in a number alone."""
    return any(letter.isdigit() or letter in "?[" for letter in "".join(patterns))


def _more_blocks_are_of_known_kinds(config: Config, near: Sequence[int], times: int) -> bool:
    """Tell whether the deep model has as many blocks of each kind as two shallow ones let expect."""
    deep, one, two = map(_kinds_of_blocks, (config, *(with_depth(config, at) for at in near[:2])))
    return all(deep[k] == one[k] + times * (two[k] - one[k]) for k in {*deep, *one, *two})


def _kinds_of_blocks(config: Config) -> Counter[Kind]:
    model = build_on_meta(config)
    return Counter(kinds_of(model.module, model.blocks))


def kinds_of(module: nn.Module, blocks: Sequence[str]) -> list[Kind]:
    """Return the kind of each of the named blocks: what it is made of, but for its number in the list."""
    made = [_made_of(module.get_submodule(name)) for name in blocks]
    numbers = {
        name
        for name in (made[0] if made else ())
        if all(block.get(name) == index for index, block in enumerate(made))
    }
    return [frozenset(b.items() - {(n, b[n]) for n in numbers}) for b in made]


def _made_of(block: nn.Module) -> dict[str, Any]:
    """Return the classes and plain settings of all modules inside, and the shapes of parameters and buffers."""
    values: dict[str, Any] = {}
    for prefix, module in block.named_modules():
        values[prefix] = type(module).__qualname__
        plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
        values |= {f"{prefix}:{name}": value for name, value in plain.items()}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        values[f"{name}()"] = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    return values


def depth_of(config: Config) -> int:
    """Return the number of blocks that the config names, or 0 where it leaves it to the library."""
    family = MODELS[config.model.family]
    return int(getattr(config.model, family.shape).get(family.depth, 0))


def with_depth(config: Config, depth: int) -> Config:
    family = MODELS[config.model.family]
    config = deepcopy(config)
    getattr(config.model, family.shape)[family.depth] = depth
    return config


def _extrapolate(one: Any, two: Any, times: int) -> Any:
    """Return `one + times * (two - one)` for every number inside; what is no number is taken from `one`."""
    if is_dataclass(one) and not isinstance(one, type):
        return type(one)(**_extrapolate(vars(one), vars(two), times))
    if isinstance(one, dict):
        return {k: _extrapolate(one.get(k, 0), two.get(k, 0), times) for k in {**one, **two}}
    if not isinstance(one, int | float):
        return one
    number = one + times * (two - one)
    # Less is waited for per block the deeper a model is, and a line would go on below nothing.
    return max(0.0, number) if isinstance(number, float) else number


def _agree(one: Any, two: Any) -> bool:
    """Tell whether all whole numbers inside agree; others are seconds, which are never as exact."""
    if is_dataclass(one) and not isinstance(one, type):
        return _agree(vars(one), vars(two))
    if isinstance(one, dict):
        return all(_agree(one.get(k, 0), two.get(k, 0)) for k in {**one, **two})
    return not isinstance(one, int) or abs(one - two) <= ROUNDING_BYTES
