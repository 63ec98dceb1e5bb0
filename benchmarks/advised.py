"""`python -m benchmarks.advised`: is what `--advise` names really the fastest that fits?

Cases are drawn: a small LLaMA, a batch, and a limit of memory between what its candidates hold. Each is advised for two
CPU ranks by this machine's calibration (`zeroexp calibrate`), where there is one; then candidates are run, in rounds,
and the fastest step of each and the most that a rank held are taken. Not run are those that are planned to hold a tenth
more than the limit, or to take twice as long as what was named.

The rule: what was named is run twice in every round, as two candidates, and the noise of a case is what its two figures
differ by, at least CLEAR. A case is right if what was named fits and nothing that fits is faster than the slower of the
two by more than the noise. Where the noise is above LOUD, or nothing fits, it is no case, and another is drawn.

    python -m benchmarks.advised --cases 10 --rounds 2 [--seed 1] [--first]

--first: ranks run before all other programs of the machine (SCHED_RR, for root): where it is not quiet.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.real_runs import before_others, config_of, peak_and_steps_of
from zeroexp.plan.advise import Advice, advise, confirm_best
from zeroexp.plan.composed_points import ComposedPoints
from zeroexp.plan.outcome import PlannedPoint, plan_point
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.text_table import GIB, MIB
from zeroexp.process import safe_output

NUM_RANKS, SAMPLES = 2, 4  # samples of a rank in a step: micro-batches of 1, 2 and 4
CLEAR, LOUD = 0.05, 0.2
HOPELESS_BYTES, HOPELESS_SECONDS = 1.1, 2.0
STEPS = "train.warmup_steps=2 train.steps=8"


@dataclass
class Run:
    """One candidate of a case, as it was planned and as it ran."""

    candidate: PlannedPoint
    peak_bytes: float = 0.0
    seconds: float = float("inf")  # of the fastest step

    def run(self, prepare: Callable[[], object]) -> None:
        peak, steps = peak_and_steps_of(self.candidate.config, prepare)
        self.peak_bytes, self.seconds = max(self.peak_bytes, peak), min(self.seconds, *steps)


def main() -> int:
    safe_output.ignore_output_errors()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", action="store_true")
    args = parser.parse_args()
    drawn, judged = random.Random(args.seed), list[bool]()
    while len(judged) < args.cases:
        words = draw(drawn)
        is_right, line = judge(
            advice_of(words), drawn.random(), args.rounds, before_others if args.first else int
        )
        judged += [] if is_right is None else [is_right]
        word = {True: "right", False: "WRONG", None: "no case"}[is_right]
        print(f"{len(judged):2} {word}  {words}\n   {line}", flush=True)
    told = f"nothing that fits is faster by more than the noise, at least {CLEAR:.0%}"
    print(f"{sum(judged)} of {args.cases} right ({told})")
    return 0


def draw(drawn: random.Random) -> str:
    """Return the words of a case without its limit."""
    width, depth = 64 * drawn.randint(2, 7), drawn.randint(2, 6)
    shape = {
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "num_hidden_layers": depth,
        "vocab_size": drawn.choice((512, 1024, 2048, 4096)),
    }
    sizes = [f"model.hf_config.{key}={value}" for key, value in shape.items()]
    tokens = 32 * drawn.randint(1, 6)
    data = f"data=synthetic data.vocab_size={shape['vocab_size']} data.seq_len={tokens}"
    batch = f"data.global_batch_size={NUM_RANKS * SAMPLES}"
    return f"model=tiny {' '.join(sizes)} {data} {batch} world_size={NUM_RANKS} {STEPS}"


def advice_of(words: str) -> Advice:
    """Return all ways to do the work of a case, rehearsed."""
    plans = Plans(ComposedPoints(words.split()), gives_time=True)
    plans.entries = [plan_point(config_of(words), None, "cpu")]
    (found,) = advise(plans)
    return found


def judge(
    case: Advice, share: float, rounds: int, prepare: Callable[[], object]
) -> tuple[bool | None, str]:
    """Return whether what is named under a limit is the fastest that fits, or None: no case; and what was measured.

    share: where the limit lies between the least and the most that candidates are planned to hold.
    """
    peaks = sorted(each.outcome.peak_bytes for each in case.candidates)
    limit = int(peaks[0] + share * (peaks[-1] - peaks[0]))
    case.candidates = [within(each, limit) for each in case.candidates]
    confirm_best(case)
    if (best := case.best) is None:
        return (
            None,
            f"{limit / MIB:.2f} MiB: nothing fits, which rehearsals of one rank did not see",
        )
    twins = [Run(best), Run(best)]
    others = [
        Run(each)
        for each in case.candidates
        if each is not best
        and each.outcome.peak_bytes <= HOPELESS_BYTES * limit
        and each.seconds <= HOPELESS_SECONDS * best.seconds
    ]
    for _ in range(rounds):
        for each in random.sample(runs := [*twins, *others], len(runs)):
            each.run(prepare)
    quick, slow = sorted(each.seconds for each in twins)
    noise = max(CLEAR, slow / quick - 1)
    faster = sorted(
        (r for r in others if r.peak_bytes <= limit and slow > (1 + noise) * r.seconds),
        key=lambda run: run.seconds,
    )
    fits = all(each.peak_bytes <= limit for each in twins)
    told = f"{limit / MIB:.2f} MiB: named {name_of(twins[0])} and {1e3 * twins[1].seconds:.1f} ms"
    found = f"{len(faster)} of {len(others)} others that ran fit and are faster"
    by = f", most {name_of(faster[0])}" if faster else ""
    return (
        None if noise > LOUD else fits and not faster,
        f"{told} (noise {noise:.0%}{'' if fits else ', does NOT fit'}); {found}{by}",
    )


def within(each: PlannedPoint, limit: int) -> PlannedPoint:
    return each._replace(outcome=replace(each.outcome, memory_gib=limit / GIB))


def name_of(run: Run) -> str:
    each = run.candidate
    again = " recomputing" if each.recomputes else ""
    return f"{each.outcome.strategy}, {each.micro}{again}: {1e3 * run.seconds:.1f} ms, {run.peak_bytes / MIB:.2f} MiB"


if __name__ == "__main__":
    sys.exit(main())
