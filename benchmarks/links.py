"""Links between ranks: loopback, or links with a speed, of nodes that zeroexp/cluster/emulated_network.py makes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from zeroexp.cluster.emulated_network import open_nodes
from zeroexp.config.keys import ClusterConfig, ConfigError
from zeroexp.measure.tcp_bytes import LINK, payload_rate

NUM_NODES = 2
SHAPES = ("1gbit", "200mbit")


def payload_bytes_per_second(name: str) -> float | None:
    """What TCP can carry in one direction; None for loopback."""
    return payload_rate(name) if name in SHAPES else None


def why_not_shaped() -> str | None:
    """Why this machine can have no shaped link, or None."""
    try:
        with open_nodes(ClusterConfig(link="1gbit")):
            return None
    except ConfigError as error:
        return str(error)


@dataclass(frozen=True)
class Link:
    """What ranks send through; the first half of them is on one node."""

    nodes: tuple[int, ...] = ()  # descriptors that this process holds; none on loopback
    interface: str = "lo"

    def namespace_of(self, rank: int, world_size: int) -> str | None:
        if not self.nodes:
            return None
        node = self.nodes[rank * len(self.nodes) // world_size]
        return f"/proc/{os.getpid()}/fd/{node}"


@contextmanager
def open_link(name: str) -> Iterator[Link]:
    """Make the link of this name, which lasts until the end, or until this process and its ranks have ended."""
    cluster = ClusterConfig(link=name if name in SHAPES else None, nodes=NUM_NODES)
    with open_nodes(cluster) as nodes:
        yield Link(tuple(nodes), LINK if nodes else "lo")
