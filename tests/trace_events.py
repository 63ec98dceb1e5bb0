"""The schema of the trace-event format, as far as viewers need it: what every event of a trace must have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NEEDS: dict[str, dict[str, Any]] = {
    "X": {"ts": (int, float), "dur": (int, float)},
    "C": {"ts": (int, float), "args": dict},
    "M": {"args": dict},
    "i": {"ts": (int, float)},
    **{ph: {"ts": (int, float), "id": object} for ph in "bensftP"},
}


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a file that keeps to the schema; AssertionError names the first that does not."""
    content = json.loads(path.read_text(encoding="utf-8"))
    events = content["traceEvents"]
    assert isinstance(events, list) and events
    for event in events:
        assert isinstance(event["name"], str), event
        assert event["ph"] in NEEDS, event
        for key, kind in NEEDS[event["ph"]].items():
            assert isinstance(event[key], kind), event
        assert event.get("dur", 0) >= 0, event
        assert "pid" in event, event
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
    return events
