"""A real run's summary holds its plan, and the two agree to the byte."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.composing import composed
from zeroexp import config as configs
from zeroexp.cluster.job import Job
from zeroexp.config import from_mapping, resolve
from zeroexp.measure.record import KINDS
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
    outcome = local.run(job, on_record=lambda _: None, on_event=lambda _: None)
    assert outcome.status == "done", outcome.cause
    summary = read_summary(folder)
    assert summary is not None
    return summary


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=ddp", "strategy.implementation=torch"),
        ("strategy=zero1", "strategy.implementation=parameter", "precision=bf16_master"),
        ("strategy=zero2", "strategy.implementation=torch"),
        ("strategy=zero3", "strategy.implementation=tensor", "strategy.bucket_mb=0.01"),
        ("strategy=zero3", "world_size=1", "optimizer=sgd", "strategy.reduce_each=step"),
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
