"""Links between ranks: loopback, or two network namespaces joined by a pair of shaped virtual Ethernet devices.

    namespace a                       namespace b
    ranks 0, 2, ..   veth ======= veth   ranks 1, 3, ..       each direction through a token bucket

What it makes is removed by a process of its own, which waits for the end of its standard input: also when the
script is killed, since then the kernel closes the pipe.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from types import TracebackType

CLONE_NEWNET = 0x40000000
DEVICE = "slow0"  # on either side
# Of Ethernet frames with 1500 bytes, which is what the token bucket counts.
TCP_PAYLOAD_OF_FRAME = 1448 / 1514


@dataclass(frozen=True)
class Shape:
    rate: str  # as tc writes it
    bits_per_second: float

    @property
    def payload_bytes_per_second(self) -> float:
        """What TCP can carry in one direction."""
        return self.bits_per_second / 8 * TCP_PAYLOAD_OF_FRAME


SHAPES = {"1gbit": Shape("1gbit", 1e9), "200mbit": Shape("200mbit", 200e6)}


def why_not_shaped() -> str | None:
    """Why this machine can have no shaped link, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found: install iproute2" if missing else None


class Link:
    """Loopback. `with` it, whatever it is."""

    name = "loopback"
    payload_bytes_per_second: float | None = None

    def namespace_of(self, rank: int) -> str | None:
        return None

    def interface_of(self, rank: int) -> str:
        return "lo"

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    @staticmethod
    def enter(namespace: str) -> None:
        """Move the calling process, which must have one thread, into the namespace."""
        with open(f"/run/netns/{namespace}", encoding="utf-8") as handle:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(handle.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


class ShapedLink(Link):
    def __init__(self, name: str) -> None:
        shape = SHAPES[name]
        self.name = name
        self.payload_bytes_per_second = shape.payload_bytes_per_second
        self._rate = shape.rate
        self._sides = [f"zeroexp{os.getpid()}{side}" for side in "ab"]

    def namespace_of(self, rank: int) -> str:
        return self._sides[rank % 2]

    def interface_of(self, rank: int) -> str:
        return DEVICE

    def __enter__(self) -> ShapedLink:
        self._remover = subprocess.Popen(
            ["sh", "-c", "read _; for n; do ip netns del $n; done", "remover", *self._sides],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )
        a, b = self._sides
        _ip("netns", "add", a)
        _ip("netns", "add", b)
        _ip(
            "link",
            "add",
            "name",
            DEVICE,
            "netns",
            a,
            "type",
            "veth",
            "peer",
            "name",
            DEVICE,
            "netns",
            b,
        )
        for side, address in ((a, "10.77.0.1/24"), (b, "10.77.0.2/24")):
            _ip("-n", side, "address", "add", address, "dev", DEVICE)
            _ip("-n", side, "link", "set", "lo", "up")
            _ip("-n", side, "link", "set", DEVICE, "up")
            bucket = ["rate", self._rate, "burst", "256kb", "latency", "50ms"]
            _run(["tc", "-n", side, "qdisc", "add", "dev", DEVICE, "root", "tbf", *bucket])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._remover.stdin is not None
        self._remover.stdin.close()
        self._remover.wait(timeout=30)


def open_link(name: str) -> Link:
    return ShapedLink(name) if name in SHAPES else Link()


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
