"""A laboratory for training code as strangers write it: the same function runs in plain PyTorch and under our engine.

A scenario is a function of a `Lab`. It builds a model, hands it to `lab.wrap` and trains with what it gets back:

    in one process     `Plain`: torch's optimizer, and each batch is there once for each rank
    on each rank       `Sharded`, the library's own object, and the batches of this rank alone

    for batch in lab.batches(step):
        with t.microbatch(last=batch.last):
            t.backward(loss(t.model(batch.x), batch.y))

reads the same in both. What a scenario notes and the weights it ends with must be equal, or it must be refused in one
clear line: nothing between.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from tests.oracle import assembled, pieces_of
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor, Piece
from zeroexp.process.world import World
from zeroexp.zero.options import Options

WIDTH, CLASSES, SAMPLES, VOCABULARY, SEQ_LEN = 6, 3, 4, 11, 5
# What a message says that tells how to read weights, and not that they were written.
GATHERED = r"^(?!.*were written).*strategy\.gathered\("

SECONDS_TO_AGREE = 60
LOADING = "Error(s) in loading state_dict for Net:\n\t"

Factory = Callable[[Any], torch.optim.Optimizer]


def sgd(groups: Any) -> torch.optim.Optimizer:
    """Momentum, so that a gradient that came a step too late or twice stays visible."""
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


# -- what a scenario sees ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """One microbatch of one rank: no two are alike."""

    step: int
    microbatch: int
    rank: int
    last: bool
    num_ranks: int
    notes: list[tuple[int | None, Any]]

    def _generator(self, kind: int) -> torch.Generator:
        seed = 10_000 * kind + 1000 * self.step + 10 * self.microbatch + self.rank
        return torch.Generator().manual_seed(seed)

    @property
    def x(self) -> Tensor:
        return torch.randn(SAMPLES, WIDTH, generator=self._generator(1))

    @property
    def y(self) -> Tensor:
        return torch.randn(SAMPLES, CLASSES, generator=self._generator(2))

    @property
    def ids(self) -> Tensor:
        return torch.randint(VOCABULARY, (SAMPLES, SEQ_LEN), generator=self._generator(3))

    def loss(self, output: Tensor, target: Tensor | None = None) -> Tensor:
        """This rank's share of the mean squared error over all ranks."""
        target = self.y if target is None else target
        return (output - target).pow(2).mean() / self.num_ranks

    def note(self, value: Any) -> None:
        """Compared with what one process notes for this rank's batch."""
        self.notes.append((self.rank, _kept(value)))


class Plain:
    """What `Sharded` is for one process that does the obvious thing."""

    def __init__(
        self,
        module: nn.Module,
        *,
        param_groups: Sequence[dict[str, Any]],
        optimizer_factory: Factory,
        max_grad_norm: float | None = None,
        isolated_ranks: int = 0,
    ):
        """`isolated_ranks`: each so-manieth microbatch belongs to a rank that sees its own gradients and buffers
        only; what stays of buffers is rank 0's.
        """
        self.model = module
        self._isolated_ranks, self._num_microbatches = isolated_ranks, 0
        self._buffers: list[dict[str, Tensor]] = []  # before all ranks, after rank 0
        self.optimizer = optimizer_factory(param_groups)
        self._max_grad_norm = max_grad_norm

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        if not self._isolated_ranks:
            yield
            return
        others = {p: p.grad for p in self.model.parameters() if p.grad is not None}
        self.model.zero_grad()
        if self._num_microbatches % self._isolated_ranks == 0:
            self._buffers = [self._copied_buffers()]
        self._restore(self._buffers[0])
        yield
        self._num_microbatches += 1
        for p, grad in others.items():
            p.grad = grad if p.grad is None else grad + p.grad
        self._buffers.append(self._copied_buffers())
        self._restore(self._buffers[1])

    def _copied_buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def _restore(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.copy_(values[name])

    def gathered(self, *, write: bool = False) -> Any:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> Tensor:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.tensor(0.0)
        if grads:
            bound = float("inf") if self._max_grad_norm is None else self._max_grad_norm
            norm = torch.nn.utils.get_total_norm(grads)
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), bound, norm)
        self.optimizer.step()
        first = next(self.model.parameters()).dtype
        return norm.to(torch.promote_types(first, torch.float32))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)

    def drain(self) -> None: ...

    def state_dict(self) -> CanonicalState:
        whole = {
            name: CanonicalTensor(tuple(p.shape), p.dtype, [Piece(0, p.detach().reshape(-1))])
            for name, p in self.model.named_parameters()
        }
        return {name: {"weight": tensor} for name, tensor in whole.items()}


