"""python -m benchmarks.tuned: ours beside peers at their best, so that engines and transports are told apart.

Every peer is timed with up to 16 settings (tunable.py), in turn and shortly. The fastest, and the fastest over sockets,
then run beside the peer's default and ours in one comparison, in rounds; the default is the best where it was faster
there. A ratio is the median over rounds of step over step in the same round; its spread are the quartiles.

--model NAME     the default is small      --rounds N     of the comparison; 7
--peers NAME ... some of them, and of ours what is beside them
--write FILE     the page whose section is replaced
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import table
from benchmarks.engines import engines_for
from benchmarks.run import OURS, OVER_SOCKETS, Comparison, compare, quartiles
from benchmarks.tunable import SETTINGS, variants

Rows = dict[str, dict[str, Any]]
Best = dict[
    tuple[str, str], str
]  # ours and the peer -> the peer with the settings that ours is set beside
# ours, the peer, and what is aimed at: at most so much of the tuned peer's step.
GOALS = [
    *((ours, "ddp", 1.00) for ours in OURS),
    *((ours, "ddp", 1.00) for ours in OVER_SOCKETS),
    ("zero1_buffer", "zero_redundancy", 1.00),
    ("zero2_buffer", "fsdp2_no_reshard", 0.75),
    ("zero3_buffer", "fsdp2", 0.75),
    ("zero2_buffer_sockets", "fsdp2_no_reshard", 1.00),
    ("zero3_buffer_sockets", "fsdp2", 1.00),
    ("zero2_buffer_sockets", "deepspeed2", 0.75),  # whose messages nothing else carries
    ("zero3_buffer_sockets", "deepspeed3", 0.75),
]


def main() -> int:
    args = _arguments()
    tuning = Comparison("tuning", args.model, num_steps=3, num_rounds=2)
    peers = [peer for peer in args.peers if peer in engines_for(2)]
    ranked = {peer: _fastest_first(peer, tuning) for peer in peers}
    best = {(ours, peer): fair(ours, ranked[peer]) for ours, peer, _ in GOALS if peer in ranked}
    engines = (*peers, *best.values(), *OURS, *OVER_SOCKETS)
    chosen = tuple(dict.fromkeys(engine for engine in engines if engine != "ddp"))
    rows = compare(replace(tuning, name="tuned", num_rounds=args.rounds, engines=chosen))
    by_name = {row["engine"]: row for row in rows}
    best = {(ours, peer): faster(by_name, peer, name) for (ours, peer), name in best.items()}
    table.tell("tuned", markdown(by_name, best), cells(by_name, best), args.write)
    return 0


def _fastest_first(peer: str, tuning: Comparison) -> list[str]:
    rows = compare(replace(tuning, engines=tuple(variants(peer))))
    # Engines that do not fit into memory together run in groups, each with DDP.
    measured = {row["engine"]: row["ratio_to_ddp"] for row in rows if "@" in row["engine"]}
    ranked = sorted(measured, key=lambda name: measured[name])
    for name in ranked:
        print(f"  {measured[name]:.2f} of DDP  {name}", file=sys.stderr)
    return ranked


def fair(ours: str, fastest_first: Sequence[str]) -> str:
    """Return the peer's fastest settings; beside ours over sockets those that would run between hosts."""
    return next(n for n in fastest_first if ours not in OVER_SOCKETS or "carrier=shared" not in n)


def faster(rows: Rows, default: str, tuned: str) -> str:
    """Return which of both was faster, each beside DDP of its round: short turns choose by chance too."""
    there = [name for name in (default, tuned) if name in rows]
    return min(there, key=lambda n: statistics.median(rows[n]["turns_over_ddp"]), default=tuned)


def markdown(rows: Rows, best: Best) -> str:
    """Return each goal beside what was measured: over the peer's default, and over the peer at its best."""
    lines = [
        [ours, peer, ratio(rows, ours, peer), ratio(rows, ours, name), f"{goal:.2f}"]
        for ours, peer, goal in GOALS
        if ours in rows and (name := best.get((ours, peer))) in rows
    ]
    gains = [
        [peer, f"`{name.partition('@')[2] or 'default'}`", ratio(rows, name, peer)]
        for peer, name in dict.fromkeys((peer, name) for (_, peer), name in best.items())
        if name in rows and peer in rows
    ]
    others = [row["other_cores"] for row in rows.values()]
    turns = next(iter(rows.values()))["num_turns"]
    said = table.report.wrapped(
        f"{table.machine()} Medians of {turns} rounds, with quartiles; other programs used "
        f"{min(others):.1f}–{max(others):.1f} cores meanwhile. A peer's best is of all its settings; beside our "
        "`_sockets` rows, of those over sockets, as between hosts."
    )
    head = ("ours", "peer", "over its default", "over it at its best", "goal")
    tuned = ("peer", "fastest settings", "over its default")
    return "\n\n".join([said, table.grid(tuned, gains, 2), table.grid(head, lines, 2)])


def cells(rows: Rows, best: Best) -> list[Sequence[str]]:
    """Return each engine's step and peak, below the names of the columns."""
    found = [
        (
            name,
            "at its best" if name in best.values() else "default",
            f"{1e3 * row['step_seconds']:.0f}",
            ratio(rows, name, "ddp"),
            table.megabytes(row["peak_bytes"]),
            table.megabytes(row["wire_bytes"]),
        )
        for name, row in rows.items()
    ]
    return [("engine", "settings", "step, ms", "/ DDP", "peak, MB", "sent, MB"), *found]


def ratio(rows: Rows, one: str, other: str) -> str:
    """Return the median of the ratios of a round, and their quartiles.

    Each step counts over DDP's of its round, since engines that do not fit into memory together run apart, with a DDP
    of their own.
    """
    pairs = zip(rows[one]["turns_over_ddp"], rows[other]["turns_over_ddp"], strict=True)
    ratios = [a / b for a, b in pairs]
    low, high = quartiles(ratios)
    return f"{statistics.median(ratios):.2f} ({low:.2f}–{high:.2f})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="small")
    parser.add_argument("--peers", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
