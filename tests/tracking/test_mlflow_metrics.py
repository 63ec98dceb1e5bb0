"""A run folder in MLflow's words: names, units, values, and the same entries every time."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.run_folders import PARAMETER_BYTES, record, write_run
from zeroexp.measure import system_samples
from zeroexp.measure.record import RunSummary, Spread, Traffic, VerbSeconds
from zeroexp.measure.system_samples import sampling_system
from zeroexp.tracking import mlflow_labels, mlflow_metrics
from zeroexp.tracking.files import read_timed_records, write_json
from zeroexp.tracking.run import read_run

MIB = 2**20


@pytest.fixture
def summary(tmp_path: Path) -> RunSummary:
    read = read_run(write_run(tmp_path / "run", "zero2", "buffer", world_size=4)).summary
    assert read is not None
    return read


def metrics(summary: RunSummary) -> dict[str, float]:
    return {entry.key: entry.value for entry in mlflow_metrics.summary_entries(1.0, summary)}


def test_a_step_becomes_metrics_with_units_in_their_names() -> None:
    made = mlflow_metrics.step_entries(
        12.5,
        record(
            7,
            loss=2.0,
            grad_norm=0.5,
            lr=1e-3,
            num_tokens=100,
            step_seconds=0.25,
            phase_seconds={"forward": 0.1, "step": 0.05},
            peak_bytes=3 * MIB,
        ),
    )
    assert {entry.key: entry.value for entry in made} == {
        "loss": 2.0,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "time/step_ms": 250.0,
        "tokens_per_s": 400.0,
        "phase/forward_ms": 100.0,
        "phase/step_ms": 50.0,  # a phase is called step too and must not overwrite the whole
        "memory/step_peak_mib": 3.0,
        "time/step_exposed_ms": 20.0,  # rank 0 waits for gathers alone
        "traffic/step_sent_mib": PARAMETER_BYTES / MIB,  # 2 (N-1)/N
    }
    assert {(entry.step, entry.timestamp) for entry in made} == {(7, 12_500)}


def test_quotients_have_seven_digits_and_what_is_compared_has_all() -> None:
    step = record(0, loss=1 / 3, step_seconds=0.7, peak_bytes=12_345_678_901)
    made = {entry.key: entry.value for entry in mlflow_metrics.step_entries(1.0, step)}
    assert made["memory/step_peak_mib"] == 11_773.76  # of 11773.756886482239
    assert made["tokens_per_s"] == 2194.286 and made["loss"] == 1 / 3


def test_a_byte_of_difference_to_the_plan_stays_one(summary: RunSummary) -> None:
    held = summary.memory.by_kind["gradients"].fullest
    made = metrics(replace(summary, plan={"gradients": held - 1}))
    assert made["plan_error_grads_mib"] == pytest.approx(1 / MIB)


def test_a_step_that_was_validated_has_one_metric_more() -> None:
    made = mlflow_metrics.step_entries(1.0, record(3, validation_loss=1.5))
    assert ("validation_loss", 1.5, 1000, 3) in made
    assert "validation_loss" not in {
        entry.key for entry in mlflow_metrics.step_entries(1.0, record(3))
    }


def test_the_plan_and_its_errors_become_metrics(summary: RunSummary) -> None:
    held, sent = summary.memory.by_kind["gradients"].fullest, 2 * PARAMETER_BYTES * 3 / 4
    made = metrics(replace(summary, plan={"gradients": held, "sent": sent - 3 * MIB}))
    assert made["plan_grads_mib"] == held / MIB
    assert made["plan_error_grads_mib"] == 0.0
    assert made["plan_error_sent_per_step_mib"] == 3.0
    assert summary.memory.peak
    found = {"peak": summary.memory.peak.fullest - MIB, "step_seconds_least": 0.25}
    made = metrics(replace(summary, rehearsed=found))
    assert made["plan_error_peak_mib"] == 1.0 and made["plan_step_ms_least"] == 250.0


def test_the_summary_becomes_metrics_of_the_fullest_rank_and_the_mean(summary: RunSummary) -> None:
    made, mib = metrics(summary), PARAMETER_BYTES / MIB
    assert made["world_size"] == 4
    assert made["memory/params_mib"] == mib
    assert made["memory/grads_mib"] == mib / 4
    assert made["memory/optim_mib"] == 2 * mib / 4
    assert made["memory/total_mib"] == mib + mib / 4 + 2 * mib / 4
    assert made["memory/peak_mib"] == made["memory/total_mib"] + 13  # rank 3: 10 + 3
    assert made["memory/peak_mib_mean"] == made["memory/total_mib"] + 11.5
    assert made["traffic/sent_mib_per_step"] == 2 * mib * 3 / 4
    assert made["traffic/gather_mib_per_step"] == mib * 3 / 4
    # 0.4 / 4 + 0.1, and 0, 10 or 20 ms by turns
    assert made["time/step_ms_median"] == 210.0
    assert made["time/step_ms_p95"] == 220.0
    # 2e11 operations in 0.21 s, of four ranks that reach 4e12 a second.
    assert made["model_tflop_per_step"] == pytest.approx(0.2)
    assert made["model_tflop_per_s"] == pytest.approx(0.2 / 0.21)
    assert made["mfu_percent"] == pytest.approx(100 * 0.2 / 0.21 / 16)
    assert made["verb/gather_overlapped_ms"] == 30.0
    assert made["verb/reduce_exposed_ms"] == 15.0  # rank r waits 10 r ms
    assert made["time/exposed_ms"] == 35.0
    assert made["comp_comm_overlap_pctg"] == pytest.approx(100 * 70 / (70 + 35))


def test_of_an_engine_that_counts_nothing_no_waiting_is_told(summary: RunSummary) -> None:
    """The training loop's own sum of the loss is all that is timed and counted; TCP knows the bytes."""
    own, traffic = {"loss": VerbSeconds(exposed=1e-6)}, Traffic({"loss": 8})
    of_step = record(0, verbs=own, traffic=traffic, wire_bytes=9 * MIB)
    made = {each.key: each.value for each in mlflow_metrics.step_entries(1.0, of_step)}
    assert made["traffic/step_sent_mib"] == 9.0 and "time/step_exposed_ms" not in made
    times = [replace(rank, verbs=own) for rank in summary.times]
    made = metrics(replace(summary, times=times))
    assert "time/exposed_ms" not in made and "comp_comm_overlap_pctg" not in made


