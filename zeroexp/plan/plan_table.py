"""The plan of a line as text, as JSON with every rank, or as CSV with one line a point."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict

from zeroexp.check.sweep_points import SweepPoint
from zeroexp.config.keys import Config
from zeroexp.plan.outcome import Outcome, PlannedPoint
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.text_table import Row, lines_of, unit_of, wrapped

MEANINGS = (
    "total: the most held at one named moment; mean: over ranks. On top comes what exists for a moment (activations, "
    "gathered units, gradients on their way): --rehearse tells the peak. fits: tight where model states fit, but "
    "perhaps not the peak, where the allocator must make room in every step, or where the last of a data sheet's "
    "memory is needed. skew: what the rank that owns most updates, over the mean; idle: ranks that update nothing. "
    "sent: per step, of the rank that sends most; inside, between: nodes, the mean over ranks. host, files, bus: what "
    "rests on the host, there in files, in no total, and "
    "what travels to it and back (strategy.offload). second.: the secondary copy of parameters, and the gathers that "
    "it keeps inside of a node (strategy.secondary_partition)."
)
# Columns of the tables: figures of a row, and the heads that have room for them.
POINT = {
    "strategy": "strategy",
    "implementation": "layout",
    "world_size": "ranks",
    "settings": "settings",
}
MEMORY = {
    "parameters_bytes": "params",
    "gradients_bytes": "grads",
    "optimizer_bytes": "optim",
    "master_bytes": "master",
    "secondary_bytes": "second.",
    "buffers_bytes": "buffers",
    "outer_bytes": "outer",
    "total_bytes": "total",
    "total_bytes_mean": "mean",
    "host_bytes": "host",
    "files_bytes": "files",
    "fits": "fits",
}
TRAFFIC = {  # of what a step sends all but the few bytes of the norm
    "sent_bytes": "sent",
    "sent_gather_bytes": "gather",
    "sent_secondary_bytes": "second.",
    "sent_reduce_bytes": "reduce",
    "sent_replicas_bytes": "replicas",
    "sent_publish_bytes": "publish",
    "sent_matrices_bytes": "matrices",
    "sent_inside_bytes": "inside",
    "sent_between_bytes": "between",
    "bus_bytes": "bus",
    "skew": "skew",
    "num_idle_ranks": "idle",
    "padding_bytes": "padding",
}
# Kinds at a rehearsed peak that are no states.
NO_STATES = {
    "activations": "activ",
    "logits": "logits",
    "messages": "messages",
    "temporaries": "temp",
}
PEAK = {
    "states_bytes": "states",
    **{f"rehearsed_{kind}_bytes": name for kind, name in NO_STATES.items()},
    "rehearsed_peak_bytes": "peak",
    "reserved_bytes": "reserved",
    "rehearsed_phase": "in",
    "rehearsed_rank": "rank",
    "step_ms": "step ms",
}


def render(plans: Plans) -> str:
    """Return tables of memory and of traffic, the points that are skipped, and what the columns mean."""
    outcomes = [each.outcome for each in plans.planned]
    rows = [{**row_of(each), **_for_readers(each.outcome)} for each in plans.planned]
    unit, size = unit_of([row[key] for row in rows for key in ("total_bytes", "sent_bytes")])
    point, memory = (
        {key: name for key, name in names.items() if any(row.get(key) for row in rows)}
        for names in (POINT, MEMORY)
    )
    models = ", ".join(dict.fromkeys(o.model for o in outcomes))
    places = " | ".join(dict.fromkeys(o.place for o in outcomes))
    lines = [
        *wrapped(
            f"Planned, not measured; {unit} of one rank, fullest first. Model {models}; {places} ranks."
        ),
        "",
        *_table({**point, **memory}, rows, size),
        "",
        *_table({**point, **TRAFFIC}, rows, size),
        "",
        *_rehearsed(plans, point, rows),
        *wrapped(*_foot(plans.entries, outcomes), *plans.notes),
    ]
    return "\n".join(lines).rstrip()


def as_json(plans: Plans) -> str:
    """Return every point with every rank's bytes, or with the reason why it is skipped."""
    return json.dumps([json_entry(each) for each in plans.entries], indent=1)


def json_entry(each: PlannedPoint | SweepPoint) -> dict[str, object]:
    if isinstance(each, SweepPoint):
        return {"name": each.name, "skipped": each.refusal}
    outcome = each.outcome
    more = {"skew": outcome.skew, "num_idle_ranks": outcome.num_idle_ranks, "fits": outcome.verdict}
    return {**asdict(outcome), **_batch(each.config), **more}


def as_csv(plans: Plans) -> str:
    """Return one line for each point; bytes are those of the fullest rank, and `mean` where that is said."""
    rows = [row_of(each) for each in plans.entries]
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


