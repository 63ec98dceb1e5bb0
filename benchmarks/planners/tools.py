"""Which planners there are, where they come from, and how one is asked.

Each has a folder of its own below outputs/planners, which its process alone sees beside this environment, whose torch
is used. A repository is cloned at a commit and run from there: pip installs Calculon and SimuMax without the files that
they read, and Megatron-LM without its report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.planners.point import Answer, Point

FOLDER = Path("outputs/planners")
GITHUB = "https://github.com/"
SECONDS = 1800
DEEPSPEED_IS_PYTHON = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}


@dataclass(frozen=True)
class Tool:
    name: str
    module: str  # of this folder
    packages: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # of pip
    repository: str = ""
    commit: str = ""

    def put_into(self, folder: Path, sources: Mapping[str, str]) -> str | None:
        """Install and clone what is not there yet; return why that is impossible, or None.

        sources: other places of repositories, by the planner's name.
        """
        python, packages, clone = sys.executable, folder / "packages", folder / "clone"
        lines: list[list[str]] = []
        if self.packages and not packages.exists():
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            lines.append([*pip, "--target", str(packages), *self.flags, *self.packages])
        if self.repository and not clone.exists():
            source = sources.get(self.name, GITHUB + self.repository)
            lines.append(["git", "clone", "--quiet", "--no-checkout", source, str(clone)])
            lines.append(["git", "-C", str(clone), "checkout", "--quiet", self.commit])
        for line in lines:
            done = _run(line)
            if done.returncode:
                last = (done.stderr.strip() or "no word").splitlines()[-1]
                return f"{' '.join(line[:4])} ...: {last}"
        return None

    def ask(self, points: Sequence[Point], sources: Mapping[str, str]) -> list[Answer]:
        """Return what it says of every point. Raises RuntimeError where it can not be installed or run."""
        folder = FOLDER / self.module
        if reason := self.put_into(folder, sources):
            raise RuntimeError(f"not installed: {reason}")
        asked = [sys.executable, "-m", "benchmarks.planners.asked", self.module]
        paths = [str(folder / "packages"), str(folder / "clone"), os.getcwd()]
        done = _run(
            asked, {"PYTHONPATH": os.pathsep.join(paths)}, json.dumps([*map(asdict, points)])
        )
        if done.returncode:
            raise RuntimeError(f"not run: {done.stderr.strip().splitlines()[-1]}")
        return [(states, peak) for states, peak in json.loads(done.stdout)]


TOOLS = (
    Tool("zeroexp", "of_ours"),
    Tool("FSDPMemTracker", "of_mem_tracker"),
    Tool(
        "DeepSpeed",
        "of_deepspeed",
        packages=(
            *("deepspeed==0.19.8", "hjson", "py-cpuinfo", "einops", "msgpack", "ninja"),
            *("psutil", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
        ),
        flags=("--no-deps", "--no-build-isolation"),
    ),
    Tool(
        "Megatron-LM",
        "of_megatron",
        repository="NVIDIA/Megatron-LM",
        commit="3271c428382f2e9e733c2ae4f23a6795e99759a0",  # of September 2025: later ones import Triton
    ),
    Tool(
        "llm-analysis",
        "of_llm_analysis",
        packages=("fire",),
        repository="cli99/llm-analysis",  # of its last release, 0.2.2, no MLP is gated
        commit="d841e40aec8c84b9e76ba9cfbce67418adb172bd",
    ),
    Tool(
        "SimuMax",
        "of_simumax",
        packages=("pandas", "sympy", "tabulate", "graphviz", "matplotlib", "tqdm"),
        repository="MooreThreads/SimuMax",
        commit="4dcaae513ba7679d56c116a17cd4a691ec41e252",
    ),
    Tool(
        "Calculon",
        "of_calculon",
        packages=("pandas", "psutil"),
        repository="calculon-ai/calculon",
        commit="caa4b11f8fe1fee3ba57adaacb7590d7deabd053",
    ),
)


def _run(
    line: Sequence[str], env: Mapping[str, str] | None = None, given: str = ""
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **DEEPSPEED_IS_PYTHON, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(
        line,
        env=env,
        input=given,
        capture_output=True,
        encoding="utf-8",
        timeout=SECONDS,
        check=False,
    )
