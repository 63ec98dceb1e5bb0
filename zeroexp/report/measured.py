"""What a summary says of the bytes held at one moment, and of the bytes sent, whatever its version and engine. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeroexp.measure.record import RunSummary

MOMENT = "after_backward"  # gradients are reduced and the optimizer has not run: stages differ most
UNCOUNTED = "by TCP"  # the kind of all bytes of an engine that does not count them by kind


def at_moment(summary: RunSummary) -> dict[str, float]:
    """Return bytes by kind of the fullest rank after backward; old summaries know only the most of each kind."""
    told = summary.memory.fullest_at.get(MOMENT)
    if told:
        return dict(told)
    return {kind: ranks.fullest for kind, ranks in summary.memory.by_kind.items()}


def closed_forms_beside(
    summaries: Sequence[RunSummary], planned: str, tables: Sequence[Mapping[str, int] | None]
) -> dict[str, list[float | None]]:
    """Return bytes to mark beside what was measured: the closed form of each run, else its stage's table.

    planned: the key of RunSummary.plan. Runs of older versions, and what torch's engines send, have no closed form.
    """
    known = [summary.plan.get(planned) for summary in summaries]
    rest = [
        sum(table.values()) if form is None and table is not None else None
        for form, table in zip(known, tables, strict=True)
    ]
    marks = {"closed form": known, "the stage's table": rest}
    return {name: values for name, values in marks.items() if any(v is not None for v in values)}


def by_kind(summary: RunSummary) -> dict[str, float]:
    """Return the bytes the engine counted; where TCP carried more, it did not count and all is one kind."""
    counted = dict(summary.sent_bytes_by_kind)
    wire = summary.wire_bytes_per_step
    if wire and wire.fullest > 1.02 * sum(counted.values()):
        return {UNCOUNTED: wire.fullest}
    return counted