def test_what_an_engine_counts_is_without_the_headers_of_sockets() -> None:
    of_step = record(0, traffic=Traffic({"gather": MIB, "loss": 8}), wire_bytes=2 * MIB)
    made = {each.key: each.value for each in mlflow_metrics.step_entries(1.0, of_step)}
    assert made["traffic/step_sent_mib"] == pytest.approx((MIB + 8) / MIB)


def test_what_scales_stands_at_the_world_size(summary: RunSummary) -> None:
    steps = {entry.key: entry.step for entry in mlflow_metrics.summary_entries(1.0, summary)}
    scaling = {key for key in steps if key.startswith("scaling/")}
    assert {steps[key] for key in scaling} == {4}
    assert {steps[key] for key in steps.keys() - scaling} == {0}


def test_a_peak_is_a_metric_where_it_is_known(summary: RunSummary) -> None:
    summary.memory.build_peak, summary.memory.peak = Spread(3 * MIB, 2 * MIB, []), None
    made = metrics(summary)
    assert (made["memory/build_peak_mib"], made["memory/build_peak_mib_mean"]) == (3, 2)
    assert not any("memory/peak" in key for key in made)


def test_params_are_the_flat_config_and_tags_say_what_it_was(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "sweep" / "run", status="failed", reason="rank 1: boom"))
    params = mlflow_labels.run_params(run)
    assert params["world_size"] == "2"
    assert params["strategy.name"] == "zero3"
    assert params["optimizer.betas"] == "[0.9, 0.95]"
    assert mlflow_labels.run_tags(run, "failed") == {
        "sweep": "sweep",
        "strategy": "zero3-buffer",
        "status": "failed",
        "reason": "rank 1: boom",
        "git_commit": "0123abc",
        "git_dirty": "false",
        "host": "laptop",
        "mlflow.source.git.commit": "0123abc",
        "mlflow.source.name": "zeroexp -m study=compare",
    }


