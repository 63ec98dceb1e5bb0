"""One traced step as a chart, rank under rank: what each does at every moment and what it holds meanwhile.

It reads `trace.<rank>.<step>.json` of a run's folder, in the trace-event format that `measure/trace_file.py` describes.
Under ZeRO-3 one sees a unit gathered, used and freed: the verb's span, the block's span, and the bytes that rise before
it and fall behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroexp.config.engines import stage_carried_out
from zeroexp.cut.stage import Placement
from zeroexp.measure.formats import refuse_newer_format
from zeroexp.report.columns import MIB
from zeroexp.report.measured_points import MeasuredPoint
from zeroexp.report.page.chart import INK, Chart, Trace, axis_of, scatter
from zeroexp.report.palette import CAUSE_COLOURS, SPAN_COLOURS, SPARE
from zeroexp.report.reading import UNREADABLE

TITLE = "One step"
NOTHING = (
    "No step was traced, or its files are torn or of a later version. With train.trace_steps=[5] each rank writes what "
    "it did and held in that step, and this page shows it."
)
CAPTION = (
    "step {step}, traced, so that it is slower than others. For each rank: the phase, the block that computes, the "
    "verbs of the engine (issued and waited for), the time in which the rank only waits, and moves under way beside "
    "compute. Below, the bytes it holds, by cause."
)
MOST_POINTS, MOST_RANKS = 4, 4  # that are drawn
LANES = ("flight", "exposed", "verb", "unit", "phase")  # from below
HEIGHT, BETWEEN = 300, 0.04  # pixels of one rank; space between two, as a fraction of all
MICROSECONDS = 1e-3  # in milliseconds


@dataclass(frozen=True)
class RankTrace:
    rank: int
    step: int
    began_at: float  # Unix seconds
    spans: list[dict[str, Any]]
    memory: list[tuple[float, dict[str, float]]]  # microseconds since it began, bytes by cause


def timeline_charts(points: Sequence[MeasuredPoint]) -> list[Chart]:
    """Return one chart for each of a few traced points, of the last step that each traced.

    Those come first that show most: our engines, and of these the ones that gather and free units.
    """
    charts: list[Chart] = []
    for point in sorted(points, key=_shows_less):
        if len(charts) == MOST_POINTS:
            break
        if ranks := read_traces(point.run.folder):
            number = f"-{len(charts) + 1}" if charts else ""
            charts.append(_chart(f"timeline{number}", point, ranks[:MOST_RANKS]))
    return charts or [Chart("timeline", TITLE, NOTHING)]


def _shows_less(point: MeasuredPoint) -> tuple[bool, bool]:
    stage = stage_carried_out(point.run.implementation, point.run.strategy)
    gathers = stage is not None and stage.parameters is Placement.SHARD
    return point.run.implementation == "torch", not gathers


def read_traces(folder: Path) -> list[RankTrace]:
    """Return the last traced step of each rank that traced it; files that cannot be read are passed over."""
    traces: dict[int, list[RankTrace]] = {}
    for path in sorted(folder.glob("trace.*.*.json")):
        try:
            one = _read_trace(path)
        except UNREADABLE:
            continue
        traces.setdefault(one.step, []).append(one)
    return sorted(traces[max(traces)], key=lambda one: one.rank) if traces else []


def _read_trace(path: Path) -> RankTrace:
    content = json.loads(path.read_text(encoding="utf-8"))
    other, events = content["otherData"], content["traceEvents"]
    refuse_newer_format(other, path.name)
    return RankTrace(
        rank=int(other["rank"]),
        step=int(other["step"]),
        began_at=float(other["began_at"]),
        spans=[
            {**e, "ts": float(e["ts"]), "dur": float(e["dur"]), "args": dict(e.get("args", {}))}
            for e in events
            if e["ph"] == "X" and e["cat"] in LANES and e["dur"] >= 0
        ],
        memory=[
            (float(e["ts"]), {cause: float(held) for cause, held in e["args"].items()})
            for e in events
            if e["ph"] == "C" and e["name"] == "memory"
        ],
    )


def _chart(name: str, point: MeasuredPoint, ranks: Sequence[RankTrace]) -> Chart:
    first = min(rank.began_at for rank in ranks)
    height = (1 - BETWEEN * (len(ranks) - 1)) / len(ranks)
    end = axis_of("ms since the first rank began", anchor=f"y{2 * len(ranks)}")
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "bargap": 0.15,
        "hovermode": "closest",
        "xaxis": end,
    }
    data: list[Trace] = []
    for index, rank in enumerate(ranks):
        top = 1 - index * (height + BETWEEN)
        lanes, memory = (str(2 * index + n) if index or n > 1 else "" for n in (1, 2))
        shift = 1e3 * (rank.began_at - first)
        data += _span_traces(rank, f"y{lanes}", shift)
        data += _memory_traces(rank, f"y{memory}", shift)
        layout[f"yaxis{lanes}"] = {
            "domain": [top - 0.55 * height, top],
            "title": {"text": f"rank {rank.rank}", "standoff": 24},
            **{"type": "category", "categoryorder": "array", "categoryarray": list(LANES)},
        }
        domain = [top - height, top - 0.6 * height]
        layout[f"yaxis{memory}"] = axis_of("MiB", domain=domain, rangemode="tozero")
    in_legend: set[str] = set()  # each name once, for all ranks
    for trace in data:
        trace["legendgroup"], trace["showlegend"] = trace["name"], trace["name"] not in in_legend
        in_legend.add(trace["name"])
    caption = f"{point.name}, {CAPTION.format(step=ranks[0].step)}"
    title = f"{TITLE}: {point.name}"
    return Chart(name, title, caption, data, layout, 120 + HEIGHT * len(ranks))


def _span_traces(rank: RankTrace, lanes: str, shift: float) -> list[Trace]:
    """Return one trace of bars for each phase, direction of a block, and verb."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for span in rank.spans:
        group = span["args"].get("verb") or span["args"].get("pass") or span["name"]
        groups.setdefault(str(group), []).append(span)
    return [
        {
            **{"type": "bar", "orientation": "h", "name": group, "yaxis": lanes},
            "y": [span["cat"] for span in spans],
            "base": [shift + MICROSECONDS * span["ts"] for span in spans],
            "x": [MICROSECONDS * span["dur"] for span in spans],
            "text": [_hover_text(span) for span in spans],
            **{"textposition": "none", "hovertemplate": "%{text}, %{x:.2f} ms<extra></extra>"},
            "marker": {
                "color": _colour(SPAN_COLOURS, group, index),
                "line": {"width": 0.4, "color": INK},
            },
        }
        for index, (group, spans) in enumerate(groups.items())
    ]


