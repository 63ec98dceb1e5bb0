"""`python -m zeroexp.report [outputs/<sweep> ...]`: the table of sweeps, from the files of their runs.

--figure FILE.svg   also draw what each point of the sweep holds after backward, by kind
--write PAGE.md     also put the results as a Markdown table between the two markers of that page

Without a folder it is the newest sweep in outputs/. Exit codes: 0 fine, 2 refused in one line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zeroexp import output
from zeroexp.config import ConfigError
from zeroexp.report import markdown
from zeroexp.report.table import show
from zeroexp.tracking.run import Run, read_run

REFUSED = 2


def main() -> int:
    output.keep_going()
    arguments = _arguments()
    try:
        sweeps = arguments.sweeps or _newest(Path("outputs"))
        _refuse_several(arguments, sweeps)
        for sweep in sweeps:
            runs = _runs_of(sweep)
            print(f"{sweep}\n")
            show(runs)
            print()
            _write(arguments, runs)
    except ConfigError as error:
        print(f"zeroexp: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _write(arguments: argparse.Namespace, runs: Sequence[Run]) -> None:
    if arguments.figure:
        from zeroexp.report import figure  # matplotlib takes a second to import

        figure.save(runs, arguments.figure)
    if arguments.write:
        markdown.replace_in(arguments.write, markdown.render(runs))


def _refuse_several(arguments: argparse.Namespace, sweeps: Sequence[Path]) -> None:
    for option in ("figure", "write"):
        if getattr(arguments, option) and len(sweeps) > 1:
            raise ConfigError(f"--{option}: it shows one sweep, not {len(sweeps)}; name one")


def _newest(outputs: Path) -> list[Path]:
    sweeps = {config.parent.parent for config in outputs.glob("*/*/config.yaml")}
    if not sweeps:
        raise ConfigError("outputs/ holds no sweep; run one first: python -m zeroexp")
    return sorted(sweeps, key=lambda sweep: sweep.stat().st_mtime)[-1:]


def _runs_of(sweep: Path) -> list[Run]:
    """Return the sweep's runs in the order in which they were started."""
    runs = [read_run(config.parent) for config in sweep.glob("*/config.yaml")]
    if not runs:
        raise ConfigError(f"{sweep}: no run in there; give outputs/<sweep>")
    return sorted(runs, key=lambda run: (run.times.get("pending_at", 0.0), run.name))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m zeroexp.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sweeps", nargs="*", type=Path, metavar="outputs/<sweep>")
    parser.add_argument("--figure", type=Path, metavar="FILE.svg")
    parser.add_argument("--write", type=Path, metavar="PAGE.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
