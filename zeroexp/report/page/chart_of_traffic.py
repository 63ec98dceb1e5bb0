"""This chart shows what the busiest rank sends in a step, by kind of message, with the stage's table marked."""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.report.columns import MIB
from zeroexp.report.measured import by_kind, closed_forms_beside
from zeroexp.report.measured_points import Point
from zeroexp.report.page.chart import Chart, bars_height, bars_layout, form_marks, stacked
from zeroexp.report.palette import part_colour
from zeroexp.report.theory import table_traffic

TITLE = "Bytes sent in a step"
KINDS = ("gather", "reduce", "publish", "norm", "loss")
WORDS = (
    "Bytes the rank that sends most hands to others in one step, over the network or in memory that ranks share. "
    "Engines that send from C++ are counted by their TCP connections, not by kind. "
    "The diamond is what closed forms say of the same run (python -m zeroexp.plan). PyTorch's engines have the square "
    "of their stage's table: whole parameters times (N−1)/N for each all-gather and reduce-scatter."
)
NOTHING = (
    "No point counted what it sent: all ran with one rank, or over a backend that counts nothing."
)


def traffic_chart(points: Sequence[Point]) -> Chart:
    done = [(point, point.summary) for point in points if point.summary]
    sent = {point.name: by_kind(summary) for point, summary in done}
    rows = list(sent)
    found = {kind for kinds in sent.values() for kind, number in kinds.items() if number}
    if not found:
        return Chart("traffic", TITLE, NOTHING)
    ordered = [*(kind for kind in KINDS if kind in found), *sorted(found - set(KINDS))]
    data = [
        stacked(
            kind,
            rows,
            [sent[row].get(kind, 0.0) / MIB for row in rows],
            part_colour(kind, index + 3),
            index,
        )
        for index, kind in enumerate(ordered)
    ]
    tables = [table_traffic(point.run) for point, _ in done]
    data += form_marks(rows, closed_forms_beside([s for _, s in done], "sent", tables))
    layout = bars_layout("MiB of the rank that sends most")
    return Chart("traffic", TITLE, WORDS, data, layout, bars_height(len(rows)))
