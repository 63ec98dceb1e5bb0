"""A rank's speed and that of its links is measured by `zeroexp calibrate`, or is a prior from tables.

A calibration of CPUs holds for the machine that it was made on. One of GPUs holds wherever their file is, since plans
are made on machines without any; the links between their nodes are a prior's all the same.

A prior is labelled "not calibrated". That of GPUs is their data sheet (config/gpus.py), times the shares below that
large models usually reach, and the figures of a named network. That of CPUs is what a core of a Xeon did.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import exp, isfinite, log
from pathlib import Path

import numpy as np
import torch

from zeroexp.config.gpus import GPUS, LINK_SHARE, NETWORKS, USUAL_GPU, USUAL_NETWORK, Gpu, Network
from zeroexp.config.job_shape import JobShape
from zeroexp.config.keys import Config, ConfigError
from zeroexp.measure.formats import from_json
from zeroexp.measure.tcp_bytes import payload_rate
from zeroexp.plan.machines import Machines, processor_name
from zeroexp.process.durable import replace_durably

NOT_CALIBRATED = "not calibrated"
# The share of data sheets that products of large matrices and copies reach.
PRODUCT_SHARE, MEMORY_SHARE = 0.65, 0.85
LAUNCH_SECONDS = 5e-6  # of the host, for one operation on a GPU
HOST_BYTES_PER_SECOND = 25e9  # of one rank of several: PCIe 4.0 x16, and its share of host memory
CPU = "a core of a Xeon of 2.5 GHz"
CPU_FLOPS = 160e9  # the most it computes: two products of 16 numbers a cycle
# The smallest dimension of a product, and the share of this that was reached.
CPU_PRODUCT_SHARES = {1: 0.03, 16: 0.2, 64: 0.45, 128: 0.55}
CPU_DTYPE_SHARES = {"float32": 1.0, "bfloat16": 0.25}  # without instructions for bf16
CPU_BYTES_PER_SECOND, CPU_LAUNCH_SECONDS = 9e9, 20e-6  # of one core
# Transport -> seconds of one move, bytes per second; gloo's are those between processes of one host.
CPU_LINKS = {"direct": (5e-4, 1.9e9), "gloo": (7e-4, 0.9e9)}
UNSURE, UNSURE_CALIBRATED = 0.35, 0.15  # half the width of a range


@dataclass(frozen=True)
class Speed:
    """A speed is what one rank does in a second, and what a move costs it."""

    label: str
    # dtype -> smallest dimension of a product -> floating-point operations; between two along a line of logarithms,
    # outside as at the end
    product_rates: dict[str, dict[int, float]]
    bytes_per_second: float  # of memory
    launch_seconds: float  # of one operation
    latency_seconds: float  # of one move
    link_bytes_per_second: float  # of what this rank sends
    # of a GPU's host: updates there, and what goes over the bus; None: the device is the host
    host_bytes_per_second: float | None = None
    # of moves of one kind, where it differs: those over other ranks than the group's
    rates_by_kind: Mapping[str, float] = field(default_factory=dict[str, float])
    moves_on_wait: bool = False  # moves do their work in the wait, so that nothing overlaps
    products_read_memory: bool = False  # rates of products are those of operands from memory
    overlaps_launch: bool = False  # the host of a GPU launches ahead of it
    unsure: float = UNSURE
    # What a second by these tables takes in a real step, by what it is spent on (timing.py). Without any, whichever of
    # an operation's bytes and products takes longer hides the other.
    factors: dict[str, float] = field(default_factory=dict[str, float])

    def link_rate(self, kind: str) -> float:
        return self.rates_by_kind.get(kind, self.link_bytes_per_second)

    def product_rate(self, dtype: torch.dtype, smallest: int | None = None) -> float:
        """Return the operations of a product whose smallest dimension is `smallest`; None: of the best shape."""
        rates = self.product_rates.get(str(dtype).removeprefix("torch."))
        rates = rates or min(self.product_rates.values(), key=lambda each: max(each.values()))
        if smallest is None:
            return max(rates.values())
        sizes = sorted(rates)
        of_sizes = np.log([rates[size] for size in sizes])
        return exp(np.interp(log(max(smallest, 1)), np.log(sizes), of_sizes))

    def seconds_of(self, spent: Mapping[str, float]) -> float:
        """Return what work takes that takes `spent` by the tables."""
        return sum(self.factors.get(name, 1.0) * seconds for name, seconds in spent.items())


@dataclass(frozen=True)
class Calibration:
    """A calibration is what was measured on one machine. Sizes are bytes, seconds are those of the slower rank."""

    machine: str
    torch: str
    # Dtype -> rows that are multiplied by matrices from memory -> operations per second.
    products: dict[str, dict[str, float]]
    bytes_per_second: float
    launch_seconds: float
    links: dict[str, list[float]]  # transport -> latency in seconds, bytes per second
    factors: dict[str, float] = field(default_factory=dict[str, float])  # see Speed
    device: str = "cpu"  # cpu | cuda


def this_machine() -> str:
    """Return the words by which a calibration knows its machine."""
    # Without some of its instructions a machine is another one.
    word = os.environ.get("ONEDNN_MAX_CPU_ISA")
    less = f", ONEDNN_MAX_CPU_ISA={word}" if word else ""
    return f"{processor_name()}, {os.cpu_count()} cores{less}"


def these_gpus() -> str:
    """Return the words by which a calibration knows the GPUs of this machine."""
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def calibration_path(outputs: Path, device: str = "cpu") -> Path:
    """Return where this machine's calibration, or that of GPUs, is kept: beside the links of runs."""
    return outputs / "links" / ("calibration.json" if device == "cpu" else "calibration-cuda.json")


