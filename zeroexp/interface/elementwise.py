"""Test on small tensors whether the user's optimizer is correct on pieces, before it gets the real parameters.

An engine hands the optimizer what this rank holds: pieces of matrices, or some of the parameters. That trains the same
model only if the optimizer treats each element independently (`cut`), or at least each parameter independently
(`shared`). No optimizer declares this, so it is tested: the optimizer does the same steps on whole tensors, on
one-dimensional pieces of them, and on half of the tensors at a time, and the results are compared.

The trial resembles the training: it has as many groups with the same options, and each group has a pair of tensors for
every number of dimensions that its parameters have. Sides are as long as the real ones, up to a limit above the sizes
at which optimizers begin to factor matrices. (The test misses an optimizer that treats matrices as a whole only after
many steps and keeps no state for it before.)
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zeroexp.interface.strategy import OptimizerFactory

NUM_STEPS = 3  # estimates made from two steps take effect in the third
LONGEST_SIDE, FEW_GROUPS = 130, 4
SHORT_SIDE = 20  # for tensors with more than two dimensions, and for all if there are many groups
# The tolerance is a fraction of the largest distance that an element moves. Fused kernels round the last elements of a
# piece differently, by 1e-6 of that distance; an optimizer that is wrong on pieces is wrong by a tenth or more.
TOLERANCE = 1e-3
LEAST_RATE = 1e-3  # a warm-up begins with a rate of 0, which would move nothing


def refuse_unless_elementwise(
    factory: OptimizerFactory,
    groups: Sequence[Mapping[str, Any]],
    *,
    family: str,
    cut: bool,
    shared: bool,
) -> None:
    """Raise ValueError, with the remedy, if the optimizer would be wrong on what ranks hold.

    groups: the user's param_groups over real parameters, which are only inspected. family: the layout's name, for the
    message. cut: masters are one-dimensional pieces. shared: ranks hold different masters. The factory is called up
    to four times; the states of the random generators are restored afterwards.
    """
    if not (cut or shared):
        return
    factory = _in_training(factory)
    trials = [_Trial(group, _longest_side(groups)) for group in groups]
    with _random_states_kept(trials):
        whole = _run(factory, trials, _wholes)
        name = type(whole.optimizer).__name__
        if shared and not _same_apart(factory, trials, whole):
            why = f"{name} lets the update of one parameter depend on others"
            remedy = "it needs all parameters on one rank: use strategy ddp or another optimizer"
            raise ValueError(_refusal(factory, trials, whole, f"{why}: {remedy}"))
        if cut and not _same_cut(factory, trials, whole):
            why = f"{name} updates whole matrices, but strategy cuts them (layout {family})"
            remedy = "use the layout parameter"
            raise ValueError(_refusal(factory, trials, whole, f"{why}: {remedy}"))


def _in_training(factory: OptimizerFactory) -> OptimizerFactory:
    """Call `train()`, as the user's loop will, of an optimizer that steps in this mode alone (ScheduleFree)."""

    def make(groups: Any) -> Optimizer:
        optimizer = factory(groups)
        if callable(train := getattr(optimizer, "train", None)):
            train()
        return optimizer

    return make


def try_out(factory: OptimizerFactory, groups: Sequence[Mapping[str, Any]]) -> None:
    """Make the optimizer and step it a few times on small tensors. Raises ValueError if it can not do that."""
    trials = [_Trial(group, SHORT_SIDE) for group in groups]
    with _random_states_kept(trials):
        _run(factory, trials, _wholes)


# -- what is stepped --------------------------------------------------------------------------------


class _Trial:
    """The options of one param_group, and the tensors to try with them: two for each number of dimensions."""

    def __init__(self, group: Mapping[str, Any], longest_side: int) -> None:
        self.options = {key: value for key, value in group.items() if key != "params"}
        largest: dict[int, Tensor] = {}
        for parameter in (p for p in group["params"] if p.requires_grad and p.numel()):
            first = largest.setdefault(parameter.ndim, parameter)
            largest[parameter.ndim] = max(first, parameter, key=Tensor.numel)
        self.tensors = [
            _values(p, longest_side, seed=seed) for p in largest.values() for seed in (1, 2)
        ]


