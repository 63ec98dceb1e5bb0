"""`make mutants`: small changes of the sources, one at a time, each of which the nearest tests should find.

    python -m tests.mutation.run --number 250 --seed 0      as many of each file; the same seed takes the same
    python -m tests.mutation.run --files zeroexp/config/optimizer.py   all of some files
    python -m tests.mutation.run --by-hand                  the bugs of by_hand.toml (--files: in some files)
    python -m tests.mutation.run --by-hand order            43 missing waits, swapped collectives and early reuses
    python -m tests.mutation.run --list                     what there is, without running anything

A mutant is written into a copy of the tree, and the tests of `targets.toml` run there until the first one fails, in a
process forked from one that has torch loaded. Results are appended to a file, and what was found is not asked for again
(without the file all is), so that a run that was stopped goes on. A mutant that no test finds is printed with its place
and its change, unless `harmless.toml` says why it changes nothing that anybody could see. Ends with 1 where fewer than
95 % were found.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import select
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import tomllib
import traceback
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as futures_thread
from importlib.metadata import entry_points
from itertools import zip_longest
from multiprocessing import connection, forkserver
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import Queue
from typing import Any, NoReturn

import pytest

from tests.mutation.mutants import Mutant, mutants_of

HERE = Path(__file__).parent
TREE = HERE.parents[1]
LEAST_FOUND = 0.95  # of those that are not known to be harmless
SECONDS_OF_A_TEST = 60  # one that hangs has found something
SECONDS_OF_A_MUTANT = 300
LEFT_OUT = shutil.ignore_patterns(
    ".venv", ".git", "__pycache__", "outputs", "*.egg-info", ".hypothesis"
)
# By the process that forks the others, since these take longer than most tests. pytest would rather have rewritten the
# assertions of hypothesis.
LOADED_ONCE = ("torch.distributed.checkpoint", "torch.utils.checkpoint", "xxhash", "numpy.random")
LOADED_ONCE += ("torch._dynamo", "hypothesis.strategies", "hypothesis.extra", "_hypothesis_globals")
LOADED_ONCE += tuple(f"transformers.models.{m}.modeling_{m}" for m in ("gpt2", "llama", "mixtral"))
QUIET = ("-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
LIMITED = (f"--timeout={SECONDS_OF_A_TEST}", "--timeout-method=signal")
SELECTED = "not slow and not slurm and not browser and not gpu and not wide"
FOUND, SURVIVED, HUNG = "found", "survived", "hung"
FOUND_BY = "found_by"  # a file of the tree
NOT_RUN = (
    70  # exit code of a child that could not even ask pytest, or asked for tests that are not there
)
NO_SUCH_TESTS = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)


def main() -> int:
    options = _options()
    targets = _targets()
    files = options.files or list(targets)
    if options.by_hand:
        mutants = [
            m
            for m in _by_hand(options.by_hand, targets)
            if not options.files or m.file in options.files
        ]
    else:
        mutants = _chosen([mutants_of(TREE, file) for file in files], options.number, options.seed)
    targets = {key: lines[: options.lines] for key, lines in targets.items()}
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line}: {mutant.before}  ->  {mutant.after}")
        print(f"{len(mutants)} mutants")
        return 0
    results = _run(mutants, targets, options)
    return _report(mutants, results)


def _targets() -> dict[str, list[str]]:
    """Arguments of pytest by file, one line for each time it is called; a word of `[groups]` stands for its lines."""
    read: dict[str, Any] = tomllib.loads((HERE / "targets.toml").read_text())
    groups: dict[str, list[str]] = read["groups"]
    return {
        file: [line for entry in entries for line in groups.get(entry, [entry])]
        for file, entries in read["tests"].items()
    }


def _harmless() -> dict[str, str]:
    """Why, by key of the mutant."""
    return tomllib.loads((HERE / "harmless.toml").read_text())["harmless"]


def _chosen(by_file: list[list[Mutant]], number: int | None, seed: int) -> list[Mutant]:
    """One of each file in turn, until there are as many: what a run that is stopped has done is even."""

    def chance(mutant: Mutant) -> bytes:
        """Stays the same while others come and go."""
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).digest()

    mixed = [sorted(mutants, key=chance) for mutants in by_file]
    in_turn = [mutant for turn in zip_longest(*mixed) for mutant in turn if mutant is not None]
    return in_turn[:number]


def _by_hand(table: str, targets: dict[str, list[str]]) -> list[Mutant]:
    """Their tests come into `targets`: a bug's own, those of the table, or those of the file."""
    mutants: list[Mutant] = []
    read: dict[str, Any] = tomllib.loads((HERE / f"{table}.toml").read_text())
    for bug in read["bug"]:
        source = (TREE / bug["file"]).read_text()
        start, times = source.find(bug["before"]), source.count(bug["before"])
        assert times == 1, f"{bug['name']}: `before` stands {times} times in {bug['file']}"
        line = 1 + source[:start].count("\n")
        changed = source.replace(bug["before"], bug["after"])
        mutant = Mutant(bug["file"], line, "by hand", bug["name"], "", changed)
        targets[mutant.key] = bug.get("tests") or read.get("tests") or targets[bug["file"]]
        mutants.append(mutant)
    return mutants


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, help="how many, by chance (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="+", help="of targets.toml (default: all)")
    parser.add_argument(
        "--by-hand", nargs="?", const="by_hand", help="those of by_hand.toml, or of another table"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=TREE / "outputs" / "mutants.jsonl")
    parser.add_argument("--lines", type=int, help="of tests, at most: to run the others later")
    parser.add_argument("--trust", action="store_true", help="that tests pass without any change")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


