"""`--advise` as text and as JSON: one line that says what to use, then why, then all that was compared."""

from __future__ import annotations

import json

from zeroexp.config.keys import Config
from zeroexp.plan.advise import BUDGET_SECONDS, Advice, advise
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.plan_table import json_entry, row_of, states_at_peak
from zeroexp.plan.search import Candidate
from zeroexp.plan.text_table import GIB, MIB, Row, lines_of, unit_of, wrapped

HEADS = {
    **{"frontier": "", "strategy": "strategy", "implementation": "layout"},
    **{"micro_batch_size": "micro", "recomputes": "recompute", "peak_bytes": "peak"},
    **{"fits": "fits", "step_ms": "step ms", "sent_bytes": "sent"},
}


def advice_text(plans: Plans) -> str:
    """Return the advice for each number of ranks, one below the other."""
    return "\n\n".join(as_text(each) for each in advise(plans))


def advice_json(plans: Plans) -> str:
    """Return for each number of ranks what to use (null where nothing fits), and every candidate with its plan."""
    return json.dumps([_entry(each) for each in advise(plans)], indent=1)


def as_text(advice: Advice) -> str:
    return "\n".join(_lines(advice)).rstrip()


def _entry(advice: Advice) -> dict[str, object]:
    best, leanest = advice.best, advice.leanest
    return {
        "advice": " ".join(_first_line(advice)),
        "use": best and best.words,
        "leanest": leanest and leanest.words,
        "frontier": [each.words for each in advice.frontier],
        "num_not_rehearsed": len(advice.late),
        "candidates": [
            {"words": each.words, "recomputes": each.recomputes, **json_entry(each.planned)}
            for each in advice.candidates
        ],
    }


def _lines(advice: Advice) -> list[str]:
    rows = advice.rehearsed
    lines = wrapped(*_first_line(advice))
    lines += ["", *wrapped(*_reasons(advice)), ""]
    if best := advice.best:
        lines += [*wrapped(f"A run takes these words: {_words(advice, best)}"), ""]
    if not rows:
        return lines
    unit, size = unit_of([each.peak_bytes for each in rows])
    speeds = "; ".join(dict.fromkeys(each.rehearsed.speed for each in rows if each.rehearsed))
    notes = (
        f"Rehearsed, with activations: {unit} of the fullest rank{_allocator(advice)}, and expected ms of a step "
        f"({speeds}). * is on the frontier: no other is as fast and holds less."
    )
    best_of = advice.frontier
    figures = [{"frontier": "*" if each in best_of else "", **_row(each)} for each in rows]
    return [*lines, *wrapped(notes), "", *lines_of(HEADS, figures, size, 3)]


def _row(each: Candidate) -> Row:
    return {
        **row_of(each.planned),
        "recomputes": _on(each.recomputes),
        "peak_bytes": each.peak_bytes,
        "fits": each.planned.outcome.verdict or "-",
        "step_ms": f"{1e3 * each.seconds:,.1f}",
    }


def _first_line(advice: Advice) -> list[str]:
    """Return the sentence that answers, and where nothing fits the one that says so."""
    best = advice.best
    on = f"on {_ranks(advice)} with {_work(advice.config)}"
    if best is None or best.rehearsed is None:
        if advice.not_rehearsed:
            return [f"Nothing can be advised {on}: {next(iter(advice.not_rehearsed))}."]
        least = min(advice.candidates, key=lambda each: each.peak_bytes)
        held = f"{least.stage} with micro-batch {least.micro} holds {_size(least.peak_bytes)}"
        what = "" if least.rehearsed else " of model states alone"
        return [f"Nothing fits {on}: {held}{what}. Use more ranks: --fit says how many."]
    least, expected, most = best.rehearsed.step_seconds
    limit = best.planned.outcome.memory_gib
    line = (
        f"use {best.stage}, micro-batch {best.micro}, recomputation {_on(best.recomputes)}: "
        f"{_size(best.peak_bytes)}{f' of {limit:g} GiB' if limit else ''}{_reserved(best)}, "
        f"{expected:.3g} s a step ({least:.3g}-{most:.3g})"
    )
    others = [each for each in advice.fitting if each.stage != best.stage]
    if others:
        line += f", {others[0].seconds / best.seconds:.3g} x as fast as {others[0].stage}"
    lean = advice.leanest
    if lean and lean.way != best.way:
        free = f"leave {_size(limit * GIB - lean.peak_bytes)} free" if limit else ""
        takes = (
            "" if lean in others[:1] else f" and take {lean.seconds / best.seconds:.3g} x as long"
        )
        line += f"; {_name(lean)} would {free or f'hold {_size(lean.peak_bytes)}'}{takes}"
    return [f"{line}; {on}."]


