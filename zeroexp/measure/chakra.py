"""The timelines of one step as a Chakra execution trace of MLCommons, which simulators of networks replay.

    compute  forward layers.0 ──▶ forward layers.1 ──▶ forward layers.2 ──▶ ...
    move                     └──▶ gather unit layers.2 ──┘

A rank's compute is a chain of nodes, cut where its thread issues or waits for a move. A move depends on the compute
before it, and the compute after its wait on the move. A file is a message of metadata and one for each node, each
behind its length, with the fields of et_def.proto (https://github.com/mlcommons/chakra, version 1.0.0). Protobuf's wire
format is written by hand, which takes fewer lines than its generated module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from zeroexp.config.engines import ENGINES
from zeroexp.registry.errors import ConfigError, DamagedFile

COMPUTE, COLLECTIVE = 4, 7  # NodeType
COMM_TYPES = {"all_reduce": 0, "all_gather": 2, "all_to_all": 6, "reduce_scatter": 7}
GROUPS = "comm_groups.json"  # number of a group of ranks -> its ranks, as ASTRA-sim reads it
Event = dict[str, Any]


def traced_step(run: Path, step: int | None = None) -> int:
    """Return this step, or the last one that the run traced; raises ConfigError where it did not."""
    steps = sorted({int(path.name.split(".")[2]) for path in run.glob("trace.*.*.json")})
    if not steps or (step is not None and step not in steps):
        remedy = f"use {', '.join(map(str, steps))}" if steps else "run with train.trace_steps"
        raise ConfigError(f"--step={step}: {run} has no timeline of it; {remedy}")
    return steps[-1] if step is None else step


def write_chakra(run: Path, step: int, folder: Path) -> None:
    """Write chakra.<rank>.et of every rank, and GROUPS where some ranks have moves of their own.

    Raises ConfigError where a rank's timeline is missing, damaged or does not tell what it sent.
    """
    paths = sorted(run.glob(f"trace.*.{step}.json"), key=lambda path: int(path.name.split(".")[1]))
    traces = [_read(path) for path in paths]
    moves = [e["args"] for each in traces for e in each["traceEvents"] if e.get("cat") == "verb"]
    size, engine = (traces[0]["otherData"].get(key) for key in ("world_size", "implementation"))
    if engine in ENGINES or any("collective" not in move for move in moves):
        problem = f"what implementation {engine} sends is not in its timeline"
        raise ConfigError(f"--format=chakra: {run}: {problem}; trace a step of our own engine")
    if len(traces) < size:
        raise ConfigError(f"--format=chakra: {run}: {len(traces)} of {size} ranks; trace it again")
    smaller = {tuple(move["ranks"]) for move in moves if 0 < len(move["ranks"]) < size}
    groups = {ranks: number for number, ranks in enumerate(sorted(smaller), start=1)}
    for rank, trace in enumerate(traces):
        nodes = [_node(number, each, groups) for number, each in enumerate(nodes_of(trace))]
        messages = [_field(1, "1.0.0"), *nodes]
        content = b"".join(_varint(len(each)) + each for each in messages)
        (folder / f"chakra.{rank}.et").write_bytes(content)
    if groups:
        listed = {str(number): ranks for ranks, number in groups.items()}
        (folder / GROUPS).write_text(json.dumps(listed), encoding="utf-8")


def _read(path: Path) -> Event:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # a part, as of a run that filled the disk
        raise DamagedFile(path, "no JSON", "trace it again") from error


def nodes_of(trace: Event) -> list[Event]:
    """Return each node's name, ts, dur, the numbers of nodes that it is `after`, and `args` of a move."""
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    compute = [each for each in spans if each["cat"] in ("phase", "unit")]
    end: Event = {"ts": max(s["ts"] + s["dur"] for s in compute), "dur": 0.0, "args": {"part": ""}}
    nodes, after, now = list[Event](), list[int](), 0.0
    in_flight: dict[str, list[int]] = {}  # by name, the moves that nobody has waited for
    moves = [each for each in spans if each["cat"] == "verb"]
    for move in [*sorted(moves, key=_acts_at), end]:
        for name, start, stop in _computed(compute, now, move["ts"]):
            nodes.append({"name": name, "ts": start, "dur": stop - start, "after": after})
            after = [len(nodes) - 1]
        now = max(now, move["ts"] + move["dur"])
        issued = in_flight.setdefault(move.get("name", ""), [])
        if move["args"]["part"] == "issue" and move["args"]["collective"]:
            issued.append(len(nodes))
            nodes.append({**move, "after": after})
        elif move["args"]["part"] == "wait" and issued:
            arrived = issued.pop(0)
            nodes[arrived]["dur"] = now - nodes[arrived]["ts"]
            after = [*after, arrived]
    return nodes


def _acts_at(move: Event) -> float:
    """Return when a thread begins to wait for a move, or has issued it, as after what it waits for meanwhile."""
    return move["ts"] + (move["dur"] if move["args"]["part"] == "issue" else 0.0)


def _computed(spans: list[Event], start: float, end: float) -> Iterator[tuple[str, float, float]]:
    """Yield (name, from, to) of what the thread computes between two moves, cut where phases and blocks change."""
    marks = {mark for each in spans for mark in (each["ts"], each["ts"] + each["dur"])}
    for begins, ends in pairwise([start, *sorted(m for m in marks if start < m < end), end]):
        around = [s for s in spans if s["ts"] <= begins and ends <= s["ts"] + s["dur"]]
        if ends > begins and around:
            yield min(around, key=lambda each: each["dur"])["name"], begins, ends


def _node(number: int, node: Event, groups: dict[tuple[int, ...], int]) -> bytes:
    move, attributes = node.get("args"), _attribute("is_cpu_op", 27, 0)
    if move:
        numbers = {"comm_type": COMM_TYPES[move["collective"]], "comm_size": comm_size(move)}
        for name, value in {**numbers, "sent_bytes": move["bytes"]}.items():
            attributes += _attribute(name, 9, value)
        if group := groups.get(tuple(move["ranks"])):
            attributes += _attribute("pg_name", 29, str(group))
    kind = COLLECTIVE if move else COMPUTE
    after = b"".join(map(_varint, node["after"]))
    fields = {
        1: number,
        2: node["name"],
        3: kind,
        5: after,
        6: int(node["ts"]),
        7: int(node["dur"]),
    }
    return b"".join(_field(at, value) for at, value in fields.items()) + attributes


def comm_size(move: Event) -> int:
    """Return the bytes that each rank gives to a collective, cut evenly, of which this one sends so many."""
    num_others = max(1, len(move["ranks"]) - 1)
    if move["collective"] == "all_gather":
        return move["bytes"] // num_others
    rounds = 2 if move["collective"] == "all_reduce" else 1
    return move["bytes"] * len(move["ranks"]) // (rounds * num_others)


def _attribute(name: str, kind: int, value: int | str) -> bytes:
    """Write a node's AttributeProto; kind: the number of bool_val, int64_val or string_val."""
    return _field(10, _field(1, name) + _field(kind, value))


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    rest = value >> 7
    return bytes([value & 0x7F | 0x80]) + _varint(rest) if rest else bytes([value])
