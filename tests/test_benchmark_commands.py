"""Every benchmark starts: a command of a page is taken, and what it starts comes to its end, in its smallest variant.

What a step takes is made up, or is no part of a test: seconds are a machine's.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import breakdown, check, growth, instruments, run, table, targets, tunable, tuned
from benchmarks.engines import ENGINES, PRECISIONS, model_config, parameter_bytes
from benchmarks.links import SHAPES
from benchmarks.ranks import RankFailed, Turn
from zeroexp.measure.memory import count_cpu_allocations

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("benchmarks/**/*.py"),
]
# In a block, between backticks, or at the beginning of a module's docstring, which a colon ends.
NAMED = re.compile(
    r"^(?:    |\t)(?:timeout \d+ )?(?:\S*/)?python -m (benchmarks\..*)$"
    r"|`[^`\n]*python -m\s(benchmarks\.[^`]*)`"
    r'|^"""python -m (benchmarks\.[^:]*):',
    re.MULTILINE,
)
NO_WORD = re.compile(
    r"\[[^]]*\]|(?:  |[>#;]).*", re.DOTALL
)  # what may be left out, and what follows
NO_COMMAND = "benchmarks.planners.asked"  # the command of benchmarks.planners starts it


def commands() -> list[str]:
    """Every command line that a page names, once, without what a page says of it."""
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    found = ("".join(each) for text in texts for each in NAMED.findall(text))
    lines = (" ".join(NO_WORD.sub("", " ".join(line.split("\n"))).split()) for line in found)
    return sorted({line for line in lines if not line.startswith(NO_COMMAND)})


def module_named(name: str) -> ModuleType:
    module = importlib.import_module(name)
    return importlib.import_module(f"{name}.__main__") if hasattr(module, "__path__") else module


class Taken(Exception):
    """Raised where a command would begin to work."""


@pytest.fixture
def taking(monkeypatch) -> None:
    """A parser that has taken all words raises Taken; one that has not ends the command, as ever."""
    parse, parse_known = ArgumentParser.parse_args, ArgumentParser.parse_known_args

    def take(self: ArgumentParser, *words: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(ArgumentParser, "parse_known_args", parse_known)
            parse(self, *words)
        raise Taken

    def take_known(self: ArgumentParser, *words: Any) -> None:
        parse_known(self, *words)
        raise Taken

    monkeypatch.setattr(ArgumentParser, "parse_args", take)
    monkeypatch.setattr(ArgumentParser, "parse_known_args", take_known)


@pytest.fixture
def started(monkeypatch) -> Callable[..., int | None]:
    """The exit code of a benchmark with these words, in this process."""

    def start(module: ModuleType, *words: str) -> int | None:
        monkeypatch.setattr(sys, "argv", [module.__name__, *words])
        return module.main()

    return start


@pytest.mark.parametrize("command", commands())
@pytest.mark.usefixtures("taking")
def test_a_command_that_is_named_is_taken(command, started):
    name, *words = command.split()
    with pytest.raises(Taken):
        started(module_named(name), *words)


def test_every_benchmark_is_named():
    files = [
        path
        for path in ROOT.glob("benchmarks/**/*.py")
        if "__name__ ==" in path.read_text(encoding="utf-8")
    ]
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in files]
    there = {".".join(each).removesuffix(".__main__") for each in parts}
    assert {command.split()[0] for command in commands()} == there - {NO_COMMAND}


def test_every_engine_and_comparison_that_is_named_exists():
    for each in run.COMPARISONS:
        assert set(each.engines) <= ENGINES.keys()
        assert each.link in ("loopback", *SHAPES) and each.precision in PRECISIONS
        assert model_config(each.model).hf_config
    comparisons = {each.name for each in run.COMPARISONS}
    assert len(comparisons) == len(run.COMPARISONS)
    assert set(table.ON_PAGE) <= comparisons
    aimed_at = {name for each in targets.TARGETS for name in (each.ours, each.peer)}
    assert {*aimed_at} - {"its form"} <= ENGINES.keys()
    assert {name for each in targets.TARGETS for name in each.bounds} <= comparisons
    assert {name for ours, peer, _ in tuned.GOALS for name in (ours, peer)} <= ENGINES.keys()
    assert {*breakdown.DEFAULT, *instruments.DEFAULT} <= ENGINES.keys()
    stored = [name.split("/") for name in json.loads(check.STORED.read_text(encoding="utf-8"))]
    assert {comparison for comparison, _ in stored} <= comparisons
    assert {engine for _, engine in stored} <= ENGINES.keys()


# -- on made-up steps ---------------------------------------------------------------------------------


