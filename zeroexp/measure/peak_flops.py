"""Peak of a rank: the most operations per second that it could compute; it has a name.

    cluster.peak_tflops=400    named: whoever ran it says so
    GPUs of DENSE alone        datasheet: the dense figure for the dtype, without sparsity and without TF32
    any other devices          calibrated: the fastest of some products of matrices, measured on all ranks at once

Utilisation means nothing without the name of the peak that it is a share of, so the two are never apart.
"""

from __future__ import annotations

import time
from statistics import fmean
from typing import Any

import torch

from zeroexp.config.gpus import DENSE, OTHERS
from zeroexp.process import world as worlds
from zeroexp.process.world import World

NUM_TRIALS = 12  # the fastest counts, since whatever else runs only slows a product down
MOST_SECONDS = 0.3  # after which a size is not tried again: a finished run waits for it
# Rows of square matrices. A product of the largest takes a hundredth of a second, and up to seconds in bf16 on a CPU
# without instructions for it, where the smallest is four times as fast.
SIZES = {"cpu": [64, 256, 768], "cuda": [8192]}


def peak_flops(
    world: World, dtype: torch.dtype, named_tflops: float | None = None
) -> dict[str, Any]:
    """Return the peak of a rank that computes in `dtype`, as fields of RunSummary; all ranks call it together.

    Nothing where a rank can not measure it, which prints why: a run whose last step is done loses no result for it.

    named_tflops: what the config says, which counts before all else.
    """
    if named_tflops is not None:
        return _fields(1e12 * named_tflops, "named", f"cluster.peak_tflops={named_tflops:g}")
    # All ranks decide alike, also where their GPUs differ, and measure at once: those that share cores slow one another
    # down as in training.
    names = worlds.gather_objects(_device_name(world))
    devices = " and ".join(dict.fromkeys(names))
    peaks = [peak for name in names if (peak := datasheet(name, dtype))]
    if len(peaks) == world.size:
        return _fields(fmean(peaks), "datasheet", f"{devices}, dense {_word(dtype)}")
    try:
        mine = measure_peak_flops(world, dtype)
    except Exception as error:  # no memory for it, or no such product in this dtype
        print(f"rank {world.rank}: utilisation is unknown, since no product was measured: {error}")
        mine = None
    measured = [one for one in worlds.gather_objects(mine) if one is not None]
    if len(measured) < world.size:
        return {}
    return _fields(fmean(measured), "calibrated", _product(world, dtype, devices))


def _fields(flops_per_second: float, source: str, name: str) -> dict[str, Any]:
    """Return the most operations per second of one rank, where that is from, and what it is the peak of."""
    return {
        "peak_flops_per_second": flops_per_second,
        "peak_flops_source": source,
        "peak_flops_name": name,
    }


def datasheet(device: str, dtype: torch.dtype) -> float | None:
    """Return the dense peak of a device whose data sheet is known here, by its name; else None."""
    for name, teraflops in DENSE.items():
        more = device.removeprefix(name).replace("-", " ")
        is_other = OTHERS.intersection(more.split())
        if device.startswith(name) and more[:1] in ("", " ") and not is_other:
            return 1e12 * teraflops[_word(dtype)] if _word(dtype) in teraflops else None
    return None


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure_peak_flops(world: World, dtype: torch.dtype) -> float:
    rates: list[float] = []
    for size in SIZES.get(world.device.type, SIZES["cpu"]):
        # Of random values, see calibrate/rates.py; the last checkpoint has the states of the run's own generators.
        drawn = torch.Generator(world.device).manual_seed(0)
        left, right = (
            torch.randn(size, size, dtype=dtype, device=world.device, generator=drawn)
            for _ in range(2)
        )
        seconds: list[float] = []
        while len(seconds) < NUM_TRIALS and sum(seconds) < MOST_SECONDS:
            seconds.append(_seconds(left, right))
        rates.append(2 * size**3 / min(seconds))
    return max(rates)


def _product(world: World, dtype: torch.dtype, devices: str) -> str:
    """Say what was measured, and on what; not of which size, since noise picks one, and points are compared by name."""
    word = _word(dtype)
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks at once"
    return f"fastest product of matrices in {word}, {ranks}, {devices}"


def _device_name(world: World) -> str:
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} {'thread' if threads == 1 else 'threads'} a rank"


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    began = time.perf_counter()
    product = left @ right
    if product.device.type == "cuda":
        torch.cuda.synchronize(product.device)
    return time.perf_counter() - began
