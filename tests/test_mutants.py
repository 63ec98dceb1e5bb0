"""The bugs that `make mutants` puts in must still find their places, or they would test nothing."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.mutation.run import mutants_of

ROOT = Path(__file__).parent.parent
TABLES = ("by_hand", "order")
BUGS = [
    bug
    for table in TABLES
    for bug in tomllib.loads((ROOT / f"tests/mutation/{table}.toml").read_text())["bug"]
]
TARGETS = tomllib.loads((ROOT / "tests/mutation/targets.toml").read_text())["tests"]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["name"])
def test_a_bug_by_hand_has_one_place_and_is_python(bug: dict[str, str]) -> None:
    source = (ROOT / bug["file"]).read_text()
    assert source.count(bug["before"]) == 1
    compile(source.replace(bug["before"], bug["after"]), bug["file"], "exec")


def test_files_that_get_bugs_are_there() -> None:
    assert [name for name in TARGETS if not (ROOT / name).is_file()] == []


@pytest.mark.slow
def test_what_is_harmless_could_be_put_in() -> None:
    keys = tomllib.loads((ROOT / "tests/mutation/harmless.toml").read_text())["harmless"]
    functions: dict[str, set[str]] = {}
    for file, in_it in (key.split("::", 1) for key in keys):
        functions.setdefault(file, set()).add(in_it.partition(": ")[0])
    found = {mutant.key for each in functions.items() for mutant in mutants_of(ROOT, *each)}
    assert keys.keys() - found == set()


def test_every_file_of_the_heart_gets_bugs() -> None:
    files = {str(p.relative_to(ROOT)) for p in ROOT.glob("zeroexp/zero*/*.py")}
    named = {name for name in files if not name.endswith("__init__.py")}
    assert named - TARGETS.keys() == set()
