"""Nodes of one machine: network namespaces that a switch joins, each behind a link of its own speed (`cluster.link`).

    node 0  10.77.0.1 ── zeroexp-link ══ port0 ┐
                                               ├ bridge, in a namespace of its own
    node 1  10.77.0.2 ── zeroexp-link ══ port1 ┘

What a node sends passes a token bucket. The ranks of one node share memory and its loopback, and reach all others over
the link alone, the machine's own network too. No namespace has a name: it is there while a process is in it or holds
its descriptor, and the kernel removes it with its devices when the last of them ends, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from zeroexp.config.keys import ClusterConfig, ConfigError
from zeroexp.measure.tcp_bytes import LINK

CLONE_NEWNET = 0x40000000  # <linux/sched.h>
OWN_NAMESPACE = "/proc/self/ns/net"
# The queue holds what every connection may have under way, so that no packet is dropped and sent twice.
BUCKET = ("burst", "256kb", "limit", "64mb")

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def open_nodes(cluster: ClusterConfig) -> Iterator[list[int]]:
    """Make the nodes that the cluster names, and yield a descriptor of each one's namespace; none without a link.

    It is called in the main thread. Raises ConfigError where the machine does not let it.
    """
    if cluster.link is None:
        yield []
        return
    with ExitStack() as opened:
        try:
            nodes = _make_nodes(cluster.num_nodes, cluster.link, opened)
        except (OSError, subprocess.SubprocessError) as error:
            why = str(getattr(error, "stderr", None) or error).strip()
            problem = f"this machine makes no network namespaces and links ({why})"
            remedy = "run as root, apt install iproute2, or leave it null"
            raise ConfigError(f"cluster.link={cluster.link}: {problem}; {remedy}") from error
        yield nodes


def enter(namespace: int) -> None:
    """Move the calling thread, and what it starts from now on, into the namespace of this descriptor."""
    _require_done(_libc.setns(namespace, CLONE_NEWNET))


def _make_nodes(num_nodes: int, rate: str, opened: ExitStack) -> list[int]:
    """Make the namespaces, whose descriptors `opened` closes, and come back from them."""
    with ExitStack() as away:
        home = os.open(OWN_NAMESPACE, os.O_RDONLY)
        away.callback(os.close, home)
        switch = _new_namespace(opened)
        away.callback(enter, home)
        nodes = [_new_namespace(opened) for _ in range(num_nodes)]
        enter(switch)
        _run("ip", "link", "add", "name", "switch", "type", "bridge")
        _run("ip", "link", "set", "switch", "up")
        for number, node in enumerate(nodes):
            _plug_in(f"port{number}", node)
        for number, node in enumerate(nodes, start=1):
            enter(node)
            _set_up(f"10.77.0.{number}/24", rate)
        return nodes


def _new_namespace(opened: ExitStack) -> int:
    """Enter a new namespace and return its descriptor, which `opened` closes."""
    _require_done(_libc.unshare(CLONE_NEWNET))
    namespace = os.open(OWN_NAMESPACE, os.O_RDONLY)
    opened.callback(os.close, namespace)
    return namespace


def _plug_in(port: str, node: int) -> None:
    """Connect a node to the switch, in whose namespace the caller is."""
    of_node = ("peer", "name", LINK, "netns", f"/proc/{os.getpid()}/fd/{node}")
    _run("ip", "link", "add", "name", port, "type", "veth", *of_node)
    _run("ip", "link", "set", port, "master", "switch", "up")


def _set_up(address: str, rate: str) -> None:
    """Give the node that the caller is in its loopback, and its link address and speed."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "address", "add", address, "dev", LINK)
    _run("ip", "link", "set", LINK, "up")
    _run("tc", "qdisc", "add", "dev", LINK, "root", "tbf", "rate", rate, *BUCKET)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30, check=True)


def _require_done(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
