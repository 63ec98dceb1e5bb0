"""A calibration: factors are found again, real steps are spent on what their rehearsals name, and seconds are sums."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch

from zeroexp.calibrate import __main__ as command
from zeroexp.calibrate import rates
from zeroexp.calibrate.step_factors import (
    PHASES,
    POINTS,
    SmallStep,
    fit_factors,
    measured_phases,
    rehearsed_phases,
)
from zeroexp.config.job_shape import JobShape
from zeroexp.plan.machines import Machines
from zeroexp.plan.speed import Calibration, Speed, calibrated_speed, this_machine

SPEED = Speed(
    label="made up",
    product_rates={"float32": {1: 1e9}},
    bytes_per_second=1e9,
    launch_seconds=1e-5,
    latency_seconds=1e-4,
    link_bytes_per_second=1e9,
    moves_on_wait=True,
)
TINY = SmallStep(64, 2, 128, 1, 16, "zero3", "buffer")


def test_the_factors_of_made_up_phases_are_found_again():
    """Six phases of three things; what no phase was spent on keeps no factor."""
    true = {"a": 2.0, "b": 0.5, "c": 0.0}
    amounts = [(1, 2, 3), (4, 1, 1), (2, 5, 1), (1, 1, 9), (3, 3, 2), (7, 1, 4)]
    spent = [dict(zip(true, each, strict=True)) for each in amounts]
    phases = [(each, sum(true[name] * each[name] for name in true)) for each in spent]
    found = fit_factors(phases)
    assert found == pytest.approx(true, abs=0.02)
    assert min(found.values()) >= 0


def test_a_relative_error_counts_alike_in_long_and_short_phases():
    """One thing, twice as slow in a long phase as in a short one: the factor lies between, not at the long one."""
    assert fit_factors([({"a": 1000.0}, 1000.0), ({"a": 1.0}, 2.0)])["a"] == pytest.approx(
        1.2, abs=0.01
    )


def test_every_point_trains_and_names_what_it_spends():
    """On real ranks; the names are those of the phases that were trained.

    They are forked by a process without autograd's threads, which a rehearsal starts in a CUDA build of torch.
    """
    with ProcessPoolExecutor(1, get_context("forkserver")) as fresh:
        seconds = fresh.submit(measured_phases, TINY.config).result()
    spent = rehearsed_phases(TINY.config, SPEED)
    assert set(seconds) == set(spent) == set(PHASES)
    assert min(seconds.values()) > 0
    assert {"gather: sent", "products: products"} <= set(spent["forward"])
    assert {"reduce: sent", "launches: backward"} <= set(spent["backward"])
    assert "optimizer: bytes" in spent["step"]


def test_rates_are_those_of_every_dtype_shape_and_transport(monkeypatch):
    """On real ranks, with little to multiply and copy."""
    few = replace(rates.SIZES["cpu"], rows=(1, 8), width=16, num_matrices=2, num_bytes=1 << 12)
    monkeypatch.setitem(rates.SIZES, "cpu", few)
    found = command.rates()
    assert found.device == "cpu" and found.machine == this_machine() and not found.factors
    speed = calibrated_speed(found, Machines("cpu", JobShape(1, 2)), "direct")
    assert {name: set(each) for name, each in speed.product_rates.items()} == {
        "float32": {1, 8},
        "bfloat16": {1, 8},
    }
    assert set(found.links) == {"direct", "gloo"}
    assert min(found.bytes_per_second, found.launch_seconds) > 0


def test_products_are_of_values_that_differ(monkeypatch):
    """Of equal ones a GPU needs less power, so that its clock is higher than in training."""
    multiplied: list[torch.Tensor] = []
    few = replace(rates.SIZES["cpu"], rows=(1, 8), width=16, num_matrices=2)
    monkeypatch.setattr(rates, "_least_seconds", lambda do, _: do() or 1.0)
    monkeypatch.setattr(rates.functional, "linear", lambda *both: multiplied.extend(both))
    rates._measure_products(torch.float32, few, torch.device("cpu"))
    assert len(multiplied) == 8 and min(len(each.unique()) for each in multiplied) > 1


def test_a_machine_without_gpus_says_so_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["calibrate", "--device", "cuda", "--outputs", str(tmp_path)])
    assert command.main() == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and "--device cuda: torch" in told.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [0.0, 1.1])  # of all cores: others use more, less
def test_others_that_use_the_cores_meanwhile_are_told(monkeypatch, capsys, tmp_path, limit):
    """A program of our own counts as another while it runs."""

    def calibrate() -> Calibration:
        time.sleep(0.5)
        return Calibration(this_machine(), "2.13", {"float32": {"1": 1e9}}, 1e9, 1e-5, {})

    monkeypatch.setattr(command, "calibrate", calibrate)
    monkeypatch.setattr(command, "SPOILT", limit)
    monkeypatch.setattr(sys, "argv", ["calibrate", "--outputs", str(tmp_path)])
    with ExitStack() as running:
        program = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        running.callback(program.wait)
        running.callback(program.kill)
        assert command.main() == 0
    told = capsys.readouterr()
    assert f"kept in {tmp_path}/links/calibration.json" in told.out
    line = r"zeroexp: others used [\d.]+ of \d+ cores meanwhile, so the rates are too low; .*\n"
    assert re.fullmatch(line if limit < 1 else "", told.err)


def test_the_points_differ_in_every_respect():
    for name in ("width", "depth", "words", "samples", "tokens", "stage", "layout"):
        assert len({getattr(point, name) for point in POINTS}) > 2, name
