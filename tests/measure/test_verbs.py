"""Seconds of verbs by a clock that the test moves, and between real ranks of which one is late."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from tests.measure.test_clock import Seconds
from zeroexp.comm.base import Pending
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.measure import communication_overlap
from zeroexp.measure.communication_overlap import TimedMove, meter, sum_up_moves
from zeroexp.measure.record import VerbSeconds
from zeroexp.process import world as worlds
from zeroexp.process.world import World
from zeroexp.zero.options import Options


@pytest.fixture
def seconds(monkeypatch):
    return Seconds(monkeypatch)


@pytest.fixture
def moves():
    with meter.recording() as moves:
        yield moves


class Work:
    """A transport's part of a move: it waits for a peer, then copies."""

    def __init__(self, seconds: Seconds) -> None:
        self._seconds = seconds

    def wait(self) -> None:
        began = time.perf_counter()
        self._seconds.pass_by(16)
        meter.blocked(1, began)
        self._seconds.pass_by(8)


def start(seconds: Seconds, verb: str, *, moves_on_wait: bool = False) -> Pending:
    with meter.timing(verb, "unit a") as move:
        seconds.pass_by(1)
        move.in_flight, move.moves_on_wait = True, moves_on_wait
        pending = Pending([Work(seconds)], lambda: seconds.pass_by(2))
        pending.move = move
    return pending


def test_a_move_works_overlaps_and_waits(seconds, moves):
    pending = start(seconds, "reduce")
    seconds.pass_by(32)  # compute
    assert moves == []  # it has not ended
    pending.wait()
    verbs, waited = sum_up_moves(moves)
    assert verbs == {"reduce": VerbSeconds(1, working=1 + 8 + 2, overlapped=32, exposed=16)}
    assert waited == {"1": 16}
    pending.wait()  # nothing is left to wait for
    assert len(moves) == 1


def test_moves_are_kept_where_somebody_records_them_alone(seconds):
    with meter.recording() as moves:
        start(seconds, "gather").wait()
    start(seconds, "reduce").wait()
    assert [move.verb for move in moves] == ["gather"]


def test_events_of_a_gpu_are_asked_for_by_a_recorder_alone(seconds, monkeypatch):
    """A move keeps the clock that it began with, and nobody who records by another one counts it."""
    asked: list[str] = []
    real = communication_overlap.mark_now

    def mark(device: torch.device) -> float:
        asked.append(device.type)
        return real(torch.device("cpu"))

    monkeypatch.setattr(communication_overlap, "mark_now", mark)
    before = start(seconds, "gather")
    with meter.recording(torch.device("cuda")) as moves:
        before.wait()
        pending = start(seconds, "reduce")
        pending.wait()
        left = start(seconds, "publish")
    left.wait()
    start(seconds, "gather").wait()
    assert [move.verb for move in moves] == ["reduce"]
    assert sum_up_moves(moves)[1] == {}, "the stream waits, not the host"
    assert asked == ["cpu"] * 5 + ["cuda"] * 10 + ["cpu"] * 5


def test_what_moves_on_wait_overlaps_nothing(seconds, moves):
    pending = start(seconds, "gather", moves_on_wait=True)
    seconds.pass_by(32)
    pending.wait()
    verbs, _ = sum_up_moves(moves)
    assert verbs["gather"].overlapped == 0


def test_no_moment_counts_twice_however_many_moves_are_in_flight(seconds, moves):
    """Of three moves in flight, each alone would say 22, 51 and 76 s, where 24 s were computed."""
    pending = [start(seconds, verb) for verb in ("reduce", "gather", "reduce")]
    seconds.pass_by(20)  # compute
    pending[0].wait()  # 26 s, of which 16 blocked: the others overlap nothing meanwhile
    seconds.pass_by(4)  # compute
    for each in pending[1:]:
        each.wait()
    verbs, waited = sum_up_moves(moves)
    assert sum(verb.overlapped for verb in verbs.values()) == 20 + 4
    assert verbs["reduce"].overlapped == 20  # the first one's; then the gather is the oldest
    assert verbs["gather"].overlapped == 4
    assert sum(verb.exposed for verb in verbs.values()) == waited["1"] == 3 * 16
    assert sum(verb.working for verb in verbs.values()) == 3 * (1 + 8 + 2)


def test_overlapping_waits_of_streams_are_exposed_once(seconds):
    """Events of a GPU may be on several streams, whose waits overlap."""
    gpu = torch.device("cuda")

    def move(verb: str, waited: float, arrived: float) -> TimedMove:
        marks = {"issued": 0.0, "waited": waited, "arrived": arrived, "ended_at": arrived + 1}
        return TimedMove(verb, "unit a", gpu, 0.0, **marks)

    made = [move("gather", 2.0, 8.0), move("reduce", 4.0, 10.0), move("norm", 5.0, 7.0)]
    verbs, _ = sum_up_moves(made)
    exposed = {name: verb.exposed for name, verb in verbs.items()}
    assert exposed == {"gather": 6.0, "reduce": 2.0, "norm": 0.0}  # 8 of which each alone says 14
    assert sum(verb.overlapped for verb in verbs.values()) == 2.0
    assert sum(verb.working for verb in verbs.values()) == 1.0


def test_a_verb_without_a_message_works(seconds, moves):
    with meter.timing("hand_over", "unit a"):
        seconds.pass_by(4)
    assert sum_up_moves(moves) == ({"hand_over": VerbSeconds(1, working=4)}, {})


def test_a_message_inside_a_named_verb_is_part_of_it(seconds, moves):
    with meter.timing("publish", "unit a"):
        seconds.pass_by(4)  # casts
        pending = start(seconds, "inner")
    pending.wait()
    verbs, _ = sum_up_moves(moves)
    assert verbs == {"publish": VerbSeconds(1, working=4 + 1 + 8 + 2, overlapped=0, exposed=16)}


def verbs_where_rank_1_is_late(
    world: World, stage: str, late_seconds: float
) -> tuple[dict[str, VerbSeconds], dict[str, float]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    strategy = Sharded(
        module,
        blocks=["0", "1"],
        stage=STAGES[stage],
        param_groups=[{"params": list(module.parameters())}],
        optimizer_factory=lambda groups: torch.optim.AdamW(groups, lr=0.01),
        world=world,
        options=Options(),
    )
    for index in range(2):
        worlds.barrier()
        with meter.recording() as moves:
            if index == 1 and world.rank == 1:
                time.sleep(late_seconds)
            with strategy.microbatch(last=True):
                strategy.backward(strategy.model(torch.ones(2, 64)).sum())
            strategy.step(drain=True)
            strategy.zero_grad()
    return sum_up_moves(moves)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("zero1", {"hand_over", "publish", "quiesce", "norm"}),
        ("zero2", {"reduce", "hand_over", "publish", "quiesce", "norm"}),
        ("zero3", {"gather", "reduce", "hand_over", "publish", "quiesce", "norm"}),
    ],
)
def test_every_verb_is_seen(ranks, stage, expected):
    for verbs, _ in ranks(verbs_where_rank_1_is_late, stage, 0.0):
        assert set(verbs) == expected
        assert all(verb.count > 0 for verb in verbs.values())


def test_the_late_rank_is_named(ranks):
    early, late = ranks(verbs_where_rank_1_is_late, "zero3", 1.0)
    exposed = [sum(v.exposed for v in verbs.values()) for verbs, _ in (early, late)]
    assert exposed[0] > exposed[1]
    assert set(early[1]) <= {"1", "all"}
    assert max(early[1], key=lambda rank: early[1][rank]) == "1"
