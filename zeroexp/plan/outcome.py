"""One planned point: the bytes of every rank by kind, its traffic by kind and by link, and its rehearsed peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from zeroexp.check.refusal import require
from zeroexp.check.rules_machine import check_nodes
from zeroexp.config.engines import label_of
from zeroexp.config.gpus import GPUS
from zeroexp.config.keys import Config, UndefinedCombination
from zeroexp.measure.record import FILES, HOST, MOMENTS, Spread, kinds_in, on_device
from zeroexp.measure.summary import spread
from zeroexp.models.module import BuiltModel
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.form_terms import ClosedForm
from zeroexp.plan.machines import Machines, machines_of
from zeroexp.plan.sent_bytes import EngineForm

OF_RUNTIME_GIB = 1.0  # of CUDA's context and NCCL's buffers


@dataclass(frozen=True)
class RankPeak:
    """The peak of one rehearsed rank, with activations, logits and temporaries."""

    rank: int
    phase: str
    num_bytes: int
    by_kind: dict[str, int]  # largest first
    by_phase: dict[str, int]
    largest: list[tuple[int, str, str]]  # bytes, kind, and the operation that made it
    reserved_bytes: int | None = None  # of a GPU, by torch's caching allocator; None: of a CPU
    num_retries: int = 0  # how often the allocator gives back what is free in a step, to have room

    @property
    def needed_bytes(self) -> int:
        """What the device must have room for: what is reserved where that is known."""
        return self.num_bytes if self.reserved_bytes is None else self.reserved_bytes


@dataclass(frozen=True)
class RehearsedPeaks:
    """Peaks that a rehearsal (peak.py) adds to a planned point."""

    ranks: list[RankPeak]
    device: str  # whose kernels were rehearsed
    step_seconds: tuple[float, float, float]  # least, expected, most; estimated
    compute_seconds: float  # the part of the expected seconds in which the rank computes
    speed: str  # whose speed: calibrated, or a prior
    allocator: str  # the setting under which a GPU's memory is reserved; empty on a CPU

    @property
    def fullest(self) -> RankPeak:
        return max(self.ranks, key=lambda rank: rank.needed_bytes)


@dataclass(frozen=True)
class Outcome:
    """One planned point. Bytes are those of one rank; a Spread has all ranks.

    Closed forms tell what rests and what is sent. The peak and the seconds are a rehearsal's.
    """

    name: str
    strategy: str
    implementation: str
    model: str
    world_size: int
    place: str
    by_kind: dict[str, Spread]  # the most at any named moment, as a run's summary counts it
    total: Spread  # the most of all kinds together at one moment
    owned: Spread  # elements that each rank's optimizer updates
    padding_bytes: Spread  # padding of parameters at rest
    sent: Spread  # bytes of one step
    sent_by_kind: dict[str, int]  # of the rank that sends most
    sent_inside: float  # the mean over ranks of what stays inside a node
    sent_between: float
    host: Spread | None = None  # states on the host, in no other figure; None: nothing rests there
    files: Spread | None = None  # those of the host that lie in files instead
    bus: Spread | None = None  # bytes of one step between device and host
    label: str | None = None  # what the engine is, where its name tells less
    memory_gib: float | None = None  # of a device, less cluster.reserved_gib
    unsure_gib: float = 0.0  # the part of it that a run may not find
    rehearsed: RehearsedPeaks | None = None  # where that was asked for
    not_rehearsed: str | None = None  # why it was not, where it was asked for

    @property
    def peak_bytes(self) -> int:
        """What a rank's device must have room for: rehearsed, else model states alone."""
        return self.rehearsed.fullest.needed_bytes if self.rehearsed else int(self.total.fullest)

    @property
    def limit_bytes(self) -> float:
        """Bytes of a rank's device; infinite where no limit is set."""
        return inf if self.memory_gib is None else int(self.memory_gib * 2**30)

    @property
    def sure_bytes(self) -> float:
        """What a run surely finds of the limit."""
        return self.limit_bytes - int(self.unsure_gib * 2**30)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit, or where nothing was rehearsed model states."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def has_room(self) -> bool:
        return self.peak_bytes <= self.sure_bytes

    @property
    def verdict(self) -> str | None:
        """yes: the rehearsed peak fits; no; None without a limit.

        tight: model states do, which alone are known, or the peak does once free memory is given back in each step, or
        if the data sheet's memory is all there.
        """
        if self.memory_gib is None:
            return None
        is_sure = self.rehearsed and self.has_room and not self.rehearsed.fullest.num_retries
        return ("yes" if is_sure else "tight") if self.fits else "no"

    @property
    def fullest_rank(self) -> int:
        return self.total.per_rank.index(self.total.fullest)

    @property
    def skew(self) -> float:
        """What the rank that owns most updates, over the mean."""
        return self.owned.fullest / self.owned.mean if self.owned.mean else 1.0

    @property
    def num_idle_ranks(self) -> int:
        return self.owned.per_rank.count(0)


class PlannedRank(NamedTuple):
    figures: dict[str, int]  # bytes by the names of Outcome, of each kind the most at any moment
    sent: dict[str, int]  # bytes of one step, by kind


class PlannedPoint(NamedTuple):
    """One point of a line, or a change of one, whose name are its words: planned, and rehearsed by peak.py."""

    config: Config
    model: BuiltModel  # on the device `meta`
    machines: Machines
    form: ClosedForm
    outcome: Outcome

    @property
    def micro(self) -> int:
        return self.config.data.micro_batch_size

    @property
    def recomputes(self) -> bool:
        return self.config.train.activation_checkpointing

    @property
    def seconds(self) -> float:
        """Expected seconds of a rehearsed step."""
        assert self.outcome.rehearsed is not None
        return self.outcome.rehearsed.step_seconds[1]


