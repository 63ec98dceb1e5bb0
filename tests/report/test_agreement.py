"""The verdict on loss curves: agreement with the reference, falling, and what breaks either."""

from __future__ import annotations

import math

import pytest

from zeroexp.report.loss_curves import judge_losses, loss_falls

FALLING = [4.0, 3.0, 2.0, 1.0]


def test_the_largest_relative_difference_and_its_step_are_found() -> None:
    other = [4.0, 3.0 * 1.001, 2.0 * 1.01, 1.0]
    verdict = judge_losses({"ddp": FALLING, "zero3": other}, bound=1e-3)
    reference, curve = verdict.curves
    assert reference.difference == 0.0
    assert curve.difference == pytest.approx(0.01)
    assert curve.step == 2
    assert not verdict.holds


def test_a_bound_that_is_just_kept_holds() -> None:
    verdict = judge_losses({"ddp": [2.0, 1.0], "zero3": [2.0, 1.25]}, bound=0.25)
    assert verdict.holds
    assert verdict.lines() == [
        "2 loss curves agree: largest relative difference to ddp 2.5e-01 (zero3, step 1), "
        "allowed 2.5e-01"
    ]


def test_the_lines_name_every_curve_that_disagrees() -> None:
    verdict = judge_losses(
        {"a": [1.0, 1.0], "b": [1.0, 1.5], "c": [1.0, 1.0], "d": [3.0, 1.0]}, bound=0.1
    )
    text = "\n".join(verdict.lines())
    assert "DISAGREE" in text
    assert "  b: off by 5.0e-01 at step 1" in text
    assert "  d: off by 2.0e+00 at step 0" in text
    assert "  c:" not in text


@pytest.mark.parametrize(
    "bad", [[4.0, 3.0, 2.0], [4.0, math.nan, 2.0, 1.0], [math.inf, 3.0, 2.0, 1.0]]
)
def test_missing_steps_and_numbers_that_are_none_never_agree(bad: list[float]) -> None:
    assert not judge_losses({"ddp": FALLING, "zero3": bad}, bound=1e9).agree
    assert not judge_losses({"ddp": bad, "zero3": FALLING}, bound=1e9).agree


def test_two_curves_that_are_both_broken_do_not_agree() -> None:
    assert not judge_losses({"a": [math.nan], "b": [math.nan]}, bound=1e9).agree


def test_falling_is_judged_on_quarters_and_only_when_asked() -> None:
    noisy = [4.0, 4.4, 3.0, 3.5, 2.5, 2.9, 2.0, 2.2]
    rising = [1.0, 1.0, 1.1, 1.2]
    assert loss_falls(noisy)
    assert not loss_falls(rising)
    assert not loss_falls([1.0])
    assert judge_losses({"a": rising}, bound=1e-6).holds
    verdict = judge_losses({"a": noisy, "b": rising}, bound=None, must_fall=True)
    assert not verdict.holds
    assert verdict.lines() == ["1 of 2 losses fall", "  b: its loss does not fall"]


def test_no_curve_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="no loss curve"):
        judge_losses({}, bound=1e-6)
