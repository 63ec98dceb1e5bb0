"""How far is a plan from what a run measures?

    python -m benchmarks.accuracy bytes     model states and traffic of small models: closed form = rehearsal = run,
                                            number by number
    python -m benchmarks.accuracy peaks     the peak of the fullest rehearsed rank beside the most that a rank held
    python -m benchmarks.accuracy seconds   this machine is calibrated; then points that the calibration never used are
                                            run, in rounds, and their fastest step stands beside what was predicted
                                            before. The machine must have nothing else to do

--points N       the first N points of each table
--rounds N       how often each point runs for its seconds
--within N       begins no round that would end after N seconds
--keep FILE      keeps predictions and rounds there, and goes on with those of an earlier run
--write FILE     the page whose section is replaced; every point goes into benchmarks/measured/
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

from benchmarks.real_runs import config_of, step_seconds_of, summary_of
from benchmarks.table import grid, machine, tell
from zeroexp.calibrate.__main__ import calibrate
from zeroexp.config.job_shape import JobShape
from zeroexp.config.keys import Config
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.machines import Machines
from zeroexp.plan.outcome import RankPeak, RehearsedPeaks, plan_point
from zeroexp.plan.peak import rehearse_point
from zeroexp.plan.rehearse import rehearse
from zeroexp.plan.sent_bytes import EngineForm
from zeroexp.plan.speed import Speed, calibrated_speed
from zeroexp.report.markdown import wrapped

MIB = 1 << 20
NUM_RANKS, NUM_ROUNDS = 2, 8
LEAST_SECONDS, LEAST_STEPS = 4.0, 8  # of a point in a round
CLEAR = 0.03  # points whose steps differ by less are not compared
AIM_MEAN, AIM_WORST, AIM_PAIRS = 0.035, 0.08, 0.95
AIM_PEAK_MIB, AIM_PEAK_SHARE = 1.0, 0.001  # whichever is more

LLAMA = "model=small data=synthetic data.vocab_size=2048"
SHAPES = {
    "14M, 1 x 64": f"{LLAMA} model.hf_config.num_hidden_layers=4 data.seq_len=64",
    "14M, 4 x 128": f"{LLAMA} model.hf_config.num_hidden_layers=4 data.seq_len=128 "
    "data.micro_batch_size=4",
    "25M, 2 x 96": f"{LLAMA} data.seq_len=96 data.micro_batch_size=2",
    "7M, 4 x 64": f"{LLAMA} model.hf_config.hidden_size=384 model.hf_config.intermediate_size=1024 "
    "model.hf_config.num_attention_heads=6 model.hf_config.num_key_value_heads=3 "
    "model.hf_config.num_hidden_layers=4 data.seq_len=64 data.micro_batch_size=4",
}
ROWS = [
    *(("zero3", "buffer"), ("zero1", "buffer"), ("ddp", "buffer"), ("zero2", "buffer")),
    *(("zero3", "parameter"), ("zero2", "tensor"), ("zero1", "parameter")),
]
TORCH_ROWS = [("ddp", "torch"), ("zero1", "torch"), ("zero2", "torch"), ("zero3", "torch")]
LARGE = {
    "135M, 1 x 64": "model=smollm2_135m data=synthetic data.vocab_size=49152 data.seq_len=64",
}
LARGE_ROWS = [("zero3", "buffer"), ("zero1", "parameter"), ("zero2", "torch")]

SMALL = {
    "tiny": "model=tiny data=synthetic data.seq_len=32",
    "gpt2_tiny": "model=gpt2_tiny data=synthetic data.seq_len=32",
    "mlp_tiny": "model=mlp_tiny data=vectors data.seq_len=16",
}
STAGES = ("ddp", "zero1_allreduce", "zero1", "zero2", "zero3")
LAYOUTS = ("buffer", "tensor", "parameter")
PRECISIONS = ("fp32", "bf16_master")
FEW_STEPS = "train.warmup_steps=2 train.steps=2"
PEAK_MICROBATCHES = 4  # more than a plan rehearses


@dataclass(frozen=True)
class Timed:
    """The seconds of one point."""

    name: str
    shape: str
    predicted: float
    rounds: list[list[float]] = field(default_factory=list[list[float]])  # seconds of each step

    @property
    def medians(self) -> list[float]:
        """The median step of each round."""
        return [median(each) for each in self.rounds]

    @property
    def measured(self) -> float:
        """The fastest step of all rounds."""
        return min(map(min, self.rounds))

    @property
    def error(self) -> float:
        """The error of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def spread(self) -> float:
        """By how much the rounds differ, as a share of the fastest one."""
        return max(self.medians) / min(self.medians) - 1


