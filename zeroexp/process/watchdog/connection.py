"""Two tasks of a job that have connected show each other that they know the job's secret.

    each end  ── a challenge ─────────────────▶  the other
              ── rank 1 on node2 <a proof> ───▶     an HMAC of both challenges and this name, keyed by the secret

Whoever reaches a port may connect to it. An end that says something else or too much is a stranger.
"""

from __future__ import annotations

import hmac
import re
import secrets
from asyncio import IncompleteReadError, LimitOverrunError, StreamReader, StreamWriter

CHALLENGE = re.compile(rb"[0-9a-f]{32}\n")
PROOF = re.compile(rb"(rank (\d+) on \S+) ([0-9a-f]{64})\n")


class Stranger(Exception):
    """The other end of a connection is no task of this job, or none that is awaited."""


async def introduce(
    reader: StreamReader, writer: StreamWriter, me: str, secret: bytes
) -> tuple[str, int]:
    """Return name ("rank 1 on node2") and rank of the other end. Raises Stranger."""
    mine = f"{secrets.token_hex(16)}\n".encode()
    writer.write(mine)
    theirs = await _line(reader)
    if not CHALLENGE.fullmatch(theirs) or theirs == mine:
        raise Stranger("it sent no challenge")
    writer.write(f"{me} {_proof(secret, theirs, mine, me)}\n".encode())
    proof = PROOF.fullmatch(await _line(reader))
    name = proof[1].decode() if proof else ""
    if not proof or not hmac.compare_digest(proof[3].decode(), _proof(secret, mine, theirs, name)):
        raise Stranger("it does not know the job's secret")
    return name, int(proof[2])


async def _line(reader: StreamReader) -> bytes:
    try:
        return await reader.readuntil()
    except (OSError, IncompleteReadError, LimitOverrunError) as error:
        raise Stranger("it hung up, or talked too much") from error


def _proof(secret: bytes, asked: bytes, asking: bytes, name: str) -> str:
    return hmac.new(secret, asked + asking + name.encode(), "sha256").hexdigest()
