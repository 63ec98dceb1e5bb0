"""From the records of all ranks to the numbers of a run, on numbers small enough to check by eye."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.run_folders import record
from zeroexp.measure.record import HOST, KINDS, OUTER, Traffic
from zeroexp.measure.summary import summarise, summarise_rank

MIB = 2**20


def test_memory_is_the_most_at_any_moment_and_the_total_what_one_moment_holds() -> None:
    moments = {
        "at_rest": {"parameters": 10, "gradients": 0, "optimizer": 20},
        "after_backward": {"parameters": 4, "gradients": 8, "optimizer": 20},
    }
    summary = summarise_rank(3, [record(0, memory_bytes=moments), record(3, memory_bytes=None)])
    assert summary.rank == 3
    assert summary.memory_bytes == {
        **dict.fromkeys(KINDS, 0),
        "parameters": 10,
        "gradients": 8,
        "optimizer": 20,
    }
    assert summary.memory["total"] == 4 + 8 + 20  # not 10 + 8 + 20, which no moment held


def test_at_each_moment_the_fullest_reading_of_the_fullest_rank_counts() -> None:
    def reading(parameters: int, gradients: int) -> dict[str, dict[str, int]]:
        return {"after_backward": {"parameters": parameters, "gradients": gradients}}

    first = [record(3, memory_bytes=reading(4, 8)), record(4, memory_bytes=reading(5, 5))]
    second = [record(3, memory_bytes=reading(1, 10)), record(4, memory_bytes=None)]
    ranks = [summarise_rank(rank, steps) for rank, steps in enumerate((first, second))]
    assert ranks[0].memory_bytes_at == reading(4, 8)
    assert summarise(first, ranks).memory.fullest_at == reading(4, 8)  # 12 in all, not 11
    assert summarise(first, ranks).memory.mean_at == {
        "after_backward": {"parameters": 2.5, "gradients": 9.0}
    }
    ranks[1].memory_bytes_at = reading(1, 12)
    assert summarise(first, ranks).memory.fullest_at == reading(1, 12)
    ranks[1].memory_bytes_at = {}  # a mean of some ranks alone would mislead
    assert summarise(first, ranks).memory.mean_at == {}


def test_a_rank_that_has_none_of_a_kind_holds_nothing_of_it() -> None:
    """Of whole parameters a rank may own none, and keeps nothing for outer steps."""
    held = [{"at_rest": {"parameters": 4}}, {"at_rest": {"parameters": 4, OUTER: 8}}]
    steps = [record(3, memory_bytes=each) for each in held]
    ranks = [summarise_rank(rank, [step]) for rank, step in enumerate(steps)]
    for first in (0, 1):
        of = summarise([steps[first]], ranks if first == 0 else ranks[::-1]).memory.by_kind[OUTER]
        assert (of.fullest, of.mean) == (8, 4)


def test_peak_is_over_all_steps_and_unknown_if_one_rank_cannot_know_it() -> None:
    steps = [record(0, peak_bytes=7), record(3, peak_bytes=5)]
    known, unknown = summarise_rank(0, steps), summarise_rank(1, [record(3, peak_bytes=None)])
    assert summarise(steps, [known, unknown]).memory.peak is None
    peak = summarise(steps, [known, replace(known, rank=1)]).memory.peak
    assert peak is not None and peak.per_rank == [7, 7]


def test_the_peak_of_building_is_that_of_the_fullest_rank() -> None:
    steps = [record(3)]
    first, second = (summarise_rank(r, steps, build_peak_bytes=n) for r, n in enumerate((5, 9)))
    told = summarise(steps, [first, second]).memory.build_peak
    assert told is not None and (told.fullest, told.per_rank) == (9, [5, 9])
    assert summarise(steps, [first, summarise_rank(1, steps)]).memory.build_peak is None


def test_times_losses_and_tokens_leave_warm_up_out() -> None:
    warm = record(0, warmup=True, loss=9.0, step_seconds=100.0)
    steps = [
        record(step, warmup=False, loss=5.0 - step, step_seconds=seconds, num_tokens=60)
        for step, seconds in enumerate((1.0, 2.0, 3.0), start=1)
    ]
    summary = summarise([warm, *steps], [summarise_rank(0, [warm, *steps])])
    assert (summary.num_warmup_steps, summary.num_steps) == (1, 3)
    assert (summary.initial_loss, summary.final_loss) == (9.0, 2.0)
    assert summary.step_seconds_median == 2.0
    assert summary.step_seconds_p95 == pytest.approx(2.9)
    assert summary.tokens_per_second == 180 / 6.0


def test_spread_names_the_fullest_rank_whatever_the_order_of_ranks() -> None:
    small = [record(3, traffic=Traffic({"gather": 10}, {"gather": 1}))]
    large = [record(3, traffic=Traffic({"gather": 10, "reduce": 30}, {"gather": 1, "reduce": 2}))]
    summary = summarise(small, [summarise_rank(1, large), summarise_rank(0, small)])
    assert summary.world_size == 2
    assert summary.sent_bytes_per_step is not None
    assert summary.sent_bytes_per_step.per_rank == [10.0, 40.0]
    assert summary.sent_bytes_per_step.fullest == 40.0
    assert summary.sent_bytes_per_step.mean == 25.0
    assert summary.sent_bytes_by_kind == {"gather": 10.0, "reduce": 30.0}
    assert summary.calls_by_kind == {"gather": 1.0, "reduce": 2.0}


def sent(wire_bytes: int | None, told: dict[str, int]) -> tuple[float | None, float | None]:
    """Per step, of two ranks that are alike: (handed to others, by TCP)."""
    calls = dict.fromkeys(told, 1)
    steps = [record(3, traffic=Traffic(told, calls), wire_bytes=wire_bytes)]
    summary = summarise(steps, [summarise_rank(rank, steps) for rank in (0, 1)])
    handed, carried = summary.sent_bytes_per_step, summary.wire_bytes_per_step
    return handed and handed.mean, carried and carried.mean


def test_what_was_sent_is_told_by_the_engine_or_the_wire_and_else_unknown() -> None:
    assert sent(25, {"gather": 10, "loss": 4}) == (25, 25)  # more than the engine knows of
    assert sent(8, {"gather": 100, "loss": 4}) == (104, 8)  # ranks that share memory
    assert sent(70, {"loss": 4}) == (70, 70)  # an engine in C++ that tells nothing
    assert sent(None, {"gather": 100}) == (100, None)  # no TCP
    assert sent(None, {"loss": 4}) == (None, None)  # never a 4 that is not true


def test_one_rank_alone_sends_nothing() -> None:
    steps = [record(3, traffic=Traffic(), wire_bytes=None)]
    alone = summarise(steps, [summarise_rank(0, steps)]).sent_bytes_per_step
    assert alone.fullest == 0.0


def test_the_wire_is_the_mean_over_measured_steps() -> None:
    warm = record(0, warmup=True, wire_bytes=1_000_000)
    steps = [warm, record(3, wire_bytes=20), record(4, wire_bytes=30)]
    assert summarise_rank(0, steps).traffic["wire"] == 25.0
    assert summarise_rank(0, [*steps, record(5, wire_bytes=None)]).traffic["wire"] is None


def test_traffic_is_the_mean_over_measured_steps_watched_or_not() -> None:
    """What is gathered ahead of a step is sent in the one before, which may be the only one that is traced."""
    steps = [
        record(0, warmup=True, traffic=Traffic({"gather": 1000}, {"gather": 9})),
        record(3, traffic=Traffic({"gather": 4}, {"gather": 1}), wire_bytes=20),
        record(4, traffic=Traffic({"flag": 2}, {"flag": 1}), wire_bytes=30),
    ]
    steps[1].traced = True
    summary = summarise_rank(0, steps)
    assert summary.traffic["wire"] == 25.0
    assert summary.sent_bytes_by_kind == {"gather": 2.0, "flag": 1.0}
    assert summary.calls_by_kind == {"gather": 0.5, "flag": 0.5}


def test_a_rank_that_owns_nothing_sends_nothing_over_the_bus() -> None:
    held = {"at_rest": {HOST: 0}}
    moved, nothing, elsewhere = (
        record(3, memory_bytes=memory, traffic=Traffic(bus_bytes=bus))
        for memory, bus in ((held, {"to_host": 6, "to_device": 2}), (held, {}), ({}, {}))
    )
    ranks = [summarise_rank(rank, [step]) for rank, step in enumerate((moved, nothing))]
    bus = summarise([moved], ranks).bus_bytes_per_step
    assert bus is not None and bus.per_rank == [8, 0]
    assert summarise([elsewhere], [summarise_rank(0, [elsewhere])]).bus_bytes_per_step is None


def test_a_run_without_measured_steps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"none of 1 steps is measured; train\.steps"):
        summarise_rank(0, [record(0, warmup=True)])


def test_standing_still_to_save_is_in_the_throughput_and_in_no_step() -> None:
    steps = [record(0), record(3), record(4, saving_seconds=0.5)]
    quick = summarise([replace(r, saving_seconds=0.0) for r in steps], [summarise_rank(0, steps)])
    slow = summarise(steps, [summarise_rank(0, steps)])
    assert (quick.saving_seconds, slow.saving_seconds) == (0.0, 0.5)
    assert slow.step_seconds_p95 == quick.step_seconds_p95
    seconds = steps[1].step_seconds + steps[2].step_seconds
    assert slow.tokens_per_second * (seconds + 0.5) == pytest.approx(
        quick.tokens_per_second * seconds
    )
