"""Trial on small tensors whether an optimizer is correct on pieces, before it gets the real parameters.

An engine hands the optimizer what this rank holds: some of the parameters, or pieces of them (`cut`). That trains the
same model only if each parameter, or each element, is updated independently. No optimizer declares this, so it is
tried, torch's own included: a factory may give options by the shapes of what it gets. A dozen steps (two of an
optimizer that is known) move the elements of

    whole     all tensors, each in its shape

and must move them equally far, and leave the groups' options equal, where two ranks have an optimizer each, of

    tensors   every second tensor
    pieces    one of two flat pieces of every tensor (`cut`)

The gradients are those of a training in short: a long descent, whose first step lies between two that are orthogonal to
the weights, as behind a normalisation (AdamP and SGDP then project); then they change their signs, the more often the
further in a tensor (what is cautious masks some, and divides by their share).

The trial has the training's groups and options, and in each group a pair of tensors for every number of dimensions that
its parameters have. Sides are as long as the real ones, up to a limit above the sizes at which optimizers begin to
factor matrices. (An optimizer that treats tensors as a whole only after more steps, and keeps no state for it before,
is missed.)
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zeroexp.cut.moment_blocks import kind_in_full
from zeroexp.interface.canonical import moments_of
from zeroexp.interface.check_state import Kept
from zeroexp.interface.fused_kernels import HAVE_ONE, fused_is_right
from zeroexp.interface.python_values import PythonValues
from zeroexp.interface.strategy import OptimizerFactory
from zeroexp.interface.whole_matrices import Function, WholeMatrices

# Estimates made from two steps take effect in the third, and windows are of ten.
NUM_DESCENTS, NUM_CHANGES = 3, 8
NUM_STEPS = 2 + NUM_DESCENTS + NUM_CHANGES
# Torch's optimizers that are elementwise by their formulas. Two steps show what a factory makes of what it is given.
ELEMENTWISE = {optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD}
ELEMENTWISE |= {optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD}
LONGEST_SIDE, SHORT_SIDE = 130, 20  # of tensors of up to two dimensions, and of more
# The tolerance is a fraction of the largest distance that an element moves. Fused kernels round the last elements of a
# piece differently, by 1e-6 of that distance; an optimizer that is wrong on pieces is wrong by a tenth or more.
TOLERANCE = 1e-3
TO_INFINITY = (
    "moves weights to infinity or NaN in its first steps",
    "lower its learning rate (optimizer.lr)",
)
ANOTHER = "use another optimizer"
WANTS_CLOSURE = "wants a closure in step(), and no strategy can give it one"
LEAST_RATE = 1e-3  # a warm-up begins with a rate of 0, which would move nothing


def refuse_unless_elementwise(
    factory: OptimizerFactory, groups: Sequence[Mapping[str, Any]], *, layout: str, cut: bool
) -> None:
    """Raise ValueError, with the remedy, if the optimizer would be wrong on what ranks hold.

    groups: the user's param_groups over real parameters, which are only inspected. layout: the layout's name, for the
    message. cut: masters are one-dimensional pieces, else whole. The factory is called up to seven times; all
    states of random generators are restored afterwards.
    """
    trial, problem, remedy = _trial(groups), "", ""
    with _random_states_kept(trial):
        optimizer, whole = _step(factory, trial)
        whole_state = all(isinstance(key, Tensor) for key in optimizer.state)
        if not (whole_state and _move_alike(factory, whole, lambda samples, r: samples[r::2])):
            problem = "lets the update of one parameter depend on others"
            remedy = "it needs all parameters on one rank: use strategy ddp or another optimizer"
        elif cut and not (_keeps_elements(optimizer) and _move_alike(factory, whole, _pieces)):
            problem = f"updates whole matrices, but strategy cuts them (layout {layout})"
            remedy = "use the layout parameter"
        if problem and not all(bool(s.moved.isfinite().all()) for _, group in whole for s in group):
            problem, remedy = TO_INFINITY
        elif problem and not _move_alike(factory, whole, lambda samples, _: samples, seed=1):
            problem = "draws random numbers in step(), and every rank would draw its own"
            remedy = ANOTHER
    if problem:
        raise ValueError(f"optimizer {type(optimizer).__name__} {problem}: {remedy}")


def refuse_states_of_matrices(
    factory: OptimizerFactory, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ValueError if the optimizer keeps a state of rows, columns or factors where FSDP2 cuts the rows.

    The steps themselves may be right there, since FSDP2's tensors compute as whole ones.
    """
    trial = _trial(groups)
    with _random_states_kept(trial):
        optimizer, _ = _step(factory, trial)
    if not _keeps_elements(optimizer):
        problem = "keeps states of whole matrices, but FSDP2 cuts their rows"
        remedy = "use strategy.implementation=parameter"
        raise ValueError(f"optimizer {type(optimizer).__name__} {problem}: {remedy}")


