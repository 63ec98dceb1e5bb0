"""What a study claims of its runs: that they train alike, and hold, send and launch what was planned.

claim         measured                        beside
the end       points that came to it          those that were to run
losses        the curve of each point         that of the first point, within study.loss_agreement
losses fall   the curve of each point         its beginning, where study.loss_must_fall
bytes held    model states, each kind         the closed forms, every byte
bytes sent    also to the host                the closed forms, every byte
operations    collectives of a step           the closed forms
peaks         most allocated at once          a rehearsal, within 1 MiB or 0.1 %

Bytes sent and operations are claimed where an engine of the study counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from zeroexp.measure.record import RunSummary
from zeroexp.report.loss_agreement import asks_of_losses, losses_of
from zeroexp.report.measured_points import MeasuredPoint, of_one_seed
from zeroexp.tracking.run import UNFINISHED

PEAK_BYTES, PEAK_SHARE = 1 << 20, 0.001  # of a rehearsed peak, whichever is more
SENT = ("sent", "bus")  # of what is planned: by collectives, to the host
# What an interface counted has TCP's acknowledgements in it, and gloo's headers: of it nothing is claimed to the byte.
OF_AN_INTERFACE = "link"
MUST_HOLD = "study.plan_must_hold"


@dataclass(frozen=True)
class Claim:
    text: str
    holds: bool
    sweep: str | None = None  # whose claim it is, where several are shown

    @property
    def line(self) -> str:
        return f"{self.text}: {'holds' if self.holds else 'DOES NOT HOLD'}"


def lines_of(claims: Sequence[Claim]) -> list[str]:
    """Return one sentence about all of them, then each; nothing where nothing is claimed."""
    held = sum(claim.holds for claim in claims)
    proof = "" if held == len(claims) else ", so it is NOT proved"
    verdict = f"Verdict: {held} of {len(claims)} claims hold{proof}."
    return [verdict, *(f"  {claim.line}" for claim in claims)] if claims else []


def is_proof(points: Sequence[MeasuredPoint]) -> bool:
    """Tell whether the study claims all of it: plan_must_hold of every point that was to run."""
    ended = _ended(points)
    return bool(ended) and all(point.run.config.get(MUST_HOLD) == "true" for point in ended)


def _ended(points: Sequence[MeasuredPoint]) -> list[MeasuredPoint]:
    return [point for point in points if point.run.status not in ("skipped", *UNFINISHED)]


def claims_of(points: Sequence[MeasuredPoint]) -> list[Claim]:
    """Return what a study claims: of its losses what it names, and with plan_must_hold the rest too."""
    done, ended = [point for point in points if point.summary], _ended(points)
    if not is_proof(points):
        return _of_losses(done)
    text = f"{len(done)} of {len(ended)} points came to their end"
    results = {point.name: _results_beside_plan(point) for point in done}
    # Means over steps: a repeat that was resumed may have another share of outer steps (exact_numbers.py).
    means = {
        name: [each for each in runs if each.num_steps == runs[0].num_steps]
        for name, runs in results.items()
    }
    counted = [
        _of_all(
            *("bytes sent", means, partial(_byte_error, sent=True), "bytes", "to the byte"),
            is_claimed=_counts,
        ),
        _of_all("operations", means, _calls_error, "calls", "to the call", is_claimed=_counts),
    ]
    return [
        Claim(text, len(done) == len(ended)),
        *_of_losses(done),
        _of_all("bytes held", results, partial(_byte_error, sent=False), "bytes", "to the byte"),
        *(counted if not done or any(_counts(first) for first, *_ in results.values()) else []),
        _of_all(
            "peaks", results, _peak_error, "bytes", "within 1 MiB or 0.1 % of a rehearsal", _near
        ),
    ]


def _of_losses(done: Sequence[MeasuredPoint]) -> list[Claim]:
    claims, losses, same = list[Claim](), losses_of(done), of_one_seed(done)
    unread = ", ".join(point.name for point in same if not point.losses)
    lacks = f"; no losses can be read of {unread}" if unread else ""
    if not losses and unread and asks_of_losses(done):
        return [Claim(f"loss curves{lacks}", False)]
    if losses and losses.agreement and losses.compared:
        runs = ((point.name, point.pooled.summary) for point in done)
        diverged = [
            f"{name} {summary.verdict}" for name, summary in runs if summary and summary.verdict
        ]
        more = f"; {', '.join(diverged)}" if diverged else ""
        if apart := {point.name for point in done} - {point.name for point in same}:
            more += f"; of another seed, and not compared: {', '.join(sorted(apart))}"
        holds = not losses.off and not unread and not diverged
        claims.append(Claim(losses.agreement + more + lacks, holds))
    if losses and losses.fall:
        falls = all(curve.falls for curve in losses.curves) and not unread
        claims.append(Claim(losses.fall + lacks, falls))
    return claims


# What was measured less what was planned; None: one of them is unknown.
Error = Callable[[RunSummary], float | None]


def _of_all(
    what: str,
    results: Mapping[str, Sequence[RunSummary]],
    error_of: Error,
    unit: str,
    within: str,
    allowed: Callable[[RunSummary], float] = lambda _: 0.0,
    is_claimed: Callable[[RunSummary], bool] = lambda _: True,
) -> Claim:
    """Return what holds of all points, and which are wrong; where a plan or measure of one lacks it, it is not proved.

    results: of each point's repeats, by its name. is_claimed: whether that is said of a point of which it is unknown.
    """
    errors = {
        name: [(error, allowed(s)) for s in runs if (error := error_of(s)) is not None]
        for name, runs in results.items()
    }
    # Of repeats, the one that is furthest from what was planned.
    known = {name: max(each, key=lambda one: abs(one[0])) for name, each in errors.items() if each}
    unknown = [n for n, (first, *_) in results.items() if n not in known and is_claimed(first)]
    # A mean over steps may be off by a part of one.
    off = [
        (name, f"{error:+,.{0 if abs(error) >= 1 else 2}f}")
        for name, (error, most) in known.items()
        if abs(error) > most
    ]
    wrong = [f"{name} {error} {unit}" for name, error in off]
    worst = max((abs(error) for error, _ in known.values()), default=0)
    named = f" ({', '.join(wrong)})" if wrong else f" (worst {worst:,.0f} {unit})" if worst else ""
    held = f"{len(known) - len(wrong)} of {len(known) + len(unknown)} points as planned"
    text = held if known else "no point has something planned to compare with"
    lacks = f"; nothing to compare: {', '.join(unknown)}" if known and unknown else ""
    holds = bool(known) and not wrong and not unknown
    return Claim(f"{what}: {text}, {within}{named}{lacks}", holds)


def _results_beside_plan(point: MeasuredPoint) -> list[RunSummary]:
    """Return the results of all repeats; one without a plan or rehearsal, as Ctrl-C leaves it, has another one's."""
    done = [run.summary for run in point.finished_runs if run.summary]
    plan = next((each.plan for each in done if each.plan), {})
    rehearsed = next((each.rehearsed for each in done if each.rehearsed), {})
    return [replace(s, plan=s.plan or plan, rehearsed=s.rehearsed or rehearsed) for s in done]


def _counts(summary: RunSummary) -> bool:
    """Tell whether the engine counts what it sends, by its plan; engines of others do not."""
    return "sent" in summary.plan or not summary.plan


def _byte_error(summary: RunSummary, *, sent: bool) -> float | None:
    errors = (
        error
        for name, error in summary.plan_errors.items()
        if (name in SENT) == sent and name != OF_AN_INTERFACE
    )
    return max(errors, key=abs, default=None)


def _calls_error(summary: RunSummary) -> float | None:
    planned = summary.rehearsed.get("calls")
    calls = sum(number for kind, number in summary.calls_by_kind.items() if kind != "loss")
    # Sums of parts of one, in two orders.
    return None if planned is None else round(calls - planned, 6)


def _peak_error(summary: RunSummary) -> float | None:
    planned, peak = summary.rehearsed.get("peak"), summary.memory.peak
    return None if planned is None or peak is None else peak.fullest - planned


def _near(summary: RunSummary) -> float:
    return max(PEAK_BYTES, PEAK_SHARE * summary.rehearsed["peak"])
