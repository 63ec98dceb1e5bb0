"""`python -m zeroexp.report [outputs/<sweep> ...]`: the table of sweeps, from the files of their runs.

Without a folder: the newest sweep in outputs/. Exit codes: 0 printed, 2 no such sweep.
"""

from __future__ import annotations

import sys
from pathlib import Path

from zeroexp.report.table import show
from zeroexp.tracking.run import Run, read_run

NO_SUCH_SWEEP = 2


def main() -> int:
    sweeps = [Path(word) for word in sys.argv[1:]] or _newest(Path("outputs"))
    if not sweeps:
        print("zeroexp: outputs/ holds no sweep; run one first: python -m zeroexp", file=sys.stderr)
        return NO_SUCH_SWEEP
    for sweep in sweeps:
        runs = _runs_of(sweep)
        if not runs:
            print(f"zeroexp: {sweep}: no run in there; give outputs/<sweep>", file=sys.stderr)
            return NO_SUCH_SWEEP
        print(f"{sweep}\n")
        show(runs)
        print()
    return 0


def _newest(outputs: Path) -> list[Path]:
    sweeps = {config.parent.parent for config in outputs.glob("*/*/config.yaml")}
    return sorted(sweeps, key=lambda sweep: sweep.stat().st_mtime)[-1:]


def _runs_of(sweep: Path) -> list[Run]:
    """In the order in which they were started."""
    runs = [read_run(config.parent) for config in sweep.glob("*/config.yaml")]
    return sorted(runs, key=lambda run: (run.times.get("pending_at", 0.0), run.name))


if __name__ == "__main__":
    sys.exit(main())