# -- running ----------------------------------------------------------------------------------------


def _run(
    mutants: list[Mutant], targets: dict[str, list[str]], options: argparse.Namespace
) -> dict[str, str]:
    """Result by source of the mutant."""
    path, jobs = options.results, options.jobs
    path.parent.mkdir(parents=True, exist_ok=True)
    known = _read(path)
    ids = {mutant.source: _identity(mutant) for mutant in mutants}
    settled = {identity for identity, result in known.items() if result != SURVIVED}
    settled |= {ids[m.source] for m in mutants if m.key in _harmless()} & known.keys()
    left = [m for m in mutants if ids[m.source] not in settled]
    print(f"{len(mutants)} mutants, {len(mutants) - len(left)} known from {path}", flush=True)
    _load_once()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, path.open("a") as file:
        trees: Queue[Path] = Queue()
        for job in range(jobs):
            tree = Path(folder) / str(job)
            shutil.copytree(TREE, tree, ignore=LEFT_OUT)
            compileall.compile_dir(
                tree, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH
            )
            trees.put(tree)

        def attempt(file: str, source: str, lines: list[str]) -> tuple[str, str]:
            tree = trees.get()
            try:
                return _try(tree, file, source, lines)
            finally:
                trees.put(tree)

        def passes(line: str) -> None:
            """Tests that fail without any change would find everything."""
            file = "zeroexp/__init__.py"
            result, test = attempt(file, (TREE / file).read_text(), [line])
            if result != SURVIVED:
                raise SystemExit(f"{line}: {test} {result} without any change")

        def one(mutant: Mutant) -> None:
            began = time.monotonic()
            result, test = attempt(mutant.file, mutant.source, _tests(mutant, targets))
            seconds = time.monotonic() - began
            known[ids[mutant.source]] = result
            row = {"id": ids[mutant.source], "result": result, "test": test, "mutant": mutant.key}
            file.write(json.dumps({**row, "seconds": round(seconds, 1)}) + "\n")
            file.flush()
            what = f"{mutant.before}  ->  {mutant.after}  {test}"
            print(f"{seconds:5.0f} s {result:8} {mutant.file}:{mutant.line} {what}", flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            if not options.trust:
                list(pool.map(passes, sorted({line for m in left for line in _tests(m, targets)})))
            list(pool.map(one, left))
    return {mutant.source: known[ids[mutant.source]] for mutant in mutants}


def _load_once() -> None:
    for name in LOADED_ONCE:
        importlib.import_module(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    gc.collect()
    gc.freeze()  # else each collection of a child looks at it all


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["id"]: row["result"] for row in rows}


def _identity(mutant: Mutant) -> str:
    return hashlib.sha256(mutant.source.encode()).hexdigest()[:20]


def _tests(mutant: Mutant, targets: dict[str, list[str]]) -> list[str]:
    return targets.get(mutant.key) or targets[mutant.file]


def _try(tree: Path, file: str, source: str, tests: list[str]) -> tuple[str, str]:
    """Result, and which test found it."""
    original = (tree / file).read_text()
    (tree / file).write_text(source)
    (tree / FOUND_BY).write_text("")
    pid = os.fork()
    if pid == 0:
        _leave(tree, tests)
    try:
        return _await(pid, tree / FOUND_BY), (tree / FOUND_BY).read_text()
    finally:
        (tree / file).write_text(original)


class FoundBy:
    """A plugin of pytest that writes down which test failed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            hung = "hung: " if "Timeout (>" in report.longreprtext else ""
            self._path.write_text(f"{hung}{report.nodeid}")


def _leave(tree: Path, tests: list[str]) -> NoReturn:
    """Whatever happens, the child never comes back into the code of the run, which would remove the trees."""
    code = NOT_RUN
    try:
        code = _be_pytest(tree, tests)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _await(pid: int, told: Path) -> str:
    """The child leads a process group: whatever it started ends with it. `told`: why its tests did not run."""
    child = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([child], [], [], SECONDS_OF_A_MUTANT)
    finally:
        os.close(child)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not ready:
        return HUNG
    code = os.waitstatus_to_exitcode(status)
    if code == NOT_RUN:
        raise SystemExit(
            f"the tests did not run: {told.read_text(encoding='utf-8') or 'see above'}"
        )
    return SURVIVED if code == 0 else FOUND


def _be_pytest(tree: Path, tests: list[str]) -> int:
    """In the child: 0 where all tests pass. Nothing of our own tree may be imported from here on."""
    os.setpgid(0, 0)
    # This is a fork of one of the pool's threads, for which forks of it would wait as they end.
    futures_thread._threads_queues.clear()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "zeroexp")]:
        del sys.modules[name]
    os.chdir(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != TREE)]
    os.environ["PYTHONPATH"] = str(tree)  # of commands that tests run; it may name our own tree
    sys.dont_write_bytecode = True
    spec = importlib.util.find_spec("zeroexp")
    assert spec is not None and str(spec.origin).startswith(str(tree)), spec
    os.dup2(nothing, 2)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    try:
        importlib.import_module("tests.preloaded")
    except BaseException:
        return 1  # the mutant can not even be imported
    _serve_forks()
    for line in tests:
        arguments = [*QUIET, *LIMITED, "-m", SELECTED, *shlex.split(line)]
        code = int(pytest.main(arguments, plugins=[FoundBy(tree / FOUND_BY)]))
        if code in NO_SUCH_TESTS:  # a test that has another name now must not count as a find
            (tree / FOUND_BY).write_text(f"no test is selected by `{line}`")
            return NOT_RUN
        if code:
            return code
    return 0


def _serve_forks() -> None:
    """The server of multiprocessing that forks ranks, itself forked: it need not load torch again."""
    server: Any = forkserver._forkserver
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")
        listener.bind(address)
        listener.listen()
        last_user, users = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(users)
            forkserver.main(listener.fileno(), last_user, [])
            os._exit(0)
    os.close(last_user)
    server._forkserver_address, server._forkserver_alive_fd = address, users
    server._forkserver_pid = pid


# -- telling ----------------------------------------------------------------------------------------


def _report(mutants: list[Mutant], results: dict[str, str]) -> int:
    harmless = _harmless()
    survived = [mutant for mutant in mutants if results[mutant.source] == SURVIVED]
    unknown = [mutant for mutant in survived if mutant.key not in harmless]
    for mutant in unknown:
        print(f"{mutant.file}:{mutant.line}: no test finds\n    {mutant.key}")
    for key in sorted(({m.key for m in mutants} - {m.key for m in survived}) & set(harmless)):
        print(f"harmless.toml lists what a test finds: {key}")
    judged = len(mutants) - (len(survived) - len(unknown))
    found = judged - len(unknown)
    share = found / judged if judged else 1.0
    print(
        f"{found} of {judged} mutants found ({100 * share:.1f} %), "
        f"{len(survived) - len(unknown)} more are known to be harmless"
    )
    return 0 if share >= LEAST_FOUND else 1


if __name__ == "__main__":
    sys.exit(main())
