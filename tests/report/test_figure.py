"""The picture of memory by kind: the numbers behind its bars, what its file is like, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from tests.run_folders import PARAMETER_BYTES, records, summaries, write_config, write_run
from zeroexp.config.keys import ConfigError
from zeroexp.measure.record import KINDS
from zeroexp.measure.summary import summarise
from zeroexp.report.figure import bars, draw_figure, save_figure
from zeroexp.report.measured_points import points_of
from zeroexp.report.palette import KIND_NAMES as NAMES
from zeroexp.tracking.files import write_summary
from zeroexp.tracking.run import Run, read_run

MIB = 2**20
P = PARAMETER_BYTES
# Parameters, gradients and two moments of two ranks: what a stage shards is halved.
HELD = {
    "ddp · buffer": (P, P, 2 * P),
    "ddp · torch": (P, P, 2 * P),
    "zero1 · buffer": (P, P, P),
    "zero2 · buffer": (P, P // 2, P),
    "zero3 · buffer": (P // 2, P // 2, P),
    "zero3 · tensor": (P // 2, P // 2, P),
}


@pytest.fixture
def sweep(tmp_path: Path) -> list[Run]:
    """In the order of a grid, where strategies take turns, and with one point that failed."""
    folders = [
        write_run(tmp_path / name.replace(" · ", "-"), *name.split(" · "))
        for name in sorted(HELD, key=lambda name: name.split(" · ")[1])
    ]
    broken = write_run(tmp_path / "broken", "zero2", "tensor", status="failed", reason="boom")
    return [read_run(folder) for folder in [*folders, broken]]


def test_each_bar_is_what_the_fullest_rank_held_after_backward(sweep: list[Run]) -> None:
    groups = bars(points_of(sweep))
    assert {bar.name: tuple(bar.bytes_by_kind.values())[:3] for g in groups for bar in g} == HELD
    assert [[bar.name.split(" · ")[0] for bar in group] for group in groups] == [
        ["ddp", "ddp"],
        ["zero1"],
        ["zero2"],
        ["zero3", "zero3"],
    ]


def test_what_is_drawn_are_these_numbers_one_kind_behind_the_other(sweep: list[Run]) -> None:
    (axes,) = draw_figure(points_of(sweep)).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == list(HELD)
    drawn = {stack.get_label(): [bar.get_width() for bar in stack] for stack in axes.containers}
    assert drawn == {
        NAMES[kind]: [HELD[name][index] / MIB for name in names]
        for index, kind in enumerate(KINDS[:3])  # nobody holds masters or buffers
    }
    ends = [0.0] * len(names)
    for stack in axes.containers:
        assert [bar.get_x() for bar in stack] == ends
        ends = [bar.get_x() + bar.get_width() for bar in stack]
    (peaks,) = axes.collections
    # Ten MiB and one for the rank's number stand for activations in these folders.
    assert [x for x, _ in peaks.get_offsets()] == [end + 11 for end in ends]
    assert [text.get_text().strip() for text in axes.texts[-len(names) :]] == [
        f"{end:,.0f}, peak {end + 11:,.0f}" for end in ends
    ]


def test_without_a_known_peak_no_line_is_drawn(sweep: list[Run]) -> None:
    assert sweep[0].summary is not None
    sweep[0].summary.memory.peak = None
    (peaks,) = draw_figure(points_of(sweep[:1])).axes[0].collections
    assert len(peaks.get_offsets()) == 0
    assert "peak" not in draw_figure(points_of(sweep[:1])).axes[0].texts[-1].get_text()


def test_the_fullest_rank_is_shown_whatever_its_number(tmp_path: Path) -> None:
    """By parameter, owners hold unlike amounts: rank 1 has 3 MiB of moments here, rank 0 has 1."""
    write_config(tmp_path, "zero1", "parameter", 2)
    ranks = [records("zero1", 2, rank, 6) for rank in range(2)]
    for steps, optimizer in zip(ranks, (MIB, 3 * MIB), strict=True):
        for step in steps:
            if step.memory_bytes:
                step.memory_bytes["after_backward"]["optimizer"] = optimizer
    write_summary(tmp_path, summarise(ranks[0], summaries(ranks)))
    ((bar,),) = bars(points_of([read_run(tmp_path)]))
    assert bar.bytes_by_kind["optimizer"] == 3 * MIB


def test_small_numbers_have_decimals(sweep: list[Run]) -> None:
    summary = sweep[0].summary
    assert summary is not None and summary.memory.peak is not None
    summary.memory.fullest_at["after_backward"] = dict.fromkeys(KINDS, MIB // 4)
    summary.memory.peak.fullest = 1.5 * MIB
    texts = [text.get_text().strip() for text in draw_figure(points_of(sweep[:1])).axes[0].texts]
    assert texts == [*["0.25"] * len(KINDS), "1.25, peak 1.50"]


def test_what_differs_beside_strategy_and_implementation_is_named(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(n), world_size=n)) for n in (2, 4)]
    (group,) = bars(points_of(runs))
    assert [bar.name for bar in group] == ["zero3 · buffer · ranks 2", "zero3 · buffer · ranks 4"]
    title = draw_figure(points_of(runs)).axes[0].get_title(loc="left")
    assert "after backward" in title and "world size 2 and 4" in title and "model small" in title


def test_the_file_has_text_an_opaque_ground_and_the_same_bytes_each_time(
    sweep: list[Run], tmp_path: Path
) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    save_figure(points_of(sweep), first)
    save_figure(points_of(sweep), second)
    assert first.read_bytes() == second.read_bytes()
    root = ET.parse(first).getroot()
    texts = {
        "".join(element.itertext()).strip() for element in root.iter() if "text" in element.tag
    }
    assert set(HELD) | {"parameters", "gradients", "optimizer state"} <= texts
    ground = next(element for element in root.iter() if element.tag.endswith("}path"))
    assert ground.get("style") == "fill: #ffffff"


def test_what_can_not_be_drawn_is_one_line(sweep: list[Run], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--figure a\.png: .*ends in \.svg"):
        save_figure(points_of(sweep), Path("a.png"))
    with pytest.raises(ConfigError, match=r"--figure .*/a\.svg: No such file or directory; use"):
        save_figure(points_of(sweep), tmp_path / "nowhere" / "a.svg")
    with pytest.raises(ConfigError, match="no run of the sweep came to its end; run"):
        bars(points_of(sweep[-1:]))
    assert sweep[0].summary is not None
    memory = replace(sweep[0].summary.memory, fullest_at={})  # as versions before this one wrote it
    old = replace(sweep[0], summary=replace(sweep[0].summary, memory=memory))
    with pytest.raises(ConfigError, match=r"summary\.json does not say .*; run the sweep again"):
        bars(points_of([old]))


def test_no_other_report_waits_for_matplotlib() -> None:
    imports = (
        "import sys, zeroexp.report.__main__, zeroexp.__main__; print('matplotlib' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", imports], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "False"
