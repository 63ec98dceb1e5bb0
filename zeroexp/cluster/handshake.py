"""Two tasks of a job show each other that they know the job's secret, without saying it.

    each end  ── a challenge ─────────────────▶  the other
              ── rank 1 on node2 <a proof> ───▶     an HMAC of both challenges and this name, keyed by the secret

Whoever reaches a port may connect to it. An end that says something else, says too much, or is not done in time is
closed. Nobody waits for it until then, since words are read as they arrive.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress

MAX_BYTES = 4096  # of an introduction
CHALLENGE = re.compile(r"[0-9a-f]{32}")
PROOF = re.compile(r"(rank (\d+) on \S+) ([0-9a-f]{64})")


class Stranger(Exception):
    """The other end of a connection is no task of this job, or none that is awaited."""


class Introduction:
    """One end of a new connection; `awaits(rank)` tells whether the other end may be this rank."""

    def __init__(
        self, connection: socket.socket, me: str, secret: bytes, awaits: Callable[[int], bool]
    ) -> None:
        self._connection, self._me, self._secret, self._awaits = connection, me, secret, awaits
        self._mine, self._theirs = secrets.token_hex(16), ""
        self._heard = b""
        connection.setblocking(False)
        # No line waits for an answer.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._say(self._mine)

    def listen(self) -> tuple[int, str, bytes] | None:
        """Read what has arrived. Return rank and name of the other end and what it said since, or None until it has
        proved who it is.

        Raises Stranger.
        """
        try:
            packet = self._connection.recv(MAX_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Stranger(str(error)) from error
        self._heard += packet
        if not packet or len(self._heard) > MAX_BYTES:
            raise Stranger("it hung up, or talked too much")
        while b"\n" in self._heard:
            line, _, self._heard = self._heard.partition(b"\n")
            if known := self._understand(line.decode(errors="replace")):
                return *known, self._heard
        return None

    def _understand(self, line: str) -> tuple[int, str] | None:
        if not self._theirs:
            if not CHALLENGE.fullmatch(line) or line == self._mine:
                raise Stranger("it sent no challenge")
            self._theirs = line
            self._say(f"{self._me} {self._proof(self._theirs, self._mine, self._me)}")
            return None
        said = PROOF.fullmatch(line)
        if not said or not hmac.compare_digest(
            said[3], self._proof(self._mine, self._theirs, said[1])
        ):
            raise Stranger("it does not know the job's secret")
        if not self._awaits(int(said[2])):
            raise Stranger(f"nobody waits for {said[1]}")
        return int(said[2]), said[1]

    def _proof(self, asked: str, asking: str, name: str) -> str:
        return hmac.new(self._secret, f"{asked} {asking} {name}".encode(), "sha256").hexdigest()

    def _say(self, line: str) -> None:
        """Send a line. A buffer that takes none belongs to an end that does not listen, and it will be closed."""
        with suppress(OSError):
            self._connection.send(f"{line}\n".encode())