@dataclass(frozen=True)
class Setting:
    """How our engine runs a scenario."""

    stage: str = "zero3"
    unit: str = "block"
    layout: str = "buffer"
    world_size: int = 2

    def __str__(self) -> str:
        return f"{self.stage}-{self.unit}-{self.layout}-{self.world_size}"


@dataclass
class Results:
    """What is compared."""

    states: list[CanonicalState] = field(default_factory=list)  # one for each wrapped model
    notes: list[tuple[int | None, Any]] = field(default_factory=list)  # (rank or None for all, it)


class Lab:
    """`world` is None in the one process that plays all ranks."""

    def __init__(self, setting: Setting, world: World | None):
        self.setting = setting
        self.world = world
        self.plain = world is None
        self.num_ranks = setting.world_size
        self.ranks = list(range(self.num_ranks)) if world is None else [world.rank]
        self.frees = not self.plain and setting.stage == "zero3"  # weights are not there at rest
        self.notes: list[tuple[int | None, Any]] = []
        self._wrapped: list[Plain | Sharded] = []

    @property
    def stage(self) -> str:
        return "plain" if self.plain else self.setting.stage

    def wrap(
        self,
        module: nn.Module,
        blocks: Sequence[str] = ("layers.0", "layers.1", "layers.2"),
        *,
        optimizer: Factory = sgd,
        groups: Sequence[dict[str, Any]] | None = None,
        max_grad_norm: float | None = None,
        dtypes: Any = None,
        isolated: bool = False,
        **options: Any,
    ) -> Any:
        """The door of docs/library.md; typed as Any, because strangers do not read types. `isolated`: see Plain."""
        groups = [{"params": list(module.parameters())}] if groups is None else groups
        arguments: dict[str, Any] = {"param_groups": groups, "optimizer_factory": optimizer}
        if self.world is None:
            ranks = self.num_ranks if isolated else 0
            wrapped: Plain | Sharded = Plain(
                module, max_grad_norm=max_grad_norm, isolated_ranks=ranks, **arguments
            )
        else:
            ways = {"unit": self.setting.unit, "layout": self.setting.layout, **options}
            wrapped = Sharded(
                module,
                blocks=blocks,
                stage=STAGES[self.setting.stage],
                world=self.world,
                dtypes=dtypes,
                max_grad_norm=max_grad_norm,
                options=Options(**ways),
                **arguments,
            )
        self._wrapped.append(wrapped)
        return wrapped

    def batches(self, step: int, num_microbatches: int = 1) -> Iterator[Batch]:
        for microbatch in range(num_microbatches):
            for rank in self.ranks:
                last = microbatch == num_microbatches - 1
                yield Batch(step, microbatch, rank, last, self.num_ranks, self.notes)

    def train(
        self,
        t: Any,
        loss: Callable[[Any, Batch], Tensor] | None = None,
        *,
        steps: Sequence[int] = (0, 1, 2),
        num_microbatches: int = 1,
    ) -> None:
        """The usual loop. `loss` of (model, batch) runs the forward; its values and the norms are noted."""
        for step in steps:
            for batch in self.batches(step, num_microbatches):
                with t.microbatch(last=batch.last):
                    value = plain_loss(t.model, batch) if loss is None else loss(t.model, batch)
                    batch.note(value)
                    t.backward(value)
            self.note(t.step())
            t.zero_grad()

    def microbatches(
        self, t: Any, *, steps: Sequence[int] = (0, 1, 2), num_microbatches: int = 1
    ) -> Iterator[Batch]:
        """The usual loop around what a scenario does in each microbatch, which raises nothing; norms are noted."""
        for step in steps:
            for batch in self.batches(step, num_microbatches):
                with t.microbatch(last=batch.last):
                    yield batch
            self.note(t.step())
            t.zero_grad()

    def one_backward(self, t: Any, step: int = 0) -> None:
        """The last microbatch of a step, and no step yet."""
        for batch in self.batches(step):
            with t.microbatch(last=True):
                t.backward(plain_loss(t.model, batch))

    def note(self, value: Any) -> None:
        """The same on every rank, and in one process."""
        self.notes.append((None, _kept(value)))

    @contextmanager
    def raises(self, pattern: str) -> Iterator[None]:
        """Under our engine what is inside is refused in one line that matches; plain PyTorch may do as it likes."""
        try:
            yield
        except Exception as error:
            if self.plain:
                return
            complaint = wrong_refusal(type(error).__name__, str(error), pattern)
            if complaint:
                raise AssertionError(complaint) from error
            return
        if not self.plain:
            raise AssertionError(f"nothing was raised where {pattern!r} was expected")

    def results(self) -> Results:
        states = [_weights(pieces_of(t)) for t in self._wrapped]
        return Results(states, self.notes)


