"""`python -m benchmarks.advised`: is what `--advise` names really the fastest that fits?

Cases are drawn: a small LLaMA, a batch, and a limit of memory between what its candidates hold. Each is advised for two
CPU ranks by this machine's calibration (`zeroexp calibrate`), where there is one; then candidates are run, in rounds,
and the fastest step of each and the most that a rank held are taken. Not run are those that are planned to hold a tenth
more than the limit, or to take twice as long as what was named. A case is right if what was named fits and nothing that
fits is faster by more than CLEAR, which is what two runs of one candidate differ by.

    python -m benchmarks.advised --cases 10 --rounds 2 [--seed 1]
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, replace

from benchmarks.real_runs import config_of, peak_and_steps_of
from zeroexp.plan.advise import Advice, advise
from zeroexp.plan.composed_points import ComposedPoints
from zeroexp.plan.outcome import plan_point
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.search import Candidate
from zeroexp.plan.text_table import GIB, MIB
from zeroexp.process import safe_output

NUM_RANKS, SAMPLES = 2, 4  # samples of a rank in a step: micro-batches of 1, 2 and 4
CLEAR, HOPELESS_BYTES, HOPELESS_SECONDS = 0.05, 1.1, 2.0
STEPS = "train.warmup_steps=2 train.steps=8"


@dataclass
class Run:
    """One candidate of a case, as it was planned and as it ran."""

    candidate: Candidate
    peak_bytes: float = 0.0
    seconds: float = float("inf")  # of the fastest step

    def run(self) -> None:
        peak, steps = peak_and_steps_of(self.candidate.planned.config)
        self.peak_bytes, self.seconds = max(self.peak_bytes, peak), min(self.seconds, *steps)


def main() -> int:
    safe_output.keep_going()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    drawn, right = random.Random(args.seed), 0
    for number in range(args.cases):
        words = draw(drawn)
        is_right, line = judge(advice_of(words), drawn.random(), args.rounds)
        right += is_right
        print(f"{number + 1:2} {'right' if is_right else 'WRONG'}  {words}\n   {line}", flush=True)
    print(f"{right} of {args.cases} right (nothing that fits is more than {CLEAR:.0%} faster)")
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
    plans = Plans(ComposedPoints(words.split()), rehearses=True)
    plans.entries = [plan_point(config_of(words), None, "cpu")]
    (found,) = advise(plans)
    return found


def judge(case: Advice, share: float, rounds: int) -> tuple[bool, str]:
    """Return whether what is named under a limit is the fastest that fits, and what was measured.

    share: where the limit lies between the least and the most that candidates are planned to hold.
    """
    peaks = sorted(each.peak_bytes for each in case.candidates)
    limit = int(peaks[0] + share * (peaks[-1] - peaks[0]))
    case.candidates = [within(each, limit) for each in case.candidates]
    best = case.best
    assert best is not None
    runs = [
        Run(each)
        for each in case.candidates
        if each.peak_bytes <= HOPELESS_BYTES * limit
        and each.seconds <= HOPELESS_SECONDS * best.seconds
    ]
    for _ in range(rounds):
        for each in random.sample(runs, len(runs)):
            each.run()
    (named,) = (each for each in runs if each.candidate is best)
    fitting = sorted((r for r in runs if r.peak_bytes <= limit), key=lambda run: run.seconds)
    is_right = named in fitting and named.seconds <= (1 + CLEAR) * fitting[0].seconds
    place = fitting.index(named) + 1 if named in fitting else None
    return is_right, (
        f"{limit / MIB:.1f} MiB: named {told(named)}; fastest that fits {told(fitting[0])}; "
        f"place {place} of {len(fitting)} that fit, {len(runs)} run of {len(case.candidates)}"
    )


def within(each: Candidate, limit: int) -> Candidate:
    outcome = replace(each.planned.outcome, memory_gib=limit / GIB)
    return Candidate(each.words, each.planned._replace(outcome=outcome))


def told(run: Run) -> str:
    each = run.candidate
    again = " recomputing" if each.recomputes else ""
    return f"{each.stage}, {each.micro}{again}: {1e3 * run.seconds:.1f} ms, {run.peak_bytes / MIB:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
