"""Finds out when messages can not come any more, since ranks do not do the same, and ends the wait with an error.

gloo waits for a message until its time is up, and says neither for whom nor for what. So a thread looks once a second
whether this rank has been in one wait for long; only then it says so in the store of the process group, and reads what
the others say. A rank is accused of nothing as long as it computes. Ranks will wait for ever if

    rank 0 waits for a message of rank 1, which rank 1 has not sent and which waits for rank 0, which has not sent that

or in a longer ring. [Note: both looks] What a rank says counts if it said so twice, of the same wait.

[Note: let go] A thread in gloo's wait hears nothing. It is woken by the very message it waits for: the peer's thread
sends zeros of that size, after both have found that the move is lost.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_SECONDS = 3.0
LOOK_SECONDS = 1.0
GRACE_LOOKS = 600  # after the error was found: peers that find it later have to be let go
NUM_REMEMBERED = 256  # messages sent: far more than may be under way


@dataclass(frozen=True)
class Message:
    """One that this rank takes from or gives to `peer`. what: in words."""

    peer: int
    tag: int
    num_bytes: int
    what: str
    given: bool  # to the peer


class Watch:
    """Of the messages of one engine. `name` is the same on all ranks, and another one for each engine."""

    def __init__(self, rank: int, size: int, name: str):
        self.rank = rank
        self.error: str | None = None
        self.now: tuple[Message, float] | None = None  # what this rank waits for, and since when
        self.sent: deque[tuple[int, int]] = deque(maxlen=NUM_REMEMBERED)  # (peer, tag)
        self._size = size
        self._name = name
        self._started = False

    def sends(self, peer: int, tag: int) -> None:
        self.sent.append((peer, tag))
        if not self._started:
            self._started = True
            looker = Looker(weakref.ref(self), self.rank, self._size, self._name)
            threading.Thread(target=looker.run, name="zeroexp-watch", daemon=True).start()

    def wait(self, work: Any, message: Message) -> None:
        self.now = message, time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            waited = f"rank {self.rank} waited for rank {message.peer}: {message.what}"
            raise RuntimeError(self.error or f"{waited}: {error}") from error
        finally:
            self.now = None
        if self.error is not None:
            raise RuntimeError(self.error)


class Watched:
    """A work of gloo whose wait is watched."""

    def __init__(self, work: Any, message: Message, watch: Watch):
        self._work = work
        self._message = message
        self._watch = watch

    def wait(self) -> None:
        self._watch.wait(self._work, self._message)


class Looker:
    """What the thread does; it ends with the engine."""

    def __init__(self, watch: weakref.ref[Watch], rank: int, size: int, name: str):
        self._watch = watch
        self._rank = rank
        self._size = size
        self._name = name
        self._looks = 0
        self._before: dict[int, Any] = {}  # what each rank said at the last look
        self._let_go: list[Any] = []  # works, with their tensors

    def run(self) -> None:
        while (watch := self._watch()) is not None:
            waits = watch.now
            if waits is not None and time.monotonic() - waits[1] > PATIENCE_SECONDS:
                self._look(watch, *waits)
            if watch.error is not None:
                self._let_peers_go()
                return
            del watch
            time.sleep(LOOK_SECONDS)

    def _look(self, watch: Watch, message: Message, since: float) -> None:
        self._looks += 1
        self._say(watch, message, since)
        said = self._heard()
        fresh = {rank: word for rank, word in said.items() if _again(self._before.get(rank), word)}
        self._before = said
        ring = lost_ring(self._rank, fresh)
        if ring and watch.now == (message, since):
            watch.error = _describe(ring, fresh)
            self._say(watch, message, since)

    def _say(self, watch: Watch, message: Message, since: float) -> None:
        word = {
            **vars(message),
            "since": since,
            "look": self._looks,
            "sent": list(watch.sent),
            "lost": watch.error is not None,
        }
        _store().set(self._key(self._rank), json.dumps(word))

    def _heard(self) -> dict[int, Any]:
        store = _store()
        keys = {rank: self._key(rank) for rank in range(self._size)}
        return {rank: json.loads(store.get(k)) for rank, k in keys.items() if store.check([k])}

    def _key(self, rank: int) -> str:
        return f"zeroexp/waits/{self._name}/{rank}"

    def _let_peers_go(self) -> None:
        """See [Note: let go]."""
        done: set[tuple[int, float]] = set()
        for _ in range(GRACE_LOOKS):
            if not dist.is_initialized():
                return
            for rank, word in self._heard().items():
                waits_for_me = word["lost"] and word["peer"] == self._rank != rank
                if waits_for_me and (rank, word["since"]) not in done:
                    done.add((rank, word["since"]))
                    zeros = torch.zeros(word["num_bytes"], dtype=torch.uint8)
                    group = dist.group.WORLD
                    assert group is not None
                    move = group.recv if word["given"] else group.send
                    self._let_go.append((move([zeros], rank, word["tag"]), zeros))
            time.sleep(LOOK_SECONDS)


def lost_ring(rank: int, said: dict[int, Any]) -> list[int]:
    """From `rank` on, who waits for whom; empty unless it ends in a ring of messages that nobody has sent.

    said: of each rank that waits, the message, and what it has sent as (peer, tag).
    """
    chain: list[int] = []
    while rank not in chain:
        word = said.get(rank)
        peer = said.get(word["peer"]) if word is not None else None
        if word is None or peer is None or [rank, word["tag"]] in peer["sent"]:
            return []
        chain.append(rank)
        rank = word["peer"]
    return chain


def _again(before: Any, word: Any) -> bool:
    """See [Note: both looks]."""
    return before is not None and before["since"] == word["since"] and before["look"] < word["look"]


def _describe(ring: list[int], said: dict[int, Any]) -> str:
    waits = (f"rank {r} waits for rank {said[r]['peer']}: {said[r]['what']}" for r in ring)
    return (
        f"the ranks do not do the same, {'; '.join(waits)}. "
        "Between hosts every rank must use the same units in the same order"
    )


def _store() -> Any:
    group = dist.group.WORLD
    assert group is not None
    return group.get_group_store()
