"""python -m benchmarks.published_run [FOLDER]: a published table of memory as a real run, beside its plan.

Trains the study of table A on two ranks of this machine, for a few steps on drawn reviews, and sets what its ranks held
beside what was published and what is planned. It needs 20 GiB of memory. FOLDER, of a sweep of that study, is read
instead. --write FILE replaces the page's section; every cell goes into benchmarks/measured/.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from benchmarks.published import MIB, ComparedCell, Engine, compare_cells
from benchmarks.published_page import compare_study
from benchmarks.published_tables import TABLE_A
from benchmarks.table import grid, machine, tell
from zeroexp.measure.record import MemorySummary, RunSummary
from zeroexp.plan.form_terms import ClosedForm
from zeroexp.report.markdown import wrapped
from zeroexp.tracking.run import read_run

NUM_REVIEWS, NUM_WORDS, NUM_STARS = 64, 24, 5
WORDS = ("the food", "was", "good", "cold", "service", "slow", "a friendly place", "never again")
WITHIN_SECONDS = 3600


@dataclass(frozen=True)
class HeldByTwoRanks:
    """What the ranks of a run held, the fullest at each moment first; it answers as the closed forms do."""

    memory: MemorySummary
    world_size: int = 2

    def held_bytes(self, moment: str, rank: int) -> dict[str, float]:
        """Return the bytes of each kind: those of the fullest rank, or what they leave of both ranks' sum."""
        fullest = dict[str, float](self.memory.fullest_at[moment])
        if rank == 0:
            return fullest
        return {k: 2 * mean - fullest[k] for k, mean in self.memory.mean_at[moment].items()}


def main() -> int:
    args = _arguments()
    if args.folder is not None:
        runs = _runs_in(args.folder)
    else:
        with tempfile.TemporaryDirectory() as folder:
            runs = _runs_in(_train(Path(folder)))
    compared = compare(runs)
    tell(TABLE_A.study, told(runs, compared), [HEAD, *(_cell(*c) for c in compared)], args.write)
    return 0


def _train(folder: Path) -> Path:
    """Train the study in `folder`; return the folder of its sweep."""
    reviews = folder / "reviews.csv"
    draw_reviews(reviews)
    words = [f"study={TABLE_A.study}", f"data.path={reviews}", f"outputs={folder / 'outputs'}"]
    line = [sys.executable, "-m", "zeroexp", *words, "cluster.device=cpu", "tracking=files"]
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run(line, stdout=sys.stderr, env=env, timeout=WITHIN_SECONDS, check=True)
    (sweep,) = {each.parent.parent for each in folder.glob("outputs/*/*/config.yaml")}
    return sweep


def draw_reviews(path: Path) -> None:
    draw = random.Random(0)
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for index in range(NUM_REVIEWS):
            rows.writerow([" ".join(draw.choices(WORDS, k=NUM_WORDS)), index % NUM_STARS])


def _runs_in(sweep: Path) -> dict[Engine, RunSummary]:
    runs = [read_run(each.parent) for each in sweep.glob("*/config.yaml")]
    found = {(r.strategy, r.implementation): r.summary for r in runs if r.summary}
    missing = [row.engine for row in TABLE_A.rows if row.engine not in found]
    if missing:
        raise SystemExit(f"{sweep}: no finished run of {'/'.join(missing[0])}; run the study again")
    return found


def compare(runs: dict[Engine, RunSummary]) -> list[tuple[ComparedCell, ComparedCell]]:
    """Return each published cell as it is planned, and as it was measured."""
    held = {engine: HeldByTwoRanks(summary.memory) for engine, summary in runs.items()}
    # The columns of this table ask for held bytes alone, which a run has as well as a form.
    measured = compare_cells(TABLE_A, cast("dict[Engine, ClosedForm]", held))
    return list(zip(compare_study(TABLE_A), measured, strict=True))


def told(runs: dict[Engine, RunSummary], cells: Sequence[tuple[ComparedCell, ComparedCell]]) -> str:
    """Return what the page says."""
    far = max(abs(p.ours - m.ours) for p, m in cells)
    agreed = sum(m.agrees for _, m in cells)
    result = (
        f"{machine()} {len(cells)} cells, {TABLE_A.unit}; {agreed} of them agree with the publication to its rounding "
        f"when they are measured. What is measured differs from the plan by at most {far:.3f}."
    )
    return "\n\n".join([wrapped(result), wrapped(PEAKS_TOLD), _peaks(runs)])


HEAD = ("point", "column", "published", "planned", "measured")
PEAKS_TOLD = "The most that the fullest rank of the same runs held at once, with activations, MiB:"


def _cell(planned: ComparedCell, measured: ComparedCell) -> list[str]:
    numbers = [f"{each.ours:.{max(each.digits, 2)}f}" for each in (planned, measured)]
    return ["-".join(planned.row.engine), planned.column, planned.published, *numbers]


def _peaks(runs: Mapping[Engine, RunSummary]) -> str:
    peaks = [runs[row.engine].memory.peak for row in TABLE_A.rows]
    shown = ["–" if peak is None else f"{peak.fullest / MIB:,.0f}" for peak in peaks]
    return grid(["-".join(row.engine) for row in TABLE_A.rows], [shown], 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--write", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
