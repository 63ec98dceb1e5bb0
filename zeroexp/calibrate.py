"""`python -m zeroexp.calibrate`: measure this machine once, for the seconds that plans estimate.

Measured are the rate of products by dtype and size, of memory, of the optimizer, the host's time for an operation, and
what a reduction costs between two ranks of this machine, by transport and size. It takes less than a minute and is kept
in outputs/links/calibration.json, beside what runs have measured of links. It is of this machine's CPU: a plan for GPUs
uses tables and says "not calibrated".

--outputs FOLDER   instead of outputs/
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zeroexp import world as worlds
from zeroexp.comm.tuning import PROBED_BYTES, fit_link, measure_moves
from zeroexp.plan.speed import Calibration, calibration_path, save, this_machine

SIZES = (64, 256, 768)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_BYTES, NUM_ELEMENTS, NUM_LAUNCHES = 64 << 20, 1 << 22, 2000
NUM_TRIALS = 5
NUM_RANKS = 2
TRANSPORTS = ("direct", "gloo")


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
    moves = {transport: _measure_moves(transport) for transport in TRANSPORTS}
    links = {name: fit_link(list(PROBED_BYTES), list(seconds)) for name, seconds in moves.items()}
    return Calibration(
        machine=this_machine(),
        torch=torch.__version__,
        products={name: _measure_products(dtype) for name, dtype in DTYPES.items()},
        bytes_per_second=_measure_memory(),
        optimizer_elements_per_second=_measure_optimizer(),
        launch_seconds=_measure_launch(),
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


def _measure_products(dtype: torch.dtype) -> dict[str, float]:
    rates: dict[str, float] = {}
    for size in SIZES:
        left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        rates[str(size)] = 2 * size**3 / _least_seconds(lambda left=left, right=right: left @ right)
    return rates


def _measure_memory() -> float:
    """Return the bytes that an addition reads and writes in a second."""
    source = torch.ones(NUM_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * NUM_BYTES / _least_seconds(lambda: torch.add(source, 1.0, out=target))


def _measure_optimizer() -> float:
    parameter = torch.nn.Parameter(torch.ones(NUM_ELEMENTS))
    parameter.grad = torch.ones_like(parameter)
    adamw = torch.optim.AdamW([parameter], fused=True)
    return NUM_ELEMENTS / _least_seconds(adamw.step)


def _measure_launch() -> float:
    one = torch.ones(1)

    def launches() -> None:
        for _ in range(NUM_LAUNCHES):
            torch.add(one, one)

    return _least_seconds(launches) / NUM_LAUNCHES


def _least_seconds(do: Callable[[], object]) -> float:
    """Return the least seconds of a few trials; the first runs cold."""
    seconds: list[float] = []
    for _ in range(1 + NUM_TRIALS):
        began = time.perf_counter()
        do()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def _measure_moves(transport: str) -> list[float]:
    """Return the seconds of reductions of PROBED_BYTES between two ranks of this machine."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        ranks = [
            context.Process(target=_rank, args=(index, f"file://{folder}/meet", transport, results))
            for index in range(NUM_RANKS)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            raise RuntimeError(f"a rank that measures {transport} ended with an error, see above")
        return results.get()


def _rank(index: int, rendezvous: str, transport: str, results: Any) -> None:
    torch.set_num_threads(1)
    place = worlds.RankInfo(index, NUM_RANKS, index)
    os.environ.update(worlds.environment_of_rank(place))
    os.environ["ZEROEXP_RENDEZVOUS"] = rendezvous
    with worlds.joined_process_group() as world:
        seconds = measure_moves(world, transport=transport)
        if index == 0:
            results.put(seconds)


def _summary_lines(found: Calibration) -> str:
    products = ", ".join(
        f"{name} {max(rates.values()) / 1e9:.1f}" for name, rates in found.products.items()
    )
    lines = [
        f"machine     {found.machine}",
        f"products    {products} Gflop/s",
        f"memory      {found.bytes_per_second / 1e9:.1f} GB/s",
        f"optimizer   {found.optimizer_elements_per_second / 1e6:.0f} million elements/s",
        f"launch      {1e6 * found.launch_seconds:.1f} us",
    ]
    for name, (latency, rate) in found.links.items():
        lines.append(f"{name:12}{1e6 * latency:.0f} us, {rate / 1e9:.2f} GB/s sent")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