def save(calibration: Calibration, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, (json.dumps(asdict(calibration), indent=1) + "\n").encode())


def load(path: Path) -> Calibration | None:
    """Return the calibration kept at `path`, None where there is none. Raises ConfigError for another machine's CPU."""
    if not path.exists():
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        calibration = from_json(Calibration, kept, "calibration")
        _require_numbers(calibration)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: no calibration ({error}); run zeroexp calibrate again"
        ) from None
    if calibration.device == "cpu" and calibration.machine != this_machine():
        raise ConfigError(
            f"{path}: of another machine ({calibration.machine}; this is {this_machine()}); run zeroexp calibrate "
            "here, or remove it"
        )
    return calibration


def _require_numbers(calibration: Calibration) -> None:
    """Raise ValueError, or what reading raises, unless rates are above 0, and seconds and factors not below."""
    rates = [calibration.bytes_per_second, *(rate for _, rate in calibration.links.values())]
    rates += [rate for by_rows in calibration.products.values() for rate in by_rows.values()]
    seconds = [calibration.launch_seconds, *(latency for latency, _ in calibration.links.values())]
    for value in (*rates, *seconds, *calibration.factors.values()):
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"it has {value} for a rate, a time or a factor")
    if not all(rates):
        raise ValueError("it has a rate of 0")


def speed_of(config: Config, machines: Machines, transport: str) -> Speed:
    """Return the speed of the device's calibration, where there is one and no GPU is named; else a prior's.

    transport: what the engine sends by inside of its groups. The label of a prior says why where there is a
    calibration: it is damaged, or of elsewhere.
    """
    gpu, network = config.cluster.gpu, NETWORKS[config.cluster.network or USUAL_NETWORK]
    speed = prior_speed(machines, transport, GPUS[gpu or USUAL_GPU], network)
    if gpu is None:
        try:
            if calibration := load(calibration_path(Path(config.outputs), machines.device)):
                speed = calibrated_speed(calibration, machines, transport, network)
                speed = replace(speed, label=f"{speed.label}{_unlike_calibrated(config, machines)}")
        except ConfigError as error:
            speed = replace(speed, label=f"{speed.label}; {error}")
    if config.cluster.link is None and (machines.device == "cpu" or machines.shape.nodes == 1):
        return speed
    return _behind_link(speed, config, machines, network)


def _unlike_calibrated(config: Config, machines: Machines) -> str:
    """Return in which ranks differ from those of a calibration; empty for GPUs, and where each has a core."""
    has_cores = machines.shape.ranks_per_node <= len(os.sched_getaffinity(0))
    if machines.device == "cuda" or (has_cores and config.cluster.threads_per_rank == 1):
        return ""
    return f", of one thread and a core for each rank: {NOT_CALIBRATED}"


