"""The bytes a rank really put on the wire, whatever engine sent them.

The kernel counts bytes per TCP connection (`TCP_INFO`), and gloo sends through nothing else. So the sum over this
process' sockets is exact, also for collectives issued from C++. What NCCL moves through NVLink, PCIe, shared memory or
InfiniBand passes no socket and is unknown here.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable

# struct tcp_info of <linux/tcp.h>: notsent_bytes, then bytes_sent and bytes_retrans (Linux 4.19).
TCP_INFO_BYTES = 216
NOT_SENT = struct.Struct("=I"), 144
SENT_AND_RESENT = struct.Struct("=QQ"), 200

# The interface of a node whose link to the others has a speed of its own (cluster/emulated_network.py), and the bytes
# that each packet has beside its payload: headers of Ethernet, IPv4, and TCP with its timestamps.
LINK = "zeroexp-link"
HEADER_BYTES = 14 + 20 + 32
FRAME_BYTES = 14 + 1500

_libc = ctypes.CDLL(None)


class ByteMeter:
    """Counts what a counter of this process, or of its node, grows by from now on."""

    def __init__(self, count: Callable[[], int | None]) -> None:
        self._count, self._counted = count, count() or 0

    def take_bytes(self) -> int | None:
        """Return the bytes since this was last asked; None where nothing counts them."""
        if (counted := self._count()) is None:
            return None
        before, self._counted = self._counted, counted
        return counted - before


def wire_meter(backend: str) -> ByteMeter:
    """Return the meter of this process' TCP connections, none of which may close meanwhile; of gloo alone it counts."""
    return ByteMeter(sent_bytes if backend == "gloo" else lambda: None)


def sent_bytes() -> int:
    """Return the payload bytes written to the TCP connections this process holds now; resent bytes count once."""
    return sum(_sent_by(int(name)) for name in os.listdir("/proc/self/fd"))


def _sent_by(descriptor: int) -> int:
    """Return the payload bytes written to one descriptor; 0 for anything but a TCP connection.

    This calls the C library: a socket object for each descriptor would take ten times as long, in every step.
    """
    info = ctypes.create_string_buffer(TCP_INFO_BYTES)
    size = ctypes.c_uint32(TCP_INFO_BYTES)
    refused = _libc.getsockopt(
        descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)
    )
    if refused:  # the descriptor is a file or another kind of socket
        return 0
    (not_sent,) = NOT_SENT[0].unpack_from(info, NOT_SENT[1])
    sent, resent = SENT_AND_RESENT[0].unpack_from(info, SENT_AND_RESENT[1])
    return sent - resent + not_sent


def link_bytes() -> int | None:
    """Return the payload bytes that this node has sent over its link; None where it has none.

    The interface counts bytes and packets, headers too; a packet that is acknowledgement alone has no more than these.
    What TCP sent twice counts twice.
    """
    with open("/proc/self/net/dev", encoding="utf-8") as file:
        for line in file:
            name, _, counters = line.partition(":")
            if name.strip() == LINK:
                num_bytes, num_packets = counters.split()[8:10]
                return int(num_bytes) - HEADER_BYTES * int(num_packets)
    return None


def payload_rate(link: str) -> float:
    """Return the payload bytes that TCP carries in a second over a link of this speed, as 1gbit."""
    bits = float(link[: -len("gbit")]) * {"m": 1e6, "g": 1e9}[link[-4]]
    return bits / 8 * (1 - HEADER_BYTES / FRAME_BYTES)