def try_out(
    factory: OptimizerFactory, groups: Sequence[Mapping[str, Any]], *, is_saved: bool
) -> None:
    """Make the optimizer and step it a few times on small tensors.

    Raises ValueError if it can not do that, or `is_saved` and no checkpoint can carry what it keeps.
    """
    trial = _trial(groups)
    with _random_states_kept(trial):
        optimizer, _ = _step(factory, trial, with_matrices=True)
    values = PythonValues(optimizer, [])
    for parameter in optimizer.state if is_saved else ():
        values.of("a parameter", parameter)


def moments_kept(
    factory: OptimizerFactory, groups: Sequence[Mapping[str, Any]]
) -> Callable[[], list[Kept]]:
    """Return what names, for each group, the moments that the optimizer keeps.

    They are read off one step of small tensors when it is called; of the parameters their shapes are kept until then.
    No group is named of an optimizer that can not make a step so.
    """
    trials = [
        [{**g, "params": [*map(_without_memory, _chosen(g, choose))]} for g in groups]
        for choose in (max, min)  # of small parameters an optimizer may keep others
    ]

    def names() -> list[Kept]:
        found: list[list[set[str]]] = [[] for _ in groups]
        for trial in map(_trial, trials):
            try:
                with _random_states_kept(trial):
                    optimizer, _ = _step(factory, trial, num_steps=1)
            except ValueError:
                return []
            for states, group in zip(found, optimizer.param_groups, strict=True):
                states += [set(moments_of(optimizer.state.get(p, {}))) for p in group["params"]]
        return [
            Kept(set.intersection(*states), set.union(*states)) if states else Kept(set(), set())
            for states in found
        ]

    return names


def _without_memory(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros((), device=parameter.device).expand(parameter.shape))


