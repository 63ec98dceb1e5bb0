"""`--fit`: the fewest ranks at which every strategy of the line fits cluster.device_memory_gib.

Model states and what exists for a moment count, activations do not. So a number of ranks that is too small is certainly
too small; what is left at the number found is what activations may take.
"""

from __future__ import annotations

from textwrap import wrap

from zeroexp.config import ConfigError
from zeroexp.plan.points import Planned, Plans
from zeroexp.plan.remedy import MOST_RANKS, planned, smallest_world, with_world

GIB, WIDTH = 2**30, 80
HEAD = (
    "The fewest ranks, among powers of two, at which model states and what exists for a moment fit "
    "{limit:g} GiB. Activations are not counted: they must fit what is left, in GiB."
)


def fit(plans: Plans) -> str:
    """Return a line for each strategy and layout. Raises ConfigError without a limit."""
    asked: dict[tuple[str, ...], Planned] = {}
    for each in plans.planned:
        if each.outcome is not None:
            outcome = each.outcome
            asked.setdefault((outcome.model, outcome.strategy, outcome.implementation), each)
    limits = {each.point.config.cluster.device_memory_gib for each in asked.values()}
    if None in limits:
        remedy = "set it to the memory of one device"
        raise ConfigError(f"cluster.device_memory_gib=null: --fit needs a limit; {remedy}")
    lines = [line for limit in limits if limit for line in wrap(HEAD.format(limit=limit), WIDTH)]
    lines += ["", f"{'model':16}{'strategy':17}{'layout':11}{'ranks':>6}{'peak':>10}{'left':>10}"]
    for (model, strategy, layout), each in asked.items():
        lines.append(f"{model:16.15}{strategy:17}{layout:11}{_answer(plans, each)}")
    return "\n".join(lines)


def _answer(plans: Plans, each: Planned) -> str:
    config, model = each.point.config, plans.model_of(each)
    limit = config.cluster.device_memory_gib or 0.0
    size = smallest_world(config, model, each.device)
    if size is None:
        return f"  not up to {MOST_RANKS}"
    outcome = planned(with_world(config, size), model, each.device)
    assert outcome is not None
    peak = outcome.peak.fullest / GIB
    return f"{size:>6}{peak:>10.2f}{limit - peak:>10.2f}"
