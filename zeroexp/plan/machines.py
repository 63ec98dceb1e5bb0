"""A planned run has its ranks on these machines: nodes, ranks on each, and the transport between them. No torch."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroexp.config.job_shape import JobShape, shape_of
from zeroexp.config.keys import Config


@dataclass(frozen=True)
class Machines:
    """The machines a point is planned for."""

    device: str  # cpu | cuda
    shape: JobShape

    @property
    def num_ranks(self) -> int:
        return self.shape.nodes * self.shape.ranks_per_node

    @property
    def transport(self) -> str:
        """The transport that our engine finds there: a word of comm.traits.TRAITS."""
        return self.transports(1)[0]

    def transports(self, replicas: int) -> tuple[str, str]:
        """The transport inside of each of so many groups of ranks, and that between them."""
        size = self.num_ranks // replicas
        return self._transport_of(size, 1), self._transport_of(replicas, size)

    def _transport_of(self, num_ranks: int, apart: int) -> str:
        """The transport of ranks that are `apart` from each other."""
        if self.device == "cuda":
            return "native"
        together = self._on_one_node(num_ranks, apart)
        if together == num_ranks:
            return "direct"
        return "mixed" if together > 1 else "gloo"

    def _on_one_node(self, num_ranks: int, apart: int) -> int:
        """How many of a group's ranks share a node, where they are `apart` from each other."""
        return min(num_ranks, max(1, self.shape.ranks_per_node // apart))

    def share_inside_node(self, num_ranks: int, apart: int = 1) -> float:
        """Return the part of what a rank sends that stays inside its node, the mean over ranks.

        num_ranks: of the group that sends, whose members are `apart` ranks from each other. Between CPUs every rank
        sends as much to each peer. Between GPUs messages go round a ring through all ranks, which leaves each node
        once.
        """
        together = self._on_one_node(num_ranks, apart)
        if together == num_ranks:
            return 1.0
        if self.device == "cuda":
            return (together - 1) / together
        return (together - 1) / (num_ranks - 1)

    def shares_inside(
        self, replicas: int, *, shares_updates: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Return the part inside of a node of what a rank sends in its group, and of moves over other ranks by kind."""
        size, of_all = self.num_ranks // replicas, self.share_inside_node(self.num_ranks)
        return self.share_inside_node(size), {
            **({"matrices": of_all} if shares_updates else {}),
            "replicas": self.share_inside_node(replicas, size),
            "secondary": 1.0,  # of the ranks of one node
            "norm": of_all,
        }

    def __str__(self) -> str:
        nodes = f"{self.shape.nodes} node{'s' if self.shape.nodes > 1 else ''}"
        return f"{self.device}, {nodes} of {self.shape.ranks_per_node}"


def processor_name() -> str:
    """Return the model of this machine's processor; its architecture if the kernel names no model."""
    with contextlib.suppress(OSError):  # no /proc
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def machines_of(config: Config, device: str) -> Machines:
    """Return where the ranks of a point are."""
    return Machines(device, shape_of(config, device))


def device_of(configs: Sequence[Config], num_gpus: int, num_cpus: int) -> str:
    """Return the device that cluster.device=auto means in a plan, one for all points.

    It is the device that a run on this machine would take, if the machine has one for each rank of every point. Else
    no run is possible here, and the plan is for GPUs.
    """
    if any(config.cluster.gpu or config.cluster.network for config in configs):
        return "cuda"
    if any(config.cluster.link for config in configs):
        return "cpu"
    most = max(config.world_size for config in configs)
    return "cpu" if not num_gpus and most <= num_cpus else "cuda"
