"""What a user sees: the server that `ui_command` starts, and the saved views in a browser."""

from __future__ import annotations

import re

import pytest

from tests.browser import browse, needs_browser
from tests.mlflow_server import MlflowServer
from tests.run_folders import STRATEGIES, WORLD_SIZES
from zeroexp.tracking import mlflow_views
from zeroexp.tracking.mlflow_store import UI_PORT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

WINDOW = "--window-size=1900,2400"


@pytest.fixture(scope="module")
def links(mlflow: tuple[MlflowServer, dict[str, str]]) -> dict[str, str]:
    """What a view shows -> its link, on the server of these tests."""
    usual = f"http://127.0.0.1:{UI_PORT}"
    return {title: url.replace(usual, mlflow[0].uri) for title, url in mlflow[1].items()}


def texts(dom: str) -> set[str]:
    return {text.strip() for text in re.findall(r">([^<>]+)<", dom)}


@pytest.mark.browser
@needs_browser
def test_the_table_shows_every_run_of_the_sweep_and_the_right_columns(links, tmp_path):
    dom = browse(links["table"], tmp_path, WINDOW).dom
    seen = texts(dom)
    assert {f"{s}-buffer-n{n}" for s in STRATEGIES for n in WORLD_SIZES} <= seen
    assert "of-another-sweep" not in seen
    # The page makes only what its window can show, from the left.
    assert {"strategy", "world_size", "loss", "time/step_ms_median", "tokens_per_s_mean"} <= seen
    assert "study: table" in seen
    assert "tags.sweep = 'study'" in dom


# MLflow's assistant takes pixels of a window until it is closed once: the rest is one of 1,280.
ASSISTANT_PIXELS = 320
SMALL = "--window-size=1600,800"
TABLE_PIXELS = 1280 - 262  # without the navigation at the left and the margins


@pytest.mark.browser
@needs_browser
def test_a_small_window_shows_name_strategy_ranks_peak_and_time(links, tmp_path):
    """From the places of the columns: those before the first of ours stay where they are.

    On the first visit MLflow's assistant stands beside the table: then peak and time are still shown.
    """
    dom = browse(links["table"], tmp_path, SMALL).dom
    cell = r'col-id="([^"]+)"[^>]*style="left: (\d+)px; width: (\d+)px;"'
    places = {column: int(left) + int(width) for column, left, width in re.findall(cell, dom)}
    pinned = places["runDateAndNestInfo"]
    assert places["attributes.`Run Name`"] <= pinned
    columns = ["memory/peak_mib", "time/step_ms_median", "strategy", "world_size"]
    for pixels, number in ((TABLE_PIXELS, 4), (TABLE_PIXELS - ASSISTANT_PIXELS, 2)):
        shown = [each for each in mlflow_views.COLUMNS if pinned + places.get(each, 9999) <= pixels]
        assert [column.split("`")[1] for column in shown] == columns[:number], (pinned, places)


DOT_OR_BAR = r'class="point[ "]'
LINE = r'class="js-line" d="[^"]+" style="[^"]*stroke-opacity: 1;'  # a band's edges are transparent


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize(
    ("title", "words", "mark", "num_marks"),
    [
        pytest.param(  # Two charts, a dot for each of nine runs.
            *("memory × step time", {"time/step_ms_median", "memory/peak_mib"}, DOT_OR_BAR, 2 * 9),
            id="scatter",
        ),
        pytest.param(  # Six charts, a bar for each of nine runs.
            *("memory by kind", {"memory/params_mib", "memory/grads_mib"}, DOT_OR_BAR, 6 * 9),
            id="bars",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # Three charts, a line for each of three strategies.
            *("scaling over world size", {"scaling/step_ms", "scaling/tokens_per_s"}, LINE, 3 * 3),
            id="lines",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_charts_show_every_run(links, tmp_path, title, words, mark, num_marks):
    dom = browse(links[title], tmp_path, WINDOW).dom
    assert words <= texts(dom)
    assert len(re.findall(mark, dom)) == num_marks