def _hover_text(span: dict[str, Any]) -> str:
    args = span["args"]
    part = f" ({args['part']})" if "part" in args else ""
    peer = args.get("peer")
    return f"{span['name']}{part}{'' if peer is None else f', waiting for rank {peer}'}"


def _memory_traces(rank: RankTrace, lane: str, shift: float) -> list[Trace]:
    """Return the bytes by cause, one over the other."""
    causes = dict.fromkeys(cause for _, held in rank.memory for cause in held)
    times = [round(shift + MICROSECONDS * at, 3) for at, _ in rank.memory]
    traces: list[Trace] = []
    for index, cause in enumerate(causes):
        mebibytes = [round(held.get(cause, 0) / MIB, 3) for _, held in rank.memory]
        colour = _colour(CAUSE_COLOURS, cause, index)
        look = {
            "line": {"shape": "hv", "width": 0.5, "color": colour},
            "hovertemplate": "%{y:,.1f} MiB",
        }
        stack = {"yaxis": lane, "stackgroup": f"rank {rank.rank}", **look}
        traces.append(scatter(f"held: {cause}", times, mebibytes, "lines", **stack))
    return traces


def _colour(colours: Mapping[str, str], name: str, index: int) -> str:
    return colours.get(name, SPARE[index % len(SPARE)])
