"""The real Slurm of the tests: `with Minicluster(folder, "--nodes=4") as cluster`."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from zeroexp.cluster.follow import follow
from zeroexp.cluster.job import Job
from zeroexp.report.sweep_progress import SweepProgress

ROOT = Path(__file__).parents[2]
MINICLUSTER = str(ROOT / "slurm" / "minicluster")


def why_not() -> str | None:
    """Why no cluster can be started here; None if one can."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    for program in ("slurmctld", "slurmd", "munged"):
        if shutil.which(program, path=path) is None:
            return f"{program} is not installed: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "slurm/minicluster needs root"
    unshare = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True)
    return "this container may make no namespaces" if unshare.returncode else None


def why_no_accounting() -> str | None:
    """Why `--accounting` can not be had here; None if it can."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    for program in ("slurmdbd", "mariadbd", "mariadb-install-db", "my_print_defaults"):
        if shutil.which(program, path=path) is None:
            packages = "slurmdbd mariadb-server-core mariadb-client-core"
            return f"{program} is not installed: apt-get install {packages}"
    return None


def why_no_networks() -> str | None:
    """Why `--namespaces` can not be had here; None if it can."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if shutil.which("ip", path=path) is None:
        return "ip is not installed: apt-get install iproute2"
    probe = ["unshare", "--net", "sh", "-c", "ip link add x type bridge && ip link add y type veth"]
    made = subprocess.run(probe, capture_output=True, text=True, env={**os.environ, "PATH": path})
    return "this kernel has no bridges or veths" if made.returncode else None


def follow_to_the_end(jobs: Mapping[str, Job]) -> None:
    with SweepProgress(len(jobs), io.StringIO()) as progress:
        follow(dict(enumerate(jobs.values(), start=1)), progress, on_step=ignore, on_end=ignore)


def ignore(run: Path) -> None:
    """What MLflow would be told."""


@contextmanager
def entered(folder: Path, *flags: str, **variables: str) -> Iterator[Minicluster]:
    """A cluster that this process submits to itself, with these variables in its environment."""
    with Minicluster(folder / "cluster", *flags) as started, pytest.MonkeyPatch.context() as m:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        conf = started.environment["SLURM_CONF"]
        for name, value in {"SLURM_CONF": conf, "PYTHONPATH": path, **variables}.items():
            m.setenv(name, value)
        yield started


class Minicluster:
    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.flags = folder, flags
        self.environment = dict(os.environ)

    def __enter__(self) -> Minicluster:
        try:
            export = self.command("up", *self.flags)
        except BaseException:  # Ctrl-C, of which `up` was killed halfway
            subprocess.run([MINICLUSTER, f"--folder={self.folder}", "down"], capture_output=True)
            raise
        name, _, value = export.removeprefix("export ").strip().partition("=")
        self.environment[name] = value
        return self

    def __exit__(self, *_: object) -> None:
        self.command("down")

    def command(self, *words: str) -> str:
        """One command of slurm/minicluster for this cluster, whose database may be slow to begin."""
        return self.run(MINICLUSTER, f"--folder={self.folder}", *words, timeout_s=300)

    def run(self, *words: str, timeout_s: float = 60) -> str:
        """Standard output of a command that sees this cluster; raises if it fails."""
        done = subprocess.run(
            words,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.folder.parent,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def node_state(self, node: str) -> str:
        return self.run(
            "sinfo", "--noheader", f"--nodes={node}", "--partition=low", "--format=%T"
        ).strip()

    def job_state(self, job: str) -> str:
        return self.run(
            "squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"
        ).strip()

    def wait_for(self, happened: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
            time.sleep(0.1)
