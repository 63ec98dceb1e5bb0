"""The plan of a line as text, as JSON with every rank, or as CSV with one line a point."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from zeroexp.check.sweep_points import Point
from zeroexp.config.keys import Config
from zeroexp.measure.record import KINDS
from zeroexp.plan.outcome import Outcome, PlannedPoint, RankPeak
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.text_table import Column, amount, lines_of, unit_of, wrapped

KIND_NAMES = {"parameters": "params", "gradients": "grads", "optimizer": "optim"}
MEANINGS = (
    "total: the most held at one named moment; mean: over ranks. On top comes what exists for a moment (activations, "
    "gathered units, gradients on their way): --rehearse tells the peak. fits: tight where model states fit, but "
    "perhaps not the peak. skew: what the rank that owns most updates, over the mean; idle: ranks that update nothing. "
    "sent: per step, of the rank that sends most; inside, between: nodes, the mean over ranks."
)
# Kinds at a rehearsed peak that are no states, and the names of their columns.
REHEARSED = {
    "activations": "activ",
    "logits": "logits",
    "messages": "messages",
    "temporaries": "temp",
}
MOVES = (
    "gather",
    "reduce",
    "replicas",
    "publish",
)  # what a step sends, but for the few bytes of the norm


def render(plans: Plans) -> str:
    """Return tables of memory and of traffic, the points that are skipped, and what the columns mean."""
    outcomes = [each.outcome for each in plans.planned]
    unit, size = unit_of([o.total.fullest for o in outcomes] + [o.sent.fullest for o in outcomes])
    point = point_columns(outcomes)
    models = ", ".join(dict.fromkeys(o.model for o in outcomes))
    places = " | ".join(dict.fromkeys(o.place for o in outcomes))
    lines = [
        *wrapped(
            f"Planned, not measured; {unit} of one rank, fullest first. Model {models}; {places} ranks."
        ),
        "",
        *lines_of([*point, *_memory_columns(outcomes, size)], outcomes, len(point)),
        "",
        *lines_of([*point, *_traffic_columns(outcomes, size)], outcomes, len(point)),
        "",
        *_rehearsed(point, [o for o in outcomes if o.rehearsed]),
        *wrapped(*_foot(plans.entries, outcomes), *plans.notes),
    ]
    return "\n".join(lines).rstrip()


def as_json(plans: Plans) -> str:
    """Return every point with every rank's bytes, or with the reason why it is skipped."""
    return json.dumps([json_entry(each) for each in plans.entries], indent=1)


def json_entry(each: PlannedPoint | Point) -> dict[str, object]:
    if isinstance(each, Point):
        return {"name": each.name, "skipped": each.refusal}
    outcome = each.outcome
    more = {"skew": outcome.skew, "num_idle_ranks": outcome.num_idle_ranks, "fits": outcome.verdict}
    return {**asdict(outcome), **_batch(each.config), **more}


def as_csv(plans: Plans) -> str:
    """Return one line for each point; bytes are those of the fullest rank, and `mean` where that is said."""
    rows = [_row(each) for each in plans.entries]
    text = io.StringIO()
    names = dict.fromkeys(key for row in rows for key in row)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip()


def _batch(config: Config) -> dict[str, object]:
    """Return the samples that are planned, which may be more than the line says: see Plans."""
    keys = ("global_batch_size", "micro_batch_size", "seq_len")
    return {key: getattr(config.data, key) for key in keys}


def _row(each: PlannedPoint | Point) -> dict[str, object]:
    config = each.config
    row: dict[str, object] = {
        "name": each.name if isinstance(each, Point) else each.outcome.name,
        "model": config.model.name,
        "strategy": config.strategy.name,
        "implementation": config.strategy.implementation,
        "world_size": config.world_size,
        "skipped": (each.refusal or "") if isinstance(each, Point) else "",
    }
    if isinstance(each, Point):
        return row
    outcome = each.outcome
    row |= _batch(config)
    for kind, spread in {**outcome.by_kind, "total": outcome.total}.items():
        row |= {f"{kind}_bytes": spread.fullest, f"{kind}_bytes_mean": spread.mean}
    row |= {"skew": outcome.skew, "num_idle_ranks": outcome.num_idle_ranks}
    row |= {"padding_bytes": outcome.padding_bytes.fullest, "place": outcome.place}
    row |= {"sent_bytes": outcome.sent.fullest, "sent_bytes_mean": outcome.sent.mean}
    row |= {f"sent_{kind}_bytes": sent for kind, sent in outcome.sent_by_kind.items()}
    row |= {"sent_inside_bytes": outcome.sent_inside, "sent_between_bytes": outcome.sent_between}
    if outcome.rehearsed:
        peak = outcome.rehearsed.fullest
        row |= {"rehearsed_peak_bytes": peak.num_bytes, "rehearsed_phase": peak.phase}
        row |= {"rehearsed_rank": peak.rank}
        least, expected, most = outcome.rehearsed.step_seconds
        row |= {"step_seconds": expected, "step_seconds_least": least, "step_seconds_most": most}
        row |= {"speed": outcome.rehearsed.speed}
        row |= {f"rehearsed_{kind}_bytes": size for kind, size in peak.by_kind.items()}
    if outcome.not_rehearsed:
        row |= {"not_rehearsed": outcome.not_rehearsed}
    return {**row, "fits": outcome.verdict or ""}


# -- columns of outcomes ---------------------------------------------------------------------------


def point_columns(outcomes: Sequence[Outcome]) -> list[Column[Outcome]]:
    """Return the columns that tell points apart."""
    columns: list[Column[Outcome]] = [
        Column("strategy", lambda o: o.strategy, left=True),
        Column("layout", lambda o: o.implementation, left=True),
        Column("ranks", lambda o: str(o.world_size)),
    ]
    if any(settings_of(o) for o in outcomes):
        columns.append(Column("settings", settings_of, left=True))
    return columns


