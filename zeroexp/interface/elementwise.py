"""Trial on small tensors whether an optimizer is correct on pieces, before it gets the real parameters.

An engine hands the optimizer what this rank holds: pieces of matrices (`cut`), or some of the parameters (`shared`).
That trains the same model only if each element, or at least each parameter, is updated independently. No optimizer
declares this, so it is tried, torch's own included: their options decide too.

    whole     all tensors, each in its shape       the same three steps, and then every element
    halves    every second tensor, twice           must have moved equally far
    pieces    every tensor as two flat pieces

The trial has the training's groups and options, and in each group a pair of tensors for every number of dimensions that
its parameters have. Sides are as long as the real ones, up to a limit above the sizes at which optimizers begin to
factor matrices. (An optimizer that treats matrices as a whole only after many steps, and keeps no state for it before,
is missed.)
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zeroexp.cut.moment_blocks import kind_in_full
from zeroexp.interface.strategy import OptimizerFactory
from zeroexp.interface.whole_matrices import Function, WholeMatrices

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
    layout: str,
    cut: bool,
    shared: bool,
) -> None:
    """Raise ValueError, with the remedy, if the optimizer would be wrong on what ranks hold.

    groups: the user's param_groups over real parameters, which are only inspected. layout: the layout's name, for the
    message. cut: masters are one-dimensional pieces. shared: ranks hold different masters. The factory is called up
    to five times; the states of the random generators are restored afterwards.
    """
    if not (cut or shared):
        return
    trial = _trial(groups, LONGEST_SIDE if len(groups) <= FEW_GROUPS else SHORT_SIDE)
    with _random_states_kept(trial):
        whole = _step(factory, trial)
        problem = remedy = ""
        if shared and not _same_apart(factory, trial, whole):
            problem = "lets the update of one parameter depend on others"
            remedy = "it needs all parameters on one rank: use strategy ddp or another optimizer"
        elif cut and not _same_cut(factory, trial, whole):
            problem = f"updates whole matrices, but strategy cuts them (layout {layout})"
            remedy = "use the layout parameter"
        if problem and not all(bool(moved.isfinite().all()) for moved in whole.moved):
            problem = "moves weights to infinity or NaN in its first steps"
            remedy = "lower its learning rate (optimizer.lr)"
        elif problem and not _near(_step(factory, trial, seed=1).moved, whole.moved):
            problem = "draws random numbers in step(), and every rank would draw its own"
            remedy = "use another optimizer"
    if problem:
        raise ValueError(f"optimizer {type(whole.optimizer).__name__} {problem}: {remedy}")


def try_out(factory: OptimizerFactory, groups: Sequence[Mapping[str, Any]]) -> None:
    """Make the optimizer and step it a few times on small tensors. Raises ValueError if it can not do that."""
    trial = _trial(groups, SHORT_SIDE)
    with _random_states_kept(trial):
        _step(factory, trial, with_matrices=True)


def make_optimizer(factory: OptimizerFactory, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Make the user's optimizer. Raises ValueError unless it is one over tensors of `groups` alone.

    Of other tensors, as the model's parameters beside masters in float32, no strategy would publish the updates.
    """
    ids = {id(tensor) for group in groups for tensor in group["params"]}
    optimizer = factory(groups)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer_factory returned a {type(optimizer).__name__}: return an optimizer over the groups it is given"
        )
    if any(id(tensor) not in ids for group in optimizer.param_groups for tensor in group["params"]):
        problem = f"optimizer_factory makes {type(optimizer).__name__} over other parameters"
        raise ValueError(f"{problem} than it is handed: make it over the groups it gets")
    return optimizer


# -- what is stepped --------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """A tensor, or a flat piece of one, and its gradient in each step."""

    values: Tensor
    gradients: Tensor  # [NUM_STEPS, *values.shape]


Samples = list[_Sample]
Trial = list[tuple[dict[str, Any], Samples]]  # by group: its options, and its tensors


def _trial(groups: Sequence[Mapping[str, Any]], longest_side: int) -> Trial:
    """Return a pair of samples for each number of dimensions in a group, like the largest parameter of these."""
    trial: Trial = []
    for group in groups:
        largest: dict[int, Tensor] = {}
        for parameter in (p for p in group["params"] if p.requires_grad and p.numel()):
            first = largest.setdefault(parameter.ndim, parameter)
            largest[parameter.ndim] = max(first, parameter, key=Tensor.numel)
        options = {key: value for key, value in group.items() if key != "params"}
        if "kind" in group:  # pieces of a sample begin amid a block of moments, as no engine's do
            options["kind"] = kind_in_full(group["kind"])
        samples = [_sample(p, longest_side, seed) for p in largest.values() for seed in (1, 2)]
        trial.append((options, samples))
    return trial