def row_of(each: PlannedPoint | SweepPoint) -> Row:
    """Return the figures of a point by their names in CSV."""
    config = each.config
    row: Row = {
        "name": each.name if isinstance(each, SweepPoint) else each.outcome.name,
        "model": config.model.name,
        "strategy": config.strategy.name,
        "implementation": config.strategy.implementation,
        "world_size": config.world_size,
        "skipped": (each.refusal or "") if isinstance(each, SweepPoint) else "",
    }
    if isinstance(each, SweepPoint):
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
    for name in ("host", "files", "bus"):
        row |= {f"{name}_bytes": ranks.fullest} if (ranks := getattr(outcome, name)) else {}
    if outcome.rehearsed:
        peak = outcome.rehearsed.fullest
        row |= {"rehearsed_peak_bytes": peak.num_bytes, "rehearsed_phase": peak.phase}
        row |= {"rehearsed_rank": peak.rank}
        if peak.reserved_bytes is not None:
            row |= {"reserved_bytes": peak.reserved_bytes, "num_retries": peak.num_retries}
        least, expected, most = outcome.rehearsed.step_seconds
        row |= {"step_seconds": expected, "step_seconds_least": least, "step_seconds_most": most}
        row |= {"speed": outcome.rehearsed.speed}
        row |= {f"rehearsed_{kind}_bytes": size for kind, size in peak.by_kind.items()}
    if outcome.not_rehearsed:
        row |= {"not_rehearsed": outcome.not_rehearsed}
    return {**row, "fits": outcome.verdict or ""}


# -- tables ----------------------------------------------------------------------------------------


def settings_of(outcome: Outcome) -> str:
    """Return what a point's name says beyond its strategy, layout and ranks."""
    usual = f"{outcome.strategy}-{outcome.implementation}-n{outcome.world_size}"
    return outcome.name.removeprefix(usual).removeprefix("-")


def states_at_peak(by_kind: dict[str, int]) -> int:
    """Return the bytes at a rehearsed peak of all kinds that exist for longer than a moment."""
    return sum(num_bytes for kind, num_bytes in by_kind.items() if kind not in NO_STATES)


def _for_readers(outcome: Outcome) -> Row:
    """Return the figures that tables show, and that programs find in others."""
    row: Row = {"settings": settings_of(outcome)}
    if outcome.rehearsed:
        least, _, most = outcome.rehearsed.step_seconds
        row["states_bytes"] = states_at_peak(outcome.rehearsed.fullest.by_kind)
        row["step_ms"] = f"{1e3 * least:,.0f}-{1e3 * most:,.0f}"
    return row


def _table(names: dict[str, str], rows: Sequence[Row], size: int) -> list[str]:
    """Return the lines of a table of those figures that some row has, beside what tells its point."""

    heads = {key: name for key, name in names.items() if any(key in row for row in rows)}
    return lines_of(heads, rows, size, num_fixed=sum(key in POINT for key in names))


def _rehearsed(plans: Plans, point: dict[str, str], rows: Sequence[Row]) -> list[str]:
    rehearsals = [each.outcome.rehearsed for each in plans.planned if each.outcome.rehearsed]
    if not rehearsals:
        return []
    peaks = [row for row in rows if "rehearsed_rank" in row]
    unit, size = unit_of([row["rehearsed_peak_bytes"] for row in peaks])
    kernels = [f"{each.device} kernels" for each in rehearsals]
    notes = (
        f"Rehearsed on tensors without memory ({', '.join(dict.fromkeys(kernels))}), {unit} at the peak "
        "of the fullest rehearsed rank: states are parameters, gradients, optimizer, master weights and gathered "
        f"units. Seconds are estimates, {'; '.join(dict.fromkeys(r.speed for r in rehearsals))}."
    )
    if allocators := {each.allocator: None for each in rehearsals if each.allocator}:
        notes += (
            " reserved: what torch's caching allocator takes of the GPU to hold the peak, a prediction with "
            f"{' and '.join(allocators)}, all that is modelled of PYTORCH_CUDA_ALLOC_CONF; it decides whether a "
            "step fits."
        )
    if any(each.config.train.compile for each in plans.planned):
        notes += (
            " Blocks are rehearsed as they are without train.compile: compiled ones keep other activations and "
            "take other seconds."
        )
    return [*wrapped(notes), "", *_table({**point, **PEAK}, peaks, size), ""]


# -- sentences -------------------------------------------------------------------------------------


def _foot(entries: Sequence[PlannedPoint | SweepPoint], outcomes: Sequence[Outcome]) -> list[str]:
    sentences = [
        MEANINGS,
        *(f"{o.strategy}-{o.implementation} is {o.label}." for o in outcomes if o.label),
        *(f"not rehearsed: {o.not_rehearsed}." for o in outcomes if o.not_rehearsed),
        *(
            f"{o.name} does not fit {o.memory_gib:g} GiB; --fit finds the ranks, --advise the strategy that does"
            for o in outcomes
            if not o.fits
        ),
        *skipped_sentences(entries),
    ]
    return list(dict.fromkeys(sentences))


def skipped_sentences(entries: Sequence[PlannedPoint | SweepPoint]) -> list[str]:
    """Return a sentence for each reason for which points are skipped."""
    skipped: dict[str, list[str]] = {}
    for each in entries:
        if isinstance(each, SweepPoint):
            skipped.setdefault(str(each.refusal), []).append(each.name)
    return [f"skipped {', '.join(names)}: {reason}" for reason, names in skipped.items()]
