"""python -m benchmarks.promise: does what a plan says of memory come true under a limit?

Each point is planned by a rehearsal. Then its two ranks train twice under a limit of what torch allocates on the CPU
and what ranks share, enforced by the allocator that counts:

    fits      the limit is the planned peak and MARGIN of it: no rank may die
    refused   the limit is the planned peak and MARGIN, and WASTE less: if no rank dies, the plan asks for more than it
              needs

A thread of gloo may let go late on busy cores, of what no plan counts ([Note: gloo] in hidden_memory.py), so that FSDP2
needs quiet ones here.

The limit is of tensors, not of the process. What the C library keeps of freed memory depends on the history of the
heap, since a rank keeps freed memory for speed, and no plan of tensors knows it.

--points N       the first N of all points
--write FILE     the page whose section is replaced; every row goes into benchmarks/measured/
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

from benchmarks.real_runs import config_of, trains
from benchmarks.table import machine, tell
from zeroexp.comm.collectives import held_shared_bytes
from zeroexp.config.keys import Config
from zeroexp.measure.memory import call_allocator, count_cpu_allocations
from zeroexp.plan.outcome import RankPeak, plan_point
from zeroexp.plan.peak import rehearse_point
from zeroexp.report.markdown import wrapped
from zeroexp.run import rank

MIB = 1 << 20
MARGIN = 0.03
WASTE = 0.05
NUM_RANKS = 2


ROWS = [
    *(
        (stage, layout)
        for stage in ("ddp", "zero1", "zero2", "zero3")
        for layout in ("buffer", "torch")
    ),
    *(("zero3", "tensor"), ("zero3", "parameter"), ("zero1", "tensor"), ("zero2", "parameter")),
]
LLAMA = "model=small data=synthetic data.vocab_size=2048"
SHAPES = {
    "llama 14M, 1 x 64": f"{LLAMA} model.hf_config.num_hidden_layers=4 data.seq_len=64",
    "llama 14M, 4 x 128": f"{LLAMA} model.hf_config.num_hidden_layers=4 data.seq_len=128 data.micro_batch_size=4",
    "llama 25M, 2 x 64": f"{LLAMA} data.seq_len=64 data.micro_batch_size=2",
    "llama 4M, 8 x 128": f"{LLAMA} model.hf_config.hidden_size=256 model.hf_config.intermediate_size=704 "
    "data.seq_len=128 data.micro_batch_size=8",
    "mlp 17M, 8 x 16": "model=mlp_tiny data=vectors model.mlp.width=1024 model.mlp.depth=8 data.seq_len=16 "
    "data.micro_batch_size=8",
}


@dataclass(frozen=True)
class Row:
    """What came of one point."""

    name: str
    planned_bytes: int  # the peak, by the rehearsal
    limit_bytes: int  # with which it fits
    refused_bytes: int  # with which it does not
    fits: bool  # no rank died at limit_bytes
    dies_below: bool  # a rank died at refused_bytes


def main() -> int:
    args = _arguments()
    if reason := count_cpu_allocations():
        print(reason, file=sys.stderr)
        return 1
    names = [(shape, *row) for row in ROWS for shape in SHAPES][: args.points]
    rows: list[Row] = []
    for name in names:
        rows.append(judge(name))
        print(f"{len(rows)}/{len(names)} {rows[-1]}", file=sys.stderr, flush=True)
    tell("promise", markdown(rows), cells(rows), args.write)
    return 0 if all(row.fits for row in rows) else 1


def judge(name: Sequence[str]) -> Row:
    """Plan a point, and train it at the limit that fits and at the one that is refused."""
    shape, strategy, implementation = name
    point = f"{SHAPES[shape]} strategy={strategy} strategy.implementation={implementation}"
    # As few steps as show every phase.
    config = config_of(f"{point} train.warmup_steps=1 train.steps=2 world_size={NUM_RANKS}")
    planned = planned_peak(config)
    limit = int(planned.num_bytes * (1 + MARGIN))
    refused = int(planned.num_bytes * (1 + MARGIN) * (1 - WASTE))
    return Row(
        name=f"{shape}, {strategy} {implementation}",
        planned_bytes=planned.num_bytes,
        limit_bytes=limit,
        refused_bytes=refused,
        fits=lives_within(config, limit),
        dies_below=not lives_within(config, refused),
    )


def planned_peak(config: Config) -> RankPeak:
    """Return the rehearsed peak of the fullest rank."""
    return rehearse_point(plan_point(config, None, "cpu")).fullest


# -- ranks under a limit ---------------------------------------------------------------------------


def lives_within(config: Config, limit: int) -> bool:
    """Train; return whether no rank died."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "sweep" / "run"
        return trains(config, run, partial(_limit_when_training, limit))


def _limit_when_training(limit: int) -> None:
    """Let no step hold more than `limit`; building is over by then, and what ranks share is known."""
    train = rank.train

    def limited(*args: Any, **settings: Any) -> Any:
        call_allocator("limit", limit - held_shared_bytes())
        return train(*args, **settings)

    rank.train = limited


# -- what came of it -------------------------------------------------------------------------------


def markdown(rows: Sequence[Row]) -> str:
    """Return what the page says."""
    died = sum(not row.fits for row in rows)
    wasted = sum(not row.dies_below for row in rows)
    told = (
        f"{machine()} {len(rows)} points, {NUM_RANKS} ranks each, margin {MARGIN:.0%}. Of those that fit, {died} died. "
        f"At {WASTE:.0%} less than the peak and its margin, {wasted} trained all the same. Models, batch x tokens and "
        "MiB that fit: "
    )
    by_shape = [[row for row in rows if row.name.startswith(f"{shape},")] for shape in SHAPES]
    return wrapped(f"{told}{'; '.join(_of_shape(each) for each in by_shape if each)}.")


def _of_shape(rows: Sequence[Row]) -> str:
    limits = [row.limit_bytes / MIB for row in rows]
    shape, _, _ = rows[0].name.rpartition(",")
    return f"{shape}, {min(limits):.0f}–{max(limits):.0f}"


def cells(rows: Sequence[Row]) -> list[Sequence[str]]:
    """Return every row, below the names of the columns."""
    found: list[Sequence[str]] = [
        ("point", "peak, MiB", "fits, MiB", "trains", "refused, MiB", "dies")
    ]
    for row in rows:
        sizes = (row.planned_bytes, row.limit_bytes, row.refused_bytes)
        peak, limit, refused = (f"{size / MIB:.1f}" for size in sizes)
        trains, dies = ("yes" if holds else "no" for holds in (row.fits, row.dies_below))
        found.append((row.name, peak, limit, trains, refused, dies))
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int)
    parser.add_argument("--write", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
