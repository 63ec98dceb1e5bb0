"""A planned run has its ranks on these machines: nodes, ranks on each, and the transport between them. No torch."""

from __future__ import annotations

import contextlib
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroexp.config.job_shape import JobShape, job_shape_of
from zeroexp.config.keys import Config
from zeroexp.config.optimizer import overs_of
from zeroexp.cut.rank_grid import RankGrid


@dataclass(frozen=True)
class Machines:
    device: str  # cpu | cuda
    shape: JobShape

    @property
    def num_ranks(self) -> int:
        return self.shape.nodes * self.shape.ranks_per_node

    def transports(self, grid: RankGrid) -> tuple[str, str]:
        """The transport inside of the groups of ranks, and that between them: words of comm.traits.TRAITS."""
        return self._transport_of(_groups(grid)), self._transport_of(_holders(grid))

    def _transport_of(self, groups: Sequence[Sequence[int]]) -> str:
        if self.device == "cuda":
            return "native"
        nodes = [(len(set(self._nodes(group))), len(group)) for group in groups]
        if all(num == 1 for num, _ in nodes):
            return "direct"
        return "mixed" if any(num < size for num, size in nodes) else "gloo"

    def _nodes(self, ranks: Sequence[int]) -> list[int]:
        return [rank // self.shape.ranks_per_node for rank in ranks]

    def share_inside_node(
        self, groups: Sequence[Sequence[int]], *, by_pairs: bool = False
    ) -> float:
        """Return the part of what ranks send in their groups that stays inside of a node, the mean over ranks.

        Between CPUs every rank sends as much to each peer, and so do GPUs that exchange bytes (by_pairs). Their other
        messages go round a ring through the group.
        """
        inside = sent = 0
        for nodes in map(self._nodes, groups):
            if self.device == "cuda" and not by_pairs:
                inside += sum(a == b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True))
                sent += len(nodes)
            else:
                inside += sum(num * (num - 1) for num in Counter(nodes).values())
                sent += len(nodes) * (len(nodes) - 1)
        return inside / sent if sent else 1.0

    def shares_inside(self, config: Config) -> tuple[float, dict[str, float]]:
        """Return the part inside of a node of what a rank sends in its group, and of other moves by kind."""
        of_all, groups = self.share_inside_node([range(self.num_ranks)]), _groups(config.grid)
        stepping = [range(self.num_ranks)] if "all" in overs_of(config) else groups
        # Codes travel from each rank to the one that sums them.
        has_codec = config.strategy.reduce_codec is not None
        reduced = self.share_inside_node(groups, by_pairs=has_codec)
        return self.share_inside_node(groups), {
            **{"reduce": reduced, "hand_over": reduced},
            "matrices": self.share_inside_node(stepping, by_pairs=True),
            "replicas": self.share_inside_node(_holders(config.grid)),
            "secondary": 1.0,  # of the ranks of one node
            "norm": of_all,
        }

    def __str__(self) -> str:
        nodes = f"{self.shape.nodes} node{'s' if self.shape.nodes > 1 else ''}"
        return f"{self.device}, {nodes} of {self.shape.ranks_per_node}"


def _groups(grid: RankGrid) -> list[range]:
    return [grid.group(first) for first in grid.holders(0)]


def _holders(grid: RankGrid) -> list[range]:
    return [grid.holders(first) for first in grid.group(0)]


def processor_name() -> str:
    """Return the model of this machine's processor; its architecture if the kernel names no model."""
    with contextlib.suppress(OSError):  # no /proc
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def machines_of(config: Config, device: str) -> Machines:
    return Machines(device, job_shape_of(config, device))


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
    return "cpu" if num_gpus < most <= num_cpus else "cuda"
