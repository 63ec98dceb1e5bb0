"""This chart shows what each point holds after backward, by kind, with the stage's table and the peak marked."""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.measure.record import KINDS
from zeroexp.report.columns import MIB
from zeroexp.report.measured import MOMENT, at_moment, closed_forms_beside
from zeroexp.report.measured_points import Point
from zeroexp.report.page.chart import Chart, bars_height, bars_layout, form_marks, marks, stacked
from zeroexp.report.palette import KIND_COLOURS, KIND_NAMES
from zeroexp.report.theory import table_bytes

WORDS = (
    "Bytes of the rank that holds most, after backward and before the optimizer's step, when stages differ most. "
    "The diamond is what closed forms say of the same run (python -m zeroexp.plan); the line is the most that was "
    "allocated at once in any step, activations included."
)
TITLE = "Memory by kind"


def memory_chart(points: Sequence[Point]) -> Chart:
    done = [(point, point.summary) for point in points if point.summary]
    held = {point.name: at_moment(summary) for point, summary in done}
    rows = list(held)
    data = [
        stacked(
            KIND_NAMES[kind],
            rows,
            [held[row].get(kind, 0) / MIB for row in rows],
            KIND_COLOURS[kind],
            index,
        )
        for index, kind in enumerate(KINDS)
        if any(held[row].get(kind) for row in rows)
    ]
    known = closed_forms_beside(
        [s for _, s in done], MOMENT, [table_bytes(point.run) for point, _ in done]
    )
    peaks = [s.memory.peak.fullest / MIB if s.memory.peak else None for _, s in done]
    data += form_marks(rows, known)
    data.append(marks("peak of any step", rows, peaks, "line-ns-open", "INK"))
    layout = bars_layout("MiB of the fullest rank")
    return Chart("memory", TITLE, WORDS, data, layout, bars_height(len(rows)))