@dataclass(frozen=True)
class Peaked:
    """The peak of one point."""

    name: str
    planned: RankPeak  # of the fullest rehearsed rank
    measured_bytes: float  # of the fullest rank, in any step

    @property
    def error(self) -> float:
        """Bytes that were measured beyond those planned."""
        return self.measured_bytes - self.planned.num_bytes

    @property
    def allowed(self) -> float:
        """The error that is aimed at, in bytes."""
        return max(AIM_PEAK_MIB * MIB, AIM_PEAK_SHARE * self.measured_bytes)


Point = TypeVar("Point", Timed, Peaked)


@dataclass(frozen=True)
class Compared:
    """The bytes of one small model's points: how many numbers were compared, and those that differ."""

    model: str
    num_points: int
    num_rehearsed: int
    num_measured: int
    differ: list[str]


def main() -> int:
    args = _arguments()
    compared: list[Compared] = []
    if args.what == "bytes":
        points = list(product(SMALL, STAGES, LAYOUTS, PRECISIONS))[: args.points]
        compared = compare_bytes(points)
        text, rows = bytes_told(compared), list[Sequence[str]]()
    elif args.what == "peaks":
        peaked = [*product(SHAPES, [*ROWS, *TORCH_ROWS]), *product(LARGE, LARGE_ROWS)]
        peaks = measure_peaks(peaked[: args.points])
        text, rows = peaks_told(peaks), peak_cells(peaks)
    else:
        names = list(product(SHAPES, ROWS))[: args.points]
        timed = time_points(names, args.rounds, args.within, args.keep)
        text, rows = seconds_told(timed), seconds_cells(timed)
    tell(args.what, text, rows, args.write)
    return 1 if any(each.differ for each in compared) else 0


# -- bytes -----------------------------------------------------------------------------------------


def compare_bytes(points: Sequence[tuple[str, str, str, str]]) -> list[Compared]:
    """Compare closed form, rehearsal and run of these points (model, stage, layout, precision)."""
    found: list[Compared] = []
    for model in dict.fromkeys(each[0] for each in points):
        mine = [each[1:] for each in points if each[0] == model]
        rehearsals, runs, differ = 0, 0, list[str]()
        for stage, layout, precision in mine:
            words = f"strategy={stage} strategy.implementation={layout} precision={precision}"
            _tell(f"{model} {words}")
            config = config_of(f"{SMALL[model]} {words} {FEW_STEPS} world_size={NUM_RANKS}")
            in_rehearsal, in_run = rehearsed_errors(config), summary_of(config).plan_errors
            rehearsals, runs = rehearsals + len(in_rehearsal), runs + len(in_run)
            wrong = [name for name, error in {**in_rehearsal, **in_run}.items() if error]
            differ += [f"{model} {words}: {name}" for name in wrong]
        found.append(Compared(model, len(mine), rehearsals, runs, differ))
    return found


def rehearsed_errors(config: Config) -> dict[str, int]:
    """Return what the rehearsed ranks hold at each moment and send, less what the closed forms say, by name."""
    form = form_of(config, build_on_meta(config), "native")  # a rehearsal moves as GPUs do
    assert isinstance(form, EngineForm)
    found: dict[str, int] = {}
    for rank in {0, config.world_size - 1}:
        each = rehearse(config, rank, reads=True)
        for moment, held in each.held_bytes.items():
            expected = form.held_bytes(moment, each.rank)
            found |= {f"{each.rank} {moment} {kind}": held[kind] - expected[kind] for kind in held}
        sent = {k: v for k, v in each.traffic.bytes_by_kind.items() if k != "loss"}
        expected = form.traffic(each.rank).bytes_by_kind
        kinds = {*sent, *expected}
        found |= {f"{each.rank} {k}": sent.get(k, 0) - expected.get(k, 0) for k in kinds}
    return found


