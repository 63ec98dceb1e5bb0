"""The page as text: what its charts say, from run folders alone. tests/report/test_page_in_browser.py looks at it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.run_folders import PARAMETER_BYTES, write_run
from zeroexp.config.keys import ConfigError
from zeroexp.measure.record import Peak
from zeroexp.report import page
from zeroexp.report.columns import MIB
from zeroexp.report.headline import headline_cards
from zeroexp.report.measured_points import Point, points_of
from zeroexp.report.page.chart import DEFAULTS
from zeroexp.report.reading import read_runs

P = PARAMETER_BYTES / MIB


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for strategy, size in product(("ddp", "zero2", "zero3"), (1, 2)):
        write_run(tmp_path / "sweep" / f"{strategy}-{size}", strategy, "buffer", size)
    return tmp_path / "sweep"


def points(folder: Path) -> list[Point]:
    return points_of(read_runs([folder])[0])


def charts(text: str) -> dict[str, dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.S)
    assert found
    return {chart["name"]: chart for chart in json.loads(found[1])}


def bars(chart: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Name of a part -> row -> length."""
    return {t["name"]: dict(zip(t["y"], t["x"], strict=True)) for t in chart["data"]}


def test_memory_and_traffic_stand_beside_the_closed_form_of_the_run(sweep: Path) -> None:
    one, *others = points(sweep)
    assert one.summary is not None
    plan = {"after_backward": 7.0 * MIB, "sent": 5.0 * MIB}
    planned = replace(one.run, summary=replace(one.summary, plan=plan))
    drawn = charts(page.render([Point(one.name, (planned,)), *others]))
    assert bars(drawn["memory"])["closed form"] == {one.name: 7.0}
    assert bars(drawn["traffic"])["closed form"] == {one.name: 5.0}
    for name in ("memory", "traffic"):
        older = bars(drawn[name])["the stage's table"]
        assert list(older) == [point.name for point in others]


def timed(folder: Path, seconds: float) -> Path:
    """Give the run a median step time."""
    summary = json.loads((folder / "summary.json").read_text())
    summary["step_seconds_median"] = seconds
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_the_first_numbers_compare_what_can_be_compared(sweep: Path) -> None:
    made = {card.label: card for card in headline_cards(points(sweep))}
    assert made["least memory"].value == f"{2 * P:.1f} MiB"
    assert made["least memory"].detail.startswith("zero3 · buffer · ranks 2, 0.50 of")
    assert made["least sent"].detail == "ddp · buffer · ranks 2, like all others", (
        "one rank sends none"
    )
    assert made["losses"].value == "equal"


def test_the_peak_is_told_by_cause(sweep: Path) -> None:
    one, *others = points(sweep)
    assert one.summary is not None
    assert "causes" not in charts(page.render([one, *others]))
    made = {"activations": 3 * MIB, "parameters": 2 * MIB}
    peak = Peak(2, 5 * MIB, made, "TanhBackward0", None, "backward", "blocks.1", 0.1, 0.2)
    less = replace(peak, num_bytes=MIB, bytes_by_cause={"logits": MIB})
    memory = replace(one.summary.memory, peaks=[less, peak])
    watched = replace(one.run, summary=replace(one.summary, memory=memory))
    chart = charts(page.render([Point(one.name, (watched,)), *others]))["causes"]
    assert bars(chart) == {"parameters": {one.name: 2.0}, "activations": {one.name: 3.0}}
    assert chart["caption"].endswith("in TanhBackward0 of the backward phase of blocks.1.")


def test_intervals_of_the_verdicts_are_drawn(tmp_path: Path) -> None:
    for name, factor in (("ddp", 1.0), ("zero3", 0.5)):
        for repeat in range(3):
            folder = write_run(tmp_path / "sweep" / f"{name}-{repeat}", name)
            timed(folder, factor * (1 + 0.01 * repeat * (name == "ddp")))
    text = page.render(points(tmp_path / "sweep"))
    (faster,) = charts(text)["forest"]["data"]
    assert faster["name"] == "faster" and faster["y"] == ["zero3 · buffer"]
    assert faster["x"][0] == pytest.approx(0.495, abs=1e-3)
    assert 0 < faster["error_x"]["arrayminus"][0] < 0.02
    assert "<strong>500.0 ms</strong><span>zero3 · buffer, 0.50 of ddp · buffer</span>" in text


