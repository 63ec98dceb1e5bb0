"""What a program does around its steps changes what it says, and nothing else: weights written between them, gradients
dropped amid them, an optimizer that raises, torch's defaults, objects in options, and ranks that start apart.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import RankError
from zeroexp.comm.collectives import Collectives
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.canonical import merge
from zeroexp.process.world import World, fake_world, gather_objects
from zeroexp.zero.full_storage import FullStorage
from zeroexp.zero.options import Dtypes, Options, OuterOptimizer
from zeroexp.zero.unit import Unit

WIDTH = 6
BF16_MASTER = Dtypes(torch.bfloat16, torch.float32, torch.float32)


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-3, momentum=0.9)


def sharded(
    world: World,
    stage: str,
    model: nn.Module | None = None,
    group: dict[str, Any] | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    scales_loss: bool = False,
    dtypes: Dtypes | None = None,
    **options: Any,
) -> Sharded:
    model = model or make_model()
    return Sharded(
        model,
        blocks=["0", "1"],
        stage=STAGES[stage],
        param_groups=[{"params": list(model.parameters()), **(group or {})}],
        optimizer_factory=make_optimizer,
        world=world,
        dtypes=dtypes,
        options=Options(**options),
        scales_loss=scales_loss,
    )


def microbatch(strategy: Sharded, world: World, number: int, *, last: bool = True) -> None:
    drawn = torch.Generator("cpu").manual_seed(10 * number + world.rank)
    dtype = next(strategy.model.parameters()).dtype
    inputs = torch.randn(4, WIDTH, generator=drawn, dtype=torch.float32, device="cpu").to(dtype)
    with strategy.microbatch(last=last):
        strategy.backward(strategy.model(inputs).float().square().sum())


def step(strategy: Sharded, world: World, number: int) -> None:
    microbatch(strategy, world, number, last=False)
    microbatch(strategy, world, number + 50)
    strategy.step()
    strategy.zero_grad()


def weights_of(strategy: Sharded) -> dict[tuple[str, int], Tensor]:
    """This rank's pieces of the masters, by name and place."""
    return {
        (name, piece.start): piece.tensor.clone()
        for name, entry in strategy.state_dict().items()
        if "weight" in entry  # it is no buffer
        for piece in entry["weight"].pieces
    }


# -- weights written between two steps -------------------------------------------------------------


def train_and_write(world: World, stage: str, writes: bool, options: dict[str, Any]) -> Any:
    """Train with masters of more digits than parameters; between steps all are open to be written, and one bias is."""
    strategy = sharded(world, stage, dtypes=BF16_MASTER, **options)
    for number in range(3):
        step(strategy, world, number)
        if writes:
            with strategy.gathered(write=True), torch.no_grad():
                if number == 2:
                    strategy.model[2].bias.fill_(0.5)
    return weights_of(strategy)


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        ("ddp", {}),
        ("zero2", {"layout": "tensor"}),
        ("zero3", {}),
        ("zero3", {"masters_rest": True}),
    ],
)
def test_masters_keep_the_digits_of_what_nobody_wrote(ranks, stage, options):
    without = ranks(train_and_write, stage, False, options)
    for mine, theirs in zip(ranks(train_and_write, stage, True, options), without, strict=True):
        for (name, start), weights in theirs.items():
            expected = torch.full_like(weights, 0.5) if name == "2.bias" else weights
            assert torch.equal(mine[name, start], expected), name
        assert any(not torch.equal(each, each.bfloat16().float()) for each in theirs.values())


# -- gradients that are dropped --------------------------------------------------------------------


def drop_microbatches(world: World, stage: str, transport: str, num_dropped: int) -> Any:
    strategy = sharded(world, stage, transport=transport, reduce_each="microbatch")
    step(strategy, world, 0)
    for number in range(num_dropped):
        microbatch(strategy, world, 20 + number, last=False)
    if num_dropped:
        strategy.zero_grad()
    step(strategy, world, 1)
    return weights_of(strategy)


