"""A whole run on a GPU: forked after the imports, through NCCL, measured by events and CUDA's own counters."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.test_rank import make_job
from zeroexp.config.job_shape import JobShape
from zeroexp.plan.machines import Machines
from zeroexp.plan.speed import calibrated_speed, calibration_path, load
from zeroexp.tracking.files import read_records

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no CUDA device"),
]


def test_a_run_on_a_gpu_equals_the_run_on_the_cpu(local, tmp_path):
    losses = {}
    for device in ("cpu", "cuda"):
        job = make_job(tmp_path / device, world_size=1, cluster__device=device)
        outcome = local.run(job)
        assert outcome.status == "done", outcome.cause
        records = read_records(job.folder)
        losses[device] = [record.loss for record in records]
    # Matrix products are summed in another order: a few rounding errors of float32 in each step.
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-4)
    for record in records:
        assert record.step_seconds == pytest.approx(sum(record.phase_seconds.values()))
        assert min(record.phase_seconds.values()) > 0
        assert record.peak_bytes is not None and record.peak_bytes > 0
        assert record.wire_bytes is None  # what NCCL sends passes no socket


def test_gpus_are_calibrated_and_a_plan_takes_their_rates(tmp_path):
    """In a process of its own: one that forks ranks must not have started CUDA."""
    line = [sys.executable, "-m", "zeroexp.calibrate", "--device", "cuda", "--outputs"]
    subprocess.run([*line, str(tmp_path)], check=True, timeout=600)
    found = load(calibration_path(tmp_path, "cuda"))
    assert found is not None and torch.cuda.get_device_name() in found.machine
    assert set(found.products) == {"float32", "bfloat16", "float16"}
    assert ("native" in found.links) == (torch.cuda.device_count() > 1)
    machines = Machines("cuda", JobShape(1, torch.cuda.device_count()))
    speed = calibrated_speed(found, machines, "native")
    assert speed.product_rate(torch.bfloat16, 4096) > speed.product_rate(torch.float32, 4096)
