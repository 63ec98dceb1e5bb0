"""`python -m benchmarks.planners`: a planner without a word can't say, and errors and verdicts are arithmetic."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from benchmarks.planners import of_calculon, of_deepspeed, of_mem_tracker, of_ours, of_simumax
from benchmarks.planners.asked import of_point
from benchmarks.planners.point import NO_PEAK, Point
from benchmarks.planners.points import config_of, of_this_machine
from benchmarks.planners.score import errors_of, rows, table, wrong_verdicts

POINT = Point(
    *("a", "cpu", {}, "zero2", "buffer", "bf16_master"),
    world_size=2,
    micro_batch=1,
    seq_len=64,
    recompute="none",
    num_parameters=100,
    largest_module=10,
    states=200.0,
    peak=400.0,
)
GATED = {"gated": True, "tied": True}


@pytest.mark.parametrize(
    ("planner", "point", "reason"),
    [
        (of_deepspeed, replace(POINT, strategy="zero1_allreduce"), "no word for zero1"),
        (of_deepspeed, replace(POINT, precision="fp32"), "no word for these dtypes (fp32)"),
        (of_simumax, replace(POINT, strategy="ddp"), "transformers alone"),
        (of_simumax, replace(POINT, strategy="ddp", shape=GATED), "no word for tied embeddings"),
        (of_calculon, replace(POINT, strategy="ddp", shape=GATED), "no word for a gated MLP"),
        (of_mem_tracker, POINT, "FSDP2 alone"),
    ],
)
def test_a_planner_without_a_word_can_not_say(planner, point, reason):
    assert of_point(planner.answer, point) == (reason, reason)


def test_a_planner_that_fails_can_not_say_and_why_is_its_error():
    def answer(point):
        raise KeyError(point.name)

    assert of_point(answer, POINT) == ("fails: KeyError: 'a'",) * 2


def test_errors_are_signed_and_scaled():
    """Of 220, 190 and 210 x 1.1 for 200."""
    points = [POINT, POINT, replace(POINT, scale=1.1), replace(POINT, states=None)]
    answers = [(220.0, NO_PEAK), (190.0, NO_PEAK), (210.0, NO_PEAK), (1.0, NO_PEAK)]
    assert errors_of(points, answers, 0) == pytest.approx([0.1, -0.05, 0.155])
    assert errors_of(points, answers, 1) == []
    shown = table(points, {"x": answers, "silent": [("", "")] * 4})
    assert "x | +10.0 (-5.0…+15.5) of 3 | can't say | 4 | 0" in shown
    assert "silent" not in shown


def test_a_verdict_is_wrong_where_a_point_fits_and_dies_or_is_refused_and_trains():
    """It took 400: with 380 it dies, and with 420 it trains. Who knows no peak is taken at its states."""
    said = [(0.0, 380.0), (0.0, 381.0), (0.0, 420.0), (0.0, 421.0), (300.0, NO_PEAK), ("", "")]
    assert wrong_verdicts([POINT] * 6, said) == ("2", "1")
    assert wrong_verdicts([POINT], [("", "")]) == ("can't say",) * 2


def test_every_answer_is_a_row():
    found = rows([POINT], {"x": [(2.0**20, "why")]})
    assert [row[-1] for row in found] == ["x", "1.000", "can't say: why"]


@pytest.fixture(scope="module")
def of_llama() -> list[Point]:
    return list(islice(of_this_machine(), 10))


@pytest.mark.slow
def test_points_are_told_as_they_are_trained(of_llama):
    assert len({point.name for point in of_llama}) == 10
    for point in of_llama:
        config = config_of(point)
        assert (config.strategy.name, config.precision.name) == (point.strategy, point.precision)
        assert config.data.global_batch_size == point.world_size * point.micro_batch
        assert point.num_parameters == 6_426_880 and point.shape["tied"]
        assert point.largest_module == 2048 * 256


@pytest.mark.slow
def test_ours_says_states_and_a_peak_beyond_them(of_llama):
    states, peak = of_ours.answer(of_llama[9])
    assert states == pytest.approx(16 * 6_426_880 / 2, rel=1e-3)  # fp32, ZeRO-3, two ranks
    assert states < peak < 4 * states