SHARED, SOCKETS = (f"bucket_cap_mb=5,static_graph=True,carrier={c}" for c in ("shared", "gloo"))
# Seconds of a step; all others take one.
MADE_UP = {f"ddp@{SHARED}": 0.5, f"ddp@{SOCKETS}": 0.8, **dict.fromkeys(run.OURS, 0.4)}
PEAK = 9 << 20


@pytest.fixture
def made_up(monkeypatch, tmp_path) -> dict[str, int]:
    """Ranks of no process, whose steps are made up; the peak of each engine, to be changed."""
    peaks = dict.fromkeys(ENGINES, PEAK)

    class MadeUp:
        def __init__(self, spec: Any, link: Any) -> None:
            self.spec = spec

        def wait_until_ready(self) -> None:
            pass

        def turn(self, order: int) -> list[Turn]:
            seconds, peak = MADE_UP.get(self.spec.engine, 1.0), peaks[self.spec.engine]
            return [Turn(seconds, 0.0, peak, PEAK, PEAK, PEAK)] * self.spec.world_size

        def stop(self) -> None:
            pass

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "Ranks", MadeUp)
    monkeypatch.setattr(run, "parameter_bytes", cache(parameter_bytes))
    monkeypatch.setattr(table, "ROWS", tmp_path)
    monkeypatch.setattr(check, "STORED", tmp_path / "ratios.json")
    return peaks


def page_of(section: str) -> Path:
    page = Path("page.md")
    page.write_text(f"<!-- {section}: begin -->\n<!-- {section}: end -->\n", encoding="utf-8")
    return page


def test_run_and_check_end_well(made_up, started, capsys):
    assert started(run, "--quick", "--write", str(page_of("speed"))) == 0
    assert "\nzero3_buffer | 0.40" in Path("page.md").read_text(encoding="utf-8")
    assert "zero3_buffer" in Path("speed.csv").read_text(encoding="utf-8")
    assert started(check, "--store") == 0
    assert started(check) == 0
    made_up["zero3_buffer"] *= 2
    assert started(run, "--quick", "--engines", "zero3_buffer") == 0
    assert started(check) == 1
    assert "quick/zero3_buffer: peak_bytes" in capsys.readouterr().out


@pytest.mark.parametrize("rows", ["", "[]"])
def test_check_without_rows_says_what_measures_some(rows, made_up, started):
    if rows:
        check.LATEST.parent.mkdir(parents=True)
        check.LATEST.write_text(rows)
    for words in [], ["--store"]:
        with pytest.raises(SystemExit, match=r"nothing is measured yet; python -m benchmarks\.run"):
            started(check, *words)


def test_a_run_whose_comparisons_are_all_skipped_says_why(made_up, started, capsys, monkeypatch):
    monkeypatch.setattr(run, "why_not_shaped", lambda: "no link here")
    assert started(run, "--only", "small_1gbit") == 1
    assert capsys.readouterr().err == "small_1gbit: skipped, no link here\n"


def test_an_engine_that_dies_fails_the_run_and_is_named(made_up, started, capsys, monkeypatch):
    def wait(self: Any) -> None:
        if self.spec.engine == "zero3_buffer":
            raise RankFailed("rank 1 is gone")

    monkeypatch.setattr(run.Ranks, "wait_until_ready", wait)
    assert started(run, "--quick") == 1
    assert "for the reasons above: quick/zero3_buffer\n" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_an_engine_that_is_asked_for_and_not_installed_is_refused(made_up, started):
    with pytest.raises(SystemExit, match="--engines deepspeed3: DeepSpeed is not installed"):
        started(run, "--quick", "--engines", "deepspeed3")


def test_targets_compare_engines_that_did_not_take_turns_by_ddp_of_each(made_up):
    """The second took its turns in an hour in which all took twice as long, DDP too."""
    ours = {"engine": "zero2_buffer", "step_seconds": 0.9, "ratio_to_ddp": 0.5}
    peer = {"engine": "zero_redundancy", "step_seconds": 2.0, "ratio_to_ddp": 1.0}
    rows = [
        {"comparison": "135m", "peak_bytes": 1, "ratio_to_limit": 1, **row} for row in (ours, peer)
    ]
    found = {name: ratio for name, _, ratio, _ in targets._measured(rows)}
    assert found["zero2_buffer / zero_redundancy (time)"] == 0.5


def test_a_peer_is_tuned_upon_its_default():
    for peer in tunable.SETTINGS:
        default = (ENGINES[peer].settings or {}).get("settings", {})
        for name in tunable.variants(peer):
            of_variant = (ENGINES[name].settings or {}).get("settings", {})
            assert default.keys() <= of_variant.keys(), name


