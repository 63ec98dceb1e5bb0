"""Ranks that do not do the same in a step: right as one process is, or an error that names rank and unit.

On one host a gather reads what was exposed and needs no counterpart, so that all of it is right. By message, and in
the backend's collectives, every gather has one: where a rank does not come, the others end with an error.

Ranks that run the same program, and differ in what their collector of garbage, their threads and their clocks do, give
their backend the same collectives in the same order, and the values of one process.
"""

from __future__ import annotations

import copy
import gc
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.crossed import crossed
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.process.world import World, barrier
from zeroexp.zero.options import Options

WIDTH = 6
NUM_STEPS = 3
WAYS = ["a block skipped", "no gradient", "no backward", "no forward", "another order"]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, way: str) -> Tensor:
        """`way`: what the rank does that others do not; "" is the usual."""
        orders = {"another order": [3, 2, 1, 0], "two swapped": [1, 0, 2, 3]}
        for block in (self.blocks[i] for i in orders.get(way, range(4))):
            if way == "a block skipped" and block is self.blocks[1]:
                continue
            y = torch.tanh(block(x))
            x = x + (y.detach() if way == "no gradient" and block is self.blocks[2] else y)
        return x


def make_model() -> Chain:
    torch.manual_seed(3)
    return Chain()


def sharded(model: nn.Module, world: World, stage: str, options: Options) -> Sharded:
    return Sharded(
        model,
        blocks=[f"blocks.{i}" for i in range(4)],
        stage=STAGES[stage],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.1),
        world=world,
        options=options,
    )


def loss_of(model: nn.Module, rank: int, step: int, way: str) -> Tensor:
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x, way).square().mean()


def way_of(rank: int, way: str) -> str:
    return way if rank == 1 else ""


def oracle(way: str, num_ranks: int) -> list[Tensor]:
    """One process adds the ranks' gradients, one after the other; none counts as zeros."""
    model = make_model()
    for step in range(NUM_STEPS):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(num_ranks):
            one = copy.deepcopy(model)
            mine = way_of(rank, way)
            if mine not in ("no forward", "no backward"):
                loss_of(one, rank, step, mine).backward()
            for total, parameter in zip(sums, one.parameters(), strict=True):
                total += 0 if parameter.grad is None else parameter.grad
        with torch.no_grad():
            for parameter, total in zip(model.parameters(), sums, strict=True):
                parameter -= 0.1 * total
    return [parameter.detach() for parameter in model.parameters()]


def train(world: World, way: str, stage: str, options: Options) -> list[tuple[str, int, Tensor]]:
    """This rank's pieces: the name, where it begins, the values."""
    model = make_model()
    strategy = sharded(model, world, stage, options)
    mine = way_of(world.rank, way)

    def read_weights(when: str) -> None:
        if mine == f"weights read {when}":
            with strategy.gathered():
                pass

    for step in range(NUM_STEPS):
        with strategy.microbatch(last=True):
            read_weights("in a microbatch")
            if mine != "no forward":
                loss = loss_of(strategy.model, world.rank, step, mine)
                if mine != "no backward":
                    strategy.backward(loss)
        read_weights("before a step")
        strategy.step()
        strategy.zero_grad()
    strategy.drain()
    barrier()
    return [
        (name, piece.start, piece.tensor.clone())
        for name, tensors in strategy.state_dict().items()
        for piece in tensors["weight"].pieces
    ]


def is_right(pieces: list[tuple[str, int, Tensor]], way: str, num_ranks: int) -> None:
    names = [name for name, _ in make_model().named_parameters()]
    expected = dict(zip(names, oracle(way, num_ranks), strict=True))
    for name, start, values in pieces:
        part = expected[name].reshape(-1)[start : start + values.numel()]
        torch.testing.assert_close(values.reshape(-1), part, rtol=1e-6, atol=1e-7)


SETTINGS = [("zero2", 2, False), ("zero3", 3, False), ("zero2", 3, True), ("zero3", 2, True)]


# Every way under each stage, in turns with each number of ranks.
@pytest.mark.parametrize(
    ("way", "stage", "world_size", "overlap"),
    [(way, *SETTINGS[2 * (i % 2) + j]) for i, way in enumerate(WAYS) for j in range(2)],
)
def test_on_one_host_ranks_may_differ(ranks, way, stage, world_size, overlap):
    options = Options(overlap=overlap, prefetch=1 if overlap else None)
    for pieces in ranks(train, way, stage, options, world_size=world_size):
        is_right(pieces, way, world_size)


