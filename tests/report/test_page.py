"""The page as text: what its charts say, from run folders alone. tests/report/test_page_in_browser.py looks at it."""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.report.made import change, edit, points, repeats
from tests.run_folders import PARAMETER_BYTES, write_run
from zeroexp.report import page
from zeroexp.report.columns import MIB
from zeroexp.report.headline import headline_cards, headline_sentences

P = PARAMETER_BYTES / MIB


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three strategies on one rank and on two. Nobody writes into it."""
    folder = tmp_path_factory.mktemp("page") / "sweep"
    for strategy in ("ddp", "zero2", "zero3"):
        for size in (1, 2):
            write_run(folder / f"{strategy}-n{size}", strategy, "buffer", size)
    return folder


@pytest.fixture(scope="module")
def text(sweep: Path) -> str:
    return page.render(points(sweep))


def embedded(text: str, name: str) -> Any:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def charts(text: str) -> dict[str, dict[str, Any]]:
    return {chart["name"]: chart for chart in embedded(text, "charts")}


def charts_of(folder: Path) -> dict[str, dict[str, Any]]:
    return charts(page.render(points(folder)))


def bars(chart: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Name of a part -> row -> length."""
    return {t["name"]: dict(zip(t["y"], t["x"], strict=True)) for t in chart["data"]}


# ---- what each chart draws


def test_memory_and_traffic_stand_beside_closed_forms(tmp_path: Path) -> None:
    for strategy in ("zero2", "zero3"):
        write_run(tmp_path / strategy, strategy)
    plan = {"after_backward": 7.0 * MIB, "sent": 5.0 * MIB}
    change(tmp_path / "zero2/summary.json", {"plan": plan})
    drawn = charts_of(tmp_path)
    memory, traffic = (bars(drawn[name]) for name in ("memory", "traffic"))
    assert memory["parameters"]["zero2"] == P and "master weights" not in memory
    assert memory["gradients"]["zero2"] == P / 2 and memory["optimizer state"]["zero2"] == P
    assert memory["peak of any step"]["zero2"] == pytest.approx(2.5 * P + 11)  # of rank 1
    assert traffic["gather"]["zero3"] == P / 2
    assert memory["closed form"] == {"zero2": 7.0} and traffic["closed form"] == {"zero2": 5.0}


def test_the_peak_is_told_by_cause(tmp_path: Path, text: str) -> None:
    assert "causes" not in charts(text)
    peak = {
        **{"step": 2, "num_bytes": 5 * MIB, "operator": "TanhBackward0", "verb": None},
        **{"bytes_by_cause": {"activations": 3 * MIB, "parameters": 2 * MIB}, "unit": "blocks.1"},
        **{"phase": "backward", "seconds": 0.1, "step_seconds": 0.2},
    }
    less = {**peak, "num_bytes": MIB, "bytes_by_cause": {"logits": MIB}}
    run = write_run(tmp_path / "a")
    change(run / "summary.json", {"memory.peaks": [less, peak]})
    drawn = charts_of(tmp_path)
    chart, held = drawn["causes"], {"parameters": {"a": 2.0}, "activations": {"a": 3.0}}
    of_any_step = bars(drawn["memory"])["peak of any step"]  # not the 5 MiB of the watched step
    assert bars(chart) == {**held, "peak of any step": of_any_step} and of_any_step["a"] > 5
    assert "That was step 2, counted from 0. The line" in chart["caption"]
    assert chart["caption"].endswith("in TanhBackward0 of the backward phase of blocks.1.")
    first = {**peak, "step": 0, "operator": "", "unit": None}
    change(run / "summary.json", {"memory.peaks": [first]})
    caption = charts_of(tmp_path)["causes"]["caption"]
    assert "That was step 0, counted from 0: in step 0 the optimizer has no moments" in caption
    assert caption.endswith(
        "The watched peak comes outside of torch's operators in the backward phase."
    )


