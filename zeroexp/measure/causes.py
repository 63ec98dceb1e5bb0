"""Causes of the memory of a traced step: model states are known by their address, all else by when it came.

    asked of the engine    where its model states lie at a moment: parameters, gradients, optimizer, master, pools
    seen by a hook         a gradient as autograd makes it; the model's output (logits)
    by the time of birth   in forward and kept for backward: activations; from the model's output to the gradient of it:
                           logits; inside of a gather: pools; of another verb: buckets; in a collective of torch or a
                           thread of the backend: backend; else temporaries

A block keeps one cause for its whole life. What was there before the step and is no model state is "other".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from zeroexp.interface.strategy import ModelStates
from zeroexp.measure.allocations import FOREVER, Allocation, Log, is_counted
from zeroexp.measure.memory import storages_by_kind
from zeroexp.measure.record import KINDS, OUTER
from zeroexp.measure.time_spans import Interval, interval_at

CAUSE_OF_KIND = {"buffers": "pools", OUTER: "optimizer"}
COLLECTIVES = ("c10d::", "gloo:", "nccl:")
# Ranges that FSDP2 names itself.
RANGES = {"FSDP::all_gather": "pools", "FSDP::post_backward_reduce": "buckets"}
# When, the block that came or None, and bytes by cause from then on.
Change = tuple[float, Allocation | None, dict[str, int]]


@dataclass
class Reading:
    """Model states of an engine at one moment, by address."""

    when: float
    storages: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])
    # Cause -> bytes in memory that ranks share.
    shared: Counter[str] = field(default_factory=Counter[str])
    hidden_bytes: int = 0


def read_states(states: ModelStates, when: float) -> Reading:
    """Note where the engine's model states lie."""
    reading = Reading(when, hidden_bytes=states.hidden_bytes)
    for kind, tensor in storages_by_kind(states, (*KINDS, OUTER)):
        cause, storage = CAUSE_OF_KIND.get(kind, kind), tensor.untyped_storage()
        if not is_counted(tensor):
            reading.shared[cause] += storage.nbytes()
        elif storage.nbytes():
            reading.storages.setdefault(storage.data_ptr(), (cause, storage.nbytes()))
    return reading


def changes_by_cause(
    log: Log,
    phases: Sequence[Interval],
    births: Sequence[Interval],
    readings: Sequence[Reading],
    noted: Sequence[tuple[float, int, str]],
    shared_bytes: int,
) -> list[Change]:
    """Give each block of the log its cause, and return what was held, by cause, after every change.

    births: the cause of what is born inside, and the first one counts: "pools" and "buckets" while this thread issued a
    move or waited for it, "logits" from the model's output to its gradient, "activations" in a forward inside of
    backward. noted: (when, address, cause) of single tensors that hooks saw.
    """
    blocks_at: dict[int, list[Allocation]] = defaultdict(list)
    ranges = _ranges(log)
    for block in log.blocks:
        block.cause = _cause_by_birth(block, ranges, phases, births)
        blocks_at[block.address].append(block)

    def give_cause(address: int, when: float, cause: str) -> bool:
        """Give the block that lay at this address its cause; False where the log has none."""
        there = (b for b in blocks_at.get(address, ()) if b.began_at <= when < b.ended_at)
        block = next(there, None)
        if block is not None:
            block.cause = cause
        return block is not None

    for when, address, cause in noted:
        give_cause(address, when, cause)
    base: Counter[str] = Counter()
    before: dict[int, str] = {}  # blocks from before the log: address -> cause
    for reading in readings:
        for address, (cause, num_bytes) in reading.storages.items():
            if not give_cause(address, reading.when, cause) and address not in before:
                before[address] = cause
                base[cause] += num_bytes
    base.update(_shared(readings, shared_bytes))
    unknown = log.base_bytes + shared_bytes - base.total()
    hidden = 0 if shared_bytes else max((r.hidden_bytes for r in readings), default=0)
    base["buckets"] += min(hidden, max(0, unknown))
    base["other"] += unknown - min(hidden, max(0, unknown))
    return [*_changes(base, log, before)]


def _changes(base: Counter[str], log: Log, before: dict[int, str]) -> Iterator[Change]:
    """Yield what is held after each change, in order of time, the first from before the log."""
    rows: list[tuple[float, Allocation | None, str | None, int]] = []
    for block in log.blocks:
        rows.append((block.began_at, block, block.cause, block.num_bytes))
        if block.ended_at < FOREVER:
            rows.append((block.ended_at, None, block.cause, -block.num_bytes))
    rows += [(when, None, before.get(address), -size) for when, address, size in log.freed]
    held = base.copy()
    yield -FOREVER, None, dict(held)
    for when, block, cause, num_bytes in sorted(rows, key=lambda row: row[0]):
        held[cause or _cause_of_unknown(held, -num_bytes)] += num_bytes
        yield when, block, dict(held)


def _ranges(log: Log) -> list[Interval]:
    return [
        (cause, span.began_at, span.ended_at)
        for span in log.spans
        for name, cause in RANGES.items()
        if span.name.startswith(name)
    ]


def _cause_by_birth(
    block: Allocation,
    ranges: Sequence[Interval],
    phases: Sequence[Interval],
    births: Sequence[Interval],
) -> str:
    if (cause := interval_at(ranges, block.began_at)) is not None:
        return cause[0]
    if block.thread or block.operator.startswith(COLLECTIVES):
        return "backend"
    if (cause := interval_at(births, block.began_at)) is not None:
        return cause[0]
    phase, _, phase_end = interval_at(phases, block.began_at) or ("data", 0.0, 0.0)
    if phase == "data":
        return "other"
    if phase == "forward" and block.ended_at > phase_end:
        return "activations"
    stays = block.ended_at == FOREVER
    return "optimizer" if phase == "optimizer" and stays else "temporaries"


def _cause_of_unknown(held: Counter[str], num_bytes: int) -> str:
    """Return the cause of a freed block that nobody showed: a bucket inside of DDP, which lays them out anew."""
    return "buckets" if held["buckets"] >= num_bytes > held["other"] else "other"


def _shared(readings: Sequence[Reading], shared_bytes: int) -> Counter[str]:
    """Divide the memory that ranks share."""
    most: Counter[str] = Counter()
    for reading in readings:
        most |= reading.shared
    most["shared memory"] = shared_bytes - most.total()
    return +most