@pytest.mark.parametrize(
    "when", ["in a microbatch", pytest.param("before a step", marks=pytest.mark.slow)]
)
def test_on_one_host_a_rank_that_reads_all_weights_alone_is_told(ranks, when):
    """Reading compares the ranks: the comparison meets that of the first microbatch, or the norm, and then nothing."""
    with pytest.raises(AssertionError) as caught:
        ranks(train, f"weights read {when}", "zero3", Options(transport="direct"))
    text = str(caught.value)
    assert "the ranks do not do the same" in text and "strategy.gathered()" in text, text


def names_rank_and_unit(ranks, way: str) -> None:
    with pytest.raises(AssertionError) as caught:
        ranks(train, way, "zero3", Options(transport="gloo"))
    text = str(caught.value)
    assert "the ranks do not do the same" in text, text
    assert "rank 0 is in the" in text and "rank 1 is in the" in text
    assert "of unit blocks." in text or "of unit (root)" in text
    assert "Timed out waiting" not in text, "the wait was ended, and did not run out"


def test_by_message_ranks_that_differ_end_with_an_error(ranks):
    names_rank_and_unit(ranks, "a block skipped")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS[1:])
def test_by_message_every_difference_is_right_or_an_error(ranks, way):
    try:
        for pieces in ranks(train, way, "zero3", Options(transport="gloo")):
            is_right(pieces, way, 2)
    except AssertionError as error:
        assert "the ranks do not do the same" in str(error), str(error)


def evaluate_in_another_order(world: World, swapped: bool) -> str:
    """Rank 1 uses the first two blocks in the other order once, then all ranks do one step alike."""
    model = make_model()
    strategy = sharded(model, world, "zero3", Options(transport="native", overlap=False))
    with torch.no_grad():
        loss_of(strategy.model, world.rank, 0, "two swapped" if swapped and world.rank == 1 else "")
    with strategy.microbatch(last=True):
        strategy.backward(loss_of(strategy.model, world.rank, 0, ""))
    strategy.step()
    return "went on"


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_backend_mixes_blocks_up_and_every_rank_says_so(ranks, world_size):
    """Its gathers have no names: those of one size meet, whatever they gather."""
    same = ranks(evaluate_in_another_order, False, world_size=world_size)
    assert same == ["went on"] * world_size
    with pytest.raises(AssertionError) as caught:
        ranks(evaluate_in_another_order, True, world_size=world_size)
    _, *texts = str(caught.value).split(": Traceback")
    assert len(texts) == world_size
    for text in texts:
        found_at_the_end = "used their blocks in different orders" in text
        assert found_at_the_end or "the ranks do not do the same, rank 0 is in the gather" in text


@pytest.mark.slow
@pytest.mark.parametrize("way", ["no backward"])
def test_in_the_backend_ranks_that_differ_end_with_an_error(ranks, way):
    """Each waits in another collective; the second rank to give up finds its peer gone, or the same words."""
    with pytest.raises(AssertionError) as caught:
        ranks(train, way, "zero3", Options(transport="native"))
    text = str(caught.value)
    assert "the ranks do not do the same, rank 0 is in the" in text, text
    assert "; rank 1 is in the" in text


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "world_size"), [("zero2", 3), ("zero3", 2)])
@pytest.mark.parametrize("way", WAYS)
def test_in_the_backend_every_difference_is_right_or_an_error(ranks, way, stage, world_size):
    try:
        for pieces in ranks(train, way, stage, Options(transport="native"), world_size=world_size):
            is_right(pieces, way, world_size)
    except AssertionError as error:
        text = str(error)
        assert "the ranks do not do the same" in text or "in different orders" in text, text


# -- ranks that do the same, beside which other things happen -----------------------------------------

EVERY_RANK_GATHERS = pytest.mark.parametrize("transport", ["gloo", "native"])
NUM_MICROBATCHES = 2


