"""The plan as text: a table for 80 columns, JSON with every rank, or CSV with one line a point."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from textwrap import wrap

from zeroexp.measure.record import KINDS
from zeroexp.plan.outcome import Outcome, RankPeak
from zeroexp.plan.plan_points import Planned

WIDTH = 80
MIB, GIB = 2**20, 2**30
KIND_NAMES = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "master": "master",
    "buffers": "buffers",
}


MEANINGS = (
    "total: the most held at one named moment; mean: over ranks. On top comes what exists for a moment (activations, "
    "gathered units, gradients on their way): --rehearse tells the peak. fits: tight where model states fit, but "
    "perhaps not the peak. skew: what the rank that owns most updates, over the mean; idle: ranks that update nothing. "
    "sent: per step, of the rank that sends most; inside, between: nodes, the mean over ranks."
)
LATE = "late: what gloo's threads may hold beside the peak on busy cores; fits is tight where there is no room for it. "
# Kinds at a rehearsed peak, and the names of their columns.
REHEARSED = {
    "states": "states",
    "activations": "activ",
    "logits": "logits",
    "messages": "messages",
    "temporaries": "temp",
}
MOVES = ("gather", "reduce", "publish")  # what a step sends, but for the few bytes of the norm


@dataclass(frozen=True)
class Column:
    name: str
    value: Callable[[Outcome], str]
    left: bool = False


def render(planned: Sequence[Planned], notes: Sequence[str]) -> str:
    """Return tables of memory and of traffic, the points that are skipped, and what the columns mean."""
    outcomes = [each.outcome for each in planned if each.outcome]
    unit, size = unit_of([o.total.fullest for o in outcomes] + [o.sent.fullest for o in outcomes])
    point, caption = point_columns(planned)
    memory = [*point, *_memory_columns(outcomes, size)]
    traffic = [*point, *_traffic_columns(outcomes, size)]
    lines = [
        *_wrapped(f"Planned, not measured; {unit} of one rank, fullest first. {caption}"),
        "",
        *lines_of(memory, outcomes),
        "",
        *lines_of(traffic, outcomes),
        "",
        *_rehearsed(point, [o for o in outcomes if o.rehearsed]),
        *_foot(planned, outcomes),
        *[line for note in notes for line in _wrapped(note)],
    ]
    return "\n".join(lines).rstrip()


def as_json(planned: Sequence[Planned]) -> str:
    """Return every point with every rank's bytes, or with the reason why it is skipped."""
    return json.dumps([_entry(each) for each in planned], indent=1)


def as_csv(planned: Sequence[Planned]) -> str:
    """Return one line for each point; bytes are those of the fullest rank, and `mean` where that is said."""
    rows = [_row(each) for each in planned]
    text = io.StringIO()
    names = dict.fromkeys(key for row in rows for key in row)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip()


def _entry(planned: Planned) -> dict[str, object]:
    outcome = planned.outcome
    if outcome is None:
        return {"name": planned.point.name, "skipped": planned.point.refusal}
    more = {"skew": outcome.skew, "num_idle_ranks": outcome.num_idle_ranks, "fits": outcome.verdict}
    return {**asdict(outcome), **_batch(planned), **more}


def _batch(planned: Planned) -> dict[str, object]:
    """Return the samples that are planned, which may be more than the line says: see Plans."""
    data = planned.point.config.data
    return {key: getattr(data, key) for key in ("global_batch_size", "micro_batch_size", "seq_len")}


