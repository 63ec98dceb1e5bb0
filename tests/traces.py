"""A trace file as measure/trace_file.py describes it, small enough to count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MIB = 2**20


def write_trace(folder: Path, rank: int, step: int, began_at: float) -> None:
    """A gather of 2 ms, a block that runs for 3 ms, and memory that rises and falls with them."""

    def span(cat: str, name: str, ts: int, dur: int, **args: Any) -> dict[str, Any]:
        shared = {"ph": "X", "pid": rank, "tid": 0}
        return {**shared, "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    def held(ts: int, pools: int) -> dict[str, Any]:
        args = {"parameters": 4 * MIB, "pools": pools * MIB}
        return {"ph": "C", "pid": rank, "tid": 0, "name": "memory", "ts": ts, "args": args}

    events = [
        {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": "rank"}},
        span("phase", "forward", 0, 6000),
        span(
            "verb", "gather unit block", 1000, 2000, verb="gather", what="unit block", part="wait"
        ),
        span("exposed", "gather unit block", 1000, 500, verb="gather", what="unit block", peer=1),
        span("unit", "forward block", 3000, 3000, unit="block", **{"pass": "forward"}),
        span("backend", "c10d::allreduce_", 0, 10),
        *(held(0, 0), held(1000, 8), held(6000, 0)),
    ]
    other = {
        "format": 1,
        "rank": rank,
        "world_size": 2,
        "step": step,
        "began_at": began_at,
        "peak": None,
    }
    text = json.dumps({"otherData": other, "displayTimeUnit": "ms", "traceEvents": events})
    (folder / f"trace.{rank}.{step}.json").write_text(text)
