"""Traced steps against arithmetic: every byte of the peak has a cause, and the timeline says when."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto
from torch import nn

from tests import rank_code
from tests.measure.watched_main import EARLY
from tests.plain_strategy import PlainStrategy
from tests.plan.real_steps import SCRATCH_BYTES
from tests.test_rank import log_of, make_job
from tests.test_train import Numbers, make_config
from tests.trace_events import read_trace
from zeroexp.check import rules_of_one_key
from zeroexp.config import keys as configs
from zeroexp.config.keys import Config, ConfigError
from zeroexp.measure.allocations import Allocation, Log, logging_allocations
from zeroexp.measure.causes import Reading, changes_by_cause
from zeroexp.measure.chakra import COLLECTIVE, COMPUTE, traced_step, write_chakra
from zeroexp.measure.instruments import Instruments
from zeroexp.measure.memory import AllocationMeter, count_cpu_allocations
from zeroexp.measure.record import CAUSES, Peak
from zeroexp.process import world as worlds
from zeroexp.process.world import World
from zeroexp.tracking.files import read_records, read_summary
from zeroexp.training.loop import train

CPU = torch.device("cpu")


@pytest.fixture
def world():
    with worlds.joined_process_group() as world:
        yield world


def test_the_log_has_every_block_with_its_operator():
    assert count_cpu_allocations() is None
    old = torch.empty(100)
    meter = AllocationMeter(CPU)
    base = meter.peak_bytes()
    with logging_allocations(CPU) as log:
        kept = torch.ones(1000)
        total = (kept + 1).exp()  # the sum is freed
        del old
    assert log is not None and log.base_bytes == base
    blocks = [block for block in log.blocks if block.num_bytes > 8]  # the number 1 is a tensor too
    assert [(b.operator, b.num_bytes) for b in blocks] == [
        ("aten::ones", 4000),
        ("aten::add", 4000),
        ("aten::exp", 4000),
    ]
    ended = [block.ended_at < float("inf") for block in blocks]
    assert ended == [False, True, False]
    assert blocks[0].address == kept.data_ptr() and blocks[2].address == total.data_ptr()
    assert [num_bytes for _, _, num_bytes in log.freed] == [400]
    assert {block.thread for block in log.blocks} == {0}


def test_backward_names_the_node_of_autograd_and_nothing_is_logged_afterwards():
    assert count_cpu_allocations() is None
    weight = torch.ones(8, requires_grad=True)
    loss = weight.exp().sum()
    with logging_allocations(CPU) as log:
        loss.backward()
    torch.ones(5)
    assert {b.operator for b in log.blocks if b.num_bytes == 32} == {"ExpBackward0"}
    with logging_allocations(CPU) as again:
        pass
    assert again is not None and again.blocks == []


class Wide(nn.Module):
    """Two layers whose sizes tell causes apart: 3 samples of WIDTH numbers become 3 x HIDDEN."""

    IN, HIDDEN = 4, 1000

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(self.IN, self.HIDDEN, bias=False)
        self.second = nn.Linear(self.HIDDEN, self.IN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def traced_peak(world: World, folder: Path, **settings: Any) -> tuple[Peak, Any]:
    assert count_cpu_allocations() is None
    config = make_config(warmup=1, steps=3)
    config.data.micro_batch_size = 6  # one microbatch
    for key, value in settings.items():
        setattr(config.train, key, value)
    model = Wide()
    strategy = PlainStrategy(model)
    blocks = {"first": model.first, "second": model.second}
    instruments = Instruments(config.train, world, folder, model, blocks)
    records = list(
        train(strategy, Numbers(config), config=config, world=world, instruments=instruments)
    )
    (traced,) = [r for r in records if r.peak is not None and r.step != 0]
    assert traced.peak is not None
    return traced.peak, records


def test_the_peak_of_a_step_is_arithmetic(world, tmp_path):
    peak, records = traced_peak(world, tmp_path, trace_steps=[2])
    weights = 2 * Wide.IN * Wide.HIDDEN * 4
    held = peak.bytes_by_cause
    hidden = 6 * Wide.HIDDEN * 4  # of six samples
    # Backward is at tanh: the second layer has its gradient, the first has none yet. The gradients before and after
    # tanh are there, and what tanh saved.
    assert peak.phase == "backward" and peak.unit == "second"
    assert peak.operator == "TanhBackward0"
    assert held["parameters"] == weights
    assert held["gradients"] == weights // 2
    assert held["activations"] == hidden
    assert held["temporaries"] == 2 * hidden
    assert "optimizer" not in held  # plain SGD has no state
    assert peak.num_bytes == sum(held.values()) == records[2].peak_bytes
    assert 0 < peak.seconds < peak.step_seconds
    assert [r.traced for r in records] == [False, False, True, False]
    # The last warm-up step tells it too, and no other step.
    assert [r.step for r in records if r.peak] == [0, 2]
    assert records[0].peak is not None
    in_warmup = records[0].peak.bytes_by_cause
    assert {**in_warmup, "other": 0} == {**held, "other": 0}


def test_the_history_of_a_gpu_becomes_a_log(monkeypatch):
    """Fakes in the form that torch documents, since no GPU is here: _snapshot's TraceEntry."""
    calls: list[Any] = []
    now = time.time()

    def entry(action: str, addr: int, size: int, after: float) -> dict[str, Any]:
        frames = [{"name": "f", "filename": "a.py", "line": 3}]
        times = {"time_us": int(1e6 * (now + after)), "frames": frames}
        return {"action": action, "addr": addr, "size": size, "stream": 0, **times}

    history = [
        entry("segment_alloc", 1, 2_097_152, 0.0),
        entry("alloc", 1, 1000, 0.1),
        entry("free_requested", 1, 1000, 0.2),
        entry("free_completed", 1, 1000, 0.3),
        entry("free_completed", 9, 600, 0.4),  # from before
    ]
    snapshot = {"device_traces": [[], history], "segments": []}
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"requested_bytes.all.current": 700})
    monkeypatch.setattr(memory, "_record_memory_history", lambda *a, **k: calls.append(a))
    monkeypatch.setattr(memory, "_snapshot", lambda _: snapshot)
    with logging_allocations(torch.device("cuda", 1)) as log:
        pass
    assert log is not None and calls == [("all",), (None,)], "nothing is recorded afterwards"
    assert log.base_bytes == 700 and log.snapshot is snapshot
    (block,) = log.blocks
    assert (block.num_bytes, block.address, block.operator) == (1000, 1, "f (a.py:3)")
    assert block.ended_at - block.began_at == pytest.approx(0.2, abs=1e-4)
    assert block.began_at == pytest.approx(time.perf_counter() + 0.1, abs=5)
    assert [(address, num_bytes) for _, address, num_bytes in log.freed] == [(9, 600)]


