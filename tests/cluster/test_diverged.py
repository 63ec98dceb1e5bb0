"""A run whose loss becomes no number: it is done, and marked wherever its result is shown."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.cluster.test_sweep import LIGHT, jobs, statuses, write_study, zeroexp
from tests.run_folders import write_run
from zeroexp.cluster import sweep
from zeroexp.config.keys import load, save
from zeroexp.report.conclusions import conclude
from zeroexp.report.measured_points import points_of
from zeroexp.tracking import mlflow_labels
from zeroexp.tracking.files import read_records, read_summary, write_summary
from zeroexp.tracking.run import read_run

WORDS = ["-m", "world_size=1", "optimizer=sgd", *LIGHT, "train.steps=6"]


def test_a_sweeper_that_learns_gets_losses_and_none_of_a_run_that_diverged(tmp_path):
    """It launches one point after another, and may take no loss for the best of all. The study has its verdict."""
    study = write_study(tmp_path, "loss_agreement: 1e-5")
    rates = ["hydra/sweeper=halving", "hydra.sweeper.rates=[0.001,1000000.0]"]
    done = zeroexp(tmp_path, *study, *WORDS, *rates)
    assert done.returncode == 1, done.stderr
    assert set(statuses(tmp_path).values()) == {"done"}, "it is the claim that fails"
    (line,) = [line for line in done.stdout.splitlines() if "2 loss curves DISAGREE" in line]
    assert not list((tmp_path / "outputs").glob("*/state.json"))
    fine, diverged = (jobs(tmp_path)[f"zero3-buffer-n1-lr{lr}"] for lr in ("0.001", "1000000.0"))
    records = read_records(diverged.folder)
    first = next(r.step for r in records if not abs(r.loss) + r.grad_norm < float("inf"))
    verdict = f"diverged at step {first}"
    assert 0 < first < len(records) - 1, "it goes on to its end"
    assert (diverged.state["status"], diverged.state["reason"]) == ("done", verdict)
    assert line.endswith(f"; {diverged.name} {verdict}: DOES NOT HOLD")
    (row,) = [line for line in done.stdout.splitlines() if f" done: {verdict}" in line]
    assert row.startswith("zero3 ")
    assert f"{diverged.name}: done in" in done.stderr and f" s: {verdict}\n" in done.stderr
    run = read_run(diverged.folder)
    assert mlflow_labels.run_tags(run, run.status)["verdict"] == verdict
    assert json.loads((diverged.folder / "summary.json").read_text())["diverged_at"] == first
    assert fine.state["reason"] is None
    final = read_summary(fine.folder).final_loss
    told = json.loads((tmp_path / "halving.json").read_text())
    assert told == [[0.001, final], [1e6, None]]
    assert "verdict" not in mlflow_labels.run_tags(read_run(fine.folder), "done")


def test_the_claim_of_a_study_fails_with_it(tmp_path, capsys):
    """Alone, it disagrees with nobody."""
    folder = write_run(tmp_path / "run")
    config = load(folder / "config.yaml")
    config.study.loss_agreement = 1e-5
    save(config, folder / "config.yaml")
    assert conclude(points_of([read_run(folder)])).broken == []
    write_summary(folder, replace(read_summary(folder), diverged_at=7))
    points = points_of([read_run(folder)])
    (broken,) = conclude(points).broken
    assert broken.endswith("; run diverged at step 7: DOES NOT HOLD")
    assert not sweep._print_conclusions(points)
    assert capsys.readouterr().out.endswith(f"\n{broken}\n")
