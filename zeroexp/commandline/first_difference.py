"""`zeroexp report --diverge A B`: where two strategies begin to differ.

A and B are run folders (outputs/<sweep>/<run>). Runs without hashes are run again on this machine, in the folder
outputs/<sweep>/hashed/<run>, with hashes of the first steps on. Exit codes: 0 they are equal within the bound, 1 they
differ, 2 refused.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from zeroexp.cluster.job import Job
from zeroexp.cluster.local import LocalCluster
from zeroexp.config import keys as configs
from zeroexp.config.keys import Config, ConfigError
from zeroexp.process import safe_output
from zeroexp.report.step_differences import Comparison, compare_hashes, has_hashes

NUM_STEPS = 3  # that a rerun hashes
DIVERGES, REFUSED = 1, 2
ENVIRONMENT = "environment.json"
AGAIN = "hashed"  # the folder of a sweep's runs that ran again with hashes


def main() -> int:
    safe_output.keep_going()
    arguments = _arguments()
    try:
        first, second = (_with_hashes(Path(run)) for run in arguments.diverge)
        comparison = compare_hashes(first, second, arguments.bound)
    except ConfigError as error:
        print(f"zeroexp: {error}", file=sys.stderr)
        return REFUSED
    for line in report_lines(comparison, arguments.bound):
        print(line)
    return DIVERGES if comparison.beyond else 0


def report_lines(comparison: Comparison, bound: float) -> list[str]:
    """Return the verdict, line by line."""
    compared = f"{comparison.num_tensors} tensors of {comparison.num_steps} steps"
    if comparison.exactly is None:
        return [f"equal in every bit: {compared}"]
    lines = [f"first difference in bits: {comparison.exactly}"]
    if comparison.beyond is None:
        return [*lines, f"nothing lies further apart than {bound:g}: {compared}"]
    return [*lines, f"first difference beyond {bound:g}: {comparison.beyond}"]


def _with_hashes(run: Path) -> Path:
    """Return a folder of this run that has hashes; run it again where there is none."""
    if not (run / "config.yaml").exists():
        raise ConfigError(f"{run}: no run in there; give outputs/<sweep>/<run>")
    if has_hashes(run):
        return run
    again = run.parent / AGAIN / run.name  # where no report of the sweep counts it as a point
    if not has_hashes(again):
        _rerun(run, again)
    return again


def _rerun(run: Path, again: Path) -> None:
    config = configs.load(run / "config.yaml")
    if config.cluster.kind != "local":
        raise ConfigError(
            f"{run}: it ran on {config.cluster.kind}; run it there with train.hash_steps=[0,1,2]"
        )
    shutil.rmtree(again, ignore_errors=True)
    again.mkdir(parents=True)
    _shorten(config)
    configs.save(config, again / "config.yaml")
    if (run / ENVIRONMENT).exists():  # it says in which folder plugins are looked for
        shutil.copy(run / ENVIRONMENT, again)
    print(f"{run.name} is run again with hashes, into {again}", file=sys.stderr)
    with LocalCluster(config.cluster) as cluster:
        outcome = cluster.run(Job(again), on_record=lambda _: None, on_event=lambda _: None)
    if outcome.status != "done":
        raise ConfigError(f"{again}: the rerun ended as {outcome.status}; see its logs")


def _shorten(config: Config) -> None:
    """Hash the first steps, and take no more than those unless the learning rate depends on how many there are."""
    num_steps = config.train.warmup_steps + config.train.steps
    config.train.hash_steps = list(range(min(NUM_STEPS, num_steps)))
    if config.optimizer.schedule == "constant":
        config.train.warmup_steps, config.train.steps = 0, len(config.train.hash_steps)
    config.train.trace_steps, config.train.profile_steps = [], []
    config.checkpoint.every, config.resume = None, None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="zeroexp report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--diverge", nargs=2, required=True, metavar=("A", "B"))
    parser.add_argument(
        "--bound", type=float, default=1e-4, help="relative distance that is rounding"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
