"""The saved views of a sweep in the MLflow UI: table, memory, speed, loss, scaling. Pure.

MLflow keeps a saved view as an experiment tag `mlflow.sharedViewState.<key>`: a JSON envelope around the deflated state
of its page (columns, filter, grouping, chart cards). The format is that of MLflow 3.
"""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from zeroexp.process.content_hash import hash_of

TAG_PREFIX = "mlflow.sharedViewState."
KEY_PREFIX = "zeroexp."
MAX_SWEEPS = 5  # sweeps with views: MLflow lets no user save a view beyond 40

COLUMNS = (
    # A window of 1,280 pixels shows these four beside the name of the run, and the first two while MLflow's assistant
    # is open, as it is until a user closes it: a run's name has its strategy and ranks.
    "metrics.`memory/peak_mib`",
    "metrics.`time/step_ms_median`",
    "tags.`strategy`",
    "metrics.`world_size`",
    "metrics.`loss`",
    "metrics.`time/step_ms_p95`",
    "metrics.`tokens_per_s_mean`",
    "metrics.`mfu_percent`",
    "metrics.`time/exposed_ms`",
    "metrics.`memory/params_mib`",
    "metrics.`memory/grads_mib`",
    "metrics.`memory/optim_mib`",
    "metrics.`memory/total_mib`",
    "metrics.`plan_peak_mib`",
    "metrics.`traffic/sent_mib_per_step`",
    "tags.`status`",
)
WIDEST = {"strategy": 170}  # pixels, where values are longer than the header
# What stands before the slash of our metrics: MLflow unfolds charts of a section that a view does not name.
SECTIONS = ("memory", "phase", "scaling", "system", "time", "traffic", "verb", "Model metrics")
Chart = dict[str, Any]


@dataclass(frozen=True)
class ChartView:
    sweep: str
    title: str
    charts: list[Chart] = field(default_factory=list[Chart])  # empty: the view is the table
    group_by: str | None = None  # the charts show all runs with the same value of this tag as one

    @property
    def key(self) -> str:
        sweep = re.sub(r"[^A-Za-z0-9_-]+", "-", self.sweep)
        if sweep != self.sweep:  # as another may read
            sweep += f"-{hash_of([os.fsencode(self.sweep)])[:8]}"
        return f"{KEY_PREFIX}{sweep}.{re.sub(r'[^a-z]+', '-', self.title.lower())}"

    @property
    def tag(self) -> str:
        return TAG_PREFIX + self.key

    def envelope(self, now: float) -> str:
        """Return the value of the tag; `now` is in Unix seconds."""
        state = base64.b64encode(zlib.compress(json.dumps(self.state()).encode())).decode()
        name = f"{self.sweep}: {self.title}"
        stamp = int(now * 1000)
        return json.dumps(
            {"name": name, "createdAt": stamp, "updatedAt": stamp, "state": f"deflate;{state}"}
        )

    def url(self, base: str, experiment_id: str) -> str:
        query = {"workflowType": "machine_learning", "viewStateShareKey": self.key}
        if self.charts:
            query["compareRunsMode"] = "CHART"
        return f"{base}/#/experiments/{experiment_id}/runs?{urlencode(query)}"

    def state(self) -> dict[str, Any]:
        """Return the state that the page restores; other sections hold MLflow's generated charts and start folded."""
        section = {"isReordered": True, "deleted": False, "isGenerated": False, "columns": 2}
        names = [self.title, *SECTIONS]
        grouping = {
            "aggregateFunction": "average",
            "groupByKeys": [{"mode": "tag", "groupByData": self.group_by}],
        }
        return {
            "searchFilter": filter_of(self.sweep),
            "orderByKey": "attributes.start_time",
            "orderByAsc": True,
            "startTime": "ALL",
            "lifecycleFilter": "Active",
            "datasetsFilter": [],
            "modelVersionFilter": "All Runs",
            "selectedColumns": list(COLUMNS),
            "columnOrder": list(COLUMNS),
            "columnWidths": {column: _width(column) for column in COLUMNS},
            "runsHiddenMode": "SHOW_ALL",
            "groupBy": grouping if self.group_by else None,
            "useGroupedValuesInCharts": True,
            "hideEmptyCharts": True,
            "runListHidden": False,
            "isAccordionReordered": True,
            "compareRunCharts": [
                {**chart, "uuid": f"{self.key}.{i}", "metricSectionId": self.key}
                for i, chart in enumerate(self.charts)
            ],
            "compareRunSections": [
                {
                    **section,
                    "uuid": self.key if name == self.title else f"section.{name}",
                    "name": name,
                    "display": name == self.title,
                }
                for name in names
            ],
        }


