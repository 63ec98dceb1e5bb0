"""`python -m zeroexp.calibrate`: measure this machine once, for the seconds that plans estimate.

Measured are the rate of products by dtype and size, of memory, the host's time for an operation, and what a reduction
costs between two ranks of this machine, by transport and size. Then small models train for a few steps, and what the
rates miss of their seconds becomes a factor for each thing that seconds are spent on. All this takes about a minute
and is kept in outputs/links/calibration.json, beside what runs have measured of links. It is of this machine's CPU: a
plan for GPUs uses tables and says "not calibrated".

--outputs FOLDER   instead of outputs/
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from zeroexp.calibrate.factors import fit_factors
from zeroexp.calibrate.on_ranks import NUM_RANKS, on_ranks
from zeroexp.calibrate.practice import practise
from zeroexp.calibrate.rates import measure_rates
from zeroexp.comm.tuning import PROBED_BYTES, fit_link
from zeroexp.plan.speed import Calibration, calibrated_speed, calibration_path, save, this_machine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--outputs", type=Path, default=Path("outputs"))
    outputs: Path = parser.parse_args().outputs
    torch.set_num_threads(1)
    began = time.perf_counter()
    found = calibrate()
    path = calibration_path(outputs)
    try:
        save(found, path)
    except OSError as error:
        print(f"zeroexp: --outputs {outputs}: {error}", file=sys.stderr)
        return 2
    print(_summary_lines(found))
    print(f"kept in {path}, after {time.perf_counter() - began:.0f} s")
    return 0


def calibrate() -> Calibration:
    """Measure this machine."""
    found = rates()
    return replace(found, factors=fit_factors(practise(calibrated_speed(found, "direct"))))


def rates() -> Calibration:
    """Measure what each thing takes by itself; there are no factors yet."""
    found = on_ranks(measure_rates)
    moves = found.pop("moves")
    links = {name: fit_link(list(PROBED_BYTES), seconds) for name, seconds in moves.items()}
    return Calibration(
        **found,
        machine=this_machine(),
        torch=torch.__version__,
        # A reduction of b bytes sends the part of b that the peers own.
        links={
            name: [link.latency_seconds, link.bytes_per_second * (NUM_RANKS - 1) / NUM_RANKS]
            for name, link in links.items()
        },
        moves={
            name: {str(size): each for size, each in zip(PROBED_BYTES, seconds, strict=True)}
            for name, seconds in moves.items()
        },
    )


def _summary_lines(found: Calibration) -> str:
    products = ", ".join(
        f"{name} {max(rates.values()) / 1e9:.1f}" for name, rates in found.products.items()
    )
    lines = [
        f"machine     {found.machine}",
        f"products    {products} Gflop/s",
        f"memory      {found.bytes_per_second / 1e9:.1f} GB/s",
        f"launch      {1e6 * found.launch_seconds:.1f} us",
    ]
    for name, (latency, rate) in found.links.items():
        lines.append(f"{name:12}{1e6 * latency:.0f} us, {rate / 1e9:.2f} GB/s sent")
    lines.append("in a step, times the above:")
    lines += [f"  {name:28}{factor:6.2f}" for name, factor in found.factors.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