@pytest.mark.parametrize("stage", ["ddp", "zero1_allreduce", "zero2", "zero3"])
@pytest.mark.parametrize("transport", ["gloo", "direct", "native"])
def test_microbatches_are_dropped_with_what_is_in_flight_of_them(ranks, stage, transport):
    usual = ranks(drop_microbatches, stage, transport, 0)
    for mine, theirs in zip(ranks(drop_microbatches, stage, transport, 3), usual, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


# -- memory that runs out --------------------------------------------------------------------------


def run_out_once(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, after: int = 0) -> None:
    """Let one call of a method find no memory: that after so many others."""
    method, passed = getattr(kind, name), iter(range(after))

    def maybe(self: Any, *words: Any, **named: Any) -> Any:
        if next(passed, None) is None:
            monkeypatch.setattr(kind, name, method)
            raise torch.OutOfMemoryError
        return method(self, *words, **named)

    monkeypatch.setattr(kind, name, maybe)


def test_a_program_goes_on_behind_a_gather_without_memory(monkeypatch):
    """It looks for the largest batch, say."""
    with fake_world(0, 2) as world:
        strategy = sharded(world, "zero3", transport="gloo")
        step(strategy, world, 0)
        run_out_once(monkeypatch, FullStorage, "take_up")
        with pytest.raises(torch.OutOfMemoryError):
            microbatch(strategy, world, 1)
        strategy.zero_grad()
        step(strategy, world, 2)


def test_a_validation_goes_on_behind_a_gather_without_memory(monkeypatch):
    """Outside of a microbatch nothing drops what the first forward has left."""
    with fake_world(0, 2) as world, torch.no_grad():
        strategy, inputs = sharded(world, "zero3", transport="gloo"), torch.ones(4, WIDTH)
        run_out_once(monkeypatch, FullStorage, "take_up")
        with pytest.raises(torch.OutOfMemoryError):
            strategy.model(inputs)
        strategy.model(inputs)


@pytest.mark.parametrize("write", [False, True])
def test_a_program_goes_on_where_the_model_does_not_fit_whole(monkeypatch, write):
    with fake_world(0, 2) as world:
        strategy = sharded(world, "zero3", transport="gloo")
        run_out_once(monkeypatch, Unit, "gather_into", after=2)
        with pytest.raises(torch.OutOfMemoryError), strategy.gathered(write=write):
            pass
        assert all(held.pinned is None for unit in strategy.units for held in unit.held)
        step(strategy, world, 0)


def show_all_where_one_runs_out(world: World) -> None:
    options = {"transport": "messages", "replicas": 2, "optimizer_over": "all"}
    strategy = sharded(world, "zero3", **options)
    with pytest.MonkeyPatch.context() as monkeypatch, suppress(RuntimeError):
        if world.rank != 0:
            with strategy.gathered(write=True):  # until rank 0 has ended
                return
        run_out_once(monkeypatch, Unit, "gather_into", after=2)
        with pytest.raises(torch.OutOfMemoryError), strategy.gathered(write=True):
            pass
        raise ArithmeticError("rank 0 was told of its memory")


@pytest.mark.slow
def test_a_rank_that_runs_out_alone_is_told_so(ranks):
    """With shares of an optimizer to publish is a collective, which its peers, in the gather, do not join."""
    with pytest.raises(RankError, match="rank 0 was told of its memory"):
        ranks(show_all_where_one_runs_out, world_size=4)


def test_a_reduction_without_memory_ends_the_engine(monkeypatch):
    """Some gradients of it may be counted, and peers may have launched it."""
    with fake_world(0, 2) as world:
        strategy = sharded(world, "zero2", transport="gloo")
        run_out_once(monkeypatch, Collectives, "reduce_scatter")
        with pytest.raises(torch.OutOfMemoryError):
            microbatch(strategy, world, 0)
        with pytest.raises(RuntimeError, match="build the engine again and load the last"):
            step(strategy, world, 1)


# -- an optimizer that raises ----------------------------------------------------------------------


class Refusing(torch.optim.SGD):
    raises = False

    def step(self, closure: Any = None) -> None:
        if self.raises:
            raise ArithmeticError("no step")
        super().step(closure)


def refusing(groups: Any) -> torch.optim.Optimizer:
    return Refusing(groups, lr=1e-3)


def go_on_after_a_step_that_raised(world: World, stage: str, transport: str) -> None:
    strategy = sharded(world, stage, make_optimizer=refusing, transport=transport)
    step(strategy, world, 0)
    before = weights_of(strategy)
    strategy.optimizer.raises = True
    with pytest.raises(ArithmeticError, match="no step"):
        step(strategy, world, 1)
    strategy.optimizer.raises = False
    strategy.zero_grad()
    now = weights_of(strategy)
    assert all(torch.equal(now[key], before[key]) for key in before)
    step(strategy, world, 2)
    other = sharded(world, stage, make_optimizer=refusing, transport=transport)
    for number in (0, 2):
        step(other, world, number)
    weights, expected = weights_of(strategy), weights_of(other)
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("stage", "transport"), [("zero3", "direct"), ("zero3", "native"), ("zero1", "direct")]
)
def test_a_program_goes_on_after_an_optimizer_that_raised(ranks, stage, transport):
    ranks(go_on_after_a_step_that_raised, stage, transport)