def _sample(parameter: Tensor, longest_side: int, seed: int) -> _Sample:
    """Return values that are small at the beginning and large at the end, so that norms and means of pieces differ.

    The shape is never square, so that a factor of a matrix differs in shape from the matrix. A gradient has the same
    sign in each step, as on a long descent, and grows faster towards the end of the tensor and in the second of a pair.
    """
    longest = longest_side if parameter.ndim <= 2 else SHORT_SIDE
    shape = [max(min(side, longest) - dim % 2, 1) for dim, side in enumerate(parameter.shape)]
    numel = torch.Size(shape).numel()
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    flat = flat * torch.linspace(0.1, 2.0, numel)
    growth = torch.arange(NUM_STEPS)[:, None] * torch.linspace(0.0, 2.0 * seed, numel)
    device = "cpu" if parameter.is_meta else parameter.device
    gradients = (flat.sin() * (1 + growth)).view(NUM_STEPS, *shape)
    return _Sample(flat.view(shape).to(device), gradients.to(device))


def _pieces(sample: _Sample) -> Samples:
    """Return two pieces, whose border rarely falls on one between two rows; one piece of few elements."""
    flat, gradients = sample.values.reshape(-1), sample.gradients.reshape(NUM_STEPS, -1)
    sizes = [len(flat) // 3 + 1, len(flat) - len(flat) // 3 - 1]
    parts = zip(flat.split(sizes), gradients.split(sizes, dim=1), strict=True)
    return [_Sample(*part) for part in parts if len(part[0])]


class _NoMatrices(WholeMatrices):
    """Leaves out what an optimizer asks of whole matrices, which an engine brings together; the rest is tried."""

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        return 2, 2

    def apply(
        self, function: Function, tensors: Sequence[Tensor], values: Sequence[Tensor]
    ) -> list[Tensor]:
        return list(values)


# -- stepping and comparing -------------------------------------------------------------------------


class _Outcome(NamedTuple):
    optimizer: Optimizer
    moved: list[Tensor]  # by sample, flattened: how far each element moved


def _step(
    factory: OptimizerFactory, trial: Trial, seed: int = 0, *, with_matrices: bool = False
) -> _Outcome:
    """Take a few steps of a new optimizer. Raises ValueError if it cannot do what a strategy asks of it."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    samples = [sample for _, of_group in trial for sample in of_group]
    parameters = [nn.Parameter(sample.values.clone()) for sample in samples]
    left = iter(parameters)
    groups = [
        {**copy.deepcopy(options), "params": [next(left) for _ in of_group]}
        for options, of_group in trial
    ]
    optimizer: Any = make_optimizer(factory, groups)
    if not with_matrices and hasattr(optimizer, "matrices"):
        optimizer.matrices = _NoMatrices()
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), (int, float)):
            group["lr"] = max(group["lr"], LEAST_RATE)
    if callable(train := getattr(optimizer, "train", None)):
        train()  # as the user's loop will: ScheduleFree steps in this mode alone
    for step in range(NUM_STEPS):
        for parameter, sample in zip(parameters, samples, strict=True):
            parameter.grad = sample.gradients[step].clone()
        try:
            optimizer.step()
        except Exception as error:  # ScheduleFree raises this class itself
            problem = f"can not make a step: {str(error).splitlines()[0]}"
            if "closure" in str(error):
                problem = "wants a closure in step(), and no strategy can give it one"
            name = type(optimizer).__name__
            raise ValueError(f"optimizer {name} {problem}: use another optimizer") from error
    pairs = zip(parameters, samples, strict=True)
    return _Outcome(optimizer, [(p.detach() - s.values).reshape(-1) for p, s in pairs])


def _same_apart(factory: OptimizerFactory, trial: Trial, whole: _Outcome) -> bool:
    """Check that each half of the samples moves as it did beside the other half."""
    if any(not isinstance(key, Tensor) for key in whole.optimizer.state):
        return False  # this state belongs to no parameter
    for which in (0, 1):
        half = _step(factory, [(options, samples[which::2]) for options, samples in trial])
        if not _near(half.moved, whole.moved[which::2]):
            return False
    return True


def _same_cut(factory: OptimizerFactory, trial: Trial, whole: _Outcome) -> bool:
    """Check that pieces move as the tensors did, and that no state is one of a matrix: of rows, columns or factors."""
    for parameter, state in whole.optimizer.state.items():
        for tensor in (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)):
            if tensor.numel() > 1 and tensor.shape != parameter.shape:
                return False
    samples = [sample for _, of_group in trial for sample in of_group]
    pieces = [(options, [p for s in of_group for p in _pieces(s)]) for options, of_group in trial]
    try:
        moved = iter(_step(factory, pieces).moved)
    except Exception:
        return False  # it accepted the whole tensors, so it is the pieces that it rejects
    return _near([torch.cat([next(moved) for _ in _pieces(s)]) for s in samples], whole.moved)


def _near(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(
        bool((one - other).abs().max() <= TOLERANCE * other.abs().max())
        for one, other in zip(ours, theirs, strict=True)
    )


@contextmanager
def _random_states_kept(trial: Trial) -> Iterator[None]:
    devices = {sample.values.device for _, samples in trial for sample in samples}
    python = random.getstate()
    try:
        with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]):
            yield
    finally:
        random.setstate(python)