class Backend(TorchDispatchMode):
    """Notes what torch.distributed hands to the backend, in order: the operation, and a message's tag."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            sizes = [each.numel() for each in args if isinstance(each, Tensor)]
            message = name.startswith(("c10d.send", "c10d.recv"))
            self.issued.append((name, str(args[-1] if message else sizes)))
        return func(*args, **(kwargs or {}))


class Seen(nn.Module):
    """A tied embedding and head around blocks, which reads its weights before the embedding's backward."""

    unit = "block"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(4))
        self.seen: list[float] = []
        self.kept: Callable[[Tensor], None] = lambda weight: None

    def penalty(self) -> Tensor | None:
        """Return what is added to the loss, computed from weights that are whole until backward has ended."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        self.kept(self.embed.weight)
        if x.requires_grad:
            x.register_hook(lambda _: self.seen.append(float(self.embed.weight.detach().norm())))
        for block in self.blocks:
            x = block(x).tanh()
        return nn.functional.linear(x, self.embed.weight)


class Scaled(nn.Module):
    """A block of which a parameter gets a gradient on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))
        self.scales = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        return y * (self.scale if self.scales else self.scale.detach())


class Reentrant(Seen):
    """Each block is recomputed by a backward of its own inside the backward of the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return nn.functional.linear(x, self.embed.weight)


class Nested(Seen):
    """Blocks are units around units; of their own parameters one rank has gradients in the first microbatch alone."""

    unit = "module"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.head = nn.Linear(WIDTH, 40)
        self._num_forwards = 0

    def forward(self, ids: Tensor) -> Tensor:
        self._num_forwards += 1
        lacking = [block for block in self.blocks if not block.scales and self._num_forwards <= 2]
        for block in lacking:
            block.scales = True
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        for block in lacking:
            block.scales = False
        return self.head(x)


class Penalised(Seen):
    """Some ranks lack a gradient of each block, so that they reduce it later."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))

    def penalty(self) -> Tensor | None:
        return self.embed.weight.square().sum() / 100


def ids_of(step: int, microbatch: int, rank: int) -> Tensor:
    seed = 100 * step + 10 * microbatch + rank
    return torch.randint(40, (2, 3), generator=torch.Generator().manual_seed(seed))


def made(kind: type[Seen], rank: int) -> Seen:
    torch.manual_seed(3)
    model = kind()
    for block in model.blocks:
        if isinstance(block, Scaled):
            block.scales = rank != 1
    return model


class Habit:
    """What happens on one rank beside the program; this one is nothing."""

    def begin(self, strategy: Sharded, model: Seen) -> None: ...
    def after_forward(self, output: Tensor) -> None: ...
    def before_backward(self) -> None: ...
    def after_backward(self) -> None: ...
    def after_microbatch(self) -> None: ...
    def after_step(self) -> None: ...
    def end(self) -> None: ...


class Garbage(Habit):
    """Outputs with their graphs and views of weights stay in cycles, which nobody collects."""

    def begin(self, strategy: Sharded, model: Seen) -> None:
        gc.disable()
        model.kept = lambda weight: self.after_forward(weight.detach())

    def after_forward(self, output: Tensor) -> None:
        cycle: list[Any] = [output]
        cycle.append(cycle)

    def end(self) -> None:
        gc.enable()
        gc.collect()


class Collected(Habit):
    """Garbage is collected before each backward."""

    def before_backward(self) -> None:
        gc.collect()


class Thread(Habit):
    """A thread holds a weight's memory while backward runs, as those of a backend do for a moment."""

    def begin(self, strategy: Sharded, model: Seen) -> None:
        self._held: list[Tensor] = []
        model.kept = lambda weight: self._held.append(weight.detach())

    def before_backward(self) -> None:
        self._ends = threading.Event()
        held, self._held = self._held, []
        self._thread = threading.Thread(target=lambda held: self._ends.wait(), args=(held,))
        self._thread.start()

    def after_backward(self) -> None:
        self._ends.set()
        self._thread.join()
        del self._thread  # and with it what it held