def measure_peaks(names: Sequence[tuple[str, tuple[str, str]]]) -> list[Peaked]:
    """Rehearse every point, and run it for a few steps."""
    found: list[Peaked] = []
    for shape, row in names:
        name = name_of(shape, row)
        _tell(name)
        config = _config(shape, row, FEW_STEPS, PEAK_MICROBATCHES)
        planned = rehearse_point(plan_point(config, None, "cpu")).fullest
        peak = summary_of(config).memory.peak
        if peak is None:
            raise SystemExit("peaks are not counted here; a C++ compiler is needed")
        found.append(Peaked(name, planned, peak.fullest))
    return found


# -- seconds ---------------------------------------------------------------------------------------


def time_points(
    names: Sequence[tuple[str, tuple[str, str]]], num_rounds: int, within: float, kept: Path | None
) -> list[Timed]:
    """Calibrate and predict every point, and then run all of them in rounds.

    kept: where predictions and rounds are kept; what another run left there is gone on with.
    """
    began, took = time.monotonic(), 0.0
    timed = _read(kept, names) if kept is not None and kept.exists() else _predicted(names)
    for number in range(num_rounds):
        if number and time.monotonic() + took > began + within:
            break
        _tell(f"round {number + 1} of {num_rounds}")
        took = -time.monotonic()
        for name, point in zip(names, timed, strict=True):
            steps = f"train.warmup_steps=2 train.steps={num_steps(point.predicted)}"
            point.rounds.append(step_seconds_of(_config(*name, steps)))
        took += time.monotonic()
        if kept is not None:
            kept.write_text(json.dumps([asdict(point) for point in timed]), encoding="utf-8")
    return timed


def _predicted(names: Sequence[tuple[str, tuple[str, str]]]) -> list[Timed]:
    _tell("calibrating")
    machines = Machines("cpu", JobShape(1, NUM_RANKS))
    speed = calibrated_speed(calibrate(), machines, "direct")
    _tell("predicting")
    return [
        Timed(name_of(*name), name[0], predict(_config(*name, FEW_STEPS), speed).step_seconds[1])
        for name in names
    ]


def _read(kept: Path, names: Sequence[tuple[str, tuple[str, str]]]) -> list[Timed]:
    timed = [Timed(**point) for point in json.loads(kept.read_text(encoding="utf-8"))]
    if [each.name for each in timed] != [name_of(*name) for name in names]:
        raise SystemExit(f"--keep {kept}: has other points; name another file")
    return timed


def name_of(shape: str, row: tuple[str, str]) -> str:
    return f"{shape}, {' '.join(row)}"


def num_steps(step_seconds: float) -> int:
    """Return how many steps of a point are measured in a round, so that each is as likely to meet a quiet moment."""
    return max(LEAST_STEPS, round(LEAST_SECONDS / step_seconds))


def predict(config: Config, speed: Speed) -> RehearsedPeaks:
    planned = plan_point(config, None, "cpu")
    return rehearse_point(planned, ranks=[planned.outcome.fullest_rank], speed=speed)


def _config(shape: str, row: tuple[str, str], steps: str, num_microbatches: int = 1) -> Config:
    samples = num_microbatches * NUM_RANKS * int(shape.split(", ")[1].split(" x ")[0])
    words = f"strategy={row[0]} strategy.implementation={row[1]} data.global_batch_size={samples}"
    return config_of(f"{(SHAPES | LARGE)[shape]} {words} {steps} world_size={NUM_RANKS}")


def named_right(timed: Sequence[Timed]) -> tuple[int, int]:
    """Return of how many pairs that differ clearly the faster one is named right, and how many there are."""
    right = num_pairs = 0
    for one, other in combinations(timed, 2):
        slow, fast = sorted((one, other), key=lambda each: -each.measured)
        if slow.measured > (1 + CLEAR) * fast.measured:
            num_pairs += 1
            right += slow.predicted > fast.predicted
    return right, num_pairs


# -- what came of it -------------------------------------------------------------------------------


def bytes_told(compared: Sequence[Compared]) -> str:
    """Return what the page says of model states and traffic."""
    differ = [name for each in compared for name in each.differ]
    points = sum(c.num_points for c in compared)
    rehearsed = sum(c.num_rehearsed for c in compared)
    told = (
        f"{machine()} {points} points of {', '.join(c.model for c in compared)}: of {rehearsed} numbers of "
        f"rehearsals and {sum(c.num_measured for c in compared)} of runs {len(differ)} differ."
    )
    return "\n\n".join([wrapped(told), *(wrapped(f"* {name}") for name in differ)])


