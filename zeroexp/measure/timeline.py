"""The timeline of one step of one rank, as a file in the run's folder: trace.<rank>.<step>.json.

The file is JSON in the trace-event format, which Perfetto and chrome://tracing open as it is:

    {"otherData": {...}, "displayTimeUnit": "ms", "traceEvents": [...]}

`ts` and `dur` are microseconds; ts 0 is the beginning of this rank's step. `pid` is the rank. Events by `ph`:

    "M"   names: process_name "rank 1", thread_name of each row (`tid`) below
    "X"   a span with `ts`, `dur`, `name`, `cat` and `args`, by `cat`:
            phase     tid 0   data | forward | backward | optimizer | step, without gaps
            unit      tid 1   forward or backward of one block; args {"unit": "model.layers.0", "pass": "forward"}
            verb      tid 2   this rank's thread issues or waits for a move; args {"verb": "gather", "what":
                              "unit model.layers.0", "part": "issue" | "wait"}
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

from zeroexp.measure.causes import Causes
from zeroexp.measure.record import CAUSES
from zeroexp.measure.trace import StepTrace, spans_of
from zeroexp.measure.verb_seconds import TimedMove

ROWS = ("phase", "unit", "verb", "exposed", "flight", "backend")
NUM_MEMORY_POINTS = 1000  # of one step; each shows the most that was held since the one before
MICRO = 1e6


def events_of(trace: StepTrace, rank: int) -> list[dict[str, Any]]:
    """Return the trace events of one step, as this file's head describes them."""
    maker = _EventMaker(rank, trace.began_at)
    events = maker.names()
    for name, start, end in trace.phases:
        events.append(maker.span("phase", name, start, end))
    for unit in trace.unit_spans():
        words = {"unit": unit.unit, "pass": unit.turn}
        events.append(
            maker.span("unit", f"{unit.turn} {unit.unit}", unit.began_at, unit.ended_at, words)
        )
    for number, move in enumerate(trace.moves):
        events += _events_of_move(maker, move, number, trace.began_at)
    for span in trace.log.spans if trace.log is not None else ():
        words = {"async": span.asynchronous}
        events.append(maker.span("backend", span.name, span.began_at, span.ended_at, words))
    if trace.causes is not None:
        events += [maker.memory(when, held) for when, held in _points(trace.causes, trace)]
    return events


class _EventMaker:
    """Makes events of one rank whose times count from the beginning of its step."""

    def __init__(self, rank: int, began: float):
        self._rank, self._began = rank, began

    def names(self) -> list[dict[str, Any]]:
        def named(what: str, tid: int, name: str) -> dict[str, Any]:
            return {"ph": "M", "pid": self._rank, "tid": tid, "name": what, "args": {"name": name}}

        rows = [named("thread_name", tid, row) for tid, row in enumerate(ROWS)]
        return [named("process_name", 0, f"rank {self._rank}"), *rows]

    def span(
        self, row: str, name: str, start: float, end: float, args: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            **{"ph": "X", "pid": self._rank, "tid": ROWS.index(row), "cat": row, "name": name},
            **{"ts": self._micro(start), "dur": max(0.0, round(MICRO * (end - start), 3))},
            "args": args or {},
        }

    def flow(self, name: str, number: int, issued: float, waited: float) -> list[dict[str, Any]]:
        """Return both ends of the arrow from the span that issues a move to the span that waits for it."""
        shared = {"pid": self._rank, "tid": ROWS.index("verb"), "cat": "move", "name": name}
        shared["id"] = (
            f"{self._rank}.{number}"  # ids are those of the whole trace, which viewers may join
        )
        return [
            {**shared, "ph": "s", "ts": self._micro(issued)},
            {**shared, "ph": "f", "bp": "e", "ts": self._micro(waited)},
        ]

    def memory(self, when: float, held: dict[str, int]) -> dict[str, Any]:
        point = {"ph": "C", "pid": self._rank, "tid": 0, "name": "memory"}
        return {**point, "ts": self._micro(max(when, self._began)), "args": held}

    def _micro(self, when: float) -> float:
        return round(MICRO * (when - self._began), 3)


def _events_of_move(
    maker: _EventMaker, move: TimedMove, number: int, began: float
) -> Iterator[dict[str, Any]]:
    words = {"verb": move.verb, "what": move.what}
    name = f"{move.verb} {move.what}"
    spans = spans_of(move)
    if len(spans) == 2 and spans["issue"][0] >= began:
        yield from maker.flow(name, number, spans["issue"][0], spans["wait"][0])
    for part, (start, end) in spans.items():
        if end > began:  # a move of the step before may be waited for in this one
            yield maker.span("verb", name, max(start, began), end, {**words, "part": part})
    for peer, start, seconds in move.blocked:
        if start >= began:
            yield maker.span("exposed", name, start, start + seconds, {**words, "peer": peer})
    if isinstance(move.issued, float) and isinstance(move.waited, float) and not move.moves_on_wait:
        yield maker.span("flight", name, max(move.issued, began), max(move.waited, began), words)


def _points(causes: Causes, trace: StepTrace) -> Iterator[tuple[float, dict[str, int]]]:
    """Yield (when, bytes by cause): in each slice of the step the moment that held most."""
    width = (trace.ended_at - trace.began_at) / NUM_MEMORY_POINTS
    fullest: dict[int, tuple[float, dict[str, int]]] = {}  # by slice
    for when, _, held in causes.changes():
        number = int((max(when, trace.began_at) - trace.began_at) / width)
        if number not in fullest or sum(held.values()) > sum(fullest[number][1].values()):
            fullest[number] = when, dict(held)
    shown = [cause for cause in CAUSES if any(held.get(cause) for _, held in fullest.values())]
    for when, held in fullest.values():
        yield when, {cause: held.get(cause, 0) for cause in shown}
