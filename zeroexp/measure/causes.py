"""Every block of a traced step has a cause: model states are known by their address, all else by when it came.

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
from zeroexp.measure.memory import local_tensor
from zeroexp.measure.record import CAUSES, KINDS

CAUSE_OF_KIND = {"buffers": "pools"}
COLLECTIVES = ("c10d::", "gloo:", "nccl:")
# Ranges that FSDP2 names itself.
RANGES = {"FSDP::all_gather": "pools", "FSDP::post_backward_reduce": "buckets"}

Interval = tuple[float, float]


@dataclass
class Times:
    """Times tell when the things of a step happened, in seconds of time.perf_counter."""

    phases: list[tuple[str, float, float]]  # (phase, from, to), in order
    # This thread issued a gather or waited for one, and the same for another move.
    gathers: list[Interval] = field(default_factory=list[Interval])
    verbs: list[Interval] = field(default_factory=list[Interval])
    # From the model's output to its gradient.
    losses: list[Interval] = field(default_factory=list[Interval])
    # Forwards inside of backward.
    recomputed: list[Interval] = field(default_factory=list[Interval])

    def phase_at(self, when: float) -> str | None:
        return next((name for name, start, end in self.phases if start <= when < end), None)


@dataclass
class Reading:
    """A reading is what an engine held at one moment."""

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
    for kind in KINDS:
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
    """Tells the cause of every block of a log, and the bytes by cause at any time."""

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
            (cause, (span.began_at, span.ended_at))
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
        times, born = self._times, block.began_at
        for cause, interval in self._ranges:
            if _within([interval], born):
                return cause
        if block.thread or block.operator.startswith(COLLECTIVES):
            return "backend"
        if _within(times.gathers, born):
            return "pools"
        if _within(times.verbs, born):
            return "buckets"
        phase = next((row for row in times.phases if row[1] <= born < row[2]), None)
        if phase is None or phase[0] == "data":
            return "other"
        if _within(times.losses, born):
            return "logits"
        kept = block.ended_at > phase[2]
        if phase[0] == "forward":
            return "activations" if kept else "temporaries"
        if phase[0] == "backward" and _within(times.recomputed, born):
            return "activations"
        return (
            "optimizer"
            if phase[0] == "optimizer" and block.ended_at == float("inf")
            else "temporaries"
        )


def _of_unknown(held: Counter[str], num_bytes: int) -> str:
    """Return the cause of a freed block that nobody showed: a bucket inside of DDP, which lays them out anew."""
    return "buckets" if held["buckets"] >= num_bytes > held["other"] else "other"


def _within(intervals: Sequence[Interval], when: float) -> bool:
    return any(start <= when < end for start, end in intervals)


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
