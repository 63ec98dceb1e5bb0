"""Closed forms of torch's engines: DistributedDataParallel, ZeroRedundancyOptimizer and FSDP2.

    ddp          DDP: everything replicated; its C++ buckets hold one more copy of the gradients
    zero1        DDP and ZeroRedundancyOptimizer: whole tensors' optimizer state on the least loaded rank
    zero2, zero3 FSDP2: each parameter is cut along dim 0 in ceil(rows / N) rows, padded; zero2 leaves it gathered

Traffic is what the algorithm needs, as NCCL's rings send it, without the few bytes of norms and buffers. gloo sends
more: its reduce-scatter is an all-reduce inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from math import prod
from typing import NamedTuple, TypeVar

from torch import nn

from zeroexp.config.keys import TORCH_DDP, Config
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.cut.rank_grid import RankGrid
from zeroexp.measure.record import Traffic
from zeroexp.models.module import BuiltModel
from zeroexp.plan.form_of_config import arguments_of_every_form
from zeroexp.plan.form_terms import ClosedForm, HeldElements
from zeroexp.plan.module_uses import Use, uses_in_forward
from zeroexp.zero.grouping import group_parameters, named_in, outer_names, with_shared_in_root

Dealt = TypeVar("Dealt")


class ParameterShape(NamedTuple):
    shape: tuple[int, ...]
    trainable: bool = True
    kind: str = ""  # of the optimizer's group

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def shard_numel(self, num_ranks: int) -> int:
        """Return the elements of one rank's rows, padding included."""
        return -(-(self.shape or (1,))[0] // num_ranks) * prod(self.shape[1:])

    def real_numel(self, rank: int, num_ranks: int) -> int:
        """Return the real elements of `rank`; by torch.chunk's rule the last ranks may have fewer, or none."""
        shard = self.shard_numel(num_ranks)
        return max(0, min(self.numel, (rank + 1) * shard) - rank * shard)


def deal_out(
    groups: Sequence[Sequence[Dealt]], size: Callable[[Dealt], int], num_ranks: int
) -> list[list[list[Dealt]]]:
    """Return, by rank and group, the parameters that a rank updates, as ZeroRedundancyOptimizer deals them out.

    Each parameter of a group, the largest first, goes to the rank that updates least so far.
    """
    load = [0] * num_ranks
    dealt: list[list[list[Dealt]]] = [[[] for _ in groups] for _ in load]
    for number, group in enumerate(groups):
        for each in sorted(group, key=size, reverse=True):
            rank = load.index(min(load))
            dealt[rank][number].append(each)
            load[rank] += size(each)
    return dealt


@dataclass(frozen=True)
class DdpForm(ClosedForm):
    """DistributedDataParallel, with ZeroRedundancyOptimizer where `shards_optimizer`.

    groups: the optimizer's parameter groups, which ZeroRedundancyOptimizer deals out one after the other.
    """

    groups: Sequence[Sequence[ParameterShape]]
    frozen: Sequence[ParameterShape]
    shards_optimizer: bool = False
    gradient_as_bucket_view: bool = True

    def traffic(self, rank: int) -> Traffic:
        """Return the bytes `rank` sends in one step, by kind; how many calls it takes is DDP's own business."""
        if self.world_size == 1:
            return Traffic()
        peers = self.world_size - 1
        sent = {"reduce": 2 * self._whole_bytes * peers // self.world_size}
        if self.shards_optimizer:
            sent["publish"] = peers * self.parameter_itemsize * self.held_elements(rank).owned
        return Traffic(bytes_by_kind=sent)

    def held_elements(self, rank: int) -> HeldElements:
        """Return what `rank` holds: all parameters, and the optimizer state of those that it updates."""
        owned = self._owned[rank if self.shards_optimizer else 0]
        resting = self._num_trainable + sum(p.numel for p in self.frozen)
        return HeldElements(resting, 0, Counter((p.kind, p.numel) for p in owned))

    @cached_property
    def _owned(self) -> list[list[ParameterShape]]:
        num_dealt = self.world_size if self.shards_optimizer else 1
        dealt = deal_out(self.groups, lambda p: p.numel, num_dealt)
        return [[p for group in groups for p in group] for groups in dealt]

    def _gradient_bytes(self, moment: str, rank: int) -> int:
        return self._whole_bytes

    def _buffer_bytes(self, moment: str, rank: int) -> int:
        """Return the bytes of the C++ buckets, or 0 where the gradients that exist are views of them."""
        are_views = self.gradient_as_bucket_view and moment in ("after_backward", "after_step")
        return 0 if are_views else self._whole_bytes

    @property
    def _whole_bytes(self) -> int:
        return self.parameter_itemsize * self._num_trainable

    @cached_property
    def _num_trainable(self) -> int:
        return sum(p.numel for group in self.groups for p in group)


@dataclass(frozen=True)
class FsdpForm(ClosedForm):
    """FSDP2: `units` are the parameters of the root and of each block; the root stays gathered until its backward.

    gathers: of each unit in one microbatch, or without reshard in one step. is_reached: whether backward reaches it, so
    that its trainable parameters are reduced.
    """

    units: Sequence[Sequence[ParameterShape]]
    reshards: bool = True  # blocks are freed after forward: zero3
    gathers: Sequence[int] = ()
    is_reached: Sequence[bool] = ()
    replicas: int = 1
    at_rest = "master"  # the shards are the master weights, but for those of what is frozen

    @property
    def grid(self) -> RankGrid:
        return RankGrid(self.world_size, self.replicas)

    def traffic(self, rank: int) -> Traffic:
        if self.world_size == 1:
            return Traffic()
        times = self.accumulation if self.reshards else 1  # else only after weights have changed
        used = [(u, times * num) for u, num in zip(self.units, self.gathers, strict=True) if u]
        trained = [
            [p for p in unit if p.trainable] for unit in compress(self.units, self.is_reached)
        ]
        peers, reductions = self.group_size - 1, self.accumulation
        reduced = sum(map(self._shard, trained))
        sent = {
            "gather": peers * self._compute * sum(num * self._shard(unit) for unit, num in used),
            "reduce": peers * self._reduce * reductions * reduced,
        }
        calls = {
            "gather": sum(num for _, num in used),
            "reduce": reductions * sum(map(bool, trained)),
        }
        if self.replicas > 1:  # an all-reduce of what each reduction left
            others = self.replicas - 1
            numel = reductions * reduced
            sent["replicas"] = 2 * self._reduce * numel * others // self.replicas
            calls["replicas"] = calls["reduce"]
        return Traffic(bytes_by_kind=sent, calls_by_kind=calls)

    def held_elements(self, rank: int) -> HeldElements:
        """Return what `rank` holds: shards that are padded alike on all ranks, and moments of its real rows."""
        place = self.grid.place(rank)
        real, spans = 0, Counter[tuple[str, int]]()
        for parameter, num in self._different.items():
            numel = parameter.real_numel(place, self.group_size)
            real += num * numel
            if parameter.trainable:
                spans[parameter.kind, numel] += num
        resting = self._shard(self._all)
        return HeldElements(resting, resting - real, spans)

    def held_bytes(self, moment: str, rank: int) -> dict[str, int]:
        shards = (self._itemsize(p) * p.shard_numel(self.group_size) for p in self._all)
        return {**super().held_bytes(moment, rank), "parameters": sum(shards)}

    def padding_bytes(self, rank: int) -> int:
        place, size = self.grid.place(rank), self.group_size
        return sum(
            self._itemsize(p) * num * (p.shard_numel(size) - p.real_numel(place, size))
            for p, num in self._different.items()
        )

    def _itemsize(self, parameter: ParameterShape) -> int:
        return self._master if parameter.trainable else self._compute

    def _gradient_bytes(self, moment: str, rank: int) -> int:
        return self.parameter_itemsize * self._shard(p for p in self._all if p.trainable)

    def _buffer_bytes(self, moment: str, rank: int) -> int:
        """Return what is gathered between forward and backward: the root, and without reshard all blocks."""
        if moment != "after_forward":
            return 0
        gathered = self.units[0] if self.reshards else self._all
        return self.group_size * self._shard(gathered) * self._compute

    @cached_property
    def _all(self) -> list[ParameterShape]:
        return [p for unit in self.units for p in unit]

    @cached_property
    def _different(self) -> Counter[ParameterShape]:
        return Counter(self._all)

    def _shard(self, unit: Iterable[ParameterShape]) -> int:
        """Return the elements of one rank's shard, padding included."""
        return sum(p.shard_numel(self.group_size) for p in unit)


def form_of_torch(config: Config, model: BuiltModel) -> DdpForm | FsdpForm:
    return (_ddp_form if config.strategy.name in TORCH_DDP else _fsdp_form)(config, model)


def _ddp_form(config: Config, model: BuiltModel) -> DdpForm:
    groups = parameter_groups(model.module, config.optimizer, model.blocks)
    frozen = [p for p in model.module.parameters() if not p.requires_grad]
    kinds = named_in(groups, "kind")
    return DdpForm(
        groups=[_shapes(group["params"], kinds) for group in groups],
        frozen=_shapes(frozen, kinds),
        shards_optimizer=config.strategy.name == "zero1",
        gradient_as_bucket_view=bool(config.strategy.gradient_as_bucket_view),
        **arguments_of_every_form(config),
    )


def _fsdp_form(config: Config, model: BuiltModel) -> FsdpForm:
    of_optimizer = parameter_groups(model.module, config.optimizer, model.blocks)
    unit = config.strategy.unit or "block"
    groups = with_shared_in_root(group_parameters(model.module, model.blocks, unit, of_optimizer))
    reshards = config.strategy.name == "zero3"
    uses = uses_in_forward(config, model, groups)
    gathers = fsdp_gathers(uses, [group.name for group in groups if group.parameters], reshards)
    names = (use.name for use in uses if use.has_backward)
    reached = {each for name in names for each in ("", *outer_names(name), name)}
    return FsdpForm(
        units=[_shapes(group.parameters.values(), group.kinds) for group in groups],
        reshards=reshards,
        gathers=[gathers[group.name] for group in groups],
        is_reached=[group.name in reached for group in groups],
        replicas=config.grid.num_groups,
        **arguments_of_every_form(config),
    )


def fsdp_gathers(uses: Iterable[Use], units: Collection[str], reshards: bool) -> Counter[str]:
    """Return how often FSDP2 gathers each of these units, which have parameters, in forward and backward.

    Backward gathers ahead the unit that was used before, and frees one after each of its uses. The root stays.
    """
    uses = [use for use in uses if use.name in units]
    num, there = Counter[str](), set[str]()

    def gather(name: str) -> None:
        num[name] += name not in there
        there.add(name)

    positions: dict[str, list[int]] = {name: [] for name in units}
    for position, use in enumerate(uses):
        gather(use.name)
        positions[use.name].append(position)
        if reshards and use.name:
            there.remove(use.name)
    for use in reversed(uses):
        if use.has_backward:
            gather(name := use.name)
            if position := positions[name].pop():
                gather(uses[position - 1].name)
            there.discard(name)
    return num


def _shapes(
    parameters: Iterable[nn.Parameter], kinds: Mapping[nn.Parameter, str]
) -> list[ParameterShape]:
    return [ParameterShape(tuple(p.shape), p.requires_grad, kinds.get(p, "")) for p in parameters]
