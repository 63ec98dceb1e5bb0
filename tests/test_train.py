"""The loop: what it asks of an engine and when, and the numbers it hands on. The engine is one obvious process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.cluster.test_local import make_job
from tests.plain_strategy import PlainStrategy
from zeroexp.comm.collectives import Collectives
from zeroexp.config.keys import Config
from zeroexp.data import Microbatch, StepBatch
from zeroexp.interface.strategy import ModelStates
from zeroexp.measure import clock
from zeroexp.measure.instruments import Instruments
from zeroexp.measure.record import MOMENTS, StepRecord
from zeroexp.process import world as worlds
from zeroexp.process.world import World
from zeroexp.training.agree_to_stop import Stop
from zeroexp.training.loop import train

WIDTH = 4
MEGABYTE = 1_000_000
WEIGHT_BYTES = WIDTH * WIDTH * 4


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Numbers:
    """Regression data of which sample i is a function of i alone."""

    def __init__(self, config: Config) -> None:
        self._micro = config.data.micro_batch_size
        self._global = config.data.global_batch_size

    def sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2, WIDTH, generator=generator).unbind()

    def step_batch(
        self, position: int, *, rank: int, world_size: int, replica: range | None = None
    ) -> StepBatch:
        microbatches = []
        for first in range(rank * self._micro, self._global, world_size * self._micro):
            rows = [self.sample(position + first + i) for i in range(self._micro)]
            x, y = (torch.stack(column) for column in zip(*rows, strict=True))
            microbatches.append(Microbatch({"x": x}, y))
        return StepBatch(microbatches, num_valid=self._global, num_tokens=7 * self._global)


def make_config(*, warmup: int = 2, steps: int = 2) -> Config:
    config = Config()
    config.model.task = "regression"
    config.data.global_batch_size = 6
    config.data.micro_batch_size = 3
    config.train.warmup_steps = warmup
    config.train.steps = steps
    config.optimizer.lr = 0.1
    config.optimizer.schedule = "linear"
    config.optimizer.min_lr_ratio = 0.5
    return config


@pytest.fixture
def world():
    with worlds.joined_process_group() as world:
        yield world


def run(config: Config, world: World, **options) -> tuple[PlainStrategy, list[StepRecord]]:
    strategy = PlainStrategy(Linear())
    return strategy, list(train(strategy, Numbers(config), config=config, world=world, **options))


def test_what_is_asked_of_an_engine_and_when(world):
    strategy, records = run(make_config(warmup=2, steps=2), world)
    lrs = [record.lr for record in records]
    step = [
        [f"lr={lr:g}", "microbatch", f"lr={lr:g}", "last microbatch", "step", "zero_grad"]
        for lr in lrs
    ]
    for end_of_the_window in (step[1], step[3]):
        end_of_the_window[4] = "step and drain"
    reading = step[1].copy()
    reading.insert(3, "model_states")  # after_forward, inside of the last microbatch
    reading.insert(5, "model_states")  # after_backward
    reading.insert(7, "model_states")  # after_step
    assert strategy.calls == [
        *step[0],
        *reading,
        "model_states",  # at_rest
        *step[2],
        *step[3],
    ]
    assert lrs[0] == 0.1 and lrs[-1] == pytest.approx(0.05)


def test_nothing_is_in_flight_where_a_profile_ends(world, tmp_path):
    """torch's profiler ends in a segmentation fault where work of gloo that it saw begin ends after it."""
    config = make_config(warmup=1, steps=4)
    config.train.profile_steps = [2]
    strategy, _ = run(config, world, instruments=Instruments(config.train, world, tmp_path))
    steps = [call for call in strategy.calls if call.startswith("step")]
    assert steps == ["step and drain", "step", "step and drain", "step", "step and drain"]


def test_losses_equal_the_plain_computation(world):
    config = make_config()
    _, records = run(config, world)
    numbers, weight = Numbers(config), torch.eye(WIDTH, requires_grad=True)
    for record in records:
        rows = [numbers.sample(record.step * 6 + i) for i in range(6)]
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        loss = functional.mse_loss(x @ weight.T, y, reduction="sum") / 6
        (gradient,) = torch.autograd.grad(loss, weight)
        assert record.loss == pytest.approx(loss.item(), rel=1e-6)
        assert record.grad_norm == pytest.approx(gradient.norm().item(), rel=1e-6)
        weight = (weight - record.lr * gradient).detach().requires_grad_()