def test_phases_of_the_median_step_add_up_to_it(tmp_path: Path) -> None:
    """Their medians do not: each is that of another step."""
    phases = {"forward": 0.2, "backward": 0.3}
    change(
        write_run(tmp_path / "a") / "summary.json",
        {"phase_seconds_median": phases, "step_seconds_median": 0.4},
    )
    drawn = bars(charts_of(tmp_path)["times"])
    assert drawn["forward"]["a"] == pytest.approx(160)
    assert drawn["backward"]["a"] == pytest.approx(240)
    assert drawn["whole step"]["a"] == 400


def test_a_step_is_cut_into_what_waits_for_each_verb_and_the_rest(text: str) -> None:
    chart = charts(text)["exposed"]
    drawn, point = bars(chart), "zero3-n2"
    # Rank 1 waits 10 ms for reductions, rank 0 not at all; both wait 20 ms for gathers.
    assert drawn["gather, exposed"][point] == pytest.approx(20)
    assert drawn["reduce, exposed"][point] == pytest.approx(5)
    assert drawn["all else"][point] == pytest.approx(359.5 - 25)  # the mean of 20 steps in turn
    assert drawn["overlapped with compute"][point] == pytest.approx(70)


def test_a_sweep_ends_with_a_page_in_its_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "sweep/a")
    page.write_into(tmp_path / "sweep", points(tmp_path / "sweep"))
    assert capsys.readouterr().out == "\nReport: sweep/report.html\n"
    assert "memory" in charts((tmp_path / "sweep/report.html").read_text(encoding="utf-8"))


def test_lines_of_scaling_have_an_ideal(text: str, tmp_path: Path) -> None:
    drawn = {t["name"]: t for t in charts(text)["scaling"]["data"]}
    assert list(drawn) == ["ddp", "zero2", "zero3", "ideal"]
    assert drawn["zero3"]["x"] == [1, 2]
    fastest = max(t["y"][0] for name, t in drawn.items() if name != "ideal")
    assert drawn["ideal"]["y"] == [fastest, 2 * fastest]
    write_run(tmp_path / "a")
    alone = page.render(points(tmp_path))
    assert "scaling" not in charts(alone) and "sweep world_size=1,2,4" in alone


def test_intervals_of_the_verdicts_are_drawn(tmp_path: Path) -> None:
    repeats(tmp_path, {"ddp": [1.0, 1.01, 1.02], "zero3": [0.5, 0.5, 0.5]})
    text = page.render(points(tmp_path))
    (faster,) = charts(text)["forest"]["data"]
    assert faster["name"] == "faster" and faster["y"] == ["zero3"]
    assert faster["x"][0] == pytest.approx(0.495, abs=1e-3)
    assert 0 < faster["error_x"]["arrayminus"][0] < 0.02
    assert "<strong>500.0 ms</strong><span>zero3, 0.50 of ddp</span>" in text
    assert "  zero3  0.50 [0.48, 0.51]: faster</pre>" in text


def test_times_that_scatter_are_in_doubt(tmp_path: Path) -> None:
    repeats(tmp_path, {name: [0.2, 0.4] for name in ("ddp", "zero1", "zero2", "zero3")})
    text = page.render(points(tmp_path))
    (doubt,) = re.findall("In doubt, [^<]*", text)
    assert doubt.startswith(
        "In doubt, and marked with ?, are the times of 4 of 4 points, as of ddp ("
    )
    assert (
        "like all others, measured once" not in text and "; in doubt: its 2 runs took 200" in text
    )