def test_buckets_that_ddp_lays_out_anew_are_never_counted_below_zero():
    log = Log(base_bytes=100, blocks=[Allocation(1.0, 40, 7, "", 0)], freed=[(2.0, 9, 40)])
    reading = Reading(0.5, {5: ("parameters", 60)}, hidden_bytes=40)
    noted = [(1.5, 7, "gradients")]  # the new buckets hold gradients
    changes = changes_by_cause(log, [("backward", 0.0, 3.0)], [], [reading], noted, shared_bytes=0)
    (_, _, before), *_, (_, _, after) = changes
    assert {c: n for c, n in before.items() if n} == {"parameters": 60, "buckets": 40}
    assert {c: n for c, n in after.items() if n} == {"parameters": 60, "gradients": 40}


def test_a_run_of_two_ranks_leaves_its_traces(local, tmp_path):
    job = make_job(
        tmp_path / "run",
        strategy__name="zero3",
        train__trace_steps=[2],
        train__profile_steps=[3],
        train__profile_ranks=[1],
    )
    config = configs.load(job.folder / "config.yaml")
    for row in (config.strategy.parameters, config.strategy.gradients, config.strategy.optimizer):
        row.placement = "shard"
    configs.save(config, job.folder / "config.yaml")
    assert local.run(job).status == "done", log_of(job, 0)
    _check_timelines(job.folder)
    _check_profile(job.folder)
    _check_chakra(job.folder, tmp_path / "chakra")
    records, summary = read_records(job.folder), read_summary(job.folder)
    assert [r.traced for r in records] == [False, False, True, True]
    assert summary is not None and summary.num_steps == 1
    assert [peak is not None and peak.step in (0, 2) for peak in summary.memory.peaks] == [True] * 2
    for rank in summary.times:
        assert {"gather", "reduce", "hand_over", "publish", "norm", "loss"} <= set(rank.verbs)
        assert rank.step_seconds == pytest.approx(sum(rank.phase_seconds.values()))