def test_tuned_ends_well(made_up, started):
    """Ours is beside DDP at its best, and ours over sockets beside DDP's best over sockets."""
    words = ["--model", "tiny", "--rounds", "2", "--write", str(page_of("tuned"))]
    assert started(tuned, *words) == 0
    text = Path("page.md").read_text(encoding="utf-8")
    assert f"\nddp | `{SHARED}` | 0.50" in text and f"\nddp | `{SOCKETS}` | 0.80" in text
    spread = "0.80 (0.80–0.80)"
    assert f"\nzero1_buffer | ddp | 0.40 (0.40–0.40) | {spread} | 1.00\n" in text
    assert "\nzero1_buffer_sockets | ddp | 1.00 (1.00–1.00) | 1.25 (1.25–1.25) | 1.00\n" in text
    assert "\nfsdp2 | `default` | 1.00" in text, "no setting is faster"
    told = Path("tuned.csv").read_text(encoding="utf-8")
    assert all(f"\n{engine}," in told for engine in ("ddp", *run.OURS, *run.OVER_SOCKETS))


@pytest.mark.parametrize(("moves", "code"), [(9, 0), (10, 1)])
def test_instruments_end_with_1_where_measuring_takes_a_hundredth(
    moves, code, started, monkeypatch, capsys
):
    row = {"step": 1.0, "traced": 1.0, "moves": moves, "allocations": 0, "move": 1e-3, "sum": 0.0}
    monkeypatch.setattr(instruments, "measure", lambda *_: {"zero3_buffer": row})
    assert started(instruments, "zero3_buffer") == code
    assert f"| zero3_buffer | 1000 | {moves} |" in capsys.readouterr().out


def test_a_part_of_the_breakdown_stops_the_one_around_it(monkeypatch):
    """By a clock that each reading moves on by one."""
    clock = SimpleNamespace(perf_counter=count().__next__)
    monkeypatch.setattr(breakdown, "time", clock)
    watch = breakdown.Stopwatch()
    watch._timed("backward", watch._timed("copy", lambda: None))()
    assert watch.read() == {breakdown.OTHER: 2, "backward": 2, "copy": 1}


# -- as they are, and small --------------------------------------------------------------------------


def output_of(folder: Path, *words: str) -> str:
    """What a benchmark prints, as a command of its own that has to end well."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *words]
    return subprocess.run(
        command, cwd=folder, env=env, check=True, timeout=600, stdout=subprocess.PIPE, text=True
    ).stdout


@pytest.mark.slow
def test_building_never_holds_the_whole_model(tmp_path):
    """GiB of the small model's 24M parameters on one of four ranks: a quarter rests, and never is all of it held."""
    words = ["benchmarks.building", "small", "--ranks", "4", "--step"]
    told = re.findall(r"^(\S.*?)  +([\d.]+) GiB$", output_of(tmp_path, *words), re.MULTILINE)
    held = {what: float(number) for what, number in told}
    whole, rest = held["model, whole"], held["at rest after it"]
    assert whole == pytest.approx(parameter_bytes("small", "fp32") / 2**30, abs=1e-3)
    assert rest == pytest.approx(whole / 4, rel=0.05)
    assert rest <= held["building, most at once"] < whole
    assert held["step, most at once"] > 3 * rest, "gradients and two moments"
    assert held["optimizer after it"] == pytest.approx(2 * rest, rel=0.05)


@pytest.mark.slow
def test_instruments_count_what_a_step_does():
    (row,) = instruments.measure(["zero3_buffer"], "tiny", num_turns=2).values()
    assert all(row[key] > 0 for key in ("step", "traced", "move", "sum"))
    assert row["moves"] > 4 and row["allocations"] > 100
    assert instruments.share(row) > 0


@pytest.mark.slow
def test_the_promise_of_the_first_point_is_kept(tmp_path):
    """It ends well where no rank died at the limit that fits; at 5 % less, one has to."""
    text = output_of(tmp_path, "benchmarks.promise", "--points", "1")
    (row,) = re.findall(r'^"llama.*$', text, re.MULTILINE)
    assert [cell for cell in row.split(",") if cell in ("yes", "no")] == ["yes", "yes"]


@pytest.mark.slow
def test_every_part_of_the_breakdown_takes_time():
    rows = breakdown.measure(["limit", "zero3_buffer"], "tiny", "fp32", 2, num_turns=3)
    assert [part for part, spent in rows["zero3_buffer"].items() if not spent > 0] == []
    computes = ["forward", "backward", "optimizer", breakdown.OTHER]
    assert [part for part, spent in rows["limit"].items() if spent > 0] == computes


@pytest.mark.slow
@pytest.mark.parametrize("axis", growth.AXES)
def test_at_the_quick_points_nothing_grows_faster_than_with_fsdp2(axis):
    """But for time, which other programs take too."""
    assert count_cpu_allocations() is None
    found = list(growth.grow(axis, list(growth.ENGINES), quick=True))
    assert [line for line in found if "milliseconds" not in line] == []
