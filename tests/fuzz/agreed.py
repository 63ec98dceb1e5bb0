"""The words that the command line accepts alone, as a reader has agreed with them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.fuzz.words import single

LIST = Path(__file__).with_name("accepted.txt")
HEAD = "# Words that the command line accepts alone, by key, of those in words.py; a reader has agreed with each.\n"


def by_key(words: Iterable[str]) -> str:
    """One line for each key: `train.steps: 1 2 3`; words are written as Python writes them."""
    found: dict[str, list[str]] = defaultdict(list)
    for word in words:
        key, equals, value = word.partition("=")
        found[key + equals].append(value)
    return "".join(f"{key}{found[key]!r}\n" for key in found)


def agree(tried: set[str], accepted: set[str]) -> None:
    """Write the list again: of the words that were tried those that were accepted, of all others those it had."""
    kept = (agreed() - tried) | accepted
    LIST.write_text(HEAD + by_key(word for word in single() if word in kept))


def agreed() -> set[str]:
    """The words of accepted.txt."""
    words: set[str] = set()
    for line in LIST.read_text().splitlines():
        if not line.startswith("#"):
            key, _, listed = line.partition("[")
            words |= {key + value for value in ast.literal_eval("[" + listed)}
    return words