def _check_timelines(folder: Path) -> None:
    for rank in (0, 1):
        path = folder / f"trace.{rank}.2.json"
        events = read_trace(path)
        other = json.loads(path.read_text())["otherData"]
        assert (other["rank"], other["step"], other["strategy"]) == (rank, 2, "zero3")
        named = {(e.get("cat"), e["name"]) for e in events}
        assert {("phase", p) for p in ("data", "forward", "backward", "optimizer", "step")} <= named
        for verb in ("gather unit blocks.0", "reduce unit blocks.1", "publish unit blocks.1"):
            assert ("verb", verb) in named
        assert {("unit", "forward blocks.0"), ("unit", "backward blocks.1")} <= named
        _check_flows(events)
        memory = [e["args"] for e in events if e["ph"] == "C"]
        assert all(list(held) == [c for c in CAUSES if c in held] for held in memory)
        peak = other["peak"]
        assert max(sum(held.values()) for held in memory) == peak["num_bytes"]
        assert peak["num_bytes"] == sum(peak["bytes_by_cause"].values())
        if rank == 0:
            # A thread of gloo may let go of a small message between the two counts.
            apart = peak["num_bytes"] - (read_records(folder)[2].peak_bytes or 0)
            assert abs(apart) <= SCRATCH_BYTES
        # Gather, use and free: each forward of a block begins after its gather has.
        began = {e["name"]: e["ts"] for e in reversed(events) if e["ph"] == "X"}
        for block in ("blocks.0", "blocks.1"):
            assert began[f"gather unit {block}"] <= began[f"forward {block}"]


def _check_flows(events: list[dict[str, Any]]) -> None:
    """Each arrow leads from the issue of a move to the wait for the same one."""
    parts = {(e["name"], e["args"]["part"], e["ts"]) for e in events if e.get("cat") == "verb"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    assert {"gather unit blocks.0", "reduce unit blocks.1"} <= {e["name"] for e in starts.values()}
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        assert (start["name"], "issue", start["ts"]) in parts
        assert (start["name"], "wait", ends[number]["ts"]) in parts and ends[number]["bp"] == "e"


def _check_profile(folder: Path) -> None:
    names = sorted(path.name for path in folder.glob("profile.*"))
    assert names == ["profile.1.3.json", "profile.1.3.txt"]
    events = read_trace(folder / names[0])
    ranges = {e["name"] for e in events if e["name"].startswith("zeroexp::")}
    assert "zeroexp::gather unit blocks.0, wait" in ranges
    assert any(name.startswith("zeroexp::reduce unit blocks.1, ") for name in ranges)
    table = (folder / names[1]).read_text()
    assert "aten::mm" in table and "zeroexp::publish unit blocks.0, issue" in table


def _chakra_node() -> Any:
    """Return the class of a Chakra node, built here from the fields of its schema that are read below."""
    texts = {"Node": "id:4 name:9 type:13 data_deps:4", "AttributeProto": "name:9 value:3"}
    places = {"Node": (1, 2, 3, 5), "AttributeProto": (1, 9)}  # name, int64_val
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="et", syntax="proto3")
    for message, text in texts.items():
        descriptor = file.message_type.add(name=message)
        for number, word in zip(places[message], text.split(), strict=True):
            name, kind = word.split(":")
            label = 3 if name == "data_deps" else 1
            descriptor.field.add(name=name, number=number, type=int(kind), label=label)
    file.message_type[0].field.add(
        name="attr", number=10, type=11, label=3, type_name=".et.AttributeProto"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("et.Node"))