def make_optimizer(factory: OptimizerFactory, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Make the user's optimizer. Raises ValueError unless it is one over tensors of `groups`, in these groups.

    Of other tensors, as the model's parameters beside masters in float32, no strategy would publish the updates. In
    other groups a checkpoint would not find what they count, and a rank that holds nothing would have no group. By a
    wrong kernel (fused_kernels.py) nothing would be trained.
    """
    handed = _ids_of(groups)
    optimizer = factory(groups)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer_factory returned a {type(optimizer).__name__}: return an optimizer over the groups it is given"
        )
    _add_left_out(optimizer, groups)
    if (made := _ids_of(optimizer.param_groups)) != handed:
        what = (
            "in other groups" if {*chain(*made)} <= {*chain(*handed)} else "over other parameters"
        )
        problem = f"optimizer_factory makes {type(optimizer).__name__} {what}"
        raise ValueError(f"{problem} than it is handed: make it over the groups it gets")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure and closure.default is inspect.Parameter.empty:
        raise ValueError(f"optimizer {type(optimizer).__name__} {WANTS_CLOSURE}: {ANOTHER}")
    refuse_wrong_kernels(optimizer)
    return optimizer


def refuse_wrong_kernels(optimizer: Optimizer) -> None:
    """Raise ValueError for a fused kernel by which its tensors would not be trained (fused_kernels.py)."""
    for group in optimizer.param_groups if type(optimizer) in HAVE_ONE else ():
        for tensor in group["params"] if group.get("fused") else ():
            if not fused_is_right(type(optimizer), tensor, group.get("momentum", 0.0)):
                where = f"{tensor.dtype} on {tensor.device.type}"
                problem = f"has a fused kernel in this torch that computes wrong in {where}"
                raise ValueError(
                    f"optimizer {type(optimizer).__name__} {problem}: make it with fused=False"
                )


def _add_left_out(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give back groups of which this rank holds nothing, where the factory left them out: other ranks have them."""
    made = [group for group in optimizer.param_groups if group["params"]]
    are_left_out = len(optimizer.param_groups) < len(groups)
    if are_left_out and len(made) == sum(bool(group["params"]) for group in groups):
        rest = iter(made)
        optimizer.param_groups[:] = [
            next(rest) if group["params"] else {**optimizer.defaults, **group} for group in groups
        ]


def _ids_of(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [[id(tensor) for tensor in group["params"]] for group in groups]


# -- what is stepped --------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """A tensor, or a flat piece of one."""

    values: Tensor
    gradients: Tensor  # in each step: [NUM_STEPS, *values.shape]
    moved: Tensor  # how far each element moved where all tensors were whole; zeros before
    options: Mapping[str, float]  # of the group that it was stepped in; none before


Trial = list[tuple[dict[str, Any], list[_Sample]]]  # by group: its options, and its tensors


def _trial(groups: Sequence[Mapping[str, Any]]) -> Trial:
    """Return a pair of samples for each number of dimensions in a group, like the largest parameter of these."""
    trial: Trial = []
    for group in groups:
        options = {key: value for key, value in group.items() if key != "params"}
        if "kind" in group:  # pieces of a sample begin amid a block of moments, as no engine's do
            options["kind"] = kind_in_full(group["kind"])
        trial.append((options, [_sample(p, seed) for p in _chosen(group, max) for seed in (1, 2)]))
    return trial


def _chosen(group: Mapping[str, Any], choose: Callable[..., Tensor]) -> Iterable[Tensor]:
    """Return a trained parameter for each number of dimensions in a group: that which `choose` takes by its size."""
    chosen: dict[int, Tensor] = {}
    for each in (p for p in group["params"] if p.requires_grad and p.numel()):
        chosen[each.ndim] = choose(chosen.get(each.ndim, each), each, key=Tensor.numel)
    return chosen.values()


@contextmanager
def _torch_defaults() -> Iterator[None]:
    """Make tensors as torch does at first, whatever dtype and device a program has made its defaults."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


@_torch_defaults()
def _sample(parameter: Tensor, seed: int) -> _Sample:
    """Return values that are small at the beginning and large at the end, so that norms and means of pieces differ.

    The shape is never square, so that a factor of a matrix differs in shape from the matrix. On the descent a gradient
    keeps its sign, and grows faster towards the end of the tensor and in the second of a pair.
    """
    longest = LONGEST_SIDE if parameter.ndim <= 2 else SHORT_SIDE
    shape = [max(min(side, longest) - dim % 2, 1) for dim, side in enumerate(parameter.shape)]
    numel = torch.Size(shape).numel()
    drawn = torch.Generator().manual_seed(seed)
    flat = torch.randn(numel, generator=drawn) * torch.linspace(0.1, 2.0, numel)
    growth = torch.arange(NUM_DESCENTS)[:, None] * torch.linspace(0.0, 2.0 * seed, numel)
    descent = flat.sin() * (1 + growth)
    share = torch.rand(NUM_CHANGES, numel, generator=drawn)
    changing = descent[-1] * share.where(share > torch.linspace(0.0, 0.5, numel), -share - 0.5)
    aside = _orthogonal(flat)[None]
    steps = [aside, descent[:1], aside, descent[1:], changing]
    device = "cpu" if parameter.is_meta else parameter.device
    values, gradients = flat.view(shape), torch.cat(steps).view(NUM_STEPS, *shape)
    moved = torch.zeros_like(values, device=device)
    return _Sample(values.to(device), gradients.to(device), moved, {})


def _orthogonal(flat: Tensor) -> Tensor:
    """Return a vector that is orthogonal to `flat`, unlike its signs: small elements as they are, large ones turned."""
    small = flat.abs() < flat.abs().median()
    squares = flat.double().square()
    if not small.any():  # one element
        return flat.sin()
    turned = -squares[small].sum() / squares[~small].sum()
    return torch.where(small, flat.double(), turned * flat).float()


def _pieces(samples: Sequence[_Sample], rank: int) -> list[_Sample]:
    """Return a rank's flat pieces; the border of two rarely falls on one between two rows."""
    pieces: list[_Sample] = []
    for each in samples:
        border = each.values.numel() // 3 + 1
        own = slice(border) if rank == 0 else slice(border, None)
        flat, gradients = each.values.reshape(-1), each.gradients.reshape(NUM_STEPS, -1)
        moved = each.moved.reshape(-1)[own]
        pieces.append(_Sample(flat[own], gradients[:, own], moved, each.options))
    return [piece for piece in pieces if piece.values.numel()]


class _NoMatrices(WholeMatrices):
    """Leaves out what an optimizer asks of whole matrices, which an engine brings together; the rest is tried."""

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        return 2, 2

    def apply(
        self, function: Function, tensors: Sequence[Tensor], values: Sequence[Tensor]
    ) -> list[Tensor]:
        return list(values)


# -- stepping and comparing -------------------------------------------------------------------------


def _step(
    factory: OptimizerFactory,
    trial: Trial,
    seed: int = 0,
    *,
    with_matrices: bool = False,
    num_steps: int = NUM_STEPS,
) -> tuple[Optimizer, Trial]:
    """Take a few steps of a new optimizer; return it, and the trial with how far each element moved.

    Raises ValueError if it cannot do what a strategy asks of it.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    groups = [
        {**copy.deepcopy(options), "params": [nn.Parameter(s.values.clone()) for s in samples]}
        for options, samples in trial
    ]
    pairs = [
        pair
        for group, (_, samples) in zip(groups, trial, strict=True)
        for pair in zip(group["params"], samples, strict=True)
    ]
    optimizer: Any = make_optimizer(factory, groups)
    if not with_matrices and hasattr(optimizer, "matrices"):
        optimizer.matrices = _NoMatrices()
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), (int, float)):
            group["lr"] = max(group["lr"], LEAST_RATE)
    if callable(train := getattr(optimizer, "train", None)):
        train()  # as the user's loop will: ScheduleFree steps in this mode alone
    for step in range(min(num_steps, 2) if _is_known(optimizer) else num_steps):
        for parameter, sample in pairs:
            parameter.grad = sample.gradients[step].clone()
        try:
            optimizer.step()
        except Exception as error:  # ScheduleFree raises this class itself
            problem = f"can not make a step: {str(error).splitlines()[0]}"
            remedy = ANOTHER
            if "closure" in str(error):
                problem = WANTS_CLOSURE
            if not all(bool(parameter.isfinite().all()) for parameter, _ in pairs):
                problem, remedy = TO_INFINITY
            raise ValueError(f"optimizer {type(optimizer).__name__} {problem}: {remedy}") from error
    by_tensor = {p: _numbers_of(group) for group in optimizer.param_groups for p in group["params"]}
    after = iter(
        sample._replace(moved=p.detach() - sample.values, options=by_tensor.get(p, {}))
        for p, sample in pairs
    )
    return optimizer, [(options, [next(after) for _ in samples]) for options, samples in trial]


def _is_known(optimizer: Optimizer) -> bool:
    """Tell whether it is one of torch's that are elementwise, whose steps nobody has changed."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer) in ELEMENTWISE and not hooks and "step" not in vars(optimizer)


def _move_alike(
    factory: OptimizerFactory,
    whole: Trial,
    held_by: Callable[[list[_Sample], int], list[_Sample]],
    seed: int = 0,
) -> bool:
    """Check that what each of two ranks holds moves there as in the whole tensors, with the same options."""
    for rank in (0, 1):
        own = [(options, held_by(samples, rank)) for options, samples in whole]
        try:
            _, moved = _step(factory, own, seed)
        except Exception:
            return False  # it accepted the whole tensors, so it is these that it rejects
        before, after = ([s for _, group in each for s in group] for each in (own, moved))
        if not all(map(_near, before, after)):
            return False
    return True


def _numbers_of(group: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in group.items()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _near(one: _Sample, other: _Sample) -> bool:
    """Check that elements moved alike, and that no rank gave a tensor options by what it holds."""
    if one.options.keys() != other.options.keys():
        return False
    pairs = ((number, other.options[key]) for key, number in one.options.items())
    if not all(isclose(*pair, rel_tol=TOLERANCE) for pair in pairs):
        return False
    distance = (one.moved - other.moved).abs().max()
    return bool(distance <= TOLERANCE * one.moved.abs().max())


def _keeps_elements(optimizer: Optimizer) -> bool:
    """Check that no state is one of a matrix: of rows, columns or factors."""
    return all(
        tensor.numel() <= 1 or tensor.shape == parameter.shape
        for parameter, state in optimizer.state.items()
        for tensor in tree_leaves(state)
        if isinstance(tensor, Tensor) and isinstance(parameter, Tensor)
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