def of_sweep(sweep: str) -> list[ChartView]:
    kinds = ("params", "grads", "optim", "buffers", "total", "peak")
    speeds = ("tokens_per_s_mean", "mfu_percent", "time/step_ms_median", "time/exposed_ms")
    scaling = ("step_ms", "tokens_per_s", "memory_total_mib")
    charts = {
        "table": [],
        "memory × step time": [
            _scatter("time/step_ms_median", f"memory/{kind}_mib") for kind in ("peak", "total")
        ],
        "memory by kind": [_bar(f"memory/{kind}_mib") for kind in kinds],
        "speed": [_bar(metric) for metric in (*speeds, "traffic/sent_mib_per_step")],
        "loss": [_line(metric, "step") for metric in ("loss", "grad_norm")],
    }
    views = [ChartView(sweep, title, cards) for title, cards in charts.items()]
    curves = [_line(f"scaling/{metric}") for metric in scaling]
    return [*views, ChartView(sweep, "scaling over world size", curves, group_by="strategy")]


def filter_of(sweep: str) -> str:
    """Return MLflow's filter for the sweep's runs; its syntax has no escape for a quote."""
    if "'" not in sweep:
        return f"tags.sweep = '{sweep}'"
    return "tags.sweep LIKE '{}'".format(sweep.replace("'", "_"))  # `_` matches any one character


def outdated_tags(tags: Mapping[str, str], sweep: str) -> list[str]:
    """Return the tags of our views for all but the newest sweeps; `sweep` counts as the newest."""
    ages: dict[str, int] = {}  # a sweep's part of the tag -> time of its last write
    ours = [tag for tag in tags if tag.startswith(TAG_PREFIX + KEY_PREFIX)]
    for tag in ours:
        ages[_owner(tag)] = max(ages.get(_owner(tag), 0), json.loads(tags[tag])["updatedAt"])
    ages.pop(_owner(ChartView(sweep, "table").tag), None)
    newest_first = sorted(ages, key=ages.__getitem__, reverse=True)
    dropped = set(newest_first[MAX_SWEEPS - 1 :])
    return [tag for tag in ours if _owner(tag) in dropped]


def _owner(tag: str) -> str:
    return tag.rpartition(".")[0]


def _width(column: str) -> int:
    """Return a width in pixels that shows the whole header."""
    name = column.split("`")[1]
    return max(WIDEST.get(name, 90), 7 * len(name) + 20)


def _card(kind: str, title: str, **settings: Any) -> Chart:
    shared = {"type": kind, "displayName": title, "deleted": False, "isGenerated": False}
    return {**shared, "runsCountToCompare": 100, **settings}


def _scatter(x: str, y: str) -> Chart:
    axes = {name: {"type": "METRIC", "key": key} for name, key in (("xaxis", x), ("yaxis", y))}
    return _card("SCATTER", f"{y} over {x}", **axes)


def _bar(metric: str) -> Chart:
    return _card("BAR", metric, metricKey=metric)


def _line(metric: str, over: str = "world size") -> Chart:
    return _card(
        "LINE",
        f"{metric} over {over}",
        metricKey=metric,
        selectedMetricKeys=[metric],
        xAxisKey="step",
        useGlobalXaxisKey=False,
        lineSmoothness=0,
        useGlobalLineSmoothing=False,
        xAxisScaleType="linear",
        scaleType="linear",
        yAxisKey="metric",
        displayPoints=True,
    )
