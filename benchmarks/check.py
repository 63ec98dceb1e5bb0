"""python -m benchmarks.check: compare outputs/bench/latest.json with the stored numbers; --store replaces them.

Bytes depend on nothing but the code: a peak or what was sent is worse when it is more than what is stored, beyond
NOISE_BYTES. Seconds differ from machine to machine; ratios to the limit, measured in the same run, differ far less.
They are judged where the processor is that of the stored ratio, and nothing else ran; a time is worse
when the faster quarter of its turns is more than TIME_TOLERANCE above its stored ratio. What is not judged is
said. `--store` keeps stored times where these are not to be judged by.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines import ENGINES
from zeroexp.cluster.environment import processor_name

LATEST = Path("outputs/bench/latest.json")
STORED = Path(__file__).with_name("ratios.json")
TIME_TOLERANCE = 1.12  # twice the spread of medians seen between runs on a quiet machine
NOISE_BYTES = 1 << 16  # of handshakes by TCP, and of memory that threads of gloo still hold
MOST_OTHERS = 0.1  # share of the cores that other programs may use
TIME, BYTES, PROCESSOR = "ratio_to_limit", ("peak_bytes", "wire_bytes"), "processor"

Stored = dict[str, dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", action="store_true")
    stores = parser.parse_args().store
    rows = json.loads(LATEST.read_text(encoding="utf-8")) if LATEST.exists() else []
    if not rows:
        raise SystemExit(f"{LATEST}: nothing is measured yet; python -m benchmarks.run --quick")
    stored: Stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    if stores:
        for name, numbers in numbers_of(rows).items():
            stored[name] = {**stored.get(name, {}), **numbers}
        text = json.dumps(stored, indent=1, sort_keys=True)
        STORED.write_text(f"{text}\n", encoding="utf-8")
        return 0
    if not stored:
        raise SystemExit(f"{STORED}: nothing is stored yet; python -m benchmarks.check --store")
    problems = [*more_bytes(rows, stored), *slower(rows, stored)]
    for line in [*why_not_timed(rows, stored), *problems]:
        print(line)
    if not problems:
        known = sum(_name(row) in stored for row in _ours(rows))
        print(f"{known} of {len(rows)} rows have stored numbers, none is worse than {STORED.name}")
    return 1 if problems else 0


def numbers_of(rows: Sequence[Mapping[str, Any]]) -> Stored:
    """What is kept of rows: comparison/engine -> numbers that travel between machines, of our engines alone."""
    kept: Stored = {}
    for row in _ours(rows):
        kept[_name(row)] = {
            key: row[key] for key in BYTES if row[key] is not None and row[key] >= NOISE_BYTES
        }
        if _is_quiet(row):
            kept[_name(row)] |= {TIME: row[TIME], PROCESSOR: processor_name()}
    return kept


def more_bytes(rows: Sequence[Mapping[str, Any]], stored: Stored) -> list[str]:
    """One line for each number of bytes that rose; what is not stored, or not measured now, has not risen."""
    return [
        f"{_name(row)}: {key} {row[key]:,.0f} is {row[key] - old:,.0f} more than the stored {old:,.0f}"
        for row in _ours(rows)
        for key in BYTES
        if (old := stored.get(_name(row), {}).get(key)) is not None
        and row[key] is not None
        and row[key] > old + NOISE_BYTES
    ]


def slower(rows: Sequence[Mapping[str, Any]], stored: Stored) -> list[str]:
    """One line for each time that got worse, of those that can be judged."""
    lines: list[str] = []
    for row in _ours(rows):
        old = stored.get(_name(row), {})
        if TIME not in old or not _can_be_judged(row, old):
            continue
        fast = row[TIME] * row["step_seconds_quartiles"][0] / row["step_seconds"]
        if fast > old[TIME] * TIME_TOLERANCE:
            lines.append(
                f"{_name(row)}: {row[TIME]:.2f} of the limit, {fast:.2f} in its faster quarter of turns; "
                f"{old[TIME]:.2f} is stored"
            )
    return lines


def why_not_timed(rows: Sequence[Mapping[str, Any]], stored: Stored) -> list[str]:
    """Say of how many rows no time is judged, if of any."""
    known = [(row, stored.get(_name(row), {})) for row in _ours(rows)]
    known = [(row, old) for row, old in known if TIME in old]
    busy = sum(not _is_quiet(row) for row, _ in known)
    elsewhere = sum(old.get(PROCESSOR) != processor_name() for _, old in known)
    lines: list[str] = []
    if busy:
        lines.append(
            f"times of {busy} rows are not judged: other programs used more than a tenth of the cores"
        )
    if elsewhere:
        lines.append(
            f"times of {elsewhere} rows are not judged: stored ones are of another processor"
        )
    return lines


def _can_be_judged(row: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    return _is_quiet(row) and old.get(PROCESSOR) == processor_name()


def _is_quiet(row: Mapping[str, Any]) -> bool:
    return row["other_cores"] <= MOST_OTHERS * (os.cpu_count() or 1)


def _ours(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if ENGINES[row["engine"]].is_ours]


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['comparison']}/{row['engine']}"


if __name__ == "__main__":
    sys.exit(main())
