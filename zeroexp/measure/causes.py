"""Causes of the memory of a traced step: model states are known by their address, all else by when it came.

    asked of the engine    where its model states lie at a moment: parameters, gradients, optimizer, master, pools
    seen by a hook         a gradient as autograd makes it; the model's output (logits)
    by the time of birth   in forward and kept for backward: activations; from the model's output to the gradient of it:
                           logits; inside of a gather: pools; of another verb: buckets; in a collective of torch or a
                           thread of the backend: backend; else temporaries

A block keeps one cause for its whole life. What was there before the step and is no model state is "other".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import UntypedStorage

from zeroexp.interface.strategy import ModelStates
from zeroexp.measure.allocations import Block, Log, is_counted
from zeroexp.measure.intervals import Interval, interval_at
from zeroexp.measure.memory import local_tensor
from zeroexp.measure.record import CAUSES, KINDS, OUTER

CAUSE_OF_KIND = {"buffers": "pools", OUTER: "optimizer"}
COLLECTIVES = ("c10d::", "gloo:", "nccl:")
# Ranges that FSDP2 names itself.
RANGES = {"FSDP::all_gather": "pools", "FSDP::post_backward_reduce": "buckets"}


@dataclass
class Times:
    """When the things of a step happened, each as (name, from, to) in seconds of time.perf_counter."""

    phases: list[Interval]  # data | forward | backward | optimizer | step, in order
    # The cause of what is born inside: "pools" and "buckets" while this thread issued a move or waited for it, "logits"
    # from the model's output to its gradient, "activations" in a forward inside of backward. The first one counts.
    by_birth: list[Interval] = field(default_factory=list[Interval])


@dataclass
class Reading:
    """Model states of an engine at one moment, by address."""

    when: float
    cause_of: dict[int, str] = field(default_factory=dict[int, str])  # address -> cause
    # Address -> bytes of the storage.
    num_bytes: dict[int, int] = field(default_factory=dict[int, int])
    # Cause -> bytes in memory that ranks share.
    shared: Counter[str] = field(default_factory=Counter[str])
    hidden_bytes: int = 0


def read_states(states: ModelStates, when: float) -> Reading:
    """Note where the engine's model states lie; each storage counts once, under the first kind that shows it."""
    reading = Reading(when, hidden_bytes=states.hidden_bytes)
    seen: set[UntypedStorage] = set()
    for kind in (*KINDS, OUTER):
        cause = CAUSE_OF_KIND.get(kind, kind)
        for tensor in getattr(states, kind):
            local = local_tensor(tensor)
            storage = local.untyped_storage()
            if storage in seen or not storage.nbytes():
                continue
            seen.add(storage)
            if is_counted(local):
                reading.cause_of.setdefault(storage.data_ptr(), cause)
                reading.num_bytes[storage.data_ptr()] = storage.nbytes()
            else:
                reading.shared[cause] += storage.nbytes()
    return reading


class Causes:
    """Cause of every block of a log, and the bytes by cause at any time."""

    def __init__(
        self,
        log: Log,
        times: Times,
        readings: Sequence[Reading],
        noted: Sequence[tuple[float, int, str]],
        shared_bytes: int,
    ):
        """noted: (when, address, cause) of single tensors that hooks saw."""
        self._log, self._times = log, times
        self._ranges = [
            (cause, span.began_at, span.ended_at)
            for span in log.spans
            for name, cause in RANGES.items()
            if span.name.startswith(name)
        ]
        self._cause_of = {id(block): self._by_birth(block) for block in log.blocks}
        self._blocks_at: dict[int, list[Block]] = {}
        for block in log.blocks:
            self._blocks_at.setdefault(block.address, []).append(block)
        for when, address, cause in noted:
            self._give_cause(address, when, cause)
        self._base: Counter[str] = Counter()
        self._before: dict[int, str] = {}  # blocks from before the log: address -> cause
        for reading in readings:
            for address, cause in reading.cause_of.items():
                is_logged = self._give_cause(address, reading.when, cause)
                if not is_logged and address not in self._before:
                    self._before[address] = cause
                    self._base[cause] += reading.num_bytes[address]
        self._base.update(_shared(readings, shared_bytes))
        hidden = 0 if shared_bytes else max((r.hidden_bytes for r in readings), default=0)
        unknown = log.base_bytes + shared_bytes - self._base.total()
        self._base["buckets"] += min(hidden, max(0, unknown))
        self._base["other"] += unknown - min(hidden, max(0, unknown))

    def _give_cause(self, address: int, when: float, cause: str) -> bool:
        """Give the block that lay at this address its cause; False where the log has none."""
        blocks = self._blocks_at.get(address, [])
        block = next((b for b in blocks if b.began_at <= when < b.ended_at), None)
        if block is not None:
            self._cause_of[id(block)] = cause
        return block is not None

    def changes(self) -> Iterator[tuple[float, Block | None, dict[str, int]]]:
        """Yield (when, the block that came or None, bytes by cause from then on), in order of time."""
        held = self._base.copy()
        yield float("-inf"), None, dict(held)
        for when, block, cause, num_bytes in self._sorted():
            held[cause or _of_unknown(held, -num_bytes)] += num_bytes
            yield when, block, held

    def _sorted(self) -> list[tuple[float, Block | None, str | None, int]]:
        """Return (when, the block that came or None, cause or None where nobody knows it, bytes) in order of time."""
        rows: list[tuple[float, Block | None, str | None, int]] = []
        for block in self._log.blocks:
            cause = self._cause_of[id(block)]
            rows.append((block.began_at, block, cause, block.num_bytes))
            rows.append((block.ended_at, None, cause, -block.num_bytes))
        for when, address, num_bytes in self._log.freed:
            rows.append((when, None, self._before.get(address), -num_bytes))
        return sorted((row for row in rows if row[0] < float("inf")), key=lambda row: row[0])

    def _by_birth(self, block: Block) -> str:
        if (cause := interval_at(self._ranges, block.began_at)) is not None:
            return cause[0]
        if block.thread or block.operator.startswith(COLLECTIVES):
            return "backend"
        if (cause := interval_at(self._times.by_birth, block.began_at)) is not None:
            return cause[0]
        phase, _, phase_end = interval_at(self._times.phases, block.began_at) or ("data", 0.0, 0.0)
        if phase == "data":
            return "other"
        if phase == "forward" and block.ended_at > phase_end:
            return "activations"
        stays = block.ended_at == float("inf")
        return "optimizer" if phase == "optimizer" and stays else "temporaries"


def _of_unknown(held: Counter[str], num_bytes: int) -> str:
    """Return the cause of a freed block that nobody showed: a bucket inside of DDP, which lays them out anew."""
    return "buckets" if held["buckets"] >= num_bytes > held["other"] else "other"


def _shared(readings: Sequence[Reading], shared_bytes: int) -> Counter[str]:
    """Divide the memory that ranks share."""
    most: Counter[str] = Counter()
    for reading in readings:
        most |= reading.shared
    most["shared memory"] = shared_bytes - most.total()
    return +most


def largest_causes(causes: Causes) -> tuple[float, Block | None, dict[str, int]]:
    """Return the moment of the largest total: (when, the block that made it, bytes by cause)."""
    best: tuple[int, float, Block | None, dict[str, int]] = (-1, 0.0, None, {})
    for when, block, held in causes.changes():
        total = sum(held.values())
        if total > best[0]:
            best = total, when, block, dict(held)
    return best[1:]


def in_causes_order(held: dict[str, int]) -> dict[str, int]:
    return {cause: held[cause] for cause in CAUSES if held.get(cause)}
