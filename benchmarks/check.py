"""python -m benchmarks.check: compare outputs/bench/latest.json with the stored ratios; --store replaces them.

Seconds differ from machine to machine; ratios to the limit, measured in the same run, differ far less. A row fails
when its ratio is more than TIME_TOLERANCE above the stored one, its peak or its bytes more than BYTES_TOLERANCE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.engines import ENGINES

LATEST = Path("outputs/bench/latest.json")
STORED = Path(__file__).with_name("ratios.json")
TIME_TOLERANCE = 1.12  # twice the spread of medians seen between runs on a quiet machine
BYTES_TOLERANCE = 1.02
HANDSHAKES_BYTES = 1 << 16  # on one host little else goes by TCP, and it varies
TOLERANCES = {
    "ratio_to_limit": TIME_TOLERANCE,
    "peak_bytes": BYTES_TOLERANCE,
    "wire_bytes": BYTES_TOLERANCE,
}


def main() -> int:
    rows = json.loads(LATEST.read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--store"]:
        kept = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
        STORED.write_text(
            json.dumps({**kept, **ratios(rows)}, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
        return 0
    if not STORED.exists():
        raise SystemExit(f"{STORED}: nothing is stored yet; python -m benchmarks.check --store")
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    problems = regressions(ratios(rows), stored)
    print("\n".join(problems) or f"{len(rows)} rows, none worse than {STORED.name}")
    return 1 if problems else 0


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What is kept of rows: comparison/engine -> numbers that travel between machines, of our engines alone."""
    return {
        f"{row['comparison']}/{row['engine']}": {
            key: row[key] for key in TOLERANCES if row[key] and not _is_noise(key, row[key])
        }
        for row in rows
        if ENGINES[row["engine"]].is_ours
    }


def _is_noise(key: str, value: float) -> bool:
    return key == "wire_bytes" and value < HANDSHAKES_BYTES


def regressions(new: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """One line for each number that got worse; what is not stored, or not measured now, is no regression."""
    return [
        f"{name}: {key} {value:.4g} is {value / stored[name][key]:.2f} x the stored {stored[name][key]:.4g}"
        for name, numbers in new.items()
        for key, value in numbers.items()
        if key in stored.get(name, {}) and value > stored[name][key] * TOLERANCES[key]
    ]


if __name__ == "__main__":
    sys.exit(main())