def peaks_told(peaks: Sequence[Peaked]) -> str:
    """Return what the page says of peaks."""
    errors = [abs(each.error) / MIB for each in peaks]
    outside = sum(abs(each.error) > each.allowed for each in peaks)
    told = (
        f"{machine()} {len(peaks)} points. Error: mean {fmean(errors):.2f} MiB, worst {max(errors):.2f} MiB; {outside} "
        f"beyond the aim, which is {AIM_PEAK_MIB:g} MiB or {AIM_PEAK_SHARE:.1%} of the peak, whichever is more."
    )
    rows: list[list[str]] = []
    for shape, mine in _by_shape(peaks).items():
        planned = [each.planned.num_bytes / MIB for each in mine]
        worst = max((each.error for each in mine), key=abs) / 1024
        rows.append([shape, f"{len(mine)}", f"{min(planned):.1f}–{max(planned):.1f}"])
        rows[-1].append(f"{worst:+,.1f}")
    head = ("model, batch x tokens", "points", "planned, MiB", "worst error, KiB")
    return f"{wrapped(told)}\n\n{grid(head, rows)}"


def peak_cells(peaks: Sequence[Peaked]) -> list[Sequence[str]]:
    """Return every point, below the names of the columns."""
    rows: list[Sequence[str]] = [
        ("point", "planned, MiB", "measured, MiB", "error, KiB", "what makes it")
    ]
    for each in peaks:
        planned, measured = each.planned.num_bytes / MIB, each.measured_bytes / MIB
        numbers = [f"{planned:.1f}", f"{measured:.1f}", f"{each.error / 1024:+,.1f}"]
        rows.append([each.name, *numbers, _terms(each.planned.by_kind)])
    return rows


def _by_shape(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each shape, which their names begin with."""
    found: dict[str, list[Point]] = {}
    for each in points:
        found.setdefault(each.name.rpartition(", ")[0] or each.name, []).append(each)
    return found


def seconds_told(timed: Sequence[Timed]) -> str:
    """Return what the page says of seconds."""
    errors = [abs(each.error) for each in timed]
    by_shape = _by_shape(timed)
    pairs, inside = named_right(timed), [named_right(each) for each in by_shape.values()]
    same = sum(right for right, _ in inside), sum(number for _, number in inside)
    told = (
        f"{len(timed)} points. Error: mean {fmean(errors):.1%} (aim {AIM_MEAN:.1%}), worst {max(errors):.1%} "
        f"(aim {AIM_WORST:.0%}). Of pairs that differ by more than {CLEAR:.0%}, the faster is named right in "
        f"{_share(pairs)} (aim {AIM_PAIRS:.0%}); of pairs of one shape in {_share(same)}. The median step of a point "
        f"differs between its rounds by {median(each.spread for each in timed):.0%} (median of the points), and by "
        f"{max(each.spread for each in timed):.0%} at most."
    )
    rows: list[list[str]] = []
    for shape, mine in by_shape.items():
        steps, wrong = [1e3 * each.measured for each in mine], [abs(each.error) for each in mine]
        rows.append([shape, f"{len(mine)}", f"{min(steps):.0f}–{max(steps):.0f}"])
        rows[-1] += [f"{fmean(wrong):.1%}", f"{max(wrong):.1%}"]
    where = f"{machine()} {len(timed[0].rounds)} rounds."
    head = ("model, batch x tokens", "points", "fastest steps, ms", "mean error", "worst")
    return f"{wrapped(f'{where} {told}')}\n\n{grid(head, rows)}"


def seconds_cells(timed: Sequence[Timed]) -> list[Sequence[str]]:
    """Return every point, below the names of the columns."""
    head = ("point", "predicted, ms", "fastest step, ms", "error", "median steps of the rounds, ms")
    rows: list[Sequence[str]] = [head]
    for each in timed:
        numbers = [f"{1e3 * seconds:.1f}" for seconds in (each.predicted, each.measured)]
        medians = f"{1e3 * min(each.medians):.0f}–{1e3 * max(each.medians):.0f}"
        rows.append([each.name, *numbers, f"{each.error:+.1%}", medians])
    return rows


def _share(counts: tuple[int, int]) -> str:
    right, number = counts
    return f"{right} of {number} ({right / number:.0%})" if number else "none of none"


def _terms(by_kind: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {size / MIB:.1f}" for kind, size in by_kind.items() if size >= MIB)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("bytes", "peaks", "seconds"))
    parser.add_argument("--points", type=int)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--within", type=float, default=float("inf"))
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--write", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
