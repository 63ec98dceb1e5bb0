"""This chart shows what makes the peak: the bytes, by cause, at the moment at which the fullest rank held most."""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.measure.record import CAUSES, Peak, RunSummary
from zeroexp.report.columns import MIB
from zeroexp.report.measured_points import Point
from zeroexp.report.page.chart import Chart, bars_height, bars_layout, stacked
from zeroexp.report.palette import CAUSE_COLOURS, SERIES

TITLE = "What makes the peak"
WORDS = (
    "Everything that the fullest rank had allocated at the moment of its peak, by what it is for, in a step that was "
    "watched for it. "
)
NOTHING = "No run tells its peak by cause: its memory was not watched, or an older version ran it."


def causes_chart(points: Sequence[Point]) -> Chart:
    known = [(point.name, peak) for point in points if (peak := _fullest(point.summary))]
    if not known:
        return Chart("causes", TITLE, NOTHING)
    rows = [name for name, _ in known]
    data = [
        stacked(
            cause,
            rows,
            [peak.bytes_by_cause.get(cause, 0) / MIB for _, peak in known],
            CAUSE_COLOURS.get(cause, SERIES[index % len(SERIES)]),
            index,
        )
        for index, cause in enumerate(CAUSES)
        if any(peak.bytes_by_cause.get(cause) for _, peak in known)
    ]
    layout = bars_layout("MiB of the fullest rank")
    return Chart("causes", TITLE, WORDS + _when(known), data, layout, bars_height(len(rows)))


def _fullest(summary: RunSummary | None) -> Peak | None:
    peaks = [peak for peak in summary.memory.peaks if peak] if summary else []
    return max(peaks, key=lambda peak: peak.num_bytes, default=None)


def _when(known: Sequence[tuple[str, Peak]]) -> str:
    """Say in which operator and when the peaks came, once for all points that agree."""
    moments: dict[str, list[str]] = {}
    for name, peak in known:
        part = f" of {peak.unit}" if peak.unit and not peak.unit.startswith("(") else ""
        verb = f", inside of {peak.verb}" if peak.verb else ""
        where = f"in {peak.operator or 'no operator'} of the {peak.phase} phase{part}{verb}"
        moments.setdefault(where, []).append(name)
    most, *rest = sorted(moments.items(), key=lambda item: -len(item[1]))
    said = [f"{', '.join(names)} {where}" for where, names in rest]
    first = f"It comes {most[0]}" if not rest else f"Most peaks come {most[0]}"
    return f"{first}{'; ' if said else ''}{'; '.join(said)}."