def _behind_link(speed: Speed, config: Config, machines: Machines, network: Network) -> Speed:
    """Return the speed of ranks that share what leaves their node: cluster.link, or the network of GPUs."""
    per_node, link = machines.shape.ranks_per_node, config.cluster.link
    own = (payload_rate(link) if link else network.node_bytes_per_second) / per_node
    within = speed.rates_by_kind.get("secondary", speed.link_bytes_per_second)

    def rate(inside: float) -> float:
        crossing = 1 - inside
        if link is None:  # GPUs send inside and between at once
            return min(within, own / crossing) if crossing else within
        return 1 / (crossing / own + inside / within)

    inside_group, shares = machines.shares_inside(config)
    return replace(
        speed,
        label=f"{speed.label}; links of {link}" if link else speed.label,
        link_bytes_per_second=rate(inside_group),
        rates_by_kind={kind: rate(inside) for kind, inside in shares.items()},
    )


def calibrated_speed(
    calibration: Calibration,
    machines: Machines,
    transport: str,
    network: Network = NETWORKS[USUAL_NETWORK],
) -> Speed:
    """Return the prior with what was measured in its place; links between nodes of GPUs were not."""
    speed = replace(
        prior_speed(machines, transport, network=network),
        label=f"calibrated on {calibration.machine}",
        product_rates={
            dtype: {int(rows): rate for rows, rate in rates.items()}
            for dtype, rates in calibration.products.items()
        },
        products_read_memory=True,
        bytes_per_second=calibration.bytes_per_second,
        launch_seconds=calibration.launch_seconds,
        unsure=UNSURE_CALIBRATED if machines.device == "cpu" else UNSURE,
        factors=calibration.factors,
    )
    link = calibration.links.get(transport) or calibration.links.get("gloo")
    if link and (machines.device == "cpu" or machines.shape.nodes == 1):
        return replace(speed, latency_seconds=link[0], link_bytes_per_second=link[1])
    if machines.shape == JobShape(1, 1):
        return speed
    inside = {"secondary": link[1]} if link else {}
    return replace(
        speed,
        label=f"{speed.label}; links of {network.name}, {NOT_CALIBRATED}",
        rates_by_kind={**speed.rates_by_kind, **inside},
    )


def prior_speed(
    machines: Machines,
    transport: str,
    gpu: Gpu = GPUS[USUAL_GPU],
    network: Network = NETWORKS[USUAL_NETWORK],
) -> Speed:
    """Return what a core for each rank would do, or a cluster of such GPUs by their data sheets."""
    if machines.device == "cpu":
        return _cpu_prior(transport)
    nodes, rate = machines.shape.nodes, LINK_SHARE * gpu.link_bytes_per_second
    return Speed(
        label=f"{gpu.name}, {network.name}, {NOT_CALIBRATED}",
        product_rates={name: {1: 1e12 * each * PRODUCT_SHARE} for name, each in gpu.tflops.items()},
        bytes_per_second=gpu.memory_bytes_per_second * MEMORY_SHARE,
        host_bytes_per_second=HOST_BYTES_PER_SECOND,
        launch_seconds=LAUNCH_SECONDS,
        latency_seconds=network.latency_seconds + network.hop_seconds * (nodes - 1),
        link_bytes_per_second=min(rate, network.node_bytes_per_second) if nodes > 1 else rate,
        rates_by_kind={"secondary": rate},  # inside of a node
        overlaps_launch=True,
    )


def _cpu_prior(transport: str) -> Speed:
    latency, rate = CPU_LINKS.get(transport, CPU_LINKS["gloo"])
    return Speed(
        label=f"{CPU}, {NOT_CALIBRATED}: run zeroexp calibrate",
        product_rates={
            dtype: {size: CPU_FLOPS * each * share for size, share in CPU_PRODUCT_SHARES.items()}
            for dtype, each in CPU_DTYPE_SHARES.items()
        },
        bytes_per_second=CPU_BYTES_PER_SECOND,
        launch_seconds=CPU_LAUNCH_SECONDS,
        latency_seconds=latency,
        link_bytes_per_second=rate,
        moves_on_wait=transport == "direct",
    )