def _reasons(advice: Advice) -> list[str]:
    """Return what makes its peak and its seconds, which stages can not fit, and how many candidates were left."""
    best, reasons = advice.best, list[str]()
    if best and best.rehearsed:
        peak, computes = best.rehearsed.fullest, best.rehearsed.compute_seconds
        states, waits = states_at_peak(peak.by_kind), max(0.0, best.seconds - computes)
        kept = ""
        if peak.reserved_bytes is not None:
            kept = f"; the allocator reserves {_size(peak.needed_bytes - peak.num_bytes)} more"
        if peak.num_retries:
            kept += f", and must make room {peak.num_retries} times a step, which costs time beyond the estimate"
        reasons.append(
            f"Why: at its peak, in {peak.phase}, {_size(states)} are model states and gathered units, and "
            f"{_size(peak.num_bytes - states)} are activations, logits and what exists for a moment{kept}. Of its step "
            f"it computes {1e3 * computes:,.1f} ms and waits {1e3 * waits:,.1f} ms for messages."
        )
    for stage in dict.fromkeys(each.stage for each in advice.candidates):
        of_stage = [each for each in advice.candidates if each.stage == stage]
        if best and not any(each.may_fit for each in of_stage):
            least = min(of_stage, key=lambda each: each.peak_bytes)
            alone = "" if least.rehearsed else " of model states alone"
            reasons.append(f"{stage} does not fit: at least {_size(least.peak_bytes)}{alone}.")
    if late := advice.late:
        spare = all(advice.only_saves_memory(each) for each in late)
        which = ", which may hold less, but are not expected to be faster" if spare else ""
        reasons.append(
            f"{len(late)} candidates were not rehearsed in {BUDGET_SECONDS} s{which}; --advise --rehearse takes the "
            "time that all of them take."
        )
    return reasons


def _words(advice: Advice, best: Candidate) -> str:
    """Return what a command line needs for the best: its own words, and what was taken for what the line left open."""
    data = best.planned.config.data
    words = [best.words, f"data.global_batch_size={data.global_batch_size}"]
    words = [words[0]] if "data.global_batch_size=" in words[0] else words
    return " ".join(
        [*words, f"data.seq_len={data.seq_len} precision={advice.config.precision.name}"]
    )


def _ranks(advice: Advice) -> str:
    config, place = advice.config, advice.candidates[0].planned.outcome.place
    gpu = f" {config.cluster.gpu}" if config.cluster.gpu else ""
    return f"{config.world_size}{gpu} ranks ({place})"


def _work(config: Config) -> str:
    data = config.data
    return (
        f"{config.precision.name}, sequences of {data.seq_len:,} and {data.global_batch_size:,} samples a step of "
        f"{config.model.name}"
    )


def _size(num_bytes: float) -> str:
    unit, size = ("GiB", GIB) if num_bytes >= GIB else ("MiB", MIB)
    return f"{num_bytes / size:.3g} {unit}"


def _reserved(each: Candidate) -> str:
    return " reserved" if each.rehearsed and each.rehearsed.allocator else ""


def _allocator(advice: Advice) -> str:
    """Return whose reservations are meant, where the ranks are GPUs."""
    settings = {each.rehearsed.allocator for each in advice.rehearsed if each.rehearsed} - {""}
    return f" reserved by torch's caching allocator ({', '.join(settings)})" if settings else ""


def _name(each: Candidate) -> str:
    return f"{each.stage}{' with recomputation' if each.recomputes else ''}"


def _on(recomputes: bool) -> str:
    return "on" if recomputes else "off"
