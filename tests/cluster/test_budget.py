"""What can not fit is not submitted to Slurm; every point's plan is shown before."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tests.composing import composed
from zeroexp.check.sweep_points import point_of
from zeroexp.cluster import fits_memory
from zeroexp.cluster.fits_memory import plan_slurm_points
from zeroexp.config.engines import ENGINES
from zeroexp.plan.outcome import RehearsedPeaks


def points(*words: str):
    config = composed("cluster=slurm", "model=tiny", "world_size=4", "cluster.rehearse_s=0", *words)
    return [point_of([], asdict(config))]


@pytest.mark.parametrize(
    ("limit", "verdict"),
    # 223,552 parameters at 16 bytes are 3.4 MiB.
    [("0.001", "no"), ("1", "tight")],
)
def test_what_can_not_fit_is_refused(limit, verdict, capsys):
    (point,) = plan_slurm_points(points("strategy=ddp", f"cluster.device_memory_gib={limit}"))
    told = capsys.readouterr().out
    assert told.startswith("plan of ddp-buffer-n4: model states 3.4 MiB; timeout_s ")
    assert told.rstrip().endswith(f"fits {limit} GiB: {verdict}")
    if verdict == "tight":
        assert point.refusal is None
    else:
        assert point.refusal and point.refusal.startswith("cluster.device_memory_gib=0.001:")
        assert "cluster.force=true" in point.refusal


def test_the_refusal_names_the_memory_that_is_set_aside():
    """3.4 MiB of model states would fit 5 MiB, of which 2 are set aside."""
    words = ("cluster.device_memory_gib=0.005", "cluster.reserved_gib=0.002")
    (point,) = plan_slurm_points(points("strategy=ddp", *words))
    assert point.refusal and "of a rank beside cluster.reserved_gib=0.002; use" in point.refusal


def test_the_refusal_names_the_gpu_whose_memory_is_too_small():
    """Of 24 GiB 0.001 are left for 3.4 MiB."""
    (point,) = plan_slurm_points(
        points("strategy=ddp", "cluster.gpu=L4", "cluster.reserved_gib=23.999")
    )
    assert point.refusal and point.refusal.startswith("cluster.gpu=L4: model states take 3.4 MiB")


def test_force_submits_all_the_same(capsys):
    words = ("strategy=ddp", "cluster.device_memory_gib=0.001", "cluster.force=true")
    (point,) = plan_slurm_points(points(*words))
    assert point.refusal is None and ": no" in capsys.readouterr().out


def test_a_point_of_an_engine_without_a_form_says_so_and_is_submitted(capsys):
    (point,) = points("strategy=ddp")
    point.config.strategy.implementation = "formless"
    ENGINES.add("formless", replace(ENGINES["torch"], form=None))
    try:
        (left,) = plan_slurm_points([point])
    finally:
        ENGINES.remove("formless")
    assert left.refusal is None
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith("no plan of ddp-buffer-n4: strategy.implementation=formless: ")


def test_points_of_this_machine_are_left_alone(capsys):
    local = [point_of([], asdict(composed("cluster.device_memory_gib=0.001")))]
    assert plan_slurm_points(local) == local and capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_rehearsal_adds_activations_and_node_hours(capsys):
    """Model states of 1.7 MiB would fit 4.1 MiB; with activations, and what torch reserves for them, they do not."""
    words = ("strategy=zero3", "cluster.device_memory_gib=0.004")
    (point,) = plan_slurm_points(points(*words))
    assert point.refusal is None and ", peak " not in capsys.readouterr().out
    (point,) = plan_slurm_points(points(*words, "cluster.rehearse_s=60"))
    told = capsys.readouterr().out
    assert "MiB with activations, " in told and " MiB reserved; " in told
    assert "fits 0.004 GiB: no" in told
    assert "node-hours (" in told and "; timeout_s allows 1 node-hours" in told
    assert point.refusal and "a rank holds" in point.refusal and "use more ranks" in point.refusal


def test_node_hours_are_those_of_all_nodes_steps_and_repeats():
    """Two nodes train 3 + 20 steps of 1 to 4 seconds, three times."""
    (point,) = points("strategy=zero3", "repeats=3")
    rehearsed = RehearsedPeaks([], "cuda", (1.0, 2.0, 4.0), 1.0, "a guess", "")
    hours = fits_memory._node_hours(point.config, rehearsed, nodes=2)
    assert hours == "0.077 node-hours (0.038 to 0.15; a guess)"


def test_what_can_not_be_rehearsed_is_submitted_all_the_same(capsys):
    words = ("model=moe_tiny", "data=synthetic", "strategy=zero3", "cluster.rehearse_s=60")
    (point,) = plan_slurm_points(points(*words))
    told = capsys.readouterr().out
    assert point.refusal is None and ", peak " not in told and "not rehearsed: " in told