def _weights(state: CanonicalState) -> CanonicalState:
    return {n: {k: t for k, t in e.items() if k == "weight"} for n, e in state.items()}


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    return batch.loss(model(batch.x))


def next_word_loss(model: nn.Module, batch: Batch) -> Tensor:
    labels = batch.ids.roll(-1, 1).flatten()
    logits = model(batch.ids).flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels) / batch.num_ranks


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


# -- the list of scenarios --------------------------------------------------------------------------

ALL_STAGES = tuple(STAGES)
USUAL = (
    *(Setting(stage) for stage in ALL_STAGES),
    Setting("zero2", unit="module"),
    Setting("zero3", unit="module"),
)
EVERY_WAY = (
    *USUAL,
    *(Setting(stage, layout=f) for stage in ("zero2", "zero3") for f in ("tensor", "parameter")),
    Setting("zero3", world_size=3),
    Setting("zero1", world_size=3),
)
BY_STAGE = tuple(Setting(stage) for stage in ALL_STAGES)
ONLY_ZERO3 = (Setting("zero3"),)


# Of weights that are whole at rest, and on their way after a step, these tell what ZeRO-3 does not.
QUICK_UNDER_ZERO1 = (
    "weights_read_right_after_the_step",
    "a_block_that_normalises_its_weight",
    "written_while_peers_may_read",
    "weights_clamped_in_the_context",
    "written_without_saying_so_by_item",
    "ranks_with_different_weights",
    "a_block_that_borrows_from_a_later_one",
    "loaded_with_a_master_of_another_dtype",
    "its_own_tensors_written_between_steps_clamp_data",
    "a_scripted_function_is_the_first_to_use_before_the_forward",
    "a_scripted_function_is_the_first_to_use_in_the_loop",
    "a_scripted_function_is_the_first_to_use_behind_the_step",
)

Patterns = str | Mapping[str, str] | None


@dataclass(frozen=True)
class Scenario:
    """`refused`: must raise what matches; `may_refuse`: is right or raises what matches."""

    name: str
    function: Callable[[Lab], None]
    settings: tuple[Setting, ...]
    refused: Patterns
    may_refuse: Patterns
    oracle: bool  # whether plain PyTorch has something to compare with
    tolerance: float
    mark: str | None  # under ZeRO-3
    first: bool  # of its variants

    def mark_of(self, setting: Setting) -> str | None:
        """None: run before every change; slow: each under ZeRO-1, of variants the first; wide: all else."""
        if setting == Setting("zero3"):
            return self.mark
        if setting != Setting("zero1"):
            return "wide"
        if self.name in QUICK_UNDER_ZERO1:
            return None
        return "slow" if self.first else "wide"


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    settings: Sequence[Setting] = USUAL,
    *,
    refused: Patterns = None,
    may_refuse: Patterns = None,
    oracle: bool = True,
    tolerance: float = 1e-6,
    mark: str | None = None,
    first: bool = True,
) -> Callable[[Callable[[Lab], None]], Callable[[Lab], None]]:
    """Puts a function on the list; its docstring says what a stranger does there."""

    def put(function: Callable[[Lab], None]) -> Callable[[Lab], None]:
        name = function.__name__
        assert name not in SCENARIOS, f"two scenarios are called {name}"
        made = Scenario(
            name, function, tuple(settings), refused, may_refuse, oracle, tolerance, mark, first
        )
        SCENARIOS[name] = made
        return function

    return put


EVERY = "every"  # the variant that does what all others do, one after another: it alone runs before every change


def each_of(table: Iterable[str], name: str) -> list[str]:
    """What this variant does."""
    return [*table] if name == EVERY else [name]


def variants(
    names: Sequence[str],
    settings: Sequence[Setting] = BY_STAGE,
    *,
    quick: Sequence[str] | None = None,
    **words: Any,
) -> Callable[[Callable[[Lab, str], None]], None]:
    """The same scenario once for each name. quick: the engine meets nothing new in the others, which are wide.

    Where it is not given each second is slow.
    """
    assert quick is None or set(quick) <= set(names)

    def put(function: Callable[[Lab, str], None]) -> None:
        for index, name in enumerate(names):

            def one(lab: Lab, name: str = name) -> None:
                function(lab, name)

            one.__name__ = f"{function.__name__}_{name}"
            mark = "slow" if index % 2 else None
            if quick:
                mark = None if name in quick else "wide"
            first = name == (quick or names)[0]
            scenario(settings, **{"mark": mark, "first": first, **words})(one)

    return put


# -- one run, and its verdict ------------------------------------------------------------------------


@dataclass
class Refusal:
    """What a rank raised, if all ranks raised it."""

    kind: str
    message: str


class Refused(Exception):
    """What a rank raised while others went on or hang: the world is of no use any more."""


