"""The page as a reader meets it: in a browser, narrow and wide, light and dark, without a network."""

from __future__ import annotations

import json
import re
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.browser import browse, needs_browser
from tests.run_folders import write_run
from tests.traces import write_trace
from zeroexp.report import page
from zeroexp.report.measured_points import points_of
from zeroexp.report.reading import read_runs

pytestmark = [pytest.mark.browser, needs_browser]
WIDTHS = (360, 1600)
# Frames of several widths in one page, since no window of a browser is as narrow as a phone. The page's own view of
# itself is copied to where --dump-dom shows it.
FRAMES = """<!doctype html><body>{frames}<script>
window.addEventListener("load", () => setTimeout(() => {{
  document.body.dataset.seen = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {{
    const inside = frame.contentDocument, root = inside.documentElement;
    return {{
      charts: Object.fromEntries([...inside.querySelectorAll(".chart")].map(
        chart => [chart.id, chart.querySelectorAll(".main-svg").length])),
      marks: inside.querySelectorAll("#memory .bars path").length,
      width: root.scrollWidth,
      requests: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name),
      height: Number(inside.querySelector("#memory .main-svg").getAttribute("height")),
      ink: inside.defaultView.getComputedStyle(inside.querySelector("#memory .xtick text")).fill,
      // The last, since the page is then as it is printed.
      paper: frame.contentWindow.dispatchEvent(new Event("beforeprint")) && {{
        height: Number(inside.querySelector("#memory .main-svg").getAttribute("height")),
        ink: inside.defaultView.getComputedStyle(inside.querySelector("#memory .xtick text")).fill,
      }},
    }};
  }}));
}}, 3000));
</script></body>"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of six points, two of which ran with more ranks, in frames."""
    folder = tmp_path_factory.mktemp("page")
    for strategy, size in product(("ddp", "zero2", "zero3"), (1, 2)):
        write_run(folder / "sweep" / f"{strategy}-n{size}", strategy, "buffer", size)
    write_trace(folder / "sweep/zero3-n2", rank=0, step=9, began_at=100.0)
    runs, problems = read_runs(folder / "sweep")
    page.save(points_of(runs), problems, folder / "report.html")
    frames = "".join(
        f'<iframe src="report.html" style="width:{width}px;height:800px;border:0"></iframe>'
        for width in WIDTHS
    )
    (folder / "frames.html").write_text(FRAMES.format(frames=frames))
    return folder / "frames.html"


def looked_at(shown: Path, profile: Path, *more: str) -> list[dict[str, Any]]:
    seen = browse(
        shown.as_uri(), profile, "--allow-file-access-from-files", *more, milliseconds=10_000
    )
    assert seen.console == []
    told = re.search(r'data-seen="([^"]*)"', seen.dom)
    assert told, "the page did not come to its end"
    return json.loads(unescape(told[1]))


def test_every_chart_is_drawn_at_any_width_and_nothing_is_asked_of_a_network(shown, tmp_path):
    frames = looked_at(shown, tmp_path, "--window-size=1700,1700")
    for width, frame in zip(WIDTHS, frames, strict=True):
        assert "timeline" in frame["charts"] and "causes" not in frame["charts"]
        assert len(frame["charts"]) == len(page.CHARTS)
        assert all(frame["charts"].values()), frame["charts"]
        assert frame["marks"] == 6 * 3  # parameters, gradients and optimizer state of six points
        assert frame["width"] <= width, "the page scrolls sideways"
        assert frame["requests"] == []
        assert frame["ink"] == "rgb(27, 27, 27)"


@pytest.mark.slow
def test_in_dark_mode_words_are_light_and_on_paper_dark(shown: Path, tmp_path: Path) -> None:
    frames = looked_at(shown, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert {frame["ink"] for frame in frames} == {"rgb(232, 232, 232)"}
    assert {frame["paper"]["ink"] for frame in frames} == {"rgb(27, 27, 27)"}
    # The page's style makes room for charts of this height on paper.
    _, wide = frames
    assert wide["paper"]["height"] == pytest.approx(0.92 * wide["height"])
