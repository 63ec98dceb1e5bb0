"""What can not fit is not submitted to Slurm; every point's plan is shown before."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.composing import composed
from zeroexp.cluster.budget import plan_slurm_points
from zeroexp.cluster.points import points_of


def points(*words: str):
    config = composed("cluster=slurm", "model=tiny", "world_size=4", *words)
    return points_of([], asdict(config))


@pytest.mark.parametrize(
    ("limit", "verdict"),
    # 223,552 parameters at 16 bytes are 3.4 MiB.
    [("0.001", "no"), ("1", "yes")],
)
def test_what_can_not_fit_is_refused(limit, verdict, capsys):
    (point,) = plan_slurm_points(points("strategy=ddp", f"cluster.device_memory_gib={limit}"))
    told = capsys.readouterr().out
    assert told.startswith("plan of ddp-buffer-n4: 3.4 MiB of model states")
    assert told.rstrip().endswith(f"fits {limit} GiB: {verdict}")
    if verdict == "yes":
        assert point.refusal is None
    else:
        assert point.refusal and point.refusal.startswith("cluster.device_memory_gib=0.001:")
        assert "cluster.force=true" in point.refusal


def test_the_refusal_names_the_memory_that_is_set_aside():
    """3.4 MiB of model states would fit 5 MiB, of which 2 are set aside."""
    words = ("cluster.device_memory_gib=0.005", "cluster.reserved_gib=0.002")
    (point,) = plan_slurm_points(points("strategy=ddp", *words))
    assert point.refusal and "of a rank beside cluster.reserved_gib=0.002; use" in point.refusal


def test_force_submits_all_the_same(capsys):
    words = ("strategy=ddp", "cluster.device_memory_gib=0.001", "cluster.force=true")
    (point,) = plan_slurm_points(points(*words))
    assert point.refusal is None and ": no" in capsys.readouterr().out


def test_points_of_this_machine_are_left_alone(capsys):
    local = points_of([], asdict(composed("cluster.device_memory_gib=0.001")))
    assert plan_slurm_points(local) == local and capsys.readouterr().out == ""
