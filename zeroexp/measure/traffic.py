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

# struct tcp_info of <linux/tcp.h>: notsent_bytes, then bytes_sent and bytes_retrans (Linux 4.19).
TCP_INFO_BYTES = 216
NOT_SENT = struct.Struct("=I"), 144
SENT_AND_RESENT = struct.Struct("=QQ"), 200

_libc = ctypes.CDLL(None)


class WireMeter:
    """Counts the bytes this process writes to its TCP connections from now on; none of them may close meanwhile."""

    def __init__(self, backend: str) -> None:
        self._counts = backend == "gloo"
        self._before = sent_bytes() if self._counts else 0

    def sent_bytes(self) -> int | None:
        """Return the bytes since the meter was made; None where the backend does not send through TCP."""
        return sent_bytes() - self._before if self._counts else None


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