# -- torch's defaults ------------------------------------------------------------------------------


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def train_under_defaults(world: World, dtype: torch.dtype, device: str, stage: str) -> Any:
    model = make_model()
    options = {"reduce_codec": "int8", "error_feedback": True} if stage == "zero2" else {}
    with defaults(dtype, device):
        strategy = sharded(world, stage, model, **options)
        for number in range(3):
            step(strategy, world, number)
        strategy.load_state_dict(merge(gather_objects(strategy.state_dict())))
        return weights_of(strategy)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")]
)
def test_defaults_of_torch_change_nothing(ranks, stage, dtype, device):
    usual = ranks(train_under_defaults, torch.float32, "cpu", stage)
    under = ranks(train_under_defaults, dtype, device, stage)
    for mine, theirs in zip(under, usual, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


# -- freed parameters ------------------------------------------------------------------------------


def test_another_tensor_becomes_of_the_dtype_and_device_of_a_freed_parameter():
    with fake_world(0, 2) as world:
        freed = sharded(world, "zero3").model[1].weight
        wide = torch.ones(2, dtype=torch.float64)
        assert wide.to(freed).dtype is wide.type_as(freed).dtype is torch.float32
        with pytest.raises(RuntimeError, match=r"parameter 1\.weight is freed"):
            wide.sum() + freed.sum()


# -- what ranks compare at the start ---------------------------------------------------------------


class PrintsItsRank:
    def __repr__(self) -> str:
        return f"of process {os.getpid()}"


def build_with_objects(world: World) -> None:
    note = {"note": PrintsItsRank(), "table": {"of": PrintsItsRank()}, "lr": 1e-3}
    strategy = sharded(world, "zero2", group=note)
    step(strategy, world, 0)


def test_options_may_be_objects_that_print_otherwise_on_each_rank(ranks):
    ranks(build_with_objects)


def build_with_another_rate(world: World) -> None:
    sharded(
        world, "zero2", group={"lr": torch.tensor(1e-3 * (1 + world.rank)), "of": PrintsItsRank()}
    )


def test_a_rate_that_is_a_tensor_is_compared_by_its_value(ranks):
    with pytest.raises(RankError, match="ranks were given different settings"):
        ranks(build_with_another_rate)


def start_apart(world: World) -> dict[str, Any]:
    """Build a model of other weights and buffers on each rank, and return what it holds."""
    model = make_model(seed=world.rank)
    for name, values in {
        "phases": torch.full((3,), complex(1, world.rank), dtype=torch.complex64),
        "conjugates": torch.full(
            (3,), complex(1, world.rank)
        ).conj(),  # a bit tells so, and not the bytes
        "negatives": torch.full((3,), complex(1, 1 + world.rank)).conj().imag,
        "short": torch.tensor(world.rank, dtype=torch.int16),
        "expanded": torch.full((1,), 1.0 + world.rank).expand(4),
        "sparse": torch.eye(3).to_sparse(),
    }.items():
        model.register_buffer(name, values, persistent=name != "sparse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = sharded(world, "zero2", model)
    assert any("those of rank 0" in str(each.message) for each in caught) == (world.rank == 0)
    return {n: b.clone() for n, b in strategy.model.named_buffers() if n != "sparse"} | {
        name: weights for (name, _), weights in weights_of(strategy).items()
    }


def test_ranks_that_start_apart_take_buffers_of_any_dtype_from_rank_0(ranks):
    for answer in ranks(start_apart):
        assert torch.equal(answer["phases"], torch.full((3,), 1 + 0j, dtype=torch.complex64))
        assert torch.equal(answer["conjugates"].resolve_conj(), answer["phases"])
        assert torch.equal(answer["negatives"], torch.full((3,), -1.0))
        assert answer["short"] == 0 and torch.equal(answer["expanded"], torch.ones(4))
    assert torch.equal(
        torch.cat([each["0.weight"] for each in ranks(start_apart)]).view(-1)[:1],
        make_model(0)[0].weight.detach().view(-1)[:1],
    )


def test_replicas_that_are_seldom_synchronised_have_no_one_loss_scale():
    dtypes = Dtypes(torch.float16, torch.float32, torch.float32)
    line = r"scales_loss=True: with options\.outer each replica would find a loss scale of its own"
    with fake_world(0, 4) as world, pytest.raises(ValueError, match=line):
        sharded(
            world,
            "zero2",
            dtypes=dtypes,
            scales_loss=True,
            replicas=2,
            outer=OuterOptimizer(every=2),
        )
