"""Trial on small tensors whether an optimizer is correct on pieces, before it gets the real parameters.

An engine hands the optimizer what this rank holds: pieces of matrices, or some of the parameters. That trains the same
model only if the optimizer treats each element independently (`cut`), or at least each parameter independently
(`shared`). No optimizer declares this, so it is tried, torch's own included: their options decide too.

    whole     all tensors, each in its shape       the same three steps, and then every element
    halves    every second tensor, twice           must have moved equally far
    pieces    every tensor as two flat pieces

One that asks for whole matrices (whole_matrices.py) gets them of its pieces, as it gets them from an engine.

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
from dataclasses import dataclass
from typing import Any

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
    longest = LONGEST_SIDE if len(groups) <= FEW_GROUPS else SHORT_SIDE
    trial = [_Group.like(group, longest) for group in groups]
    with _random_states_kept(trial):
        whole = _run(factory, trial)
        name = type(whole.optimizer).__name__
        if shared and not _same_apart(factory, trial, whole):
            why = f"{name} lets the update of one parameter depend on others"
            remedy = "it needs all parameters on one rank: use strategy ddp or another optimizer"
            raise ValueError(_refusal(factory, trial, whole, f"{why}: {remedy}"))
        if cut and not _same_cut(factory, trial, whole):
            why = f"{name} updates whole matrices, but strategy cuts them (layout {layout})"
            remedy = "use the layout parameter"
            raise ValueError(_refusal(factory, trial, whole, f"{why}: {remedy}"))


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


def try_out(factory: OptimizerFactory, groups: Sequence[Mapping[str, Any]]) -> None:
    """Make the optimizer and step it a few times on small tensors. Raises ValueError if it can not do that."""
    trial = [_Group.like(group, SHORT_SIDE) for group in groups]
    with _random_states_kept(trial):
        _run(factory, trial)


# -- what is stepped --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sample:
    """A tensor, or a flat piece of one, and its gradient in each step."""

    values: Tensor
    gradients: Tensor  # [NUM_STEPS, *values.shape]

    @classmethod
    def like(cls, parameter: Tensor, longest_side: int, seed: int) -> _Sample:
        """Make values that are small at the beginning and large at the end, so that norms and means of pieces differ.

        The shape is never square, so that a factor of a matrix differs in shape from the matrix. A gradient has the
        same sign in each step, as on a long descent, and grows faster towards the end of the tensor.
        """
        longest = longest_side if parameter.ndim <= 2 else SHORT_SIDE
        shape = [max(min(side, longest) - dim % 2, 1) for dim, side in enumerate(parameter.shape)]
        numel = torch.Size(shape).numel()
        flat = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        flat = flat * torch.linspace(0.1, 2.0, numel)
        growth = torch.arange(NUM_STEPS)[:, None] * torch.linspace(0.0, 3.0, numel)
        device = "cpu" if parameter.is_meta else parameter.device
        gradients = (flat.sin() * (1 + growth)).view(NUM_STEPS, *shape)
        return cls(flat.view(shape).to(device), gradients.to(device))

    def pieces(self) -> list[_Sample]:
        """Return two pieces, whose border rarely falls on one between two rows; one piece of few elements."""
        flat, gradients = self.values.reshape(-1), self.gradients.reshape(NUM_STEPS, -1)
        border = len(flat) // 3 + 1
        cuts = [slice(0, border), slice(border, None)] if border < len(flat) else [slice(None)]
        return [_Sample(flat[cut], gradients[:, cut]) for cut in cuts]


@dataclass(frozen=True)
class _Group:
    """The options of one param_group, and a pair of samples for each number of dimensions in it."""

    options: Mapping[str, Any]
    samples: Sequence[_Sample]

    @classmethod
    def like(cls, group: Mapping[str, Any], longest_side: int) -> _Group:
        largest: dict[int, Tensor] = {}
        for parameter in (p for p in group["params"] if p.requires_grad and p.numel()):
            first = largest.setdefault(parameter.ndim, parameter)
            largest[parameter.ndim] = max(first, parameter, key=Tensor.numel)
        samples = [_Sample.like(p, longest_side, seed) for p in largest.values() for seed in (1, 2)]
        options = {key: value for key, value in group.items() if key != "params"}
        if "kind" in group:  # pieces of a sample begin amid a block of moments, as no engine's do
            options["kind"] = kind_in_full(group["kind"])
        return cls(options, samples)


# -- stepping ---------------------------------------------------------------------------------------


@dataclass
class _Outcome:
    optimizer: Optimizer
    moved: list[Tensor]  # per sample, flattened: how far each element moved

    def numbers(self) -> list[dict[str, float]]:
        """Return the numeric options of each group: an optimizer may use them as counters."""
        return [
            {
                key: float(value)
                for key, value in group.items()
                if isinstance(value, (int, float))
                or (isinstance(value, Tensor) and value.numel() == 1)
            }
            for group in self.optimizer.param_groups
        ]


class _MatricesOfSamples(WholeMatrices):
    """Brings the pieces of samples together, as an engine does with those of ranks."""

    def __init__(self, samples: Sequence[_Sample], tensors: Iterator[Tensor]):
        self._whole = [(s.values.shape, [next(tensors) for _ in s.pieces()]) for s in samples]
        self._shapes = {piece: shape for shape, pieces in self._whole for piece in pieces}

    def shape_of(self, tensor: Tensor) -> torch.Size:
        return self._shapes[tensor]

    def apply(
        self, function: Function, tensors: Sequence[Tensor], values: Sequence[Tensor]
    ) -> list[Tensor]:
        given, results = dict(zip(tensors, values, strict=True)), dict[Tensor, Tensor]()
        for shape, pieces in self._whole:
            if pieces[0] in given:
                whole = function(torch.cat([given[piece] for piece in pieces]).view(shape))
                flat = whole.reshape(-1).split([piece.numel() for piece in pieces])
                results.update(zip(pieces, flat, strict=True))
        return [results[tensor] for tensor in tensors]


def _run(
    factory: OptimizerFactory,
    groups: Sequence[_Group],
    seed: int = 0,
    cut_from: Sequence[_Sample] = (),
) -> _Outcome:
    """Run a few steps of a new optimizer. Raises ValueError if it cannot do what a strategy asks of it.

    cut_from: the samples of which those of `groups` are pieces, if they are.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    samples = [sample for group in groups for sample in group.samples]
    parameters = [nn.Parameter(sample.values.clone()) for sample in samples]
    left = iter(parameters)
    optimizer = make_optimizer(
        factory,
        [
            {**copy.deepcopy(dict(group.options)), "params": [next(left) for _ in group.samples]}
            for group in groups
        ],
    )
    if cut_from and hasattr(optimizer, "matrices"):
        matrices = _MatricesOfSamples(cut_from, iter(parameters))
        optimizer.matrices = matrices  # pyright: ignore[reportAttributeAccessIssue]
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), (int, float)):
            group["lr"] = max(group["lr"], LEAST_RATE)
    if callable(train := getattr(optimizer, "train", None)):
        train()  # as the user's loop will: ScheduleFree steps in this mode alone
    for step in range(NUM_STEPS):
        for parameter, sample in zip(parameters, samples, strict=True):
            parameter.grad = sample.gradients[step].clone()
        _step(optimizer)
    pairs = zip(parameters, samples, strict=True)
    return _Outcome(optimizer, [(p.detach() - s.values).reshape(-1) for p, s in pairs])