def _row(planned: Planned) -> dict[str, object]:
    outcome, config = planned.outcome, planned.point.config
    row: dict[str, object] = {
        "name": planned.point.name,
        "model": config.model.name,
        "strategy": config.strategy.name,
        "implementation": config.strategy.implementation,
        "world_size": config.world_size,
        "skipped": planned.point.refusal or "",
    }
    if outcome is None:
        return row
    row |= _batch(planned)
    for kind, spread in {**outcome.by_kind, "total": outcome.total}.items():
        row |= {f"{kind}_bytes": spread.fullest, f"{kind}_bytes_mean": spread.mean}
    row |= {"skew": outcome.skew, "num_idle_ranks": outcome.num_idle_ranks}
    row |= {"padding_bytes": outcome.padding_bytes.fullest, "place": outcome.place}
    row |= {"sent_bytes": outcome.sent.fullest, "sent_bytes_mean": outcome.sent.mean}
    row |= {f"sent_{kind}_bytes": sent for kind, sent in outcome.sent_by_kind.items()}
    row |= {"sent_inside_bytes": outcome.sent_inside, "sent_between_bytes": outcome.sent_between}
    if outcome.rehearsed:
        peak = outcome.rehearsed.fullest
        row |= {"rehearsed_peak_bytes": peak.num_bytes, "rehearsed_late_bytes": peak.late_bytes}
        row |= {"rehearsed_phase": peak.phase, "rehearsed_rank": peak.rank}
        least, expected, most = outcome.rehearsed.step_seconds
        row |= {"step_seconds": expected, "step_seconds_least": least, "step_seconds_most": most}
        row |= {"speed": outcome.rehearsed.speed}
        row |= {f"rehearsed_{kind}_bytes": size for kind, size in peak.by_kind.items()}
    if outcome.not_rehearsed:
        row |= {"not_rehearsed": outcome.not_rehearsed}
    return {**row, "fits": outcome.verdict or ""}


def point_columns(planned: Sequence[Planned]) -> tuple[list[Column], str]:
    """Return the columns that tell points apart, and a sentence of what they share."""
    outcomes = [each.outcome for each in planned if each.outcome]
    columns = [
        Column("strategy", lambda o: o.strategy, left=True),
        Column("layout", lambda o: o.implementation, left=True),
        Column("ranks", lambda o: str(o.world_size)),
    ]
    if any(settings_of(o) for o in outcomes):
        columns.append(Column("settings", settings_of, left=True))
    models = dict.fromkeys(o.model for o in outcomes)
    places = dict.fromkeys(o.place for o in outcomes)
    caption = f"Model {', '.join(models)}; {' | '.join(places)} ranks."
    return columns, caption


def settings_of(outcome: Outcome) -> str:
    """Return what a point's name says beyond its strategy, layout and ranks."""
    usual = f"{outcome.strategy}-{outcome.implementation}-n{outcome.world_size}"
    return outcome.name.removeprefix(usual).removeprefix("-")


def _memory_columns(outcomes: Sequence[Outcome], size: int) -> list[Column]:
    def kind(name: str) -> Column:
        return Column(KIND_NAMES[name], lambda o: amount(o.by_kind[name].fullest, size))

    kinds = [kind(name) for name in KINDS if any(o.by_kind[name].fullest for o in outcomes)]
    columns = [
        *kinds,
        Column("total", lambda o: amount(o.total.fullest, size)),
        Column("mean", lambda o: amount(o.total.mean, size)),
    ]
    if any(o.fits is not None for o in outcomes):
        columns.append(Column("fits", lambda o: o.verdict or ""))
    return columns


def _traffic_columns(outcomes: Sequence[Outcome], size: int) -> list[Column]:
    kinds = [k for k in MOVES if any(k in o.sent_by_kind for o in outcomes)]

    def kind(name: str) -> Column:
        return Column(name, lambda o: amount(o.sent_by_kind.get(name, 0), size))

    return [
        Column("sent", lambda o: amount(o.sent.fullest, size)),
        *[kind(name) for name in kinds],
        Column("inside", lambda o: amount(o.sent_inside, size)),
        Column("between", lambda o: amount(o.sent_between, size)),
        Column("skew", lambda o: f"{o.skew:.2f}"),
        Column("idle", lambda o: str(o.num_idle_ranks)),
        Column("padding", lambda o: amount(o.padding_bytes.fullest, size)),
    ]


