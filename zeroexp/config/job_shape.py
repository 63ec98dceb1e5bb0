"""How the ranks of a point share nodes. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.keys import Config


@dataclass(frozen=True)
class JobShape:
    """The size of one point's job: `nodes * ranks_per_node` is its world size."""

    nodes: int
    ranks_per_node: int

    @classmethod
    def of(cls, world_size: int, most_per_node: int) -> JobShape:
        """Return the fewest nodes that share the ranks evenly."""
        nodes = -(-world_size // most_per_node)
        while world_size % nodes:
            nodes += 1
        return cls(nodes, world_size // nodes)


def job_shape_of(config: Config, device: str) -> JobShape:
    """Return the nodes of a point on this device, cpu or cuda.

    On Slurm and on GPUs at most cluster.slurm.ranks_per_node share a node. The ranks of a local run on CPUs share one
    machine, or the nodes behind cluster.link.
    """
    world_size, cluster = config.world_size, config.cluster
    if cluster.kind == "slurm" or device == "cuda":
        return JobShape.of(world_size, cluster.slurm.ranks_per_node)
    return JobShape(cluster.num_nodes, world_size // cluster.num_nodes)
