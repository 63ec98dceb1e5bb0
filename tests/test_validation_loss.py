"""Validation: the same loss under every engine as in one process, at the steps asked for, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from tests.crossed import every_nth
from tests.engines import ENGINES
from tests.models_for_tests import MODELS, SEQ_LEN, VOCABULARY
from tests.oracle import Make, Recipe, build_on_rank
from tests.test_rank import make_job
from zeroexp.comm.collectives import Collectives
from zeroexp.config import keys as configs
from zeroexp.config.keys import Config, ConfigError, DataConfig
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.data import Microbatch, ValidationTurn
from zeroexp.data.batches import Data
from zeroexp.data.synthetic import NUM_SAMPLES, SyntheticTokens
from zeroexp.measure.record import StepRecord
from zeroexp.process.world import World
from zeroexp.tracking.files import read_records, read_summary
from zeroexp.tracking.run import read_run
from zeroexp.training.loop import train
from zeroexp.training.validate import Validation, _num_hits, validate

NUM_VALIDATED = 7  # on two and three ranks the last turn is short, and some ranks have none left
STEPS = 3
ROUNDING = 1e-5  # of the order in which gradients and losses are added, after three steps


def make_config(*, validate_every: int | None = None) -> Config:
    config = Config()
    config.data = DataConfig(global_batch_size=12, micro_batch_size=2)
    config.data.validation_samples = NUM_VALIDATED
    config.train.warmup_steps, config.train.steps = 1, STEPS - 1
    config.train.validate_every = validate_every
    config.optimizer = Recipe().optimizer_config()
    return config


def samples() -> SyntheticTokens:
    return SyntheticTokens(VOCABULARY, SEQ_LEN, seed=3)


def train_on_rank(
    world: World, recipe: Recipe, make: Make, validate_every: int | None
) -> list[StepRecord]:
    torch.manual_seed(world.rank)
    config = make_config(validate_every=validate_every)
    strategy = build_on_rank(world, recipe, make)
    data = Data(samples(), config.data, seed=0)
    return list(train(strategy, data, config=config, world=world))


def train_often_and_rarely(
    world: World, recipe: Recipe, make: Make
) -> tuple[list[StepRecord], list[StepRecord]]:
    often, rarely = (train_on_rank(world, recipe, make, every) for every in (1, None))
    return often, rarely


@cache
def train_alone() -> list[float]:
    """The loss on the held-out samples after each step, in one process that does the obvious thing."""
    config = make_config()
    module = MODELS["toy"].build().module
    optimizer = optimizer_factory(config.optimizer)(parameter_groups(module, config.optimizer, []))
    data = Data(samples(), config.data, seed=0)
    losses = []
    for step in range(STEPS):
        batch = data.step_batch(12 * step, rank=0, world_size=1)
        for each in batch.microbatches:
            logits = module(**each.inputs).flatten(0, 1)
            loss = functional.cross_entropy(logits, each.labels.flatten(), reduction="sum")
            (loss / batch.num_valid).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(held_out_loss(module))
    return losses


@torch.no_grad()
def held_out_loss(module: torch.nn.Module) -> float:
    sums = []
    for index in range(NUM_SAMPLES - NUM_VALIDATED, NUM_SAMPLES):
        row = torch.from_numpy(samples()._row(index))
        logits = module(row[None, :-1])[0]
        sums.append(functional.cross_entropy(logits, row[1:], reduction="sum").item())
    return sum(sums) / (NUM_VALIDATED * SEQ_LEN)


# Two of torch's and two of ours; the others differ by what these have.
QUICK = ("fsdp2", "zero3_tensor")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ENGINES]
)
def test_every_engine_validates_as_one_process_and_leaves_nothing_behind(ranks, name):
    """Loss, norm, memory and traffic of each step are those of a run that validates at its end alone."""
    recipe = Recipe()
    often, rarely = ranks(train_often_and_rarely, recipe, ENGINES[name].make)[0]
    expected = train_alone()
    assert [r.validation_loss for r in often] == pytest.approx(expected, rel=ROUNDING)
    assert [r.validation_loss for r in rarely] == [None, None, often[-1].validation_loss]
    for with_it, without in zip(often, rarely, strict=True):
        for what in ("loss", "grad_norm", "traffic", "memory_bytes"):
            assert getattr(with_it, what) == getattr(without, what), what
        assert "validation" not in with_it.verbs
    # What a gather ahead sends counts in one of two steps.
    sent, expected = (sum(each.wire_bytes or 0 for each in records) for records in (often, rarely))
    assert sent == expected


@every_nth(2, "name", ["zero3_buffer", "zero1_buffer", "fsdp2", "ddp"])
def test_three_ranks_of_which_some_have_no_sample_left(ranks, name):
    recipe = Recipe(world_size=3)
    (first, *others) = ranks(train_on_rank, recipe, ENGINES[name].make, 2, world_size=3)
    expected = train_alone()
    assert [r.validation_loss for r in first] == [
        None,
        pytest.approx(expected[1], rel=ROUNDING),
        pytest.approx(expected[2], rel=ROUNDING),
    ]
    for other in others:
        assert [r.validation_loss for r in other] == [r.validation_loss for r in first]


def test_dropout_is_off_and_draws_nothing(ranks):
    """The losses of training depend on each random number, the two validations on none."""
    recipe, make = Recipe(model="dropout"), ENGINES["zero3_buffer"].make
    often, rarely = ranks(train_often_and_rarely, recipe, make)[0]
    assert [r.loss for r in often] == [r.loss for r in rarely]
    assert often[-1].validation_loss == rarely[-1].validation_loss


def test_what_was_in_evaluation_stays_there(ranks):
    """A frozen BatchNorm computes with its own statistics, after a validation too."""
    recipe, make = Recipe(model="frozen_norm"), ENGINES["zero3_buffer"].make
    often, rarely = ranks(train_often_and_rarely, recipe, make)[0]
    assert [(r.loss, r.grad_norm) for r in often] == [(r.loss, r.grad_norm) for r in rarely]
    assert often[-1].validation_loss == rarely[-1].validation_loss


# --- samples


def test_held_out_samples_are_trained_on_by_nobody():
    config = replace(make_config().data, validation_samples=NUM_SAMPLES - 24)
    data, read = Data(samples(), config, seed=0), []
    data._samples = Reading(read)
    for position in range(0, 48, 12):
        data.step_batch(position, rank=0, world_size=1)
    assert data.num_samples == 24
    assert sorted(read) == sorted([*range(24), *range(24)]), "two epochs of the others"


class Reading(SyntheticTokens):
    def __init__(self, read: list[int]) -> None:
        super().__init__(VOCABULARY, SEQ_LEN, 3)
        self._read = read

    def read(self, indices):
        self._read.extend(indices.tolist())
        return super().read(indices)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_held_out_sample_counts_once(world_size):
    data = Data(samples(), make_config().data, seed=0)
    turns = [list(data.validation_turns(rank=r, world_size=world_size)) for r in range(world_size)]
    assert len({len(mine) for mine in turns}) == 1, "every rank takes part in every turn"
    counted = [t.microbatch.labels for mine in turns for t in mine if t.counts]
    wanted = samples().read(range(NUM_SAMPLES - NUM_VALIDATED, NUM_SAMPLES)).labels
    assert sorted(torch.cat(counted).tolist()) == sorted(wanted.tolist())
    assert data.num_valid_labels == NUM_VALIDATED * SEQ_LEN


def test_a_run_needs_samples_to_train_on():
    config = replace(make_config().data, validation_samples=NUM_SAMPLES)
    with pytest.raises(ConfigError, match=r"data.validation_samples=65536: holds out all 65536"):
        Data(samples(), config, seed=0)


# --- whole runs


@pytest.mark.slow  # three runs; checkpoint/test_resume.py resumes engines
def test_a_resumed_run_validates_as_one_that_never_stopped(local, tmp_path):
    """Steps 0 and 1, then the rest; what the folder, the table's row and MLflow's tags are made of holds it."""
    changes = {"data__validation_samples": 5, "train__validate_every": 2, "checkpoint__every": 2}
    whole = make_job(tmp_path / "whole", train__steps=4, **changes)
    half = make_job(tmp_path / "half", train__steps=1, **changes)
    rest = make_job(tmp_path / "rest", train__steps=4, **changes)
    newest = str(half.folder / "checkpoint" / "step-000002")
    configs.save(replace(rest.config, resume=newest), rest.folder / "config.yaml")
    for job in (whole, half, rest):
        outcome = local.run(job)
        assert outcome.status == "done", outcome.cause
    expected = [r.validation_loss for r in read_records(whole.folder)]
    assert [loss is not None for loss in expected] == [False, True, False, True, True]
    resumed = [r.validation_loss for r in read_records(rest.folder)]
    assert resumed == expected[2:]
    summary = read_summary(rest.folder)
    assert summary is not None and summary.validation_loss == expected[-1]
    assert read_run(half.folder).summary.validation_loss == expected[1]


def test_a_classification_tells_the_share_of_labels_that_it_hits() -> None:
    logits = torch.tensor([[0.0, 2.0], [1.0, 0.0], [3.0, 1.0]])
    assert _num_hits(logits, torch.tensor([1, 1, 0]), "classification") == 2
    assert _num_hits(SimpleNamespace(logits=logits), torch.tensor([1, 0, 0]), "classification") == 3
    assert _num_hits(logits, torch.tensor([1, 0, 0]), "causal") == 0


class Turns:
    """Two samples for each rank; the last rank's second one only takes part."""

    num_valid_labels = 3

    def validation_turns(self, *, rank: int, world_size: int) -> Iterator[ValidationTurn]:
        for index in range(2):
            label = torch.tensor([index])
            made = Microbatch({"input": torch.eye(2)[None, rank]}, label)
            yield ValidationTurn(made, counts=rank + index < 2)


def validate_on_rank(world: World) -> Validation:
    strategy = SimpleNamespace(model=torch.nn.Identity())
    wire = Collectives(world)
    return validate(strategy, Turns(), wire, task="classification", step=0)


def test_the_share_is_over_all_ranks(ranks) -> None:
    """Rank 0 says 0 for labels 0 and 1, rank 1 says 1 for label 0."""
    one, other = ranks(validate_on_rank, world_size=2)
    assert one == other and one.accuracy == pytest.approx(1 / 3)
