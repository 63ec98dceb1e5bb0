"""`--explain`: what makes the peak of one point, down to its largest tensors, and what each other setting would buy.

The point is rehearsed, which tells its peak. Every other value of a setting is planned, so that its price in traffic
stands beside the model states that it saves; with `--rehearse` each is rehearsed too: then it has a peak and a price in
milliseconds, and settings that change nothing else are among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from textwrap import wrap
from typing import NamedTuple

from zeroexp.config.keys import ConfigError
from zeroexp.plan.changes import activations_and_products, states_and_traffic
from zeroexp.plan.outcome import Outcome, PlannedPoint
from zeroexp.plan.peak import with_rehearsal
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.search import planned_changes
from zeroexp.plan.text_table import WIDTH, mib, wrapped

NUM_LARGEST = 3


class Lever(NamedTuple):
    """Another value of one setting, and what it changes of the fullest rank."""

    words: str  # what to add to the command line
    num_bytes: float  # more than now, at the peak where it was rehearsed, else of model states; less where negative
    sent_bytes: float
    seconds: float | None  # of a step; None: it was not rehearsed


def explain(plans: Plans) -> str:
    """Return the breakdown of the line's only point as text, rehearsed. Raises ConfigError if there are more."""
    if len(plans.entries) != 1 or not plans.planned:
        raise ConfigError(
            f"--explain: one point, not {len(plans.entries)}; give each word one value"
        )
    planned = plans.planned[0] if plans.rehearses else with_rehearsal(plans.planned[0])
    outcome = planned.outcome
    head = f"{outcome.name}, model {outcome.model}, {outcome.place} ranks. Planned, not measured."
    parts = [
        wrapped(head),
        _state_lines(outcome),
        _rehearsed_lines(outcome),
        _lever_lines(planned, plans),
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _amounts(named: Iterable[tuple[float, str]]) -> list[str]:
    return [f"{mib(num_bytes):>14}  {name}" for num_bytes, name in named]


def _state_lines(outcome: Outcome) -> list[str]:
    most = f"The fullest rank holds {mib(outcome.total.fullest)} MiB of model states at once"
    kinds = [(each.fullest, kind) for kind, each in outcome.by_kind.items() if each.fullest]
    return [*wrapped(f"{most}; of each kind at most:"), *_amounts(kinds)]


def _rehearsed_lines(outcome: Outcome) -> list[str]:
    """Return what is held at the peak, by kind, and its largest storages; or why there is no peak."""
    if outcome.rehearsed is None:
        return wrapped(f"Its peak is not rehearsed: {outcome.not_rehearsed}.")
    peak = outcome.rehearsed.fullest
    head = f"Rehearsed, with activations: rank {peak.rank} holds {mib(peak.num_bytes)} MiB at most, in {peak.phase}"
    if peak.reserved_bytes is not None:
        allocator = f"torch's caching allocator ({outcome.rehearsed.allocator})"
        head += f", for which {allocator} reserves {mib(peak.reserved_bytes)}"
    largest = [(size, f"{kind}, {made}") for size, kind, made in peak.largest[:NUM_LARGEST]]
    return [
        *wrapped(f"{head}:"),
        *_amounts((num_bytes, kind) for kind, num_bytes in peak.by_kind.items()),
        *["", "The largest storages there, and the operation that made each:"],
        *_amounts(largest),
    ]


def _lever_lines(planned: PlannedPoint, plans: Plans) -> list[str]:
    outcome = planned.outcome
    held = "peak" if plans.rehearses and outcome.rehearsed else "states"
    lines = [
        "What each lever would change, in MiB of the fullest rank, and ms of a step:",
        *wrapped(_basis(outcome, plans.rehearses)),
        *["", f"{held:>12} {'sent/step':>12} {'ms':>10}  lever"],
    ]
    for lever in sorted(_levers(planned, plans), key=lambda lever: lever.num_bytes):
        ms = "-" if lever.seconds is None else f"{1e3 * lever.seconds:+z,.1f}"
        cells = mib(lever.num_bytes, "+"), mib(lever.sent_bytes, "+"), ms
        if any(cell.strip("+-0.,") for cell in cells):
            line = "{:>12} {:>12} {:>10}  {}".format(*cells, lever.words)
            lines += wrap(line, WIDTH, subsequent_indent=" " * 39, break_on_hyphens=False)
    return lines


def _levers(now: PlannedPoint, plans: Plans) -> Iterator[Lever]:
    """Yield what every other value of a setting changes; undefined ones are left out."""
    peak_now = now.outcome.rehearsed if plans.rehearses else None
    changes = states_and_traffic(now.config)
    if peak_now:
        changes = chain(changes, activations_and_products(now.config))
    for words, other in planned_changes(changes, now, plans.named):
        sent = other.outcome.sent.fullest - now.outcome.sent.fullest
        if peak_now is None:
            held = other.outcome.total.fullest - now.outcome.total.fullest
            yield Lever(words, held, sent, None)
        elif then := with_rehearsal(other).outcome.rehearsed:
            held = then.fullest.num_bytes - peak_now.fullest.num_bytes
            seconds = then.step_seconds[1] - peak_now.step_seconds[1]
            yield Lever(words, held, sent, seconds)


def _basis(outcome: Outcome, rehearses: bool) -> str:
    """Return what the numbers of levers rest on, or why there are no milliseconds."""
    if rehearses and outcome.rehearsed:
        peak, seconds = outcome.rehearsed.fullest.num_bytes, outcome.rehearsed.step_seconds[1]
        now = f"now {mib(peak)} MiB and {1e3 * seconds:,.1f} ms, predicted"
        return f"rehearsed, with activations: {now} ({outcome.rehearsed.speed})."
    reason = outcome.not_rehearsed if rehearses else "no lever was rehearsed; add --rehearse"
    return f"model states and what is sent, by closed forms. ms is - since {reason}."