class Unlabelled(Numbers):
    """No label of the second step counts, as a plugin's data may have it."""

    def step_batch(
        self, position: int, *, rank: int, world_size: int, replica: range | None = None
    ) -> StepBatch:
        batch = super().step_batch(position, rank=rank, world_size=world_size)
        if position < self._global:
            return batch
        rows = [
            Microbatch({"x": 0 * one.inputs["x"]}, 0 * one.labels) for one in batch.microbatches
        ]
        return StepBatch(rows, num_valid=0, num_tokens=batch.num_tokens)


def test_a_step_without_labels_that_count_changes_nothing(world):
    config = make_config(warmup=1, steps=1)
    strategy = PlainStrategy(Linear())
    records = list(train(strategy, Unlabelled(config), config=config, world=world))
    assert records[1].loss == records[1].grad_norm == 0
    assert torch.isfinite(next(strategy.model.parameters())).all()


class Asked(Numbers):
    """Remembers over which ranks' labels a loss is to be the mean."""

    def step_batch(
        self, position: int, *, rank: int, world_size: int, replica: range | None = None
    ) -> StepBatch:
        self.replica = replica
        return super().step_batch(position, rank=rank, world_size=world_size)


def replica_asked_for(world: World, every: int | None) -> range | None:
    config = make_config()
    config.world_size = config.strategy.replicas = world.size
    config.strategy.outer.every = every
    data = Asked(config)
    list(train(PlainStrategy(Linear()), data, config=config, world=world))
    return data.replica


@pytest.mark.parametrize("every", [None, 1])
def test_replicas_that_step_by_themselves_average_over_their_own_labels(ranks, every):
    expected = [range(1), range(1, 2)] if every else [None, None]
    assert ranks(replica_asked_for, every) == expected


def test_positions_tokens_and_warm_up(world):
    _, records = run(make_config(warmup=2, steps=2), world)
    assert [r.step for r in records] == [0, 1, 2, 3]
    assert [r.warmup for r in records] == [True, True, False, False]
    assert [r.samples_seen for r in records] == [6, 12, 18, 24]
    assert {r.num_tokens for r in records} == {42}
    for record in records:
        assert list(record.phase_seconds) == ["data", "forward", "backward", "optimizer", "step"]
        assert record.step_seconds == pytest.approx(sum(record.phase_seconds.values()))


@pytest.mark.parametrize(
    ("start", "warmup"), [(1, [True, True, False]), (2, [True, False]), (3, [False])]
)
def test_a_process_that_resumes_warms_up_again(world, start, warmup):
    _, records = run(make_config(warmup=2, steps=2), world, start_step=start)
    assert [r.warmup for r in records] == warmup


@pytest.mark.parametrize(
    ("warmup", "start", "reading"), [(2, 0, 1), (2, 1, 2), (0, 0, 1), (1, 0, 2), (1, 2, 2)]
)
def test_memory_is_read_in_one_step(world, warmup, start, reading):
    """The last of warm-up, or the last of all: never the first, in which an optimizer has no moments yet."""
    config = make_config(warmup=warmup, steps=2)
    _, records = run(config, world, start_step=start)
    assert [r.step for r in records if r.memory_bytes is not None] == [reading]
    (memory,) = [r.memory_bytes for r in records if r.memory_bytes is not None]
    assert set(memory) == set(MOMENTS)
    assert {moment: held["parameters"] for moment, held in memory.items()} == dict.fromkeys(
        MOMENTS, WEIGHT_BYTES
    )
    # two microbatches: the first one's gradient is there when the second one's forward ends
    assert {moment: held["gradients"] for moment, held in memory.items()} == {
        "at_rest": 0,
        "after_forward": WEIGHT_BYTES,
        "after_backward": WEIGHT_BYTES,
        "after_step": WEIGHT_BYTES,
    }