def _check_chakra(folder: Path, target: Path) -> None:
    """Its moves are those that were counted, after what came before them, and in one order on all ranks."""
    target.mkdir()
    write_chakra(folder, 2, target)
    node_class, orders = _chakra_node(), list[list[str]]()
    for rank in (0, 1):
        content, nodes = io.BytesIO((target / f"chakra.{rank}.et").read_bytes()), list[Any]()
        assert content.read(8) == b"\x07\x0a\x051.0.0"
        while node := proto.parse_length_prefixed(node_class, content):
            nodes.append(node)
        assert [node.id for node in nodes] == list(range(len(nodes)))
        moves = [node for node in nodes if node.type == COLLECTIVE]
        sent = dict[str, int]()
        for move in moves:
            told = {each.name: each.value for each in move.attr}
            verb = move.name.split()[0]
            sent[verb] = sent.get(verb, 0) + told["sent_bytes"]
            # On two ranks a gather or a reduce-scatter sends half of all that it is about.
            halves = {"gather": (2, 1), "publish": (2, 1), "reduce": (7, 2), "norm": (0, 1)}
            if verb in halves:
                kind, times = halves[verb]
                assert (told["comm_type"], told["comm_size"]) == (kind, times * told["sent_bytes"])
        if rank == 0:
            counted = read_records(folder)[2].traffic.bytes_by_kind
            assert sent == {verb: size for verb, size in counted.items() if size}
        for node in nodes[1:]:
            assert node.data_deps and max(node.data_deps) < node.id
        waited = {dep for node in nodes if node.type == COMPUTE for dep in node.data_deps}
        assert {move.id for move in moves if move.name.startswith("gather")} <= waited
        orders.append([move.name for move in moves])
    assert orders[0] == orders[1]


def test_a_torn_timeline_is_no_step_to_simulate(tmp_path):
    (tmp_path / "trace.0.2.json").write_text('{"otherData": {"ra')
    with pytest.raises(ConfigError, match=r"trace\.0\.2\.json: damaged, .*; trace it again"):
        write_chakra(tmp_path, 2, tmp_path)


def test_no_rank_begins_a_step_while_another_writes_what_it_saw_of_the_last(local, tmp_path):
    """Else the next step, which counts in times, would wait for a file."""
    job = make_job(tmp_path / "run", train__trace_steps=[2])
    rank_code.choose(job.folder, "tests.measure.watched_main:slow_writer")
    assert local.run(job).status == "done", log_of(job, 0)
    assert (job.folder / "begun.3").exists() and not (job.folder / EARLY).exists()


def test_torch_shows_its_collectives_in_traced_steps(local, tmp_path):
    job = make_job(tmp_path / "run", strategy__implementation="torch", train__trace_steps=[2])
    assert local.run(job).status == "done", log_of(job, 0)
    summary = read_summary(job.folder)
    assert summary is not None and summary.memory.peak is not None
    for rank in (0, 1):
        events = read_trace(job.folder / f"trace.{rank}.2.json")
        assert ("backend", "c10d::allreduce_") in {(e.get("cat"), e["name"]) for e in events}
    with pytest.raises(ConfigError, match="implementation torch sends is not in its timeline"):
        write_chakra(job.folder, 2, tmp_path)
    with pytest.raises(ConfigError, match="no timeline of it; use 2"):
        traced_step(job.folder, 3)
    for peak, most in zip(summary.memory.peaks, summary.memory.peak.per_rank, strict=True):
        assert peak is not None and most >= peak.num_bytes == sum(peak.bytes_by_cause.values())
        assert peak.bytes_by_cause["parameters"] == summary.memory.by_kind["parameters"].fullest


def test_a_step_or_rank_that_does_not_exist_is_refused():
    config = Config()
    config.train.trace_steps, config.train.profile_steps = [3, 99], [-1]
    config.train.profile_ranks = [1, 2]
    assert list(rules_of_one_key.check_watched_steps(config)) == [
        ("train.trace_steps=99", "no step of this run", "use numbers from 0 to 22"),
        ("train.profile_steps=-1", "no step of this run", "use numbers from 0 to 22"),
        ("train.profile_ranks=2", "no rank of this run", "use numbers from 0 to 1"),
    ]
