"""The saved views as data; tests/tracking/test_mlflow_page.py looks at them in a browser."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.run_folders import write_run
from zeroexp.tracking import mlflow_labels, mlflow_metrics, mlflow_views
from zeroexp.tracking.files import read_timed_records
from zeroexp.tracking.run import read_run


def state_of(envelope: str) -> dict[str, Any]:
    scheme, _, payload = json.loads(envelope)["state"].partition(";")
    assert scheme == "deflate"
    return json.loads(zlib.decompress(base64.b64decode(payload)))


def shown(state: dict[str, Any]) -> set[str]:
    """Names of metrics and tags that a view reads."""
    columns = {column.split("`")[1] for column in state["selectedColumns"]}
    axes = {
        chart[axis]["key"]
        for chart in state["compareRunCharts"]
        for axis in ("xaxis", "yaxis")
        if axis in chart
    }
    return columns | axes | {c["metricKey"] for c in state["compareRunCharts"] if "metricKey" in c}


@pytest.mark.parametrize("view", mlflow_views.of_sweep("compare"), ids=lambda view: view.title)
def test_a_view_reads_what_runs_really_have(view: mlflow_views.View, tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "compare" / "run"))
    assert run.summary is not None
    summary = replace(run.summary, rehearsed={"peak": 1.0})
    logged = {e.key for e in mlflow_metrics.summary_entries(1.0, summary)} | set(
        mlflow_labels.run_tags(run, "done")
    )
    (at, record), *_ = read_timed_records(run.folder)
    logged |= {e.key for e in mlflow_metrics.step_entries(at, record)}
    assert shown(state_of(view.envelope(now=1.0))) <= logged


def test_the_envelope_and_the_link_fit_together() -> None:
    table, scatter, *_ = mlflow_views.of_sweep("my sweep/2")
    envelope = table.envelope(now=12.5)
    assert json.loads(envelope)["name"] == "my sweep/2: table"
    assert json.loads(envelope)["updatedAt"] == 12_500
    assert len(envelope) < 5_000  # what older servers take in a tag
    state = state_of(envelope)
    assert state["searchFilter"] == "tags.sweep = 'my sweep/2'"
    assert state["runsHiddenMode"] == "SHOW_ALL"
    assert re.fullmatch(r"zeroexp\.my-sweep-2-[0-9a-f]{8}\.table", table.key)
    assert table.tag == f"mlflow.sharedViewState.{table.key}"
    url = table.url("http://127.0.0.1:5000", "7")
    assert url == (
        "http://127.0.0.1:5000/#/experiments/7/runs?workflowType=machine_learning"
        f"&viewStateShareKey={table.key}"
    )
    assert scatter.url("http://h", "7").endswith("&compareRunsMode=CHART")


def test_views_of_a_sweep_have_keys_of_their_own() -> None:
    sweeps = ("a", "b", "a b", "a.b", "実験一", "実験二")
    keys = {view.key for sweep in sweeps for view in mlflow_views.of_sweep(sweep)}
    assert len(keys) == len(sweeps) * 6 and "zeroexp.a.table" in keys


def _tags(ages: dict[str, float]) -> dict[str, str]:
    return {
        view.tag: view.envelope(age)
        for sweep, age in ages.items()
        for view in mlflow_views.of_sweep(sweep)
    }


def test_only_the_newest_sweeps_keep_their_views() -> None:
    ages = {f"sweep{n}": float(n) for n in range(mlflow_views.MAX_SWEEPS + 2)}
    tags = _tags(ages) | {"mlflow.sharedViewState.mine": "a user's", "other": "tag"}
    dropped = {view.tag for sweep in ("sweep0", "sweep1") for view in mlflow_views.of_sweep(sweep)}
    newest = max(ages, key=ages.__getitem__)
    assert set(mlflow_views.outdated_tags(tags, newest)) == dropped
    # The sweep at hand counts as newest, however old its views are.
    assert not any("sweep0." in tag for tag in mlflow_views.outdated_tags(tags, "sweep0"))
    assert len(mlflow_views.outdated_tags(tags, "sweep0")) == len(dropped)


def test_a_view_names_the_section_of_every_metric() -> None:
    """MLflow unfolds the charts of a section that a view does not name, beside the view's own."""
    source = Path(mlflow_metrics.__file__).read_text(encoding="utf-8")
    sections = set(re.findall(r'"([a-z]+)/', source))
    assert {"memory", "time", "verb"} <= sections <= set(mlflow_views.SECTIONS)
