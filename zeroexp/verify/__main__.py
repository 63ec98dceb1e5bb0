"""`zeroexp verify FILE:FUNCTION`: does a training loop of yours compute what one process would?

    zeroexp verify loop.py:my_loop                                        a loop of yours
    zeroexp verify strategy=zero3 strategy.implementation=tensor model=tiny    a run's engine, by its words

FUNCTION returns a `zeroexp.verify.Loop`: the plain model, its loss, batches and optimizer, and your own code that
shards the model and takes a step. It runs on CPUs, on each number of ranks, whose batches differ, beside one process
of plain PyTorch. docs/verify.md has an example, and what the answers mean.

Exit codes: 0 equal, 1 it differs, 2 it can not be run. --json: the answer for programs, on standard output.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from zeroexp.check import check
from zeroexp.check.try_model import check_model
from zeroexp.commandline.mistakes import MISTAKES, explain
from zeroexp.config.keys import Config
from zeroexp.plan.__main__ import composed_points
from zeroexp.process.json_output import REFUSED, answer, parser_of
from zeroexp.run.rank import import_for
from zeroexp.tracking.json_files import dumps
from zeroexp.verify.compare_steps import Verdict
from zeroexp.verify.loop_of_config import loop_of_config
from zeroexp.verify.loop_to_verify import NoLoop, Source, source_in
from zeroexp.verify.ranks import verify_world
from zeroexp.verify.rounding_oracle import MARGIN

DIFFERS = 1
WORLDS = "1,2,3,4"


def main() -> int:
    return answer(_verify_and_conclude)


def _verify_and_conclude(told: list[str] | None) -> int:
    """Print the answer, and return the exit code; `told` gets the verdicts where JSON is asked for."""
    arguments, verdicts, code = _arguments(), list[Verdict](), 0
    try:
        _verify(arguments, verdicts)
    except NoLoop as problem:
        print(f"zeroexp: {problem}", file=sys.stderr)
        code = REFUSED
    if any(each.difference for each in verdicts):
        code = DIFFERS  # though other numbers of ranks can not be run
    if code != REFUSED:
        print(*_conclusion(verdicts), sep="\n")
    if told is not None and verdicts:
        told.append(dumps([asdict(each) for each in verdicts]))
    return code


def _verify(arguments: argparse.Namespace, verdicts: list[Verdict]) -> None:
    """Append a verdict for each number of ranks. Raises NoLoop at the first that can not be run."""
    source = source_of(arguments.loop)
    worlds = (arguments.worlds or WORLDS).split(",")
    if not all(each.isdecimal() and int(each) for each in worlds):
        raise NoLoop(f"--worlds {arguments.worlds}: no numbers of ranks; give some, as 1,2,4")
    if arguments.steps < 1:
        raise NoLoop(f"--steps {arguments.steps}: none; give at least 1")
    if not arguments.seconds > 0:
        raise NoLoop(f"--seconds {arguments.seconds:g}: no time; give more than 0")
    print(f"{source.name} beside one process of plain PyTorch {torch.__version__}")
    for size in map(int, worlds):
        why_not = source.why_not_on(size)
        if why_not and arguments.worlds:
            raise NoLoop(f"--worlds {arguments.worlds}: {why_not}")
        if not why_not:
            verdicts.append(verify_world(source, size, arguments.steps, arguments.seconds))
        answer = f"left out: {why_not}" if why_not else _line(verdicts[-1])
        print(f"  {size} rank{'s' if size > 1 else ' '}  {answer}", flush=True)
    if not verdicts:
        raise NoLoop(f"none of {WORLDS} ranks can run it; give --worlds others")


def source_of(words: list[str]) -> Source:
    """Return the source of a loop by what stands on the line. Raises NoLoop, in one line."""
    # Its path may have a "=" too. Path.is_file raises for a name as long as a setting may be.
    is_file = os.path.isfile(words[0].rpartition(":")[0])
    return _config_source(words) if "=" in words[0] and not is_file else _file_source(words)


def _file_source(words: list[str]) -> Source:
    name, _, function = words[0].rpartition(":")
    file = Path(name).resolve()
    if len(words) > 1:
        raise NoLoop(f"{words[1]}: one loop at a time; give FILE:FUNCTION, or the words of a run")
    if not function.isidentifier() or not file.is_file():
        raise NoLoop(f"{words[0]}: no such file, or no function; give FILE:FUNCTION")
    if file.suffix != ".py":
        raise NoLoop(f"{file.name}: no Python file; give FILE.py:FUNCTION")
    return source_in(file, function)


def _config_source(words: list[str]) -> Source:
    """Return the source of a run's own loop. Raises NoLoop for words that a run would refuse, and for a sweep."""
    try:
        points = composed_points(words).points
        if len(points) > 1:
            raise NoLoop(f"{len(points)} points: one at a time; give no list")
        config = points[0].config
        if codes := config.model.lora.quantize:
            key = f"model.lora.quantize={codes}"
            raise NoLoop(f"{key}: the plain process computes with no codes; give null")
        check_model(config)
        import_for(config)  # here, and not in each rank, which is a fork
    except MISTAKES as error:
        raise NoLoop(explain(error)) from error
    why_not_on = partial(_why_not_on, config)
    return Source(" ".join(words), lambda: loop_of_config(config), why_not_on=why_not_on)


def _why_not_on(config: Config, size: int) -> str | None:
    """Return what refuses a run on so many ranks, each with as many samples."""
    samples = config.data.global_batch_size // config.world_size * size
    try:
        check(
            replace(config, world_size=size, data=replace(config.data, global_batch_size=samples))
        )
    except MISTAKES as error:
        return explain(error)
    return None


def _line(verdict: Verdict) -> str:
    found = verdict.difference
    if found is None:
        steps = f"{verdict.num_weights} weights in {verdict.num_steps} steps"
        return f"equal: {steps}, {verdict.used:.0%} of the bound used"
    place = f"step {found.step}, rank {found.rank}, {found.what} of {found.tensor}"
    return f"DIFFERS: {place}" + (f" and {found.num_tensors - 1} more" * (found.num_tensors > 1))


def _conclusion(verdicts: list[Verdict]) -> list[str]:
    notes = [f"  note: {each}" for each in dict.fromkeys(n for v in verdicts for n in v.notes)]
    found = [each.difference for each in verdicts if each.difference]
    if found:
        size = f"{found[0].distance:.2g} of it, where rounding explains {found[0].bound:.2g}"
        clearest: dict[str, str] = {}
        for cause in (each.cause for each in found):
            # What may be ranks or microbatches is one of them in another world.
            known = clearest.get(cause.kind, cause.text)
            clearest[cause.kind] = min(known, cause.text, key=len)
        told = [f"{kind}: {text}" for kind, text in clearest.items()]
        return [*notes, f"  the first is off by {size}", *told]
    rounding = max(each.rounding for each in verdicts)
    return [
        *notes,
        "equal to one process: gradients, clipping and updates, from the loop's own weights in each step",
        f"bound: {rounding:.1e} of a gradient (median): {MARGIN:g} x the rounding of plain PyTorch, measured on "
        "this model in the loop's dtype beside float64",
    ]


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "zeroexp verify")
    parser.add_argument("loop", nargs="+", metavar="FILE:FUNCTION | KEY=VALUE ...")
    parser.add_argument("--worlds", help=f"numbers of ranks ({WORLDS}, where they can run it)")
    parser.add_argument("--steps", type=int, default=3, help="of the optimizer (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=120, help="for each number of ranks (%(default)s)"
    )
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.exit(main())
