"""See tests/fuzz/__init__.py. Exit code 1 where a line ended as no line should."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.fuzz.line import Tried, attempt
from tests.fuzz.words import lines, single


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="run what is accepted")
    parser.add_argument("--key", default="", help="only single words whose key begins so")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    drawn = lines(asked.lines, asked.seed)
    if asked.key:
        drawn = [[word] for word in single() if word.startswith(asked.key)]
    tried = list(_shown(_all(drawn, asked.real, asked.jobs), len(drawn)))
    wrong = [each for each in tried if each.wrong]
    accepted = sum(each.accepted for each in tried)
    print(f"{len(tried)} lines: {accepted} accepted, {len(wrong)} wrong (--seed {asked.seed})")
    return int(bool(wrong))


def _all(drawn: list[list[str]], real: bool, jobs: int) -> Iterator[Tried]:
    if jobs == 1:
        yield from (attempt(line, real=real) for line in drawn)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(attempt_one, ((line, real) for line in drawn))


def attempt_one(asked: tuple[list[str], bool]) -> Tried:
    return attempt(asked[0], real=asked[1])


def _shown(tried: Iterable[Tried], count: int) -> Iterator[Tried]:
    for number, each in enumerate(tried, start=1):
        if each.wrong:
            said = (each.err.strip() or each.out.strip())[-600:]
            print(f"{number}/{count} {each.wrong}: {' '.join(each.line)!r}\n    {said}", flush=True)
        if each.accepted and len(each.line) == 1:
            print(f"{number}/{count} accepted: {each.line[0]!r}", flush=True)
        yield each


if __name__ == "__main__":
    sys.exit(main())
