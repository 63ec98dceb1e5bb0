"""Verify many loops in one process: `python -m tests.verify.verify_many FILE JSON`.

JSON is a list of [function, world size]; the words of a run may stand for the function. Loops on as many ranks run in
the same ranks one after the other, but those with a limit of seconds behind them, which may end theirs. The output is,
for each, [kind, text, what, tensor] of what differs, null where it is equal, or [refused, why].
"""

import json
import sys
from pathlib import Path
from typing import Any

from zeroexp.process.on_ranks import on_ranks
from zeroexp.verify.__main__ import source_of
from zeroexp.verify.compare_steps import Verdict, judge
from zeroexp.verify.loop_to_verify import NoLoop, Source, make_loop
from zeroexp.verify.observe import Record
from zeroexp.verify.ranks import (
    prepare_for_forks,
    record_of,
    silenced,
    stand_for_ranks,
    verify_world,
)
from zeroexp.verify.rounding_oracle import first_norm

NUM_STEPS = 3


def source(file: Path, function: str) -> Source:
    return source_of(function.split() if "=" in function else [f"{file}:{function}"])


def refused_or_verdict(source: Source, world_size: int, seconds: float) -> Any:
    try:
        return answer(verify_world(source, world_size, NUM_STEPS, seconds))
    except NoLoop as problem:
        return ["refused", str(problem)]


def answers_in_turn(sources: list[Source], world_size: int) -> list[Any]:
    def record_all(world: Any) -> list[Record]:
        with silenced():
            return [record_of(world, each, NUM_STEPS) for each in sources]

    def on_one_rank(_: Any) -> list[float]:
        with silenced():
            return [first_norm(make_loop(each)) for each in sources]

    def judge_all(_: Any) -> list[Any]:
        stand_for_ranks(world_size)
        with silenced():
            of_each = zip(sources, zip(*by_rank, strict=True), of_one, strict=True)
            return [answer(judge(make_loop(each), [*seen], one)) for each, seen, one in of_each]

    prepare_for_forks()
    by_rank = on_ranks(record_all, world_size, seconds=300)
    (of_one,) = on_ranks(on_one_rank, 1, seconds=300)
    return on_ranks(judge_all, 1, seconds=300)[0]


def answer(verdict: Verdict) -> list[Any] | None:
    found = verdict.difference
    return [found.cause.kind, found.cause.text, found.what, found.tensor] if found else None


def main(file: Path, asked: list[list[Any]]) -> list[Any]:
    said: dict[int, Any] = {}
    in_turn: dict[int, list[int]] = {}
    for number, (function, world_size, *limit) in enumerate(asked):
        if limit:
            said[number] = refused_or_verdict(source(file, function), world_size, limit[0])
        else:
            in_turn.setdefault(world_size, []).append(number)
    for world_size, numbers in in_turn.items():
        sources = [source(file, asked[number][0]) for number in numbers]
        said |= zip(numbers, answers_in_turn(sources, world_size), strict=True)
    return [said[number] for number in range(len(asked))]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]).resolve(), json.loads(sys.argv[2]))))
