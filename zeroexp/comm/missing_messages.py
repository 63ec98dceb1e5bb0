"""The watch finds waits for messages that can never come, since ranks do different things, and ends them with an error.

gloo waits for a message until its time-out, and then names neither the peer nor the move. So a thread checks once a
second whether this rank has been in one wait for long. Only then does it write this to the store of the process group
and read what the others wrote. A rank that computes never causes an error. Ranks will wait forever if

    rank 0 waits for a message that rank 1 has not sent, and rank 1 waits for a message that rank 0 has not sent

or if more ranks form such a ring.

[Note: both looks] The word of a rank counts if it was written at two looks during the same wait.

[Note: let go] A thread in gloo's wait can not be interrupted. Only the message it waits for wakes it: when both ranks
have found that the move is lost, the peer's thread sends zeros of that size.
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

from zeroexp.measure.verbs import meter

PATIENCE_SECONDS = 3.0
LOOK_SECONDS = 1.0
GRACE_LOOKS = 600  # looks after the error was found, to release peers that find it later
NUM_REMEMBERED = 256  # sent messages that are remembered: far more than may be in flight


@dataclass(frozen=True)
class Message:
    """A message that this rank receives from or sends to `peer`; `what` describes its content."""

    peer: int
    tag: int
    num_bytes: int
    what: str
    given: bool  # this rank sends it


class Watch:
    """Watches the messages of one engine. All ranks give the same `name`, and each engine has its own."""

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
            looker = LateMessageThread(weakref.ref(self), self.rank, self._size, self._name)
            threading.Thread(target=looker.run, name="zeroexp-watch", daemon=True).start()

    def wait(self, work: Any, message: Message) -> None:
        began, self.now = time.perf_counter(), (message, time.monotonic())
        try:
            work.wait()
            meter.blocked(message.peer, began)
        except RuntimeError as error:
            waited = f"rank {self.rank} waited for rank {message.peer}: {message.what}"
            raise RuntimeError(self.error or f"{waited}: {error}") from error
        finally:
            self.now = None
        if self.error is not None:
            raise RuntimeError(self.error)


class WatchedMessage:
    """A work of gloo whose wait is watched."""

    def __init__(self, work: Any, message: Message, watch: Watch):
        self._work = work
        self._message = message
        self._watch = watch

    def wait(self) -> None:
        self._watch.wait(self._work, self._message)


class LateMessageThread:
    """The work of the thread, which ends with the engine."""

    def __init__(self, watch: weakref.ref[Watch], rank: int, size: int, name: str):
        self._watch = watch
        self._rank = rank
        self._size = size
        self._name = name
        self._looks = 0
        self._before: dict[int, Any] = {}  # rank -> its word at the last look
        self._let_go: list[Any] = []  # works that release peers, with their tensors

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
        ring = find_lost_ring(self._rank, fresh)
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
        """Wake peers that wait for this rank, see [Note: let go]."""
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


def find_lost_ring(rank: int, said: dict[int, Any]) -> list[int]:
    """Return the chain of ranks from `rank` on, in which each waits for the next.

    The chain is empty unless it ends in a ring of messages that nobody has sent. said: for each rank that waits, its
    message and what it has sent, as (peer, tag).
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
    """Tell whether a rank wrote its word at two looks of the same wait, see [Note: both looks]."""
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