class Late(Habit):
    """It takes longer, now here and now there."""

    def begin(self, strategy: Sharded, model: Seen) -> None:
        self._chance = random.Random(5)
        for block in model.blocks:
            block.register_forward_hook(self._sleep_at)

    def after_step(self) -> None:
        self._sleep()

    def _sleep_at(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self._sleep()
        if output.requires_grad:
            output.register_hook(lambda _: self._sleep())

    def _sleep(self) -> None:
        time.sleep(self._chance.choice([0.0, 0.0, 0.01]))


class Asking(Habit):
    """It asks for its own state, and waits for what is in flight, at every pause."""

    def begin(self, strategy: Sharded, model: Seen) -> None:
        self._strategy = strategy

    def after_microbatch(self) -> None:
        self._strategy.model_states()
        self._strategy.drain()

    def after_step(self) -> None:
        self._strategy.state_dict()
        self._strategy.drain()  # beside what the step gathered ahead


HABITS = {
    "garbage": (Collected, Garbage),
    "thread": (Habit, Thread),
    "time": (Habit, Late),
    "asks": (Asking, Habit),
    "no difference": (Habit, Habit),
}


def train_with_habits(
    world: World, kind: type[Seen], habits: tuple[type[Habit], ...], stage: str, transport: str
) -> tuple[list[tuple[str, ...]], list[float], dict[str, Tensor]]:
    """Return what the backend was given, what the model saw of its weights in backward, and the weights."""
    model = made(kind, world.rank)
    strategy = sharded(model, world, stage, Options(transport=transport, unit=kind.unit))
    habit = habits[world.rank]()
    with Backend() as backend:
        habit.begin(strategy, model)
        for step in range(NUM_STEPS):
            for index in range(NUM_MICROBATCHES):
                with strategy.microbatch(last=index == NUM_MICROBATCHES - 1):
                    ids = ids_of(step, index, world.rank)
                    habit.after_forward(model(ids))  # a look without backward
                    output = model(ids)
                    habit.after_forward(output)
                    habit.before_backward()
                    loss = output.square().sum() / 100
                    if kind.penalty is Seen.penalty:
                        strategy.backward(loss)
                    else:
                        with strategy.gathered():
                            strategy.backward(loss + model.penalty())
                    del output, loss
                    habit.after_backward()
                habit.after_microbatch()
            strategy.step()
            habit.after_step()
            strategy.zero_grad()
        habit.end()
        with strategy.gathered():
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    barrier()
    return backend.issued, model.seen, weights


def train_plainly(kind: type[Seen], world_size: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Return what one process saw in each rank's backwards, and its weights."""
    models = [made(kind, rank) for rank in range(world_size)]
    for step in range(NUM_STEPS):
        for index in range(NUM_MICROBATCHES):
            for rank, model in enumerate(models):
                ids = ids_of(step, index, rank)
                model(ids)  # a look without backward
                loss = model(ids).square().sum() / 100
                penalty = model.penalty()
                (loss if penalty is None else loss + penalty).backward()
        with torch.no_grad():
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                total = sum(p.grad for p in parameters if p.grad is not None)
                for parameter in parameters:
                    parameter -= 0.1 * total
                    parameter.grad = None
    weights = {name: p.detach() for name, p in models[0].named_parameters()}
    return [model.seen for model in models], weights


def issue_the_same(ranks: Any, kind: type[Seen], habit: str, stage: str, transport: str) -> None:
    """Expect of all ranks the same collectives, and of messages the same tags; and the values of one process."""
    answers = ranks(train_with_habits, kind, HABITS[habit], stage, transport)
    seen, expected = train_plainly(kind, len(answers))
    first, *others = [issued for issued, _, _ in answers]
    assert len(first) > NUM_STEPS * NUM_MICROBATCHES
    for issued in others:
        assert issued == first
    for rank, (_, norms, weights) in enumerate(answers):
        assert norms == pytest.approx(seen[rank], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


@crossed(
    "transport, habit",
    ["gloo", "native"],
    HABITS,
    # Which collective a rank issues is decided above the transports.
    quick=lambda transport, habit: (transport == "native") == (list(HABITS).index(habit) % 2 == 1),
)
def test_garbage_threads_time_and_questions_change_no_collective(ranks, habit, transport):
    issue_the_same(ranks, Seen, habit, "zero3", transport)


@EVERY_RANK_GATHERS
@pytest.mark.parametrize("kind", [Nested, pytest.param(Reentrant, marks=pytest.mark.slow)])
def test_gradients_that_one_rank_lacks_change_no_collective(ranks, kind, transport):
    issue_the_same(ranks, kind, "no difference", "zero3", transport)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_a_penalty_is_compared_after_what_one_rank_reduces_later(ranks, stage):
    issue_the_same(ranks, Penalised, "no difference", stage, "native")