_Parts = list[slice | None]  # elements of a flattened tensor; None: all of it, in its shape
# What one optimizer gets of the tensors: the parts of tensor `number` of a trial.
_Choose = Callable[[int, Tensor], _Parts]


def _wholes(_number: int, _tensor: Tensor) -> _Parts:
    return [None]


def _half(number: int, _tensor: Tensor, *, which: int) -> _Parts:
    """One of the two tensors for each number of dimensions."""
    return [None] if number % 2 == which else []


def _pieces(_number: int, tensor: Tensor) -> _Parts:
    numel = tensor.numel()
    border = numel // 3 + 1  # rarely falls on a boundary between two rows
    return [slice(0, border), slice(border, numel)] if border < numel else [slice(0, numel)]


def _longest_side(groups: Sequence[Any]) -> int:
    return LONGEST_SIDE if len(groups) <= FEW_GROUPS else SHORT_SIDE


def _values(parameter: Tensor, longest_side: int, *, seed: int) -> Tensor:
    """Make values that are small at the beginning and large at the end, so that norms and means of pieces differ.

    The shape is never square, so that a factor of a matrix differs in shape from the matrix.
    """
    longest = longest_side if parameter.ndim <= 2 else SHORT_SIDE
    sides = [max(min(side, longest) - dim % 2, 1) for dim, side in enumerate(parameter.shape)]
    numel = torch.Size(sides).numel()
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    values = (values * torch.linspace(0.1, 2.0, numel)).view(sides)
    return values if parameter.is_meta else values.to(parameter.device)


def _gradient(values: Tensor, step: int) -> Tensor:
    """Return a gradient with the same sign in each step, as on a long descent; it grows faster towards the end."""
    flat = values.reshape(-1)
    growth = 1 + step * torch.linspace(0.0, 3.0, flat.numel(), device=flat.device)
    return flat.sin() * growth


# -- stepping ---------------------------------------------------------------------------------------


@dataclass
class _Outcome:
    optimizer: Optimizer
    numbers: list[dict[str, float]]  # per group, after the steps
    moved: list[Tensor]  # per chosen tensor, flattened: the distance that each element moved


def _run(
    factory: OptimizerFactory, trials: Sequence[_Trial], choose: _Choose, seed: int = 0
) -> _Outcome:
    """Run a few steps of a new optimizer. Raises ValueError if it cannot do what a strategy asks of it."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    optimizer, chosen = _make(factory, trials, choose)
    for step in range(NUM_STEPS):
        for parameter, values, part in chosen:
            gradient = _gradient(values, step)[part or slice(None)]
            parameter.grad = gradient.clone().view(parameter.shape)
        _step(optimizer)
    moved = [p.detach().view(-1) - v.reshape(-1)[part or slice(None)] for p, v, part in chosen]
    return _Outcome(optimizer, [_numbers(group) for group in optimizer.param_groups], moved)


def _make(
    factory: OptimizerFactory, trials: Sequence[_Trial], choose: _Choose
) -> tuple[Optimizer, list[tuple[nn.Parameter, Tensor, slice | None]]]:
    """Make an optimizer over new parameters; return it with each parameter's source tensor and chosen elements."""
    groups: list[dict[str, Any]] = []
    chosen: list[tuple[nn.Parameter, Tensor, slice | None]] = []
    for trial in trials:
        mine = [
            (_parameter(tensor, part), tensor, part)
            for number, tensor in enumerate(trial.tensors)
            for part in choose(number, tensor)
        ]
        groups.append({**copy.deepcopy(trial.options), "params": [p for p, *_ in mine]})
        chosen += mine
    optimizer = factory(groups)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer_factory returned a {type(optimizer).__name__}: return an optimizer over the groups it is given"
        )
    _require_these(optimizer, [parameter for parameter, *_ in chosen])
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), (int, float)):
            group["lr"] = max(group["lr"], LEAST_RATE)
    return optimizer, chosen


