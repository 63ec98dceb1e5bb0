"""Charts of bytes, one row for each point: held, at the peak, and sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeroexp.measure.record import CAUSES, Peak, RunSummary, kinds_in
from zeroexp.report.columns import MIB
from zeroexp.report.differences import describe_values
from zeroexp.report.measured_points import MOMENT, MeasuredPoint
from zeroexp.report.page.chart import INK, Chart, Trace, row_chart, row_marks
from zeroexp.report.palette import CAUSE_COLOURS, KIND_LOOKS, RED, part_colour

# ---- bytes held after backward, by kind, beside the closed form and the peak


def memory_chart(points: Sequence[MeasuredPoint]) -> Chart:
    held = {point.name: point.held_bytes for point in points if point.summary}
    looks = [KIND_LOOKS[kind] for kind in kinds_in(held.values())]
    return row_chart(
        "memory",
        "Memory by kind",
        "Bytes of the rank that holds most, after backward and before the optimizer's step, when stages differ most. "
        "The diamond is what closed forms say of the same run (zeroexp plan); the line is the most that was "
        "allocated at once in any step, activations included.",
        axis="MiB of the fullest rank",
        numbers={
            row: {KIND_LOOKS[k][0]: n for k, n in kinds.items()} for row, kinds in held.items()
        },
        scale=1 / MIB,
        colours=dict(looks),
        marks=[
            *_closed_forms(points, MOMENT),
            _peaks_of_any_step(points),
        ],
    )


def _peaks_of_any_step(points: Sequence[MeasuredPoint]) -> Trace:
    done = {point.name: s.memory.peak for point in points if (s := point.pooled.summary)}
    peaks = {row: peak.fullest / MIB for row, peak in done.items() if peak}
    return row_marks("peak of any step", peaks, "line-ns-open", INK)


def _closed_forms(points: Sequence[MeasuredPoint], planned: str) -> list[Trace]:
    """Return marks of what closed forms say, for runs that have one.

    planned: the key of RunSummary.plan. What torch's engines send has no closed form.
    """
    plans = {point.name: point.summary.plan for point in points if point.summary}
    forms = {row: plan[planned] / MIB for row, plan in plans.items() if planned in plan}
    return [row_marks("closed form", forms, "diamond-open", RED)] if forms else []


# ---- bytes allocated at the moment at which the fullest rank held most, by cause


def causes_chart(points: Sequence[MeasuredPoint]) -> Chart:
    peaks = {point.name: peak for point in points if (peak := _fullest_peak(point.pooled.summary))}
    return row_chart(
        "causes",
        "What makes the peak",
        "Everything that the fullest rank had allocated at the moment of its peak, by what it is for, in a step that "
        f"was watched for it. {_steps_watched(peaks)} The line is the most that was allocated at once in any step, by "
        f"any rank. {_where_peaks_come(peaks)}",
        axis="MiB of the fullest rank",
        numbers={name: peak.bytes_by_cause for name, peak in peaks.items()},
        scale=1 / MIB,
        colours={cause: CAUSE_COLOURS[cause] for cause in CAUSES},
        marks=[_peaks_of_any_step([point for point in points if point.name in peaks])],
        nothing="No run tells its peak by cause: its memory was not watched.",
    )


def _fullest_peak(summary: RunSummary | None) -> Peak | None:
    peaks = [peak for peak in summary.memory.peaks if peak] if summary else []
    return max(peaks, key=lambda peak: peak.num_bytes, default=None)


def _where_peaks_come(peaks: Mapping[str, Peak]) -> str:
    """Say in which operator and when the peaks came, once for all points that agree."""
    moments: dict[str, list[str]] = {}
    for name, peak in peaks.items():
        moments.setdefault(where_peak_comes(peak), []).append(name)
    return f"The watched peak comes {describe_values(moments)}." if moments else ""


def _steps_watched(peaks: Mapping[str, Peak]) -> str:
    steps = sorted({peak.step for peak in peaks.values()})
    text = f"That was step {' or '.join(map(str, steps))}, counted from 0"
    fresh = "in step 0 the optimizer has no moments yet; train.warmup_steps=2 watches a later one"
    return f"{text}: {fresh}." if 0 in steps else f"{text}."


def where_peak_comes(peak: Peak) -> str:
    part = f" of {peak.unit}" if peak.unit and not peak.unit.startswith("(") else ""
    verb = f", inside of {peak.verb}" if peak.verb else ""
    where = f"in {peak.operator} of" if peak.operator else "outside of torch's operators in"
    return f"{where} the {peak.phase} phase{part}{verb}"


# ---- bytes that the busiest rank sends in a step, by kind of message, beside the closed form

MESSAGES = ("gather", "secondary", "reduce", "replicas", "matrices", "publish", "norm", "loss")


def traffic_chart(points: Sequence[MeasuredPoint]) -> Chart:
    sent = {point.name: point.sent_bytes for point in points if point.summary}
    kinds = {kind for one in sent.values() for kind, number in one.items() if number}
    ordered = [*(kind for kind in MESSAGES if kind in kinds), *sorted(kinds - {*MESSAGES})]
    return row_chart(
        "traffic",
        "Bytes sent in a step",
        "Bytes the rank that sends most hands to others in one step, over the network or in memory that ranks share. "
        "Engines that send from C++ are counted by their TCP connections, not by kind. The diamond is what closed "
        "forms say of the same run (zeroexp plan); what PyTorch's engines send has none.",
        axis="MiB of the rank that sends most",
        numbers=sent if kinds else {},
        scale=1 / MIB,
        colours={kind: part_colour(kind, index + 3) for index, kind in enumerate(ordered)},
        marks=_closed_forms(points, "sent"),
        nothing="No point counted what it sent: all ran with one rank, or over a backend that counts nothing.",
    )
