"""`zeroexp plan WORDS`: what each rank would hold and send, planned before anything runs.

The words are those of a run, lists and studies too:

    zeroexp plan model=llama_7b world_size=8,64,1024 strategy=ddp,zero1,zero2,zero3
    zeroexp plan study=compare cluster.device_memory_gib=16
    zeroexp plan --config-dir ~/site cluster=mysite

--rehearse  with any of these: the peak with activations and the seconds of a step, by the real engine on tensors
            without memory; seconds are those of zeroexp calibrate, or of tables
--json      every rank's bytes; --csv: one line for each point
--fit       the fewest ranks at which each strategy of the line fits cluster.device_memory_gib, rehearsed; there the
            largest micro-batch and the longest sequence; with --json as JSON
--advise    which strategy on these ranks, and how fast: the fastest that fits of every strategy, recomputation and
            micro-batch of one global batch, rehearsed for a minute; cluster.gpu names the GPUs; with --json as JSON
--explain   what makes the peak of one point, down to its largest tensors, by a rehearsal

cluster.device=auto means the device of a run here, or GPUs if there are more ranks than this machine could run.
Exit codes: 0 planned (points that mean nothing are skipped with their reason); 2 refused in one line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from zeroexp.__main__ import INTERRUPTED, REFUSED, compose
from zeroexp.commandline import mistakes
from zeroexp.commandline.check_arguments import CONFIG_DIR
from zeroexp.config import plugins
from zeroexp.config.keys import ConfigError
from zeroexp.plan.composed_points import ComposedPoints
from zeroexp.process import locks, safe_output, signals
from zeroexp.process.cheap_imports import importing_cheaply
from zeroexp.registry import Later

ADVISE, FIT, REHEARSE = "--advise", "--fit", "--rehearse"
# Flags -> the function that answers; torch takes a second to import, and a refusal needs none.
FORMS = {
    "": Later("zeroexp.plan.plan_table:render"),
    "--json": Later("zeroexp.plan.plan_table:as_json"),
    "--csv": Later("zeroexp.plan.plan_table:as_csv"),
    FIT: Later("zeroexp.plan.fit:fit_lines"),
    f"{FIT} --json": Later("zeroexp.plan.fit:fit_json"),
    "--explain": Later("zeroexp.plan.explain_plan:explain"),
    ADVISE: Later("zeroexp.plan.advice_text:advice_text"),
    f"{ADVISE} --json": Later("zeroexp.plan.advice_text:advice_json"),
}
ALLOWED = ("-m", "--multirun", REHEARSE)


def main() -> int:
    arguments = sys.argv[1:]
    safe_output.ignore_output_errors()
    signals.handle_ctrl_c()
    try:
        print(_answer(arguments))
        return INTERRUPTED if signals.was_asked() else 0
    except mistakes.MISTAKES as error:
        print(f"zeroexp: {mistakes.explain(error)}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (Exception, SystemExit) as error:
        if (told := plugins.blame_plugin(error)) is None:
            raise
        print(f"zeroexp: {told}", file=sys.stderr)
        return REFUSED


def _answer(arguments: Sequence[str]) -> str:
    if "-h" in arguments or "--help" in arguments:
        return str(__doc__).rstrip()
    flags, words = _flags_and_words(arguments)
    _refuse(flags, words)
    points = composed_points(words)
    with importing_cheaply():
        from zeroexp.plan.plan_points import Plans
    gives_time, chooses = REHEARSE in arguments, {ADVISE, FIT} & {*flags}
    plans = Plans(points, rehearses=gives_time and not chooses, gives_time=gives_time)
    if signals.was_asked() and chooses:
        raise KeyboardInterrupt  # these begin where planning ends
    told = FORMS[" ".join(sorted(flags))](plans)
    # They are no part of CSV or JSON; what is advised or fits has a batch of its own.
    for note in points.notes if flags and not chooses else []:
        print(note, file=sys.stderr)
    return told


def _flags_and_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of a plan, and what Hydra composes: the settings, and --config-dir with its folder."""
    left = iter(arguments)
    each = [f"{word}={next(left, '')}" if word in CONFIG_DIR else word for word in left]
    words = [w for w in each if not w.startswith("-") or w.partition("=")[0] in CONFIG_DIR]
    flags = [word for word in each if word not in (*words, *ALLOWED)]
    return flags, words


def composed_points(words: Sequence[str]) -> ComposedPoints:
    """Return the points that Hydra composes of a line. Raises ConfigError for a wrong one."""
    points = ComposedPoints(words)
    # Hydra writes down what it sweeps, and a plan leaves no file.
    with ExitStack() as at_end:
        try:
            folder = at_end.enter_context(locks.temporary_folder())
        except OSError as error:
            told = "no temporary folder can be written, which a plan needs; set TMPDIR to one"
            raise ConfigError(f"TMPDIR={os.environ.get('TMPDIR', '')}: {told}") from error
        compose(points, [*words], further=[f"hydra.sweep.dir={folder}"], writes=False)
    return points


def _refuse(flags: Sequence[str], words: Sequence[str]) -> None:
    for flag in flags:
        if flag not in FORMS:
            known = ", ".join([*filter(None, FORMS), REHEARSE, *CONFIG_DIR[:1]])
            raise ConfigError(f"{flag}: a plan has no such flag; use one of {known}")
    if " ".join(sorted(flags)) not in FORMS:
        raise ConfigError(f"{' '.join(flags)}: one form at a time; leave out all but one")
    for word in words:
        if word.partition("=")[0] in ("hydra/sweeper", "hydra.sweep.dir"):
            raise ConfigError(f"{word}: a plan neither learns nor writes; leave it out")


if __name__ == "__main__":
    sys.exit(main())