def test_samples_of_a_node_become_system_metrics(tmp_path: Path) -> None:
    with sampling_system(tmp_path, 0.05, "node-3"):
        time.sleep(0.12)
    lines = [
        json.loads(line) for line in (tmp_path / "system.node-3.jsonl").read_text().splitlines()
    ]
    assert len(lines) >= 2 and all(0 < row["system_memory_usage_percentage"] < 100 for row in lines)
    assert all(0 <= row["cpu_utilization_percentage"] <= 100 for row in lines)
    with (tmp_path / "system.node-3.jsonl").open("a") as torn:
        again = json.dumps(lines[0])
        torn.write(f'{{"written_at": 1{again}\n{again}\n{{"written_at": 1')
    made = mlflow_metrics.system_entries(tmp_path)
    keys = {entry.key for entry in made}
    assert "system/node-3/cpu_utilization_percentage" in keys
    assert "system/node-3/network_receive_megabytes" in keys
    assert [e.step for e in made if e.key.endswith("cpu_utilization_percentage")] == [
        *range(len(lines)),
        len(lines) + 1,
    ]


def test_what_went_over_the_network_counts_from_the_first_reading(tmp_path, monkeypatch):
    """As MLflow's own metrics of these names do."""
    counters = (SimpleNamespace(bytes_recv=n * 10**6, bytes_sent=2 * n * 10**6) for n in count(5))
    monkeypatch.setattr(system_samples.psutil, "net_io_counters", lambda: next(counters))
    with sampling_system(tmp_path, 0.02, "node"):
        while not (file := tmp_path / "system.node.jsonl").exists() or len(file.read_text()) < 999:
            time.sleep(0.01)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["network_receive_megabytes"] for row in rows] == [*range(1, len(rows) + 1)]
    assert [row["network_transmit_megabytes"] for row in rows] == [*range(2, 2 * len(rows) + 2, 2)]


@pytest.mark.parametrize("nvml", [True, False])
def test_every_gpu_of_a_node_has_its_own_metrics(monkeypatch, nvml):
    """Fakes of what torch documents, since no GPU is here: two of 4 GB, of which 1 and 3 are used."""

    def used(gpu: int) -> int:
        if not nvml:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        return (1, 3)[gpu] * 10**9

    for name, fake in (
        ("is_initialized", lambda: True),
        ("device_count", lambda: 2),
        ("get_device_properties", lambda gpu: SimpleNamespace(total_memory=4 * 10**9)),
        ("device_memory_used", used),
        ("utilization", lambda gpu: 40 + gpu),
        ("mem_get_info", lambda gpu: (3 * 10**9, 4 * 10**9)),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    first = {"gpu_0_memory_usage_megabytes": 1000.0, "gpu_0_memory_usage_percentage": 25.0}
    second = {"gpu_1_memory_usage_megabytes": 3000.0, "gpu_1_memory_usage_percentage": 75.0}
    load = {"gpu_0_utilization_percentage": 40, "gpu_1_utilization_percentage": 41}
    assert system_samples._gpus() == (first | second | load if nvml else first)


def test_nobody_samples_unless_asked(tmp_path: Path) -> None:
    with sampling_system(tmp_path, None):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_tag_tells_which_data(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert "data" not in mlflow_labels.run_tags(run, "done"), (
        "of a run from before it was written down"
    )
    settled = replace(run, engine={"transport": "direct", "prefetch": "null"})
    assert mlflow_labels.run_tags(settled, "done")["engine.transport"] == "direct"
    assert "engine.prefetch" not in mlflow_labels.run_tags(settled, "done")
    assert run.summary is not None
    run.summary.data_source = "hub: me/reviews (mit licence)"
    assert mlflow_labels.run_tags(run, "done")["data"] == "hub: me/reviews (mit licence)"


@pytest.mark.parametrize(
    ("times", "began", "ended"),
    [
        ({"running_at": 50.0, "done_at": 80.0}, 50.0, 80.0),
        ({"running_at": 50.0}, 50.0, None),  # killed: its last sign of life
    ],
)
def test_times_come_from_the_state_else_from_the_records(tmp_path, times, began, ended):
    folder = write_run(tmp_path / "run")
    write_json(folder / "state.json", {"status": "done", **times})
    run, timed = read_run(folder), read_timed_records(folder)
    assert mlflow_labels.start_time(run) == began
    assert mlflow_labels.end_time(run, "done", timed) == (timed[-1][0] if ended is None else ended)
