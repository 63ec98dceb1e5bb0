"""`--explain`: what makes the peak of one point, down to its largest tensors, by a rehearsal."""

from __future__ import annotations

from collections.abc import Iterable

from zeroexp.config.keys import ConfigError
from zeroexp.plan.outcome import Outcome
from zeroexp.plan.peak import with_rehearsal
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.text_table import MIB, amount, wrapped

NUM_LARGEST = 3


def explain(plans: Plans) -> str:
    """Return the breakdown of the line's only point as text, rehearsed. Raises ConfigError if there are more."""
    if len(plans.entries) != 1 or not plans.planned:
        raise ConfigError(
            f"--explain: one point, not {len(plans.entries)}; give each word one value"
        )
    (planned,) = plans.planned
    planned = planned if plans.rehearses else with_rehearsal(planned)
    outcome = planned.outcome
    head = f"{outcome.name}, model {outcome.model}, {outcome.place} ranks. Planned, not measured."
    parts = [wrapped(head), _state_lines(outcome), _rehearsed_lines(outcome)]
    return "\n\n".join("\n".join(part) for part in parts)


def _amounts(named: Iterable[tuple[float, str]]) -> list[str]:
    return [f"{amount(num_bytes, MIB):>14}  {name}" for num_bytes, name in named]


def _state_lines(outcome: Outcome) -> list[str]:
    most = (
        f"The fullest rank holds {amount(outcome.total.fullest, MIB)} MiB of model states at once"
    )
    kinds = [(each.fullest, kind) for kind, each in outcome.by_kind.items() if each.fullest]
    return [*wrapped(f"{most}; of each kind at most:"), *_amounts(kinds)]


def _rehearsed_lines(outcome: Outcome) -> list[str]:
    """Return what is held at the peak, by kind, and its largest storages; or why there is no peak."""
    if outcome.rehearsed is None:
        return wrapped(f"Its peak is not rehearsed: {outcome.not_rehearsed}.")
    peak = outcome.rehearsed.fullest
    held = amount(peak.num_bytes, MIB)
    head = (
        f"Rehearsed, with activations: rank {peak.rank} holds {held} MiB at most, in {peak.phase}"
    )
    if peak.reserved_bytes is not None:
        allocator = f"torch's caching allocator ({outcome.rehearsed.allocator})"
        head += f", for which {allocator} reserves {amount(peak.reserved_bytes, MIB)}"
    largest = [(size, f"{kind}, {made}") for size, kind, made in peak.largest[:NUM_LARGEST]]
    return [
        *wrapped(f"{head}:"),
        *_amounts((num_bytes, kind) for kind, num_bytes in peak.by_kind.items()),
        *["", "The largest storages there, and the operation that made each:"],
        *_amounts(largest),
    ]