def run_on_rank(world: World, name: str, setting: Setting) -> Results | Refusal:
    load_all()
    lab = Lab(setting, world)
    try:
        answer: Results | Refusal = _run(name, lab)
    except Exception as error:
        answer, cause = Refusal(type(error).__name__, str(error)), error
        if _all_say(world, repr(answer)):
            return answer
        raise Refused(f"«{answer.kind}|{answer.message}»") from cause
    if not _all_say(world, "done"):
        raise AssertionError("a peer did not come to its end")
    return answer


def _all_say(world: World, what: str) -> bool:
    """Whether every rank came to the same end within seconds; told past the engine's own channels."""
    global _num_calls
    _num_calls += 1
    store = _get_default_store()
    store.set(f"strangers/{_num_calls}/{world.rank}", what)
    keys = [f"strangers/{_num_calls}/{rank}" for rank in range(world.size)]
    try:
        store.wait(keys, timedelta(seconds=SECONDS_TO_AGREE))
    except RuntimeError:
        return False
    return len({store.get(key) for key in keys}) == 1


_num_calls = 0


@cache
def oracle_of(name: str, num_ranks: int) -> Results:
    """One process plays all ranks."""
    return _run(name, Lab(Setting("plain", world_size=num_ranks), None))


def _run(name: str, lab: Lab) -> Results:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        SCENARIOS[name].function(lab)
        return lab.results()


def pattern_for(patterns: Patterns, stage: str) -> str | None:
    return patterns.get(stage) if isinstance(patterns, Mapping) else patterns


def wrong_refusal(kind: str, message: str, pattern: str) -> str | None:
    """What is wrong with an error as an answer to a user; None if nothing."""
    if kind not in (
        "RuntimeError",
        "ValueError",
        "TypeError",
        "NotImplementedError",
        "ConfigError",
    ):
        return f"{kind} is no refusal: {message[:300]}"
    # Torch puts what one parameter raised into lines of its own.
    message = message.removeprefix(LOADING)
    if "\n" in message.strip():
        return f"a refusal is one line, this is {kind}: {message[:300]}"
    if not re.search(pattern, message):
        return f"the refusal does not match {pattern!r}: {kind}: {message[:300]}"
    return None


def refusals_in(text: str) -> list[tuple[str, str]]:
    """(type, message) of each rank that raised, out of a RankError's text."""
    return [(kind, message) for kind, message in re.findall(r"Refused: «(\w+)\|(.*?)»", text, re.S)]


def difference(answers: Sequence[Results], name: str, num_ranks: int) -> str | None:
    """What differs between the ranks' results and plain PyTorch's; None if nothing."""
    expected, tolerance = oracle_of(name, num_ranks), SCENARIOS[name].tolerance
    for index, state in enumerate(expected.states):
        theirs = assembled([state])
        ours = assembled([answer.states[index] for answer in answers])
        for weight, tensors in theirs.items():
            if weight not in ours:
                return f"weight {weight} of model {index} is missing"
            mine, his = ours[weight]["weight"], tensors["weight"]
            # A master may be wider.
            mine = mine.to(his.dtype) if mine.dtype == torch.float64 else mine
            found = _apart(mine, his, tolerance)
            if found:
                return f"weight {weight} of model {index}: {found}"
    for rank, answer in enumerate(answers):
        notes = [note for whose, note in expected.notes if whose in (None, rank)]
        mine = [note for _, note in answer.notes]
        if len(notes) != len(mine):
            return f"rank {rank} noted {len(mine)} things, plain PyTorch {len(notes)}"
        for index, (note, other) in enumerate(zip(mine, notes, strict=True)):
            found = _apart(note, other, tolerance)
            if found:
                return f"note {index} of rank {rank}: {found}"
    return None


def _apart(ours: Any, theirs: Any, tolerance: float) -> str | None:
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        return None if ours == theirs else f"{ours!r}, plain PyTorch has {theirs!r}"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        now, then = (f"{tuple(t.shape)} {t.dtype}" for t in (ours, theirs))
        return f"{now}, plain PyTorch has {then}"
    try:
        torch.testing.assert_close(ours, theirs, rtol=10 * tolerance, atol=tolerance)
    except AssertionError:
        apart = (ours.double() - theirs.double()).abs().max().item()
        return f"off by {apart:.1e}"
    return None


@cache
def load_all() -> None:
    """Every module of scenarios puts its own on the list."""
    from importlib import import_module

    for module in MODULES:
        import_module(f"tests.strangers.{module}")


MODULES = (
    "penalties",
    "reading",
    "writing",
    "outputs",
    "stale",
    "gradients",
    "freezing",
    "optimizers",
    "parameters",
    "recomputation",
    "compiled",
    "evaluation",
    "several",
    "failing",
    "doors",
    "whole_programs",
)
