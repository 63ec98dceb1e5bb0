"""A connection between two tasks of a job, which first show each other that they know the job's secret.

    each end  ── a challenge ─────────────────▶  the other
              ── rank 1 on node2 <a proof> ───▶     an HMAC of both challenges and this name, keyed by the secret
              ── .<a report> ─────────────────▶     a beat, again and again
              ── ! ───────────────────────────▶     goodbye

Whoever reaches a port may connect to it. An end that says something else or too much is a stranger. Nobody waits for
it until then, since words are read as they arrive.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress

BEAT, BYE = ".", "!"  # how a line begins; a report may follow
MAX_BYTES = 4096  # of one read, and of an introduction
MAX_LINE_BYTES = 64 << 10
CHALLENGE = re.compile(r"[0-9a-f]{32}")
PROOF = re.compile(r"(rank (\d+) on \S+) ([0-9a-f]{64})")


class Stranger(Exception):
    """The other end of a connection is no task of this job, or none that is awaited."""


class Connection:
    """One end; `awaits(rank)` tells whether the other end may be this rank."""

    def __init__(
        self, it: socket.socket, me: str, secret: bytes, awaits: Callable[[int], bool], now: float
    ) -> None:
        self.name = ""  # "rank 1 on node2"; empty until the other end has proved it
        self.rank: int | None = None
        self.heard = now  # the time of its last beat; of a stranger that of its call
        self.left = False
        self.report = ""  # the newest, empty before the first
        self._socket, self._me, self._secret, self._awaits = it, me, secret, awaits
        self._mine, self._theirs = secrets.token_hex(16), ""
        self._unread = b""  # the beginning of a line; all of an introduction
        it.setblocking(False)
        it.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # no line waits for an answer
        self.send(self._mine)

    def read(self, now: float) -> bool:
        """Read what has arrived; return False if a task's connection is closed. Raises Stranger."""
        try:
            packet = self._socket.recv(MAX_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # reset, or a machine that can no longer be reached
            packet = b""
        *lines, self._unread = (self._unread + packet).split(b"\n")
        for line in lines:
            self._understand(line.decode(errors="replace"))
        if not self.name and (not packet or len(self._unread) > MAX_BYTES):
            raise Stranger("it hung up, or talked too much")
        self._unread = self._unread[:MAX_LINE_BYTES]
        if self.name:
            self.heard = now
        return bool(packet)

    def _understand(self, line: str) -> None:
        if self.name:
            self.left = self.left or line.startswith(BYE)
            self.report = line[1:] or self.report
        elif not self._theirs:
            if not CHALLENGE.fullmatch(line) or line == self._mine:
                raise Stranger("it sent no challenge")
            self._theirs = line
            self.send(f"{self._me} {self._proof(self._theirs, self._mine, self._me)}")
        else:
            proof = PROOF.fullmatch(line)
            if not proof or not hmac.compare_digest(
                proof[3], self._proof(self._mine, self._theirs, proof[1])
            ):
                raise Stranger("it does not know the job's secret")
            if not self._awaits(int(proof[2])):
                raise Stranger(f"nobody waits for {proof[1]}")
            self.name, self.rank = proof[1], int(proof[2])

    def _proof(self, asked: str, asking: str, name: str) -> str:
        return hmac.new(self._secret, f"{asked} {asking} {name}".encode(), "sha256").hexdigest()

    def send(self, line: str) -> None:
        """Send a line. Errors are ignored: the reading side reports the loss, and a buffer that takes none is of an end
        that has read nothing for long."""
        with suppress(OSError):
            self._socket.sendall(f"{line}\n".encode())
