"""Ports on which a job listens: chosen by the system or out of a range, and published in the job's shared folder.

Nobody can know in advance which port of a node is free. So whoever listens chooses one, and tells the others in a file
that only this user may write.
"""

from __future__ import annotations

import os
import random
import socket
import time
from pathlib import Path

from zeroexp.process.durable import replace_durably

LOOPBACK = ("127.0.0.1", "::1", "localhost")
AGAIN_SECONDS = 0.1
# Variables of a job's environment, which only its user can read.
SECRET = "ZEROEXP_SECRET"  # hexadecimal, drawn anew for every attempt
RANGE = "ZEROEXP_PORTS"  # cluster.slurm.ports
SCHEME = "job://"  # of ZEROEXP_RENDEZVOUS where ranks meet by a published port
FILE_SCHEME = "file://"  # where they meet by a file of their machine


def listen_on_free_port(
    host: str, ports: str | None = None, *, backlog: int = 128
) -> socket.socket:
    """Return a listening socket at a free port of `ports` ("60001-63000"; None: any).

    It takes callers from this machine alone if `host` is the loopback, else from any network, by IPv4 and IPv6. Raises
    OSError if no port of the range is free.
    """
    first, last = parse_port_range(ports) if ports else (0, 0)
    # In any order, so that jobs that share a node begin at different ones.
    for number in random.sample(range(first, last + 1), last - first + 1):
        try:
            return _listen(host, number, backlog)
        except OSError as error:
            refused = error
    raise OSError(refused.errno, f"no port of {ports or 'this machine'} is free: {refused}")


def parse_port_range(ports: str) -> tuple[int, int]:
    """Return the ends of a range. Raises ValueError for what is none."""
    first, _, last = ports.partition("-")
    ends = int(first), int(last)
    if not 0 < ends[0] <= ends[1] < 1 << 16:
        raise ValueError(f"{ports}: no range of ports")
    return ends


def publish_port(file: Path, port: int) -> None:
    """Write the port so that a reader sees all of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(file, str(port).encode())


def read_published_port(file: Path) -> int | None:
    """Return the port that was published, or None as long as none was."""
    try:
        # NFS caches for a minute that a file is missing, unless the folder is listed.
        os.listdir(file.parent)
        return int(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def await_published_port(file: Path, timeout_seconds: float) -> int:
    deadline = time.monotonic() + timeout_seconds
    while (port := read_published_port(file)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has told no port in {file} for {timeout_seconds:.0f} s")
        time.sleep(AGAIN_SECONDS)
    return port


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    if host in LOOPBACK:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", port), family=family, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)
