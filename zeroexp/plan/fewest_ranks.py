"""`--fit`: the fewest ranks at which every strategy of the line fits, and the largest micro-batch and sequence there;
and of the points of the line those that no other beats in memory and time (frontier.py).

Each answer is rehearsed (peak.py), so that activations, logits and temporaries count. The closed forms tell where to
begin: a number of ranks at which model states do not fit is not rehearsed. What can not be rehearsed is answered for
model states alone, and the line says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from textwrap import wrap

from zeroexp.config.keys import Config, ConfigError
from zeroexp.models.module import BuiltModel
from zeroexp.plan.frontier import dots_of, frontier
from zeroexp.plan.outcome import Outcome, RehearsedPeaks, plan_point
from zeroexp.plan.peak import rehearse_fullest_rank
from zeroexp.plan.plan_points import Planned, Plans
from zeroexp.plan.plan_table import Column, amount, lines_of, point_columns, settings_of, unit_of
from zeroexp.plan.remedy import most_ranks, smallest_world, with_world

GIB, WIDTH = 2**30, 80
MOST_SAMPLES, TOKENS = 1 << 16, 64  # the largest micro-batch that is tried; the step of sequences
MOST_TOKENS = 1 << 20  # of a model that names no longest sequence
HEAD = (
    "The fewest {device} ranks, among powers of two, at which a step fits {limit:g} GiB, and there the largest "
    "micro-batch (one in a step) and the longest sequence, each alone. Rehearsed: peak and left are {unit} of the "
    "fullest rank, with activations."
)
FRONTIER = (
    "The frontier: points of this line, at their own ranks and batch, that no other of the same model, ranks, batch "
    "and sequence beats in both peak ({unit}) and time. {beaten} more are beaten. Predicted; seconds are {speed}."
)


def fit(plans: Plans) -> str:
    """Return a line for each strategy, layout and settings, and the frontier. Raises ConfigError without a limit."""
    asked: dict[tuple[str, ...], Planned] = {}
    for each in plans.planned:
        if each.outcome is not None:
            outcome = each.outcome
            names = (outcome.model, outcome.strategy, outcome.implementation)
            asked.setdefault((*names, settings_of(outcome)), each)
    limits = dict.fromkeys(each.outcome.memory_gib for each in asked.values() if each.outcome)
    if None in limits:
        remedy = "set it to the memory of one device"
        raise ConfigError(f"cluster.device_memory_gib=null: --fit needs a limit; {remedy}")
    unit, size = unit_of([GIB * (limit or 0.0) for limit in limits])
    devices = " or ".join(dict.fromkeys(each.device for each in asked.values()))
    heads = (HEAD.format(device=devices, limit=limit, unit=unit) for limit in limits if limit)
    lines = [line for head in heads for line in wrap(head, WIDTH)]
    names = f"{'model':14}{'strategy':16}{'layout':10}"
    lines += ["", f"{names}{'ranks':>6}{'peak':>8}{'left':>8}{'batch':>7}{'seq_len':>9}"]
    notes: dict[str, None] = {}
    for (model, strategy, layout, settings), each in asked.items():
        print(f"{strategy} {layout}: rehearsing", file=sys.stderr, flush=True)
        told, note = _answer(plans, each, size)
        lines.append(f"{model:14.13}{strategy:16}{layout:10}{told}")
        lines += wrap(settings, WIDTH, initial_indent="  ", subsequent_indent="  ")
        if note:
            notes[note] = None
    for each in plans.planned:
        if each.outcome is None:
            notes[f"skipped {each.point.name}: {each.point.refusal}"] = None
    lines += [line for note in notes for line in ("", *wrap(note, WIDTH))]
    return "\n".join([*lines, "", *_frontier(plans.planned)])


def _frontier(planned: Sequence[Planned]) -> list[str]:
    """Return the table of the points that no other beats in memory and time."""
    dots, reasons = dots_of(planned)
    best = [dot.outcome for dot in frontier(dots)]
    speeds = "; ".join(dict.fromkeys(dot.rehearsed.speed for dot in dots))
    unit, size = unit_of([dot.peak_bytes for dot in dots])
    told = FRONTIER.format(unit=unit, beaten=len(dots) - len(best), speed=speeds)
    columns = [
        *point_columns(planned)[0],
        Column("peak", lambda o: amount(_rehearsal(o).fullest.num_bytes, size)),
        Column("step ms", lambda o: f"{1e3 * _rehearsal(o).step_seconds[1]:,.1f}"),
    ]
    lines = [*wrap(told, WIDTH), "", *lines_of(columns, best)] if best else []
    return [
        *lines,
        *[line for reason in reasons for line in wrap(f"not rehearsed: {reason}.", WIDTH)],
    ]


def _rehearsal(outcome: Outcome) -> RehearsedPeaks:
    assert outcome.rehearsed is not None
    return outcome.rehearsed


def _answer(plans: Plans, each: Planned, unit: int) -> tuple[str, str]:
    """Return the cells of one line, in `unit` bytes, and a sentence where they need one."""
    config, model = each.point.config, plans.model_of(each)
    assert each.outcome is not None
    limit = int((each.outcome.memory_gib or 0.0) * GIB)
    none = f"  not up to {most_ranks(each.device)}"
    size = smallest_world(config, model, each.device)
    try:
        while size is not None and size <= most_ranks(each.device):
            at = with_world(config, size)
            peak = _peak(at, model, each.device)
            if peak <= limit:
                cells = _cells(size, peak, limit, unit)
                return cells + _largest_cells(at, model, each.device, limit), ""
            size *= 2
    except ConfigError as refusal:
        note = f"Model states alone: {refusal}."
        if size is None:
            return none, note
        outcome = plan_point(with_world(config, size), model, each.device).outcome
        return _cells(size, outcome.total.fullest, limit, unit), note
    return none, ""


def _largest_cells(config: Config, model: BuiltModel, device: str, limit: int) -> str:
    def with_batch(samples: int) -> int:
        data = replace(config.data, micro_batch_size=samples)
        data.global_batch_size = samples * config.world_size
        return _peak(replace(config, data=data), model, device)

    def with_length(tokens: int) -> int:
        data = replace(config.data, seq_len=tokens)
        return _peak(replace(config, data=data), model, device)

    samples = largest(with_batch, limit, step=1, most=MOST_SAMPLES)
    tokens = largest(
        with_length, limit, step=min(TOKENS, config.data.seq_len), most=_longest(model)
    )
    return f"{samples or '-':>7}{tokens or '-':>9}"


def _cells(size: int, peak: float, limit: int, unit: int) -> str:
    cells = (amount(num_bytes, unit).replace(",", "") for num_bytes in (peak, limit - peak))
    return f"{size:>6}" + "".join(f"{cell:>8}" for cell in cells)


def largest(peak: Callable[[int], int], limit: int, *, step: int, most: int) -> int | None:
    """Return the largest multiple of `step`, or `most`, whose peak is within the limit; None if not even one step is.

    The next multiple has been seen to exceed the limit. Peaks are nearly on a line, so the line through two known ones
    tells where to look; where that does not halve what is left, the middle does.
    """
    known: dict[int, int] = {}  # steps -> peak
    fits, exceeds = 0, -(-most // step) + 1
    guess = 1
    while fits < guess < exceeds:
        left = exceeds - fits
        known[guess] = peak(min(guess * step, most))
        if known[guess] <= limit:
            fits = guess
        else:
            exceeds = guess
        if not fits:
            return None
        is_slow = exceeds in known and 2 * (exceeds - fits) > left
        guess = (fits + exceeds) // 2 if is_slow else _next(known, fits, exceeds, limit)
    return min(fits * step, most)


def _next(known: dict[int, int], fits: int, exceeds: int, limit: int) -> int:
    """Return where the line through `fits` and another known number meets the limit; `fits` if nothing is left."""
    smaller = max((steps for steps in known if steps < fits), default=None)
    undershot = list(known)[-1] == fits
    other = exceeds if exceeds in known and (undershot or smaller is None) else smaller
    if other is None:
        return min(2 * fits, exceeds - 1)
    rise = (known[other] - known[fits]) / (other - fits)
    further = int((limit - known[fits]) / rise) if rise > 0 else 16 * fits
    if exceeds not in known:
        further = max(further, fits)
    return max(fits, min(fits + max(further, 1), exceeds - 1))


def _longest(model: BuiltModel) -> int:
    shape = getattr(model.module, "config", None)
    return int(getattr(shape, "max_position_embeddings", None) or MOST_TOKENS)


def _peak(config: Config, model: BuiltModel, device: str) -> int:
    return rehearse_fullest_rank(*plan_point(config, model, device)).most_bytes