def plan_point(
    config: Config, model: BuiltModel | None, device: str, name: str = ""
) -> PlannedPoint:
    """Plan one point; `model` may be on the device `meta`, and is built there where it is None.

    Raises UndefinedCombination for an engine that brings no form, and for nodes that mean nothing.
    """
    require(config, [partial(check_nodes, device=device)], UndefinedCombination)
    machines, model = machines_of(config, device), model or build_on_meta(config)
    transports = machines.transports(config.grid)
    form = form_of(config, model, *transports)
    return PlannedPoint(config, model, machines, form, _outcome_of(name, config, form, machines))


def _outcome_of(name: str, config: Config, form: ClosedForm, machines: Machines) -> Outcome:
    ranks = planned_ranks(form)
    of = {name: spread([rank.figures[name] for rank in ranks]) for name in ranks[0].figures}
    some = {name: each for name, each in of.items() if each.fullest}
    inside = _sent_inside(config, machines, ranks)
    strategy = config.strategy
    return Outcome(
        name=name,
        strategy=strategy.name,
        implementation=strategy.implementation,
        model=config.model.name,
        world_size=form.world_size,
        place=str(machines),
        by_kind={kind: of[kind] for kind in kinds_in([ranks[0].figures])},
        total=of["total"],
        owned=of["owned"],
        padding_bytes=of["padding_bytes"],
        sent=of["sent"],
        sent_by_kind=max(ranks, key=lambda rank: rank.figures["sent"]).sent,
        sent_inside=inside,
        sent_between=of["sent"].mean - inside,
        host=some.get(HOST),
        files=some.get(FILES),
        bus=some.get("bus"),
        label=label_of(strategy.implementation, strategy.name, strategy.outer.every),
        memory_gib=_available_gib(config),
        unsure_gib=_unsure_gib(config),
    )


def _sent_inside(config: Config, machines: Machines, ranks: Sequence[PlannedRank]) -> float:
    """Return the bytes that stay inside of a rank's node, the mean over ranks."""
    inside_group, shares = machines.shares_inside(config)
    sent = (shares.get(kind, inside_group) * n for rank in ranks for kind, n in rank.sent.items())
    return sum(sent) / len(ranks)


def _available_gib(config: Config) -> float | None:
    cluster = config.cluster
    limit = cluster.device_memory_gib
    if limit is None and cluster.gpu is not None:
        limit = GPUS[cluster.gpu].memory_gib
    return None if limit is None else limit - (cluster.reserved_gib or 0.0)


def _unsure_gib(config: Config) -> float:
    """Return what of a data sheet's memory driver, context and NCCL may take, where nothing is set aside for them."""
    cluster = config.cluster
    if cluster.gpu is None or cluster.device_memory_gib or cluster.reserved_gib:
        return 0.0
    return GPUS[cluster.gpu].memory_gib * GPUS[cluster.gpu].unseen_share + OF_RUNTIME_GIB


def planned_ranks(form: ClosedForm) -> list[PlannedRank]:
    """Return what every rank holds and sends; ranks that are alike are computed once."""
    keys = [form.equivalence_key(rank) for rank in range(form.world_size)]
    of_keys = {key: rank for rank, key in enumerate(keys)}
    planned = {key: _planned_rank(form, rank) for key, rank in of_keys.items()}
    return [planned[key] for key in keys]


def _planned_rank(form: ClosedForm, rank: int) -> PlannedRank:
    held = [form.held_bytes(moment, rank) for moment in MOMENTS]
    totals, traffic = [int(on_device(kinds)) for kinds in held], form.traffic(rank)
    kinds = (*kinds_in(held), HOST, FILES)
    figures = {
        **{kind: max(each.get(kind, 0) for each in held) for kind in kinds},
        "total": max(totals),
        "after_backward": totals[MOMENTS.index("after_backward")],
        "owned": form.held_elements(rank).owned,
        "padding_bytes": form.padding_bytes(rank),
        "sent": sum(traffic.bytes_by_kind.values()),
        "bus": sum(traffic.bus_bytes.values()),
    }
    return PlannedRank(figures, traffic.bytes_by_kind)


def plan_beside(
    config: Config, settings: dict[str, Any], vocab_size: int | None
) -> dict[str, float]:
    """Return what closed forms say of a run that has just been measured, in bytes of its fullest rank.

    These are each kind, `total`, `after_backward`, and where the engine counts what it sends `sent`, and `link`: what a
    node sends over cluster.link.

    settings: what the engine settled, see Strategy.settings. vocab_size: the data's number of words.
    """
    transports = settings["transport"], settings.get("transport_between_replicas")
    form = form_of(config, build_on_meta(config, vocab_size), *transports)
    ranks = planned_ranks(form)
    most = {name: max(rank.figures[name] for rank in ranks) for name in ranks[0].figures}
    names = [*kinds_in([most]), "total", "after_backward"]
    if isinstance(form, EngineForm):
        names += ["sent", *(name for name in (HOST, "bus", FILES) if most[name])]
    planned = {name: float(most[name]) for name in names}
    if isinstance(form, EngineForm) and config.cluster.link is not None:
        machines = machines_of(config, "cpu")
        sent = fmean(rank.figures["sent"] for rank in ranks)
        between = sent - _sent_inside(config, machines, ranks)
        planned["link"] = between * machines.shape.ranks_per_node
    return planned