def lines_of(columns: Sequence[Column], outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of a table; columns that do not fit beside each other follow in tables of their own."""
    texts = [[column.name, *(column.value(o) for o in outcomes)] for column in columns]
    widths = [max(map(len, cells)) for cells in texts]
    num_points = next(i for i, c in enumerate(columns) if not c.left and c.name != "ranks")
    tables: list[list[int]] = [list(range(num_points))]
    for index in range(num_points, len(columns)):
        wide = sum(widths[i] + 1 + columns[i].left for i in [*tables[-1], index]) - 1
        if wide > WIDTH and len(tables[-1]) > num_points:
            tables.append(list(range(num_points)))
        tables[-1].append(index)
    lines: list[str] = []
    for table in tables:
        lines += [""] if lines else []
        for row in range(len(outcomes) + 1):
            cells = (
                texts[i][row].ljust(widths[i] + 1)
                if columns[i].left
                else texts[i][row].rjust(widths[i])
                for i in table
            )
            lines.append(" ".join(cells).rstrip())
    return lines


def _rehearsed(point: list[Column], outcomes: Sequence[Outcome]) -> list[str]:
    """Return the table of peaks with activations."""
    if not outcomes:
        return []
    unit, size = unit_of([_peak(o).num_bytes for o in outcomes])
    kinds = dict.fromkeys(kind for o in outcomes for kind in REHEARSED if _kind(o, kind))
    late = any(_peak(o).late_bytes for o in outcomes)
    columns = [
        *point,
        *[Column(REHEARSED[k], lambda o, k=k: amount(_kind(o, k), size)) for k in kinds],
        Column("peak", lambda o: amount(_peak(o).num_bytes, size)),
        *([Column("late", lambda o: amount(_peak(o).late_bytes, size))] if late else []),
        Column("in", lambda o: _peak(o).phase),
        Column("rank", lambda o: str(_peak(o).rank)),
        Column("step ms", _milliseconds),
    ]
    kernels = [
        (f"{o.rehearsed.device} kernels", o.rehearsed.product_scratch)
        for o in outcomes
        if o.rehearsed
    ]
    devices = dict.fromkeys(words for each in kernels for words in each if words)
    speeds = dict.fromkeys(o.rehearsed.speed for o in outcomes if o.rehearsed)
    told = (
        f"Rehearsed on tensors without memory ({', '.join(devices)}), {unit} at the peak of the fullest "
        "rehearsed rank: states are parameters, gradients, optimizer, master weights and gathered units. "
        + (LATE if late else "")
        + f"Seconds are estimates, {'; '.join(speeds)}."
    )
    return [*_wrapped(told), "", *lines_of(columns, outcomes), ""]


def _milliseconds(outcome: Outcome) -> str:
    assert outcome.rehearsed is not None
    least, _, most = outcome.rehearsed.step_seconds
    return f"{1000 * least:,.0f}-{1000 * most:,.0f}"


def _peak(outcome: Outcome) -> RankPeak:
    assert outcome.rehearsed is not None
    return outcome.rehearsed.fullest


def _kind(outcome: Outcome, kind: str) -> int:
    """Return the bytes of one kind at the rehearsed peak; all but the kinds of REHEARSED are states."""
    by_kind = _peak(outcome).by_kind
    if kind != "states":
        return by_kind.get(kind, 0)
    return sum(num_bytes for name, num_bytes in by_kind.items() if name not in REHEARSED)


def _foot(planned: Sequence[Planned], outcomes: Sequence[Outcome]) -> list[str]:
    skipped: dict[str, list[str]] = {}
    for each in planned:
        if each.outcome is None:
            skipped.setdefault(str(each.point.refusal), []).append(each.point.name)
    labels = dict.fromkeys(f"{o.strategy}/torch is {o.label}." for o in outcomes if o.label)
    remedies = dict.fromkeys(
        f"{o.name} does not fit {o.memory_gib:g} GiB; {_remedy(o)}"
        for o in outcomes
        if o.fits is False
    )
    sentences = [
        MEANINGS,
        *labels,
        *dict.fromkeys(f"not rehearsed: {o.not_rehearsed}." for o in outcomes if o.not_rehearsed),
        *remedies,
        *[f"skipped {', '.join(names)}: {reason}" for reason, names in skipped.items()],
    ]
    return [line for sentence in sentences for line in _wrapped(sentence)]


def _remedy(outcome: Outcome) -> str:
    if outcome.rehearsed:
        return "--fit finds what does"
    if not outcome.remedies:
        return "no stage and no number of ranks helps: use a smaller model or unit"
    return f"its model states would with {', or with '.join(outcome.remedies)}"


def unit_of(amounts: Sequence[float]) -> tuple[str, int]:
    """Return the unit in which the largest amount has few digits."""
    return ("GiB", GIB) if max(amounts, default=0) >= 10 * GIB else ("MiB", MIB)


def amount(num_bytes: float, size: int) -> str:
    return f"{num_bytes / size:,.2f}" if size == GIB else f"{num_bytes / size:,.1f}"


def _wrapped(sentence: str) -> list[str]:
    return wrap(sentence, WIDTH, break_long_words=False, break_on_hyphens=False)
