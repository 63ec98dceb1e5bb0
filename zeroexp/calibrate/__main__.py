"""`zeroexp calibrate`: measure this machine once, for the seconds that plans estimate.

Measured are the rate of products by dtype and size, of memory, the host's time for an operation, and what a reduction
costs between ranks of this machine, by transport and size. On CPUs these are two ranks; then small models train for a
few steps, and what the rates miss of their seconds becomes a factor for each thing that seconds are spent on. All this
takes about two minutes and is kept in outputs/links/calibration.json, beside what runs have measured of links.

--device cuda measures all GPUs of this machine, one rank on each: their rates and, of two or more, their links through
NCCL, without factors. It is kept in outputs/links/calibration-cuda.json, from which any machine may plan for such GPUs:
copy it there. Links between nodes are not measured; those of a plan are a named network's.

--outputs FOLDER   instead of outputs/
--json             what is kept, on standard output
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from zeroexp.calibrate.rates import measure_rates
from zeroexp.calibrate.step_factors import NUM_RANKS, fit_factors, run_small_steps
from zeroexp.check.rules_machine import num_gpus
from zeroexp.config.job_shape import JobShape
from zeroexp.config.keys import ConfigError
from zeroexp.measure.machine_load import begin_load
from zeroexp.plan.machines import Machines
from zeroexp.plan.speed import (
    Calibration,
    calibrated_speed,
    calibration_path,
    save,
    these_gpus,
    this_machine,
)
from zeroexp.process.json_output import answer, parser_of
from zeroexp.process.on_ranks import on_ranks
from zeroexp.report.statistics import SPOILT


def main() -> int:
    return answer(_measure)


def _measure(told: list[str] | None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--outputs", type=Path, default=Path("outputs"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    if args.device == "cuda" and not (num_gpus() and torch.backends.cuda.is_built()):
        problem = "torch finds no GPU here; run it on a machine that has one"
        raise ConfigError(f"--device cuda: {problem}")
    torch.set_num_threads(1)
    began, other_cores = time.perf_counter(), begin_load(os.getpid())
    calibration = calibrate() if args.device == "cpu" else rates("cuda", num_gpus())
    path = calibration_path(args.outputs, args.device)
    try:
        save(calibration, path)
    except OSError as error:
        raise ConfigError(f"--outputs {args.outputs}: {error}") from error
    if told is not None:
        told.append(path.read_text(encoding="utf-8"))
    print(_summary_lines(calibration))
    print(f"kept in {path}, after {time.perf_counter() - began:.0f} s")
    others, cores = other_cores(), os.cpu_count() or 1
    if others is not None and others > SPOILT * cores:
        used = f"others used {others:.1f} of {cores} cores meanwhile"
        print(f"zeroexp: {used}, so the rates are too low; run it again alone", file=sys.stderr)
    return 0


def calibrate() -> Calibration:
    """Measure the CPU of this machine."""
    measured = rates()
    speed = calibrated_speed(measured, Machines("cpu", JobShape(1, NUM_RANKS)), "direct")
    return replace(measured, factors=fit_factors(run_small_steps(speed)))


def rates(device: str = "cpu", num_ranks: int = NUM_RANKS) -> Calibration:
    """Measure what each thing takes by itself; there are no factors yet."""
    measured, *_ = on_ranks(measure_rates, num_ranks, device=device)
    machine = this_machine() if device == "cpu" else these_gpus()
    return Calibration(machine, torch.__version__, **measured, device=device)


def _summary_lines(calibration: Calibration) -> str:
    products = ", ".join(
        f"{name} {max(rates.values()) / 1e9:.1f}" for name, rates in calibration.products.items()
    )
    lines = [
        f"machine     {calibration.machine}",
        f"products    {products} Gflop/s",
        f"memory      {calibration.bytes_per_second / 1e9:.1f} GB/s",
        f"launch      {1e6 * calibration.launch_seconds:.1f} us",
    ]
    for name, (latency, rate) in calibration.links.items():
        lines.append(f"{name:12}{1e6 * latency:.0f} us, {rate / 1e9:.2f} GB/s sent")
    if calibration.factors:
        lines.append("in a step, times the above:")
    lines += [f"  {name:28}{factor:6.2f}" for name, factor in calibration.factors.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
