"""`make mutants`: small changes of the sources, one at a time, each of which the nearest tests should find.

    python -m tests.mutation.run --number 200 --seed 0      a sample; the same seed takes the same
    python -m tests.mutation.run --files zeroexp/optim.py   all of some files
    python -m tests.mutation.run --list                     what there is, without running anything

A mutant is written into a copy of the tree, and the tests of `targets.toml` run there until the first one fails, in a
process forked from one that has torch loaded. Results are appended to a file and not asked for again, so that a run
that was stopped goes on. A mutant that no test finds is printed with its place and its change, unless
`harmless.toml` says why it changes nothing that anybody could see. Ends with 1 where fewer than 95 % were found.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NoReturn

import pytest

from tests.mutation.mutants import Mutant, mutants_of

HERE = Path(__file__).parent
TREE = HERE.parents[1]
LEAST_FOUND = 0.95  # of those that are not known to be harmless
SECONDS_OF_A_MUTANT = (
    240  # one that hangs counts as found: tests have limits of their own, which are longer
)
LEFT_OUT = shutil.ignore_patterns(
    ".venv", ".git", "__pycache__", "outputs", "*.egg-info", ".hypothesis"
)
# By the process that forks the others, since these take longer than most tests. pytest would rather have rewritten the
# assertions of hypothesis.
LOADED_ONCE = ("torch.distributed.checkpoint", "torch.utils.checkpoint", "xxhash", "numpy.random")
LOADED_ONCE += ("torch._dynamo", "hypothesis.strategies", "hypothesis.extra", "_hypothesis_globals")
QUIET = ("-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
SELECTED = "not slow and not slurm and not browser and not gpu"
FOUND, SURVIVED, HUNG = "found", "survived", "hung"
NOT_RUN = 70  # exit code of a child that could not even ask pytest


def main() -> int:
    options = _options()
    targets: dict[str, list[str]] = tomllib.loads((HERE / "targets.toml").read_text())["tests"]
    files = options.files or list(targets)
    mutants = [mutant for file in files for mutant in mutants_of(TREE, file)]
    if options.number is not None and options.number < len(mutants):
        chosen = random.Random(options.seed).sample(range(len(mutants)), options.number)
        mutants = [mutants[index] for index in sorted(chosen)]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line}: {mutant.before}  ->  {mutant.after}")
        print(f"{len(mutants)} mutants")
        return 0
    results = _run(mutants, targets, options.results, options.jobs)
    return _report(mutants, results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, help="how many, by chance (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="+", help="of targets.toml (default: all)")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=TREE / "outputs" / "mutants.jsonl")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


# -- running ----------------------------------------------------------------------------------------


def _run(
    mutants: list[Mutant], targets: dict[str, list[str]], path: Path, jobs: int
) -> dict[str, str]:
    """Result by identity of the mutant and its tests."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = _read(path)
    ids = {mutant.source: _identity(mutant, targets) for mutant in mutants}  # now: tests may change
    left = [mutant for mutant in mutants if ids[mutant.source] not in known]
    print(f"{len(mutants)} mutants, {len(mutants) - len(left)} known from {path}", flush=True)
    for name in LOADED_ONCE:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, path.open("a") as file:
        trees: Queue[Path] = Queue()
        for job in range(jobs):
            shutil.copytree(TREE, Path(folder) / str(job), ignore=LEFT_OUT)
            trees.put(Path(folder) / str(job))

        def one(mutant: Mutant) -> None:
            tree = trees.get()
            began = time.monotonic()
            result = _try(tree, mutant.file, mutant.source, targets[mutant.file])
            trees.put(tree)
            seconds = time.monotonic() - began
            known[ids[mutant.source]] = result
            row = {"id": ids[mutant.source], "result": result, "mutant": mutant.key}
            file.write(json.dumps({**row, "seconds": round(seconds, 1)}) + "\n")
            file.flush()
            change = f"{mutant.before}  ->  {mutant.after}" if result == SURVIVED else ""
            print(f"{seconds:5.0f} s {result:8} {mutant.file}:{mutant.line} {change}", flush=True)

        for target in dict.fromkeys(mutant.file for mutant in left):
            tree = trees.get()
            if _try(tree, target, (TREE / target).read_text(), targets[target]) != SURVIVED:
                raise SystemExit(f"{target}: {targets[target]} fail without any change")
            trees.put(tree)
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(one, [mutant for mutant in left if mutant.file == target]))
    return {mutant.key: known[ids[mutant.source]] for mutant in mutants}


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["id"]: row["result"] for row in rows}


def _identity(mutant: Mutant, targets: dict[str, list[str]]) -> str:
    """Changes with the file, and with a test of it: what has survived is asked again when there is a new test."""
    tests = [(TREE / test).read_text() for test in targets[mutant.file]]
    return hashlib.sha256("\0".join([mutant.source, *tests]).encode()).hexdigest()[:20]


def _try(tree: Path, file: str, source: str, tests: list[str]) -> str:
    original = (tree / file).read_text()
    (tree / file).write_text(source)
    pid = os.fork()
    if pid == 0:
        _leave(tree, tests)
    try:
        return _await(pid)
    finally:
        (tree / file).write_text(original)


def _leave(tree: Path, tests: list[str]) -> NoReturn:
    """Whatever happens, the child never comes back into the code of the run, which would remove the trees."""
    code = NOT_RUN
    try:
        code = _be_pytest(tree, tests)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _await(pid: int) -> str:
    """The child leads a process group: whatever it started ends with it."""
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
        raise SystemExit("the tests did not run: see above")
    return SURVIVED if code == 0 else FOUND


def _be_pytest(tree: Path, tests: list[str]) -> int:
    """In the child: 0 where all tests pass. Nothing of our own tree may be imported from here on."""
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "zeroexp")]:
        del sys.modules[name]
    os.chdir(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != TREE)]
    sys.dont_write_bytecode = True
    spec = importlib.util.find_spec("zeroexp")
    assert spec is not None and str(spec.origin).startswith(str(tree)), spec
    os.dup2(nothing, 2)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    return int(pytest.main([*QUIET, "-m", SELECTED, *tests]))


# -- telling ----------------------------------------------------------------------------------------


def _report(mutants: list[Mutant], results: dict[str, str]) -> int:
    harmless: dict[str, Any] = tomllib.loads((HERE / "harmless.toml").read_text())["harmless"]
    survived = [mutant for mutant in mutants if results[mutant.key] == SURVIVED]
    unknown = [mutant for mutant in survived if mutant.key not in harmless]
    for mutant in unknown:
        print(f"{mutant.file}:{mutant.line}: no test finds\n    {mutant.key}")
    for key in sorted({m.key for m in mutants} & set(harmless)):
        if results[key] != SURVIVED:
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
