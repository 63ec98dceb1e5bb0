"""See tests/fuzz/__init__.py. Exit code 1 where a line ended as no line should, or accepted.txt is out of date."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.fuzz.agreed import LIST, agree, agreed
from tests.fuzz.line import Tried, attempt
from tests.fuzz.words import lines, single


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="run what is accepted")
    parser.add_argument("--write", action="store_true", help="write accepted.txt from every word")
    parser.add_argument("--key", default="", help="only single words whose key begins so")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    drawn = lines(asked.lines, asked.seed)
    if asked.write or asked.key:
        drawn = [[word] for word in single() if word.startswith(asked.key)]
    tried = list(_shown(_all(drawn, asked.real, asked.jobs), len(drawn)))
    wrong = [each for each in tried if each.wrong]
    accepted = [each for each in tried if each.accepted]
    print(f"{len(tried)} lines: {len(accepted)} accepted, {len(wrong)} wrong (--seed {asked.seed})")
    if asked.write:
        agree({word for (word,) in drawn}, {each.line[0] for each in accepted})
        return int(bool(wrong))
    alone = {each.line[0] for each in accepted if len(each.line) == 1}
    new = sorted(alone - agreed())
    print("".join(f"accepted, and not in {LIST.name}: {word!r}\n" for word in new), end="")
    return int(bool(wrong or new))


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
