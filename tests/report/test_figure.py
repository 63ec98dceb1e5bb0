"""Charts of the page on paper: the numbers behind their bars and marks, what their files are like, what is refused."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.report.made import points, repeats
from tests.run_folders import write_run
from zeroexp.measure.record import CAUSES
from zeroexp.report.conclusions import conclude
from zeroexp.report.figure import draw_figure, save_figure
from zeroexp.report.measured_points import MeasuredPoint
from zeroexp.report.page import CHARTS, chart_of
from zeroexp.report.page.byte_charts import MESSAGES
from zeroexp.report.page.chart import line_style, row_chart
from zeroexp.report.palette import CAUSE_COLOURS, DASHES, GREY, PART_COLOURS, SERIES

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


@pytest.fixture
def sweep(tmp_path: Path) -> list[MeasuredPoint]:
    for strategy in STRATEGIES:
        for size in (1, 2):
            write_run(tmp_path / f"{strategy}-n{size}", strategy, world_size=size)
    return points(tmp_path)


def test_what_is_drawn_are_the_numbers_of_the_page(sweep: list[MeasuredPoint]) -> None:
    chart = chart_of("memory", sweep, conclude(sweep))
    (axes,) = draw_figure(chart).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [point.name for point in sweep]
    bars = {trace["name"]: trace["x"] for trace in chart.data if trace["type"] == "bar"}
    drawn = {
        str(stack.get_label()): [bar.get_width() for bar in stack] for stack in axes.containers
    }
    assert drawn == bars and len(bars) == 3  # nobody holds masters or buffers
    ends = [0.0] * len(names)
    for stack in axes.containers:
        assert [bar.get_x() for bar in stack] == ends, "one kind behind the other"
        ends = [bar.get_x() + bar.get_width() for bar in stack]
    totals = [text.get_text().strip() for text in axes.texts[-len(names) :]]
    peaks = {trace["name"]: trace["x"] for trace in chart.data}["peak of any step"]
    both = zip(ends, peaks, strict=True)
    assert totals == [f"{end:,.0f}, peak {peak:,.0f}" for end, peak in both]
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert labels == {*bars, "peak of any step"}


def test_no_two_parts_of_a_row_look_alike() -> None:
    numbers = {"a": dict.fromkeys(CAUSES, 1.0)}
    chart = row_chart("causes", "", "", axis="MiB", numbers=numbers, colours=CAUSE_COLOURS)
    patterns = [tuple(trace["marker"]["pattern"].items()) for trace in chart.data]
    (axes,) = draw_figure(chart).axes
    hatches = [stack.patches[0].get_hatch() for stack in axes.containers]
    assert len({*patterns}) == len({*hatches}) == len(CAUSES)


def test_no_two_of_many_lines_look_alike() -> None:
    looks = [line_style(index) for index in range(len(SERIES) * len(DASHES))]
    assert len({tuple(each.values()) for each in looks}) == len(looks)


def test_no_two_kinds_of_messages_look_alike() -> None:
    """A colour by its place would be another in each chart, and that of a kind with a colour of its own."""
    verbs = [*MESSAGES, "hand_over", "quiesce", "by TCP"]
    assert len({GREY, *(PART_COLOURS[verb] for verb in verbs)}) == 1 + len(verbs)


def test_a_mark_hides_no_number_of_its_bar(sweep: list[MeasuredPoint]) -> None:
    chart = chart_of("exposed", sweep, conclude(sweep))
    assert chart.data[-1]["marker"]["standoff"] > 9
    (axes,) = draw_figure(chart).axes
    (marks,) = axes.lines
    beside = [row + 0.45 for row in range(len(sweep))]
    assert list(marks.get_ydata()) == pytest.approx(beside)


def test_intervals_of_verdicts_are_drawn(tmp_path: Path) -> None:
    made = points(repeats(tmp_path, {"ddp": [1.0, 1.02, 1.04], "zero3": [0.5, 0.5, 0.5]}))
    chart = chart_of("verdict", made, conclude(made))
    (axes,) = draw_figure(chart).axes
    ((ends,),) = [lines.get_segments() for lines in axes.collections]
    comparison = conclude(made).comparisons["zero3"]
    assert [x for x, _ in ends] == pytest.approx([comparison.low, comparison.high])
    assert axes.get_xscale() == "log"


def test_scaling_has_a_tick_for_each_number_of_ranks_and_no_other(tmp_path: Path) -> None:
    for size in (2, 16):
        write_run(tmp_path / f"zero3-n{size}", world_size=size)
    made = points(tmp_path)
    chart = chart_of("scaling", made, conclude(made))
    assert [line["x"] for line in chart.data] == [[2, 16]] * 2, "not in the order of the folders"
    (axes,) = draw_figure(chart).axes
    assert [label.get_text() for label in axes.get_xticklabels(which="both")] == ["2", "16"]


@pytest.mark.slow
def test_every_chart_can_be_printed(sweep: list[MeasuredPoint], tmp_path: Path) -> None:
    for make in CHARTS:
        name = make.__name__.removesuffix("_chart")
        if name != "causes":  # nobody's peak is known by cause
            save_figure(chart_of(name, sweep, conclude(sweep)), tmp_path / f"{name}.pdf")
            assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_the_file_has_text_an_opaque_ground_and_the_same_bytes_each_time(sweep, tmp_path):
    chart = chart_of("memory", sweep, conclude(sweep))
    for suffix in (".svg", ".pdf"):
        one, two = (tmp_path / f"{number}{suffix}" for number in (1, 2))
        save_figure(chart, one)
        save_figure(chart, two)
        assert one.read_bytes() == two.read_bytes()
    root = ET.parse(tmp_path / "1.svg").getroot()
    texts = {"".join(part.itertext()).strip() for part in root.iter() if "text" in part.tag}
    assert {"zero3-n2", "parameters", "gradients", "optimizer state"} <= texts
    ground = next(element for element in root.iter() if element.tag.endswith("}path"))
    assert ground.get("style") == "fill: #ffffff"
