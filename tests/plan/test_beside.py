"""A real run's summary holds its plan, and the two agree to the byte."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.composing import composed
from zeroexp.cluster.job import Job
from zeroexp.config import keys as configs
from zeroexp.config.keys import from_mapping, resolve
from zeroexp.data.batches import build_data
from zeroexp.measure.record import KINDS, OUTER
from zeroexp.models.module import build_model
from zeroexp.plan.form_of_config import build_on_meta
from zeroexp.plan.peak import rehearsed_beside
from zeroexp.plan.rehearse import rehearse
from zeroexp.run import rank
from zeroexp.tracking.files import read_summary


def measured(local, folder, *words: str):
    """Run a tiny model; memory is read in the second step, when the optimizer has its state."""
    config = composed(
        "model=mlp_tiny",
        "data=vectors",
        "data.global_batch_size=4",
        "train.warmup_steps=2",
        "train.steps=3",
        "cluster.device=cpu",
        *words,
    )
    folder.mkdir()
    configs.save(resolve(from_mapping(type(config), asdict(config))), folder / "config.yaml")
    job = Job(folder)
    outcome = local.run(job)
    assert outcome.status == "done", outcome.cause
    summary = read_summary(folder)
    assert summary is not None
    return summary


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("strategy=ddp", "strategy.implementation=torch"), marks=pytest.mark.slow),
        pytest.param(
            ("strategy=zero1", "strategy.implementation=parameter", "precision=bf16_master"),
            marks=pytest.mark.slow,
        ),
        ("strategy=zero3", "strategy.implementation=tensor", "strategy.bucket_mb=0.01"),
    ],
    ids=lambda words: "-".join(word.partition("=")[2] for word in words),
)
def test_a_run_holds_and_sends_what_its_plan_says(local, tmp_path, words):
    summary = measured(local, tmp_path / "run", *words)
    kinds = {*KINDS, "total", "after_backward"}
    if "strategy.implementation=torch" not in words:  # torch's engines do not count what they send
        kinds.add("sent")
    assert set(summary.plan) == kinds
    assert summary.plan["total"] > 0
    assert summary.plan_errors == dict.fromkeys(kinds, 0)


@pytest.mark.slow
def test_a_run_of_seldom_synchronised_replicas_holds_and_sends_what_its_plan_says(local, tmp_path):
    """Of three measured steps one ends with an outer step; before and momentum are a kind of their own."""
    words = ("strategy=zero1", "strategy.replicas=2", "strategy.outer.every=5")
    summary = measured(local, tmp_path / "run", *words)
    assert summary.plan_errors == dict.fromkeys(
        [*KINDS, OUTER, "total", "after_backward", "sent"], 0
    )
    # In a replica of one rank both lie whole, in float32, and no other byte is sent than between replicas.
    assert summary.num_parameters
    num_bytes = 4 * summary.num_parameters
    assert summary.memory.by_kind[OUTER].per_rank == [2 * num_bytes] * 2
    kinds = {kind for kind, sent in summary.sent_bytes_by_kind.items() if sent}
    assert kinds == {"replicas", "loss"}
    assert summary.sent_bytes_by_kind["replicas"] == num_bytes / 3


@pytest.mark.parametrize("implementation", ["buffer", "torch"])
def test_launches_of_a_step_are_planned_of_our_engine(implementation: str) -> None:
    words = ("data=vectors", "strategy=zero3", f"strategy.implementation={implementation}")
    planned = rehearsed_beside(composed("model=mlp_tiny", *words), "cpu")
    assert ("calls" in planned) == (implementation == "buffer")


@pytest.mark.slow
def test_the_plan_of_a_resumed_run_is_of_the_steps_that_it_takes(local, tmp_path):
    """It begins behind an outer step, at 5, and warms up for 2: one of its 3 steps is one, of 8 planned ones two."""
    words = ("strategy=zero1", "strategy.replicas=2", "strategy.outer.every=5")
    measured(local, tmp_path / "run", *words, "checkpoint.every=5")
    more = ("train.steps=8", f"resume={tmp_path / 'run/checkpoint/step-000005'}")
    summary = measured(local, tmp_path / "more", *words, *more)
    assert summary.plan_errors["sent"] == 0
    assert summary.num_parameters
    assert summary.sent_bytes_by_kind["replicas"] == 4 * summary.num_parameters / 3
    config = configs.load(tmp_path / "more/config.yaml")
    steps = rank._with_measured_steps(config, summary.num_steps)  # as a rehearsal has them
    assert rehearsed_beside(steps, "cpu")["calls"] == pytest.approx(
        sum(number for kind, number in summary.calls_by_kind.items() if kind != "loss")
    )


@pytest.mark.slow
def test_a_model_that_names_no_vocabulary_is_planned_with_the_words_of_its_data():
    """Else it would be planned with those of its class: 32,000 for LLaMA, where the shipped text has 2,048."""
    sizes = ("hidden_size=16", "intermediate_size=32", "num_hidden_layers=1")
    shape = ("model_type=llama", *sizes, "num_attention_heads=2", "num_key_value_heads=1")
    words = [f"+model.hf_config.{word}" for word in shape]
    config = composed("model=hf", *words, "strategy=ddp", "data.seq_len=8", "cluster.device=cpu")
    vocab_size = build_data(config.data, config.model, config.train.seed).vocab_size
    built = build_model(config.model, seed=0, device="meta", vocab_size=vocab_size).module
    num_bytes = sum(p.nbytes for p in built.parameters())
    assert num_bytes == sum(p.nbytes for p in build_on_meta(config).module.parameters())
    config.world_size = 1
    rehearsed = rehearse(config, reads=True)
    assert rehearsed.held_bytes["at_rest"]["parameters"] == num_bytes