def _parameter(values: Tensor, part: slice | None) -> nn.Parameter:
    return nn.Parameter((values if part is None else values.reshape(-1)[part]).clone())


def _require_these(optimizer: Optimizer, expected: Sequence[Tensor]) -> None:
    """Raise ValueError if the optimizer holds other parameters, whose updates no strategy would publish."""
    ids = {id(parameter) for parameter in expected}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in ids:
            problem = f"optimizer_factory makes {type(optimizer).__name__} over other parameters"
            raise ValueError(f"{problem} than it is handed: make it over the groups it gets")


def _step(optimizer: Optimizer) -> None:
    try:
        optimizer.step()
    except Exception as error:  # ScheduleFree raises this class itself
        problem = f"can not make a step: {str(error).splitlines()[0]}"
        if "closure" in str(error):
            problem = "wants a closure in step(), and no strategy can give it one"
        name = type(optimizer).__name__
        raise ValueError(f"optimizer {name} {problem}: use another optimizer") from error


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Return a group's numeric options: an optimizer may use them as counters."""
    return {
        key: float(value)
        for key, value in group.items()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    }


# -- comparing --------------------------------------------------------------------------------------


def _same_apart(factory: OptimizerFactory, trials: Sequence[_Trial], whole: _Outcome) -> bool:
    """Check that each half of the tensors moves as it did beside the other half, and that group counters agree."""
    if any(not isinstance(key, Tensor) for key in whole.optimizer.state):
        return False  # this state belongs to no parameter
    for which in (0, 1):
        half = _run(factory, trials, partial(_half, which=which))
        counted = zip(half.numbers, whole.numbers, strict=True)
        if not (_near(half.moved, whole.moved[which::2]) and all(_equal(*n) for n in counted)):
            return False
    return True


def _equal(ours: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    if ours.keys() != theirs.keys():
        return False
    one, other = (torch.tensor(list(n.values()), dtype=torch.float64) for n in (ours, theirs))
    return torch.allclose(one, other, rtol=1e-6, atol=0.0, equal_nan=True)


def _same_cut(factory: OptimizerFactory, trials: Sequence[_Trial], whole: _Outcome) -> bool:
    if _keeps_matrices(whole.optimizer):
        return False
    try:
        cut = _run(factory, trials, _pieces)
    except Exception:
        return False  # it accepted the whole tensors, so it is the pieces that it rejects
    pieces = iter(cut.moved)
    joined = [torch.cat([next(pieces) for _ in _pieces(0, moved)]) for moved in whole.moved]
    return _near(joined, whole.moved)


def _near(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(
        bool((one - other).abs().max() <= TOLERANCE * other.abs().max())
        for one, other in zip(ours, theirs, strict=True)
    )


def _keeps_matrices(optimizer: Optimizer) -> bool:
    """Tell whether a state is neither shaped like its parameter nor a number: rows, columns or factors of a matrix."""
    return any(
        tensor.numel() > 1 and tensor.shape != parameter.shape
        for parameter, state in optimizer.state.items()
        for tensor in tree_leaves(state)
        if isinstance(tensor, Tensor)
    )


def _refusal(factory: OptimizerFactory, trials: Sequence[_Trial], whole: _Outcome, why: str) -> str:
    """Return the error message; an optimizer whose result depends on the random seed gets a different one."""
    name = type(whole.optimizer).__name__
    if not all(bool(moved.isfinite().all()) for moved in whole.moved):
        problem = f"optimizer {name} moves weights to infinity or NaN in its first steps"
        return f"{problem}: lower its learning rate (optimizer.lr)"
    again = _run(factory, trials, _wholes, seed=1)
    if _near(again.moved, whole.moved):
        return f"optimizer {why}"
    problem = f"optimizer {name} draws random numbers in step(), and every rank would draw its own"
    return f"{problem}: use another optimizer"


@contextmanager
def _random_states_kept(trials: Sequence[_Trial]) -> Iterator[None]:
    devices = {tensor.device for trial in trials for tensor in trial.tensors}
    python = random.getstate()
    try:
        with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]):
            yield
    finally:
        random.setstate(python)
