"""The timeline of one step of one rank, as a file in the run's folder: trace.<rank>.<step>.json.

The file is JSON in the trace-event format, which Perfetto and chrome://tracing open as it is:

    {"otherData": {...}, "displayTimeUnit": "ms", "traceEvents": [...]}

`ts` and `dur` are microseconds; ts 0 is the beginning of this rank's step. `pid` is the rank. Events by `ph`:

    "M"   names: process_name "rank 1", thread_name of each row (`tid`) below
    "X"   a span with `ts`, `dur`, `name`, `cat` and `args`, by `cat`:
            phase     tid 0   data | forward | backward | optimizer | step, without gaps
            unit      tid 1   forward or backward of one block; args {"unit": "model.layers.0", "pass": "forward"}
            verb      tid 2   this rank's thread issues or waits for a move; args {"verb": "gather", "what":
                              "unit model.layers.0", "part": "issue" | "wait", "collective": "all_gather" (empty: it
                              is none), "ranks": [0, 1], "bytes": sent by this rank}
            exposed   tid 3   inside of a wait: the rank does nothing; args {"verb", "what", "peer": 1 or null}
            flight    tid 4   a move under way beside compute, from its issue to its wait; args {"verb", "what"}
                              (spans of one row may overlap here)
            backend   tid 5   what torch names itself: collectives and engines in C++ ("c10d::allreduce_",
                              "FSDP::all_gather"); args {"async": true} where another thread ended it
    "s"   the arrow from the issue of a move (verb row) to "f", its wait: equal `id`, `cat` "move"
    "C"   memory over time: name "memory", args {cause: bytes} with every cause of record.CAUSES that the step has, in
          their order, to be stacked; their sum is all that torch's allocator and shared memory hold

`otherData` holds {"format" (measure/formats.py), "rank", "world_size", "step", "began_at": Unix seconds of ts 0, by
which ranks are aligned, "strategy", "implementation", "peak": the Peak of record.py or null}.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zeroexp.measure.communication_overlap import TimedMove
from zeroexp.measure.record import CAUSES
from zeroexp.measure.trace import StepTrace, spans_of

ROWS = ("phase", "unit", "verb", "exposed", "flight", "backend")
NUM_MEMORY_POINTS = 1000  # of one step; each shows the most that was held since the one before
MICRO = 1e6
TraceSpan = tuple[str, str, float, float, dict[str, Any]]  # row, name, from, to, args


def events_of(trace: StepTrace, rank: int) -> list[dict[str, Any]]:
    """Return the trace events of one step, as this file's head describes them."""

    def micro(when: float) -> float:
        return round(MICRO * (when - trace.began_at), 3)

    names = [("process_name", 0, f"rank {rank}")]
    names += [("thread_name", tid, row) for tid, row in enumerate(ROWS)]
    spans = [
        {
            **{"ph": "X", "tid": ROWS.index(row), "cat": row, "name": name, "args": args},
            **{"ts": micro(start), "dur": max(0.0, round(MICRO * (end - start), 3))},
        }
        for row, name, start, end, args in _spans(trace)
    ]
    arrows = [
        # Ids are those of the whole trace, which viewers may join.
        {**end, "tid": ROWS.index("verb"), "cat": "move", "name": name, "id": f"{rank}.{number}"}
        for number, (name, issued, waited) in enumerate(_arrows(trace))
        for end in ({"ph": "s", "ts": micro(issued)}, {"ph": "f", "bp": "e", "ts": micro(waited)})
    ]
    events = [
        *({"ph": "M", "tid": t, "name": what, "args": {"name": name}} for what, t, name in names),
        *spans,
        *arrows,
        *(
            {"ph": "C", "tid": 0, "name": "memory", "ts": micro(when), "args": held}
            for when, held in _memory(trace)
        ),
    ]
    return [{"pid": rank, **event} for event in events]


def _spans(trace: StepTrace) -> Iterator[TraceSpan]:
    for name, start, end in trace.phases:
        yield "phase", name, start, end, {}
    for unit, turn, start, end in trace.unit_spans():
        yield "unit", f"{turn} {unit}", start, end, {"unit": unit, "pass": turn}
    for move in trace.moves:
        yield from _spans_of_move(move, trace.began_at)
    for span in trace.log.spans if trace.log is not None else ():
        words = {"async": span.asynchronous}
        yield "backend", span.name, span.began_at, span.ended_at, words


def _spans_of_move(move: TimedMove, began: float) -> Iterator[TraceSpan]:
    words = {"verb": move.verb, "what": move.what}
    name = f"{move.verb} {move.what}"
    sent = {"collective": move.collective, "ranks": [*move.ranks], "bytes": move.num_bytes}
    for part, (start, end) in spans_of(move).items():
        if end > began:  # a move of the step before may be waited for in this one
            yield "verb", name, max(start, began), end, {**words, "part": part, **sent}
    for peer, start, seconds in move.blocked:
        if start >= began:
            yield "exposed", name, start, start + seconds, {**words, "peer": peer}
    if isinstance(move.issued, float) and isinstance(move.waited, float) and not move.moves_on_wait:
        yield "flight", name, max(move.issued, began), max(move.waited, began), words


def _arrows(trace: StepTrace) -> Iterator[tuple[str, float, float]]:
    """Yield (name, when it was issued, when it was waited for) of each move that this step issued."""
    for move in trace.moves:
        spans = spans_of(move)
        if len(spans) == 2 and spans["issue"][0] >= trace.began_at:
            yield f"{move.verb} {move.what}", spans["issue"][0], spans["wait"][0]


def _memory(trace: StepTrace) -> Iterator[tuple[float, dict[str, int]]]:
    """Yield (when, bytes by cause): in each slice of the step the moment that held most."""
    width = (trace.ended_at - trace.began_at) / NUM_MEMORY_POINTS
    fullest: dict[int, tuple[float, dict[str, int]]] = {}  # by slice
    for when, _, held in trace.changes:
        when = max(when, trace.began_at)
        number = int((when - trace.began_at) / width)
        if number not in fullest or sum(held.values()) > sum(fullest[number][1].values()):
            fullest[number] = when, held
    shown = [cause for cause in CAUSES if any(held.get(cause) for _, held in fullest.values())]
    for when, held in fullest.values():
        yield when, {cause: held.get(cause, 0) for cause in shown}
