"""A network namespace for each node, and a bridge that connects them: what nodes say to each other crosses a link.

    this machine  10.213.K.254 ── bridge ── veth ── node1  10.213.K.1
                                        └── veth ── node2  10.213.K.2

K is the first number whose bridge does not exist, so that several clusters can be up.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .processes import ClusterError, find_program, unpin

MOST_CLUSTERS, HOST = 250, 254


def make_bridge() -> int:
    """Make a bridge with this machine's address on it; return its number."""
    for number in range(MOST_CLUSTERS):
        if ip("link", "add", bridge(number), "type", "bridge").returncode == 0:
            require_ip("addr", "add", f"{address(number, HOST)}/24", "dev", bridge(number))
            require_ip("link", "set", bridge(number), "up")
            return number
    raise ClusterError("no bridge can be made: --namespaces needs root and the command ip")


def connect(number: int, node: int, namespace: Path) -> None:
    """Make a namespace, pinned to this file, and connect it to the bridge."""
    namespace.touch()
    run(["unshare", f"--net={namespace}", "true"])
    inside = ["nsenter", f"--net={namespace}"]
    link = cable(number, node)
    made = ["link", "add", "eth0", "type", "veth", "peer", "name", link, "netns", str(os.getpid())]
    run([*inside, program(), *made])
    run([*inside, program(), "addr", "add", f"{address(number, node)}/24", "dev", "eth0"])
    for name in ("eth0", "lo"):
        run([*inside, program(), "link", "set", name, "up"])
    require_ip("link", "set", link, "master", bridge(number), "up")


def pull(number: int, node: int, *, out: bool) -> None:
    """Pull a node's cable out, or put it in again."""
    require_ip("link", "set", cable(number, node), "down" if out else "up")


def remove(number: int, namespaces: list[Path]) -> None:
    """Remove the bridge and the namespaces, in which nothing runs any more; the links go with them."""
    for namespace in namespaces:
        unpin(namespace)
    ip("link", "del", bridge(number))


def address(number: int, node: int) -> str:
    return f"10.213.{number}.{node}"


def bridge(number: int) -> str:
    return f"mini{number}"


def cable(number: int, node: int) -> str:
    return f"mini{number}-{node}"


def program() -> str:
    return find_program("ip") or "ip"


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program(), *words], capture_output=True, encoding="utf-8")


def require_ip(*words: str) -> None:
    run([program(), *words])


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")
