"""The ranks of one host find each other: each pair of ranks gets one Unix socket, and nobody else gets one.

Any process in the same network namespace may connect to an abstract address. So a caller must send its rank and a token
that travelled over the process group. A process of another user is closed before it is heard, and any other caller is
closed once it has spoken; neither delays anybody. A caller checks the user of the listener before it sends its token.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

TOKEN_BYTES = 16
_HELLO = struct.Struct(f"{TOKEN_BYTES}sq")  # the listener's token, the caller's rank
_PEER = struct.Struct("3i")  # <sys/socket.h>, struct ucred: process, user, group
AGAIN_SECONDS = 0.01


Door = tuple[str, bytes]  # the address of a listener, and its token


class Listener:
    """The socket to which the neighbours of this rank connect."""

    def __init__(self) -> None:
        self.address = f"\0zeroexp-{uuid.uuid4()}"  # an abstract address leaves no file behind
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(self.address)
        self.socket.listen(128)
        self.socket.setblocking(False)

    @property
    def door(self) -> Door:
        return self.address, self.token

    def close(self) -> None:
        self.socket.close()


def connect(
    rank: int,
    peers: Sequence[int],
    doors: Sequence[Door],
    listener: Listener,
    timeout_seconds: float,
) -> dict[int, socket.socket]:
    """Return a connected socket for each peer; of each pair, the higher rank calls the lower one.

    doors: the door of every rank, by rank.
    """
    deadline = time.monotonic() + timeout_seconds
    with ExitStack() as opened:
        sockets: dict[int, socket.socket] = {}
        for peer in (p for p in peers if p < rank):
            sockets[peer] = opened.enter_context(_call(rank, peer, *doors[peer], deadline))
        sockets |= _answer(rank, {p for p in peers if p > rank}, listener, deadline, opened)
        opened.pop_all()  # every peer is connected, so the sockets stay open
    return sockets


def swap_files(
    rank: int, sockets: Mapping[int, socket.socket], files: Sequence[int], seconds: float
) -> dict[int, list[int]]:
    """Send these files to every peer and receive as many from each.

    The returned descriptors belong to this process, which must close them.
    """
    deadline = time.monotonic() + seconds
    for line in sockets.values():
        socket.send_fds(line, [b"."], files)
    theirs: dict[int, list[int]] = {}
    try:
        for peer, line in sockets.items():
            theirs[peer] = _receive_files(rank, peer, line, len(files), deadline)
    except BaseException:
        for each in (file for received in theirs.values() for file in received):
            os.close(each)
        raise
    return theirs


def _receive_files(
    rank: int, peer: int, line: socket.socket, num_files: int, deadline: float
) -> list[int]:
    poll = select.poll()
    poll.register(line, select.POLLIN)
    if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        raise TimeoutError(f"rank {rank} waited in vain for the memory of rank {peer}")
    _, files, _, _ = socket.recv_fds(line, 1, num_files)
    if len(files) != num_files:
        raise ConnectionError(f"rank {peer} has left before it showed rank {rank} its memory")
    return files


def _is_connected(line: socket.socket, address: str) -> bool:
    """Return False where other callers fill the listener's queue."""
    with suppress(BlockingIOError):
        line.connect(address)
        return True
    return False


def _call(rank: int, peer: int, address: str, token: bytes, deadline: float) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.setblocking(False)
    try:
        while not _is_connected(line, address):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} could not call rank {peer}")
            time.sleep(AGAIN_SECONDS)
        if _user_of(line) != os.geteuid():
            raise ConnectionError(f"who listens for rank {peer} is another user")
        line.send(_HELLO.pack(token, rank))
    except BaseException:
        line.close()
        raise
    return line


def _answer(
    rank: int, callers: set[int], listener: Listener, deadline: float, opened: ExitStack
) -> dict[int, socket.socket]:
    met: dict[int, socket.socket] = {}
    strangers: dict[int, socket.socket] = {}  # by file; they have not said who they are
    poll = select.poll()
    poll.register(listener.socket, select.POLLIN)
    try:
        while missing := callers - met.keys():
            for file in _ready(poll, deadline, rank, missing):
                met |= _hear(file, listener, strangers, poll, callers - met.keys())
    finally:
        for caller in met.values():
            opened.enter_context(caller)
        for stranger in strangers.values():
            stranger.close()
    return met


def _hear(
    file: int,
    listener: Listener,
    strangers: dict[int, socket.socket],
    poll: select.poll,
    missing: set[int],
) -> dict[int, socket.socket]:
    """Admit who calls, or read who a stranger is; return it by its rank where that is missing."""
    if file == listener.socket.fileno():
        _admit(listener, strangers, poll)
        return {}
    caller = strangers.pop(file)
    poll.unregister(caller)
    peer = _introduced(caller, listener.token)
    if peer in missing:
        return {peer: caller}
    caller.close()
    return {}


def _admit(listener: Listener, strangers: dict[int, socket.socket], poll: select.poll) -> None:
    """Let a process of this user introduce itself."""
    caller, _ = listener.socket.accept()
    if _user_of(caller) != os.geteuid():
        caller.close()
        return
    caller.setblocking(False)
    strangers[caller.fileno()] = caller
    poll.register(caller, select.POLLIN)


def _ready(poll: select.poll, deadline: float, rank: int, missing: set[int]) -> list[int]:
    remaining = deadline - time.monotonic()
    ready = poll.poll(1000 * remaining) if remaining > 0 else []
    if not ready:
        names = ", ".join(str(peer) for peer in sorted(missing))
        raise TimeoutError(f"rank {rank} waited in vain for rank {names} of this host to call")
    return [file for file, _ in ready]


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return _PEER.unpack(credentials)[1]


def _introduced(caller: socket.socket, token: bytes) -> int:
    """Return the rank that calls, or -1 for any caller that is no rank of this run."""
    try:
        hello = caller.recv(_HELLO.size)
    except OSError:
        return -1
    if len(hello) != _HELLO.size:
        return -1
    given, rank = _HELLO.unpack(hello)
    return rank if secrets.compare_digest(given, token) else -1
