"""Seconds of intervals by hand, and against counting moments one by one."""

from __future__ import annotations

import random

from zeroexp.measure.time_spans import Union, count_once


def test_what_intervals_share_counts_once_and_for_the_first() -> None:
    #    0123456789
    # a  ####  ##
    # b    ####
    # c        ####    (but 8 to 9)
    spans = [("b", 2.0, 6.0), ("a", 0.0, 4.0), ("a", 6.0, 8.0), ("c", 6.0, 10.0)]
    assert count_once(spans, but=[("", 8.0, 9.0)]) == {"a": 6.0, "b": 2.0, "c": 1.0}
    assert sum(end - start for _, start, end in spans) == 14.0  # of 9 that were


def test_an_interval_inside_of_another_adds_nothing() -> None:
    assert count_once([("a", 0.0, 9.0), ("b", 3.0, 4.0)]) == {"a": 9.0}
    assert count_once([("a", 0.0, 9.0)], but=[("", 0.0, 9.0)]) == {"a": 0.0}
    assert count_once([]) == {}


def test_the_sum_is_the_length_of_the_union_moment_by_moment() -> None:
    draw = random.Random(0)

    def intervals(number: int) -> list[tuple[str, float, float]]:
        starts = [draw.randrange(60) for _ in range(number)]
        return [(draw.choice("abc"), float(s), float(s + draw.randrange(9))) for s in starts]

    def moments(spans: list[tuple[str, float, float]]) -> set[int]:
        return {moment for _, start, end in spans for moment in range(int(start), int(end))}

    for _ in range(200):
        spans, but = intervals(draw.randrange(12)), intervals(draw.randrange(6))
        assert sum(count_once(spans, but).values()) == len(moments(spans) - moments(but))
        for moment in (0, 13, 40, 99):
            before = {each for each in moments(but) if each < moment}
            assert Union(but).seconds_until(moment) == len(before)
