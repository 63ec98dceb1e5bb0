"""python -m benchmarks.startup: from the command to the first step, beside importing torch in every rank.

--repeats N     of the command and of the imports, in turn

A sweep of three points on two ranks. `first step` is when its record is written: of the first point since the command
was given, of the following ones since the point before was done. `imports` is what ranks would need that each start
anew: so many processes at once that import torch and transformers and do nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

LATEST = Path("outputs/bench/startup.json")
WORLD_SIZE = 2
SECONDS = 120  # for one command
COMMAND = [
    *("-m", "zeroexp", "-m", "strategy=zero1,zero2,zero3", f"world_size={WORLD_SIZE}"),
    *("model=tiny", "data.seq_len=32", f"data.global_batch_size={WORLD_SIZE}"),
    *("train.warmup_steps=0", "train.steps=1", "tracking=files", "cluster.device=cpu"),
]
IMPORTS = ["-c", "import torch, transformers.models.llama.modeling_llama"]


@dataclass(frozen=True)
class Start:
    """Seconds."""

    imports: float
    first_point: float
    following_points: float  # mean, without what building the model and its engine took
    build: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    starts = [measure() for _ in range(parser.parse_args().repeats)]
    LATEST.parent.mkdir(parents=True, exist_ok=True)
    LATEST.write_text(
        json.dumps([asdict(start) for start in starts], indent=1) + "\n", encoding="utf-8"
    )
    print("| seconds | median | least | most |\n|---|---:|---:|---:|")
    for key in asdict(starts[0]):
        values = [asdict(start)[key] for start in starts]
        row = (statistics.median(values), min(values), max(values))
        print(f"| {key.replace('_', ' ')} | " + " | ".join(f"{value:.2f}" for value in row) + " |")
    ratio = statistics.median(start.first_point / start.imports for start in starts)
    print(f"\nfirst point / imports: {ratio:.2f}")
    return 0


def measure() -> Start:
    imports = _seconds_of_imports()
    with tempfile.TemporaryDirectory(prefix="zeroexp-startup-") as folder:
        began = time.time()
        command = [sys.executable, *COMMAND, f"outputs={folder}"]
        subprocess.run(command, check=True, timeout=SECONDS, capture_output=True)
        runs = [path.parent for path in Path(folder).glob("*/*/config.yaml")]
        runs.sort(key=_first_step)
        waits = [
            _first_step(run) - _state(before)["done_at"] - _built(run)
            for before, run in pairwise(runs)
        ]
        first = _first_step(runs[0]) - began
        return Start(imports, first, statistics.mean(waits), statistics.mean(map(_built, runs)))


def _seconds_of_imports() -> float:
    began = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, *IMPORTS]) for _ in range(WORLD_SIZE)]
    for process in processes:
        if process.wait(SECONDS):
            raise SystemExit("torch and transformers can not be imported")
    return time.perf_counter() - began


def _first_step(run: Path) -> float:
    """Unix seconds."""
    return json.loads((run / "records.jsonl").read_text(encoding="utf-8").partition("\n")[0])[
        "written_at"
    ]


def _state(run: Path) -> dict[str, float]:
    return json.loads((run / "state.json").read_text(encoding="utf-8"))


def _built(run: Path) -> float:
    log = (run / "logs" / "rank0.log").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"built in ([\d.]+) s", log)
    return float(seconds)


if __name__ == "__main__":
    sys.exit(main())
