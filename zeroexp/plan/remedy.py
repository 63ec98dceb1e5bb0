"""A remedy makes a point fit: a later stage, or more ranks. Each remedy is planned before it is given."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

from zeroexp.check import check
from zeroexp.config import Config, ConfigError, resolve
from zeroexp.models.build import BuiltModel
from zeroexp.plan.form_of_config import ClosedForm, form_of
from zeroexp.plan.machines import Machines, machines_of
from zeroexp.plan.outcome import Outcome, outcome_of
from zeroexp.sharding.placement import STAGES

LATER = ("zero1", "zero2", "zero3")
MOST_RANKS, MOST_CPU_RANKS = 4096, 64


def remedies(config: Config, model: BuiltModel, device: str) -> list[str]:
    """Return the words after which the point fits: the earliest stage, and the fewest ranks (doubled each time)."""
    found: list[str] = []
    stage = next((s for s in _later(config) if _fits(with_stage(config, s), model, device)), None)
    if stage is not None:
        found.append(f"strategy={stage}")
    for name in dict.fromkeys((config.strategy.name, "zero3")):
        size = smallest_world(with_stage(config, name), model, device, above=config.world_size)
        if size is not None:
            words = f"world_size={size}"
            found.append(words if name == config.strategy.name else f"strategy={name} {words}")
            break
    return found


def most_ranks(device: str) -> int:
    """Return the largest world size that is tried: CPU ranks share a host, where each pair of ranks counts apart."""
    return MOST_RANKS if device == "cuda" else MOST_CPU_RANKS


def smallest_world(config: Config, model: BuiltModel, device: str, *, above: int = 0) -> int | None:
    """Return the least power of two, or double of `above`, at which the point fits; None up to `most_ranks`."""
    size = 2 * above or 1
    while size <= most_ranks(device):
        if _fits(with_world(config, size), model, device):
            return size
        size *= 2
    return None


def plan_point(config: Config, model: BuiltModel, device: str) -> Outcome | None:
    """Plan a changed point; None if it is not defined."""
    found = plan_point_with_form(config, model, device)
    return None if found is None else found[2]


def plan_point_with_form(
    config: Config, model: BuiltModel, device: str
) -> tuple[Machines, ClosedForm, Outcome] | None:
    try:
        check(config, on_paper=True)
    except ConfigError:
        return None
    machines = machines_of(config, device)
    form = form_of(config, model, machines.transport)
    return machines, form, outcome_of("", config, form, machines)


def with_stage(config: Config, stage: str) -> Config:
    """Return the config under another stage, with that stage's defaults."""
    config = deepcopy(config)
    strategy, row = config.strategy, STAGES[stage]
    if stage != strategy.name:
        strategy.name = stage
        strategy.parameters.placement = row.parameters.value
        strategy.gradients.placement = row.gradients.value
        strategy.optimizer.placement = row.optimizer.value
        strategy.keep = strategy.owners = strategy.prefetch = strategy.reduce_each = None
        strategy.gradient_as_bucket_view = None
    return resolve(config)


def with_world(config: Config, world_size: int) -> Config:
    """Return the config at another world size, with at least one microbatch for each rank."""
    config = deepcopy(config)
    config.world_size = world_size
    step = config.data.micro_batch_size * world_size
    config.data.global_batch_size = max(1, config.data.global_batch_size // step) * step
    return config


def _later(config: Config) -> Iterator[str]:
    now = config.strategy.name
    start = LATER.index(now) + 1 if now in LATER else 0
    yield from LATER[start:]


def _fits(config: Config, model: BuiltModel, device: str) -> bool:
    outcome = plan_point(config, model, device)
    return outcome is not None and outcome.fits is True