def _step(optimizer: Optimizer) -> None:
    try:
        optimizer.step()
    except Exception as error:  # ScheduleFree raises this class itself
        problem = f"can not make a step: {str(error).splitlines()[0]}"
        if "closure" in str(error):
            problem = "wants a closure in step(), and no strategy can give it one"
        name = type(optimizer).__name__
        raise ValueError(f"optimizer {name} {problem}: use another optimizer") from error


# -- comparing --------------------------------------------------------------------------------------


def _same_apart(factory: OptimizerFactory, groups: Sequence[_Group], whole: _Outcome) -> bool:
    """Check that each half of the samples moves as it did beside the other half, and that group counters agree."""
    if any(not isinstance(key, Tensor) for key in whole.optimizer.state):
        return False  # this state belongs to no parameter
    for which in (0, 1):
        half = _run(factory, [_Group(g.options, g.samples[which::2]) for g in groups])
        counted = zip(half.numbers(), whole.numbers(), strict=True)
        if not (_near(half.moved, whole.moved[which::2]) and all(_equal(*n) for n in counted)):
            return False
    return True


def _same_cut(factory: OptimizerFactory, groups: Sequence[_Group], whole: _Outcome) -> bool:
    """Check that pieces move as the tensors did, and that no state is one of a matrix: of rows, columns or factors."""
    for parameter, state in whole.optimizer.state.items():
        for tensor in (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)):
            if tensor.numel() > 1 and tensor.shape != parameter.shape:
                return False
    samples = [sample for group in groups for sample in group.samples]
    try:
        pieces_of_groups = [_Group(g.options, _cut(g.samples)) for g in groups]
        cut = _run(factory, pieces_of_groups, cut_from=samples)
    except Exception:
        return False  # it accepted the whole tensors, so it is the pieces that it rejects
    pieces = iter(cut.moved)
    joined = [torch.cat([next(pieces) for _ in sample.pieces()]) for sample in samples]
    return _near(joined, whole.moved)


def _cut(samples: Sequence[_Sample]) -> list[_Sample]:
    return [piece for sample in samples for piece in sample.pieces()]


def _equal(ours: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    if ours.keys() != theirs.keys():
        return False
    one, other = (torch.tensor(list(n.values()), dtype=torch.float64) for n in (ours, theirs))
    return torch.allclose(one, other, rtol=1e-6, atol=0.0, equal_nan=True)


def _near(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(
        bool((one - other).abs().max() <= TOLERANCE * other.abs().max())
        for one, other in zip(ours, theirs, strict=True)
    )


def _refusal(factory: OptimizerFactory, groups: Sequence[_Group], whole: _Outcome, why: str) -> str:
    """Return the error message; an optimizer whose result depends on the random seed gets a different one."""
    name = type(whole.optimizer).__name__
    if not all(bool(moved.isfinite().all()) for moved in whole.moved):
        problem = f"optimizer {name} moves weights to infinity or NaN in its first steps"
        return f"{problem}: lower its learning rate (optimizer.lr)"
    if _near(_run(factory, groups, seed=1).moved, whole.moved):
        return f"optimizer {why}"
    problem = f"optimizer {name} draws random numbers in step(), and every rank would draw its own"
    return f"{problem}: use another optimizer"


@contextmanager
def _random_states_kept(groups: Sequence[_Group]) -> Iterator[None]:
    devices = {sample.values.device for group in groups for sample in group.samples}
    python = random.getstate()
    try:
        with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]):
            yield
    finally:
        random.setstate(python)