def settings_of(outcome: Outcome) -> str:
    """Return what a point's name says beyond its strategy, layout and ranks."""
    usual = f"{outcome.strategy}-{outcome.implementation}-n{outcome.world_size}"
    return outcome.name.removeprefix(usual).removeprefix("-")


def _bytes(name: str, num_bytes: Callable[[Outcome], float], size: int) -> Column[Outcome]:
    return Column(name, lambda o: amount(num_bytes(o), size))


def _most_of(kind: str) -> Callable[[Outcome], float]:
    return lambda o: o.by_kind[kind].fullest


def _sent_of(kind: str) -> Callable[[Outcome], float]:
    return lambda o: o.sent_by_kind.get(kind, 0)


def _memory_columns(outcomes: Sequence[Outcome], size: int) -> list[Column[Outcome]]:
    kinds = [kind for kind in KINDS if any(o.by_kind[kind].fullest for o in outcomes)]
    columns = [_bytes(KIND_NAMES.get(kind, kind), _most_of(kind), size) for kind in kinds]
    columns.append(_bytes("total", lambda o: o.total.fullest, size))
    columns.append(_bytes("mean", lambda o: o.total.mean, size))
    if any(o.fits is not None for o in outcomes):
        columns.append(Column("fits", lambda o: o.verdict or ""))
    return columns


def _traffic_columns(outcomes: Sequence[Outcome], size: int) -> list[Column[Outcome]]:
    kinds = [k for k in MOVES if any(k in o.sent_by_kind for o in outcomes)]
    return [
        _bytes("sent", lambda o: o.sent.fullest, size),
        *[_bytes(kind, _sent_of(kind), size) for kind in kinds],
        _bytes("inside", lambda o: o.sent_inside, size),
        _bytes("between", lambda o: o.sent_between, size),
        Column("skew", lambda o: f"{o.skew:.2f}"),
        Column("idle", lambda o: str(o.num_idle_ranks)),
        _bytes("padding", lambda o: o.padding_bytes.fullest, size),
    ]


def _rehearsed(point: list[Column[Outcome]], outcomes: Sequence[Outcome]) -> list[str]:
    """Return the table of peaks with activations."""
    if not outcomes:
        return []
    rehearsals = [o.rehearsed for o in outcomes if o.rehearsed]
    unit, size = unit_of([each.fullest.num_bytes for each in rehearsals])
    kinds = [k for k in REHEARSED if any(k in each.fullest.by_kind for each in rehearsals)]

    def peak(o: Outcome) -> RankPeak:
        assert o.rehearsed is not None
        return o.rehearsed.fullest

    columns: list[Column[Outcome]] = [
        *point,
        _bytes("states", lambda o: states_at_peak(peak(o).by_kind), size),
        *[_bytes(REHEARSED[kind], _at_peak(kind), size) for kind in kinds],
        _bytes("peak", lambda o: peak(o).num_bytes, size),
        Column("in", lambda o: peak(o).phase),
        Column("rank", lambda o: str(peak(o).rank)),
        Column("step ms", lambda o: "{:,.0f}-{:,.0f}".format(*_range_ms(o))),
    ]
    kernels = [f"{each.device} kernels" for each in rehearsals]
    notes = (
        f"Rehearsed on tensors without memory ({', '.join(dict.fromkeys(kernels))}), {unit} at the peak "
        "of the fullest rehearsed rank: states are parameters, gradients, optimizer, master weights and gathered "
        f"units. Seconds are estimates, {'; '.join(dict.fromkeys(r.speed for r in rehearsals))}."
    )
    return [*wrapped(notes), "", *lines_of(columns, outcomes, len(point)), ""]


def _at_peak(kind: str) -> Callable[[Outcome], float]:
    return lambda o: o.rehearsed.fullest.by_kind.get(kind, 0) if o.rehearsed else 0


def _range_ms(outcome: Outcome) -> tuple[float, float]:
    assert outcome.rehearsed is not None
    least, _, most = outcome.rehearsed.step_seconds
    return 1e3 * least, 1e3 * most


def states_at_peak(by_kind: dict[str, int]) -> int:
    """Return the bytes at a rehearsed peak of all kinds that exist for longer than a moment."""
    return sum(num_bytes for kind, num_bytes in by_kind.items() if kind not in REHEARSED)


# -- sentences -------------------------------------------------------------------------------------


def _foot(entries: Sequence[PlannedPoint | Point], outcomes: Sequence[Outcome]) -> list[str]:
    sentences = [
        MEANINGS,
        *(f"{o.strategy}/{o.implementation} is {o.label}." for o in outcomes if o.label),
        *(f"not rehearsed: {o.not_rehearsed}." for o in outcomes if o.not_rehearsed),
        *(
            f"{o.name} does not fit {o.memory_gib:g} GiB; {_remedy(o)}"
            for o in outcomes
            if o.fits is False
        ),
        *skipped_sentences(entries),
    ]
    return list(dict.fromkeys(sentences))


def skipped_sentences(entries: Sequence[PlannedPoint | Point]) -> list[str]:
    """Return a sentence for each reason for which points are skipped."""
    skipped: dict[str, list[str]] = {}
    for each in entries:
        if isinstance(each, Point):
            skipped.setdefault(str(each.refusal), []).append(each.name)
    return [f"skipped {', '.join(names)}: {reason}" for reason, names in skipped.items()]


def _remedy(outcome: Outcome) -> str:
    if outcome.rehearsed:
        return "--fit finds what does"
    if not outcome.remedies:
        return "no stage and no number of ranks helps: use a smaller model or unit"
    return f"its model states would with {', or with '.join(outcome.remedies)}"