def test_reading_memory_is_in_no_time(world, monkeypatch):
    """By a clock that goes on while memory is read, and at no other time."""
    config = make_config(warmup=0, steps=1)
    strategy = PlainStrategy(Linear())
    quick, now = strategy.model_states, [1.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def slow() -> ModelStates:
        now[0] += 1.0
        return quick()

    strategy.model_states = slow
    (record,) = train(strategy, Numbers(config), config=config, world=world)
    assert record.step_seconds == 0.0 and now[0] > 1.0


def test_a_run_goes_on_where_it_was(world):
    """From step 1, with the state of step 1: the same records as without interruption."""
    config = make_config(warmup=0, steps=3)
    _, whole = run(config, world)
    strategy = PlainStrategy(Linear())
    steps = train(strategy, Numbers(config), config=config, world=world)
    next(steps)
    resumed = list(train(strategy, Numbers(config), config=config, world=world, start_step=1))
    assert [r.loss for r in resumed] == [r.loss for r in whole[1:]]
    assert [r.samples_seen for r in resumed] == [12, 18]


def test_it_asks_for_a_pause_between_any_two_steps(world):
    asked: list[int] = []
    run(make_config(warmup=1, steps=3), world, start_step=1, pause=asked.append)
    assert asked == [2, 3, 4]


def send_after_the_second_step(world: World, pauses: bool) -> list[int]:
    """What each step counts on the wire where rank 0 sends a megabyte between two of them."""
    config, counted = make_config(), []
    asks = (lambda done: done == 2) if pauses else (lambda done: False)
    steps = train(PlainStrategy(Linear()), Numbers(config), config=config, world=world, pause=asks)
    for record in steps:
        counted.append(record.wire_bytes or 0)
        if record.step == 1:
            payload = torch.zeros(MEGABYTE, dtype=torch.uint8)
            dist.send(payload, 1) if world.rank == 0 else dist.recv(payload, 0)
    return counted


def test_what_is_sent_between_two_steps_counts_in_the_next_one(ranks):
    """So no byte of a gather ahead is lost. After a pause, in which a run is saved, it counts in none."""
    counted, without = (ranks(send_after_the_second_step, pauses)[0] for pauses in (False, True))
    assert counted[2] - without[2] > MEGABYTE
    assert max(without) < MEGABYTE


def test_every_rank_hands_on_the_global_loss(world, local, tmp_path):
    _, alone = run(make_config(), world)
    job = make_job(tmp_path / "run", main="tests.train_main:main")
    outcome = local.run(job)
    assert outcome.status == "done", outcome.cause
    for rank in (0, 1):
        losses = [float(line) for line in (job.folder / f"losses{rank}").read_text().split()]
        assert losses == pytest.approx([record.loss for record in alone], rel=1e-6)


def test_a_wish_of_one_rank_stops_all_after_the_same_step(local, tmp_path):
    """Rank 1 is asked by a signal within step 1; rank 0 hears of it in the sum of the loss."""
    job = make_job(tmp_path / "run", main="tests.train_main:main_until_asked")
    outcome = local.run(job)
    assert outcome.status == "done", outcome.cause
    ended = [(job.folder / f"stopped{rank}").read_text() for rank in (0, 1)]
    assert ended == ["[0, 1] agreed", "[0, 1] agreed"]


def test_asking_costs_no_message_and_changes_no_bit(world, monkeypatch):
    messages = []
    whole = Collectives.sum_scalar_later

    def counting(self, value, kind):
        messages.append((kind, value.numel()))
        return whole(self, value, kind)

    monkeypatch.setattr(Collectives, "sum_scalar_later", counting)
    config, stop = make_config(), Stop()
    _, records = run(config, world)
    assert messages == [("loss", 2)] * 4
    strategy = PlainStrategy(Linear())
    steps = train(strategy, Numbers(config), config=config, world=world, stop=stop)
    asked = [next(steps)]
    stop.asked = True
    asked += steps
    assert stop.agreed
    assert [r.loss for r in asked] == [r.loss for r in records[:2]]


def test_a_wish_waits_for_the_outer_step_where_replicas_differ(world):
    """Between outer steps there is no one model to save."""
    config, stop = make_config(), Stop()
    config.strategy.outer.every = 3
    stop.asked = True
    steps = train(PlainStrategy(Linear()), Numbers(config), config=config, world=world, stop=stop)
    assert [record.step for record in steps] == [0, 1, 2] and stop.agreed
