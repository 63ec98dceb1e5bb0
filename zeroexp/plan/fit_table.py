"""`--fit` as text: the fewest ranks at which every strategy of the line fits, and how much work fits there."""

from __future__ import annotations

import sys

from zeroexp.config.keys import ConfigError
from zeroexp.plan.outcome import PlannedPoint
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.plan_table import settings_of, skipped_sentences
from zeroexp.plan.search import GIB, Fit, fit, most_ranks
from zeroexp.plan.text_table import Column, amount, lines_of, unit_of, wrapped

Row = tuple[PlannedPoint, Fit]
HEAD = (
    "The fewest {device} ranks, among powers of two, at which a step fits {limit:g} GiB, and there the largest "
    "micro-batch (one in a step) and the longest sequence, each alone. Rehearsed: peak and left are {unit} of the "
    "fullest rank, with activations."
)


def fit_lines(plans: Plans) -> str:
    """Return a line for each strategy, layout and settings. Raises ConfigError without a limit."""
    asked: dict[tuple[str, ...], PlannedPoint] = {}
    for each in plans.planned:
        outcome = each.outcome
        if outcome.memory_gib is None:
            remedy = "set it to the memory of one device"
            raise ConfigError(f"cluster.device_memory_gib=null: --fit needs a limit; {remedy}")
        names = (outcome.model, outcome.strategy, outcome.implementation)
        asked.setdefault((*names, settings_of(outcome)), each)
    unit, size = unit_of([GIB * (each.outcome.memory_gib or 0.0) for each in asked.values()])
    limits = dict.fromkeys((each.device, each.outcome.memory_gib) for each in asked.values())
    rows: list[Row] = []
    for each in asked.values():
        print(f"{each.outcome.strategy} {each.outcome.implementation}: rehearsing", file=sys.stderr)
        rows.append((each, fit(each, plans.model_of(each))))

    def left(row: Row) -> str:
        return amount((row[0].outcome.memory_gib or 0.0) * GIB - row[1].num_bytes, size)

    def if_fits(row: Row, text: str) -> str:
        return text if row[1].world_size else "-"

    columns: list[Column[Row]] = [
        Column("model", lambda row: row[0].outcome.model, left=True),
        Column("strategy", lambda row: row[0].outcome.strategy, left=True),
        Column("layout", lambda row: row[0].outcome.implementation, left=True),
        Column(
            "ranks", lambda row: str(row[1].world_size or f"not up to {most_ranks(row[0].device)}")
        ),
        Column("peak", lambda row: if_fits(row, amount(row[1].num_bytes, size))),
        Column("left", lambda row: if_fits(row, left(row))),
        Column("batch", lambda row: str(row[1].samples or "-")),
        Column("seq_len", lambda row: str(row[1].seq_len or "-")),
        Column("settings", lambda row: settings_of(row[0].outcome), left=True),
    ]
    heads = [HEAD.format(device=device, limit=limit, unit=unit) for device, limit in limits]
    notes = [
        *(f"Model states alone: {row.not_rehearsed}." for _, row in rows if row.not_rehearsed),
        *skipped_sentences(plans.entries),
    ]
    return "\n".join(
        [*wrapped(*heads), "", *lines_of(columns, rows, 4), "", *wrapped(*notes)]
    ).rstrip()
