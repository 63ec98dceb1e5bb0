"""The timeline of one step, from trace files as `measure/trace_file.py` describes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.made import points
from tests.run_folders import write_run
from tests.traces import write_trace
from zeroexp.report.page.step_timeline import read_traces, timeline_charts
from zeroexp.report.palette import CAUSE_COLOURS, SPAN_COLOURS, SPARE


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "sweep/a")
    for rank in (0, 1):
        write_trace(folder, rank, 4, 50.0)
        write_trace(folder, rank, 9, 100.0 + 0.002 * rank)
    return folder


def test_ranks_of_the_last_traced_step_stand_one_under_another(run: Path) -> None:
    (chart,) = timeline_charts(points(run))
    assert (chart.name, chart.title) == ("timeline", "One step: a")
    assert chart.caption.startswith("a, step 9, traced")
    bars = {(t["yaxis"], t["name"]): t for t in chart.data if t["type"] == "bar"}
    assert set(bars) == {(axis, name) for axis in ("y", "y3") for name in ("forward", "gather")}
    gather = bars["y", "gather"]
    assert (gather["y"], gather["base"], gather["x"]) == (["verb", "exposed"], [1, 1], [2, 0.5])
    assert gather["text"] == ["gather unit block (wait)", "gather unit block, waiting for rank 1"]
    assert bars["y", "forward"]["y"] == ["phase", "unit"]
    # Rank 1 began its step two milliseconds later.
    assert bars["y3", "gather"]["base"] == pytest.approx([3, 3], abs=1e-3)
    assert [t["showlegend"] for t in bars.values()] == [True, True, False, False]


def test_memory_rises_with_the_gather_and_falls_behind_it(run: Path) -> None:
    (chart,) = timeline_charts(points(run))
    pools = [t for t in chart.data if t["type"] == "scatter" and t["name"] == "held: pools"]
    assert [(t["yaxis"], t["stackgroup"]) for t in pools] == [("y2", "rank 0"), ("y4", "rank 1")]
    assert (pools[0]["x"], pools[0]["y"]) == ([0, 1, 6], [0, 8, 0])
    domains = [chart.layout[f"yaxis{number}"]["domain"] for number in ("", 2, 3, 4)]
    ends = [end for domain in domains for end in reversed(domain)]
    assert ends[0] == 1 and ends == sorted({*ends}, reverse=True), "none lies over another"
    assert ends[-1] == pytest.approx(0, abs=1e-9)
    (run / "trace.0.9.json").write_text('{"traceEvents": [')
    assert [(one.rank, one.step) for one in read_traces(run)] == [(1, 9)], "torn"


def test_no_colour_of_a_timeline_stands_for_two_things() -> None:
    colours = [*SPAN_COLOURS.values(), *CAUSE_COLOURS.values(), *SPARE]
    assert len({*colours}) == len(colours)


def test_the_engine_that_gathers_and_frees_is_shown_first(tmp_path: Path) -> None:
    assert timeline_charts(points(write_run(tmp_path / "none/a")))[0].data == []
    for strategy, implementation in (("ddp", "torch"), ("zero2", "buffer"), ("zero3", "buffer")):
        folder = write_run(tmp_path / "sweep" / strategy, strategy, implementation)
        write_trace(folder, rank=0, step=9, began_at=1.0)
    titles = [chart.title for chart in timeline_charts(points(tmp_path / "sweep"))]
    assert titles == [f"One step: {strategy}" for strategy in ("zero3", "zero2", "ddp")]