def test_losses_that_are_no_numbers_leave_every_chart_whole(tmp_path: Path) -> None:
    """Nothing is compared with the first point, which diverges."""
    for name in ("ddp", "zero2", "zero3"):
        write_run(tmp_path / name, name)
    equal = page.render(points(tmp_path))
    assert "yaxis2" not in charts(equal)["losses"]["layout"] and "lower half" not in equal
    records = tmp_path / "ddp/records.jsonl"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    for line in lines[5:]:
        line["loss"] = "NaN"
    records.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    change(tmp_path / "ddp/summary.json", {"final_loss": "NaN", "diverged_at": 5})
    text = page.render(points(tmp_path))
    assert "NaN" not in json.dumps(charts(text))
    chart = charts(text)["losses"]
    losses = {t["name"]: t["y"] for t in chart["data"]}
    assert list(losses) == ["zero2", "zero3", "ddp"]
    assert losses["ddp"][4] is not None and losses["ddp"][5:] == [None] * 18
    assert chart["caption"].startswith("Beside the first the curves are not alike: ddp from step ")
    assert "ddp diverged at step 5" in text and "<strong>not alike</strong>" in text


def test_the_first_numbers_compare_what_can_be_compared(tmp_path: Path) -> None:
    for strategy, size in (("ddp", 1), ("ddp", 2), ("zero3", 2)):
        write_run(tmp_path / f"{strategy}-{size}", strategy, "buffer", size)
    made = {card.label: card for card in headline_cards(points(tmp_path))}
    assert made["least memory"].value == f"{2 * P:.1f} MiB"
    assert made["least memory"].detail == "zero3-2, 0.50 of ddp-1"
    assert made["least sent"].detail == "ddp-2, like all others", "one rank sends none"
    assert made["losses"].value == "equal"


# ---- the page as a whole


def test_every_chart_is_one_that_plotly_knows(text: str) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    drawn = json.loads(json.dumps(charts(text)).replace('"INK"', '"#000"'))
    assert len(drawn) == len(page.CHARTS) - 1 and "causes" not in drawn
    defaults = {"template": {"data": embedded(text, "defaults")}}
    for chart in drawn.values():
        # Raises for a word that it does not know.
        graph_objects.Figure(chart["data"], {**chart["layout"], **defaults})


def test_words_of_a_run_cannot_become_code(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    write_run(tmp_path / "sweep/<b>")
    write_run(tmp_path / "sweep/bad", "zero2", status="failed", reason=evil)
    text = page.render(points(tmp_path / "sweep"), [evil])
    assert evil not in text
    assert unescape(text).count(evil) == 2  # in the row of the run, and among the problems
    assert "&lt;b>" in bars(charts(text)["memory"])["parameters"], "plotly would take it for a tag"


def test_steps_of_unlike_work_are_said_to_be(tmp_path: Path) -> None:
    """A step of twice the samples takes twice as long, and is on the way to another loss."""
    for name, size in (("small", 4), ("large", 8)):
        folder = write_run(tmp_path / name)
        size_before = re.search(r"global_batch_size: (.*)", (folder / "config.yaml").read_text())
        assert size_before
        edit(folder / "config.yaml", size_before[0], f"global_batch_size: {size}")
    (line,) = [line for line in headline_sentences(points(tmp_path)) if "same work" in line]
    assert "(data.global_batch_size=8, 4): compare tokens/s" in line
    shutil.rmtree(tmp_path / "large")
    assert not any("same work" in line for line in headline_sentences(points(tmp_path)))


def test_a_page_is_made_of_whatever_is_known(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    text = page.render(points(tmp_path))
    assert all(words in text for words in ("zeroexp -m study=compare", "a processor", "2.13.0"))
    assert ">status<" not in text
    (folder / "environment.json").unlink()
    (folder / "state.json").unlink()
    assert charts_of(tmp_path)
    shutil.rmtree(folder)
    write_run(tmp_path / "b", status="failed", reason="rank 0: ValueError: x", num_steps=0)
    text = page.render(points(tmp_path))
    assert "not all came to their end: 1 failed" in text and ">status<" in text
    assert "failed: rank 0: ValueError: x" in text
    assert charts(text) == {}, "no empty axes"