def test_an_interval_of_a_step_ends_within_its_axis_or_in_an_arrow(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    for (name, scatter), repeat in product(
        {"ddp": 0.02, "zero2": 0.1, "zero3": 0.5}.items(), range(3)
    ):
        timed(write_run(folder / f"{name}-{repeat}", name), 1 + scatter * repeat)
    told = charts(page.render(points(folder)))["times"]
    drawn, end = bars(told), told["layout"]["xaxis"]["range"][1]
    whole = next(trace for trace in told["data"] if trace["name"] == "whole step")
    ends = [
        middle + more for middle, more in zip(whole["x"], whole["error_x"]["array"], strict=True)
    ]
    # Student's ends: 4.303 × the scatter of the logs / √3 beyond their mean.
    assert ends == pytest.approx([1070.8, 1375.9, 3425.6], abs=0.1)
    assert drawn["interval goes on"] == {"zero3 · buffer": end} and end == 1.8 * 1500
    assert "arrow" in told["caption"]
    for repeat in range(3):
        shutil.rmtree(folder / f"zero3-{repeat}")
    told = charts(page.render(points(folder)))["times"]
    assert told["layout"]["xaxis"]["range"][1] > 1375.9
    assert "interval goes on" not in bars(told) and "arrow" not in told["caption"]


def test_times_that_scatter_crown_nobody(tmp_path: Path) -> None:
    for name, repeat in product(("ddp", "zero1", "zero2", "zero3"), range(2)):
        folder = write_run(tmp_path / "sweep" / f"{name}-{repeat}", name)
        summary = json.loads((folder / "summary.json").read_text())
        summary["step_seconds_median"] *= 1 + repeat
        (folder / "summary.json").write_text(json.dumps(summary))
    text = page.render(points(tmp_path / "sweep"))
    assert "No point is called fastest" in text and "took the shortest step" not in text
    assert text.count("worth nothing") == 1 and "The times of all points are worth nothing" in text


def test_memory_stands_beside_the_table_of_its_stage(sweep: Path) -> None:
    drawn = bars(charts(page.render(points(sweep)))["memory"])
    zero2 = "zero2 · buffer · ranks 2"
    assert drawn["parameters"][zero2] == P
    assert drawn["gradients"][zero2] == P / 2
    assert drawn["optimizer state"][zero2] == P
    # The table: whole parameters, half of the gradients, half of two moments.
    assert drawn["the stage's table"][zero2] == pytest.approx(2.5 * P)
    assert drawn["peak of any step"][zero2] == pytest.approx(2.5 * P + 11)  # rank 1 has 11 MiB more
    assert "master weights" not in drawn


def test_bytes_sent_stand_beside_the_table_of_the_stage(sweep: Path) -> None:
    drawn = bars(charts(page.render(points(sweep)))["traffic"])
    assert drawn["gather"]["zero3 · buffer · ranks 2"] == P / 2
    # One all-reduce of P at two ranks; two all-gathers and a reduce-scatter for each of six microbatches.
    assert drawn["the stage's table"]["ddp · buffer · ranks 2"] == P
    assert drawn["the stage's table"]["zero3 · buffer · ranks 2"] == 6 * 1.5 * P
    assert drawn["the stage's table"]["zero3 · buffer · ranks 1"] == 0


def test_a_step_is_cut_into_what_waits_for_each_verb_and_the_rest(sweep: Path) -> None:
    chart = charts(page.render(points(sweep)))["exposed"]
    drawn, point = bars(chart), "zero3 · buffer · ranks 2"
    # Rank 1 waits 10 ms for reductions, rank 0 not at all; both wait 20 ms for gathers.
    assert drawn["gather, exposed"][point] == pytest.approx(20)
    assert drawn["reduce, exposed"][point] == pytest.approx(5)
    assert drawn["all else"][point] == pytest.approx(359.5 - 25)  # the mean of 20 steps in turn
    assert drawn["overlapped with compute"][point] == pytest.approx(70)
    assert "rank 1 waited 10.0 ms a step for rank 0" in chart["caption"]


def test_lines_of_scaling_have_an_ideal(sweep: Path) -> None:
    drawn = {t["name"]: t for t in charts(page.render(points(sweep)))["scaling"]["data"]}
    assert list(drawn) == ["ddp · buffer", "zero2 · buffer", "zero3 · buffer", "ideal"]
    assert drawn["zero3 · buffer"]["x"] == [1, 2]
    fastest = max(t["y"][0] for name, t in drawn.items() if name != "ideal")
    assert drawn["ideal"]["y"] == [fastest, 2 * fastest]


def test_one_world_size_is_a_sentence_and_no_empty_chart(tmp_path: Path) -> None:
    text = page.render(points(write_run(tmp_path / "sweep/a").parent))
    assert "scaling" not in charts(text)
    assert "sweep world_size=1,2,4" in text


def test_the_frontier_holds_what_no_point_beats(sweep: Path) -> None:
    words = charts(page.render(points(sweep)))["pareto"]["caption"]
    # One rank is slower and holds as much; of two ranks a later stage is slower and holds less.
    assert words.endswith(
        "both: ddp · buffer · ranks 2, zero2 · buffer · ranks 2, zero3 · buffer · ranks 2."
    )


def test_every_chart_is_one_that_plotly_knows(sweep: Path) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    drawn = json.loads(json.dumps(charts(page.render(points(sweep)))).replace('"INK"', '"#000"'))
    assert len(drawn) == len(page.CHARTS) - 1 and "causes" not in drawn
    for chart in drawn.values():
        # Raises for a word that it does not know.
        graph_objects.Figure(chart["data"], {**chart["layout"], "template": {"data": DEFAULTS}})


def test_words_of_a_run_cannot_become_code(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    write_run(tmp_path / "sweep/good")
    write_run(tmp_path / "sweep/bad", "zero2", status="failed", reason=evil)
    text = page.render(points(tmp_path / "sweep"), [evil])
    assert evil not in text
    assert unescape(text).count(evil) == 2  # in the row of the run, and among the problems


def test_a_name_in_a_chart_cannot_end_its_script(tmp_path: Path) -> None:
    for name, path in (("a", "null"), ("b", "'</script><b>'")):
        config = write_run(tmp_path / "sweep" / name) / "config.yaml"
        config.write_text(config.read_text().replace("  path: null", f"  path: {path}", 1))
    text = page.render(points(tmp_path / "sweep"))
    assert "</script><b>" not in text
    name = "zero3 · buffer · path &lt;/script><b>".replace("<b>", "&lt;b>")
    assert name in bars(charts(text)["memory"])["parameters"], "plotly would take a tag for its own"


def test_a_loss_that_is_no_number_leaves_every_chart_whole(tmp_path: Path) -> None:
    for name in ("ddp", "zero3"):
        folder = write_run(tmp_path / "sweep" / name, name)
        lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
        for line in lines[5:] if name == "zero3" else []:
            line["loss"] = "NaN"
        (folder / "records.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    summary = tmp_path / "sweep/zero3/summary.json"
    told = json.loads(summary.read_text())
    summary.write_text(json.dumps({**told, "final_loss": "NaN", "diverged_at": 5}))
    text = page.render(points(tmp_path / "sweep"))
    assert "NaN" not in json.dumps(charts(text))
    losses = {t["name"]: t["y"] for t in charts(text)["losses"]["data"] if t["yaxis"] == "y"}
    assert losses["zero3 · buffer"][4] is not None and losses["zero3 · buffer"][5:] == [None] * 18
    assert "zero3 · buffer diverged at step 5" in text and "<strong>not alike</strong>" in text


def test_nothing_is_compared_with_a_curve_that_holds_what_is_no_number(tmp_path: Path) -> None:
    """The first point diverges, and the distance of the two others to one another is still told."""
    for name in ("ddp", "zero2", "zero3"):
        records = write_run(tmp_path / "sweep" / name, name) / "records.jsonl"
        if name == "ddp":
            lines = [json.loads(line) for line in records.read_text().splitlines()]
            records.write_text("".join(f"{json.dumps({**x, 'loss': 'NaN'})}\n" for x in lines))
    chart = charts(page.render(points(tmp_path / "sweep")))["losses"]
    assert [trace["name"] for trace in chart["data"]] == [
        *("zero2 · buffer", "zero3 · buffer", "ddp · buffer")
    ]
    assert chart["caption"].startswith("ddp · buffer has other steps than zero2 · buffer")


def test_equal_curves_leave_no_empty_half_and_runs_that_are_done_no_column(tmp_path: Path) -> None:
    for name in ("ddp", "zero3"):
        write_run(tmp_path / "sweep" / name, name)
    text = page.render(points(tmp_path / "sweep"))
    assert "yaxis2" not in charts(text)["losses"]["layout"] and "lower half" not in text
    assert ">status<" not in text
    write_run(tmp_path / "sweep/zero2", "zero2", status="failed", reason="rank 0 died")
    assert ">status<" in page.render(points(tmp_path / "sweep"))


def test_a_folder_that_knows_no_machine_and_no_time_makes_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sweep/a")
    (folder / "environment.json").unlink()
    (folder / "state.json").unlink()
    assert "zero3 · buffer" in page.render(points(tmp_path / "sweep"))


def test_runs_without_results_make_a_page_of_words(tmp_path: Path) -> None:
    write_run(tmp_path / "sweep/a", status="failed", reason="rank 0: ValueError: x", num_steps=0)
    text = page.render(points(tmp_path / "sweep"))
    assert "not all came to their end: 1 failed" in text
    assert "failed: rank 0: ValueError: x" in text
    assert charts(text) == {}, "no empty axes"


def test_what_was_run_can_be_run_again(sweep: Path) -> None:
    text = page.render(points(sweep))
    assert "zeroexp -m study=compare" in text
    assert "a processor" in text
    assert "2.13.0" in text


def test_a_page_that_cannot_be_written_is_one_line(sweep: Path) -> None:
    with pytest.raises(ConfigError, match=r"--html .*nowhere/x\.html: No such file"):
        page.save(points(sweep), [], sweep / "nowhere/x.html")
