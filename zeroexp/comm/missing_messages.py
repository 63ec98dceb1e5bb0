"""The watch finds waits for messages that can never come, since ranks do different things, and ends them with an error.

gloo waits for a message until its time-out, and then names neither the peer nor the move. So a thread checks once a
second whether this rank has been in one wait for long. Only then does it write this to the store of the process group
and read what the rank wrote that it waits for, what that one waits for wrote, and so on: one process serves the store,
and all ranks may wait for one at once. A rank that computes never causes an error. Ranks will wait forever if

    rank 0 waits for a message that rank 1 has not sent, and rank 1 waits for a message that rank 0 has not sent

or if more ranks form such a ring.

[Note: both looks] The word of a rank counts if it was written at two looks during the same wait, or says that the wait
was found to be for ever.

[Note: let go] A thread in gloo's wait can not be interrupted. Only the message it waits for wakes it: when both ranks
have found that the move is lost, the peer's thread sends zeros of that size. Who waits for such a message leaves a call
for its peer.
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

from zeroexp.measure.verb_seconds import meter

PATIENCE_SECONDS = 3.0
LOOK_SECONDS = 1.0
GRACE_LOOKS = 600  # looks after the error was found, to release peers that find it later
# Ranks that wait one for the other; a longer chain ends with the process group's time-out.
MOST_IN_CHAIN = 64
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
        self._num_answered = 0  # calls of peers
        self._let_go: list[Any] = []  # works that release peers, with their tensors

    def run(self) -> None:
        while (watch := self._watch()) is not None:
            waits = watch.now
            if waits is not None and time.monotonic() - waits[1] > PATIENCE_SECONDS:
                self.look(watch, *waits, _store())
            if watch.error is not None:
                self._let_peers_go()
                return
            del watch
            time.sleep(LOOK_SECONDS)

    def look(self, watch: Watch, message: Message, since: float, store: Any) -> None:
        """Write what this rank waits for, and set the error of `watch` where that can never come."""
        self._looks += 1
        said = self._read_chain(store, self._write(watch, message, since, store))
        fresh = {rank: word for rank, word in said.items() if _again(self._before.get(rank), word)}
        self._before = said
        ring = find_lost_ring(self._rank, fresh)
        if ring and watch.now == (message, since):
            calls = self._calls_of(message.peer)
            number = store.add(calls, 1)
            store.set(f"{calls}/{number}", json.dumps({**vars(message), "rank": self._rank}))
            watch.error = _describe(ring, fresh)
            self._write(watch, message, since, store)

    def _write(self, watch: Watch, message: Message, since: float, store: Any) -> dict[str, Any]:
        sent = [list(each) for each in watch.sent]
        lost = watch.error is not None
        word = {**vars(message), "since": since, "look": self._looks, "sent": sent, "lost": lost}
        store.set(self._key(self._rank), json.dumps(word))
        return word

    def _read_chain(self, store: Any, own: dict[str, Any]) -> dict[int, Any]:
        """Return this rank's word, that of the rank it waits for, and so on to one that waits for none."""
        said, rank = {self._rank: own}, own["peer"]
        while rank not in said and len(said) < MOST_IN_CHAIN and store.check([self._key(rank)]):
            said[rank] = json.loads(store.get(self._key(rank)))
            rank = said[rank]["peer"]
        return said

    def _key(self, rank: int) -> str:
        return f"zeroexp/waits/{self._name}/{rank}"

    def _calls_of(self, rank: int) -> str:
        return f"{self._key(rank)}/calls"

    def _let_peers_go(self) -> None:
        """Wake peers that wait for this rank, see [Note: let go]."""
        for _ in range(GRACE_LOOKS):
            group = dist.group.WORLD
            if group is None:
                return
            store, calls = _store(), self._calls_of(self._rank)
            num_calls = store.add(calls, 0)
            while self._num_answered < num_calls:
                self._num_answered += 1
                word = json.loads(store.get(f"{calls}/{self._num_answered}"))
                zeros = torch.zeros(word["num_bytes"], dtype=torch.uint8)
                move = group.recv if word["given"] else group.send
                self._let_go.append((move([zeros], word["rank"], word["tag"]), zeros))
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
    if word["lost"] or before is None:
        return word["lost"]
    return before["since"] == word["since"] and before["look"] < word["look"]


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
