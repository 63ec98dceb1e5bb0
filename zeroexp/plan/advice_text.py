"""`--advise` as text and as JSON: one line that says what to use, then why, then all that was compared."""

from __future__ import annotations

import json

from zeroexp.plan.advise import BUDGET_SECONDS, Advice, advise, way_of
from zeroexp.plan.changes import SEQ_LEN
from zeroexp.plan.composed_points import BATCH
from zeroexp.plan.outcome import Outcome, PlannedPoint, RankPeak
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.plan_table import json_entry, row_of, states_at_peak
from zeroexp.plan.text_table import GIB, MIB, Row, lines_of, unit_of, wrapped
from zeroexp.process.signals import was_asked

HEADS = {
    **{"frontier": "", "strategy": "strategy", "implementation": "layout"},
    **{"micro_batch_size": "micro", "recomputes": "recompute", "peak_bytes": "peak"},
    **{"fits": "fits", "step_ms": "step ms", "sent_bytes": "sent"},
}


def advice_text(plans: Plans) -> str:
    return "\n\n".join(as_text(each) for each in advise(plans))


def advice_json(plans: Plans) -> str:
    """Return for each number of ranks what to use (null where nothing fits), and every candidate with its plan.

    leanest: the fastest of the stage and recomputation that can hold least, see Advice.leanest.
    """
    return json.dumps([_entry(each) for each in advise(plans)], indent=1)


def _entry(advice: Advice) -> dict[str, object]:
    best, leanest = advice.best, advice.leanest
    return {
        "advice": _first_line(advice),
        "use": best and best.outcome.name,
        "leanest": leanest and leanest.outcome.name,
        "frontier": [each.outcome.name for each in advice.frontier],
        "num_not_rehearsed": len(advice.left_unrehearsed),
        "candidates": [
            {"words": each.outcome.name, "recomputes": each.recomputes, **json_entry(each)}
            for each in advice.candidates
        ],
    }


def as_text(advice: Advice) -> str:
    rows = advice.rehearsed
    lines = [*wrapped(_first_line(advice)), "", *wrapped(*_reasons(advice)), ""]
    if best := advice.best:
        beside = f", beside those of {advice.settings}" if advice.settings else ""
        lines += [*wrapped(f"A run takes these words{beside}: {_words(advice, best)}"), ""]
    if not rows:
        return "\n".join(lines).rstrip()
    unit, size = unit_of([each.outcome.peak_bytes for each in rows])
    rehearsals = [each.outcome.rehearsed for each in rows if each.outcome.rehearsed]
    settings = ", ".join({each.allocator for each in rehearsals} - {""})
    reserved = f" reserved by torch's caching allocator ({settings})" if settings else ""
    notes = (
        f"Rehearsed, with activations: {unit} of the fullest rank{reserved}, and expected ms of a step "
        f"({'; '.join(dict.fromkeys(each.speed for each in rehearsals))}). * is on the frontier: no other is as fast "
        "and holds less."
    )
    best_of = advice.frontier
    figures = [{"frontier": "*" if each in best_of else "", **_row(each)} for each in rows]
    return "\n".join([*lines, *wrapped(notes), "", *lines_of(HEADS, figures, size, 3)])


def _row(each: PlannedPoint) -> Row:
    return {
        **row_of(each),
        "recomputes": _on(each),
        "peak_bytes": each.outcome.peak_bytes,
        "fits": each.outcome.verdict or "-",
        "step_ms": f"{1e3 * each.seconds:,.1f}",
    }


def _first_line(advice: Advice) -> str:
    """Return the sentence that answers, and where nothing fits the one that says so."""
    best, config = advice.best, advice.config
    data, gpu = config.data, f" {config.cluster.gpu}" if config.cluster.gpu else ""
    on = (
        f"on {config.world_size}{gpu} ranks ({advice.candidates[0].outcome.place}) with {_precision(advice)}, "
        f"sequences of {data.seq_len:,} and {data.global_batch_size:,} samples a step of {config.model.name}"
        f"{f' ({advice.settings})' if advice.settings else ''}"
    )
    if best is None or best.outcome.rehearsed is None:
        for each in [] if advice.rehearsed else advice.candidates:
            if reason := each.outcome.not_rehearsed:
                return f"Nothing can be advised {on}: {reason}."
        if late := advice.left_unrehearsed:
            return f"Nothing is known yet {on}: {len(late)} candidates whose model states fit were not rehearsed."
        least = min(advice.candidates, key=lambda each: each.outcome.peak_bytes)
        held = f"{least.outcome.strategy} with micro-batch {least.micro} holds {_held(least)}"
        sure = "surely " if least.outcome.fits and least.outcome.rehearsed else ""
        return f"Nothing {sure}fits {on}: {held}. {_remedy(least.outcome)}"
    outcome, rehearsed = best.outcome, best.outcome.rehearsed
    least, expected, most = rehearsed.step_seconds
    limit, size = outcome.memory_gib, outcome.peak_bytes
    use = (
        f"use {outcome.strategy}, micro-batch {best.micro}, recomputation {_on(best)}: "
        f"{_size(size)}{f' of {limit:g} GiB' if limit else ''}{' reserved' if rehearsed.allocator else ''}, "
        f"{expected:.3g} s a step ({least:.3g}-{most:.3g})"
    )
    others = [each for each in advice.fitting if each.outcome.strategy != outcome.strategy]
    if others:
        ratio = others[0].seconds / best.seconds  # below 1 for one that is as fast and holds more
        use += f",{f' {ratio:.3g} x' * (ratio > 1)} as fast as {others[0].outcome.strategy}"
    parts, lean = [use], advice.leanest
    if lean and way_of(lean) != way_of(best):
        held, again = lean.outcome.peak_bytes, " with recomputation" if lean.recomputes else ""
        room = f"leave {_size(outcome.limit_bytes - held)} free" if limit else f"hold {_size(held)}"
        parts.append(f"{lean.outcome.strategy}{again}, micro-batch {lean.micro}, would {room}")
        if lean not in others[:1]:  # of which the seconds are told
            parts[-1] += f" and take {lean.seconds / best.seconds:.3g} x as long"
    if num := sum(not advice.only_saves_memory(each) for each in advice.left_unrehearsed):
        parts.append(f"of {len(advice.rehearsed)} rehearsed, {num} more may be faster")
    return f"{'; '.join([*parts, on])}."


def _remedy(least: Outcome) -> str:
    """Return what helps where not even the point that holds least has room."""
    if least.rehearsed and least.fits:
        unsure = _size(int(least.unsure_gib * 2**30))
        return (
            f"Driver, CUDA and NCCL may take {unsure} of {least.memory_gib:g} GiB: set cluster.reserved_gib to what "
            "they take of yours, or use more ranks."
        )
    if least.rehearsed and _beside_states(least.rehearsed.fullest) > least.limit_bytes:
        beside = _size(_beside_states(least.rehearsed.fullest))
        return f"Activations and logits take {beside} on any number of ranks: use a shorter data.seq_len."
    return "Use more ranks: --fit says how many."


def _reasons(advice: Advice) -> list[str]:
    """Return what makes its peak and its seconds, which stages can not fit, and how many candidates were left."""
    best, reasons = advice.best, list[str]()
    if best and best.outcome.rehearsed:
        peak, computes = best.outcome.rehearsed.fullest, best.outcome.rehearsed.compute_seconds
        beside, waits = _beside_states(peak), max(0.0, best.seconds - computes)
        kept = ""
        if peak.reserved_bytes is not None:
            kept = f"; the allocator reserves {_size(peak.needed_bytes - peak.num_bytes)} more"
        if peak.num_retries:
            kept += f", and must make room {peak.num_retries} times a step, which costs time beyond the estimate"
        reasons.append(
            f"Why: at its peak, in {peak.phase}, {_size(peak.num_bytes - beside)} are model states and gathered units, "
            f"and {_size(beside)} are activations, logits and what exists for a moment{kept}. Of its step "
            f"it computes {1e3 * computes:,.1f} ms and waits {1e3 * waits:,.1f} ms for messages."
        )
    for stage in dict.fromkeys(each.outcome.strategy for each in advice.candidates):
        of_stage = [each for each in advice.candidates if each.outcome.strategy == stage]
        if best and not any(each.outcome.fits for each in of_stage):
            least = min(of_stage, key=lambda each: each.outcome.peak_bytes)
            reasons.append(f"{stage} does not fit: at least {_held(least)}.")
    reasons += [f"{stage} is not compared: {why}." for stage, why in advice.left_out.items()]
    without = [each.outcome for each in advice.candidates if each.outcome.not_rehearsed]
    told = {f"{each.implementation} is not compared: {each.not_rehearsed}." for each in without}
    reasons += sorted(told)
    if late := advice.left_unrehearsed:
        spare = all(advice.only_saves_memory(each) for each in late)
        which = ", which may hold less, but are not expected to be faster" if spare else ""
        ends = "interrupted" if was_asked() else f"--advise ends after {BUDGET_SECONDS} s"
        reasons.append(
            f"{len(late)} candidates were not rehearsed{which}: {ends}, and "
            "--advise --rehearse takes the time that all of them take."
        )
    return reasons


def _beside_states(peak: RankPeak) -> float:
    """Return the bytes at a peak that are no model states: activations, logits, what exists for a moment."""
    return peak.num_bytes - states_at_peak(peak.by_kind)


def _words(advice: Advice, best: PlannedPoint) -> str:
    """Return what a command line needs for the best: its own words, and what was taken for what the line left open."""
    data = best.config.data
    words = f"{best.outcome.name} {BATCH}={data.global_batch_size} {SEQ_LEN}={data.seq_len}"
    return words if _names_dtypes(advice) else f"{words} precision={_precision(advice)}"


def _precision(advice: Advice) -> str:
    precision = advice.config.precision
    if not _names_dtypes(advice):
        return precision.name
    return f"{precision.compute} (reductions {precision.reduce}, masters {precision.master})"


def _names_dtypes(advice: Advice) -> bool:
    """Tell whether the line sets a key of the precision, which then has the name of another one."""
    return any(key.startswith("precision.") for key in advice.named)


def _held(each: PlannedPoint) -> str:
    alone = "" if each.outcome.rehearsed else " of model states alone"
    return f"{_size(each.outcome.peak_bytes)}{alone}"


def _size(num_bytes: float) -> str:
    unit, size = ("GiB", GIB) if num_bytes >= GIB else ("MiB", MIB)
    return f"{num_bytes / size:.3g} {unit}"


def _on(each: PlannedPoint) -> str:
    return "on" if each.recomputes else "off"
