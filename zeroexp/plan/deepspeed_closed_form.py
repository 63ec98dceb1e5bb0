"""Closed form of DeepSpeed's ZeRO-1, ZeRO-2 and ZeRO-3: their flat tensors, buckets and rooms for gradients.

    zero1, zero2   each parameter group is one flat tensor, padded to a multiple of 2N; of its part a rank has a copy in
                   the master's dtype, which is the optimizer's one parameter: padding has moments too
    zero3          each parameter is cut in N equal parts; the parts of a group's parameters are one flat tensor

Traffic is what the algorithm needs, as NCCL's rings send it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from torch import nn

from zeroexp.config.deepspeed_settings import SETTINGS, bucket_numel
from zeroexp.config.keys import Config, UndefinedCombination
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.measure.record import Traffic
from zeroexp.models.checkpointing import recomputed_blocks
from zeroexp.models.module import BuiltModel
from zeroexp.plan.form_of_config import arguments_of_every_form
from zeroexp.plan.form_terms import ClosedForm, HeldElements


@dataclass(frozen=True)
class DeepSpeedForm(ClosedForm):
    """Sizes are numbers of elements: `groups` those of each group's parameters, in order, and `frozen` of the others.

    gathers: how often a microbatch of zero3 gathers each of all these. overlaps: two buckets for one.
    """

    stage: int
    groups: Sequence[Sequence[int]]
    frozen: Sequence[int]
    gathers: Sequence[int]
    bucket: int
    overlaps: bool
    copies_weights = True

    def traffic(self, rank: int) -> Traffic:
        peers = self.world_size - 1
        if not peers:
            return Traffic()
        if self.stage == 3:
            parts = [
                self._part(size) * times
                for size, times in zip(self._sizes, self.gathers, strict=True)
            ]
            sent = {"gather": self._compute * sum(parts), "reduce": self._reduce * self._owned}
            return Traffic({kind: peers * self.accumulation * each for kind, each in sent.items()})
        numel = sum(self._flat) if self._keeps_all else self._num_trained
        times = self.accumulation if self.stage == 2 else 1
        reduced = 2 * times * self._reduce * numel * peers // self.world_size
        return Traffic({"reduce": reduced, "publish": peers * self._compute * self._owned})

    def held_elements(self, rank: int) -> HeldElements:
        """Return what `rank` holds; padding is counted of all ranks alike."""
        if self.stage == 3:
            resting = sum(map(self._part, self._sizes))
            padding = resting - sum(self._sizes) // self.world_size
        else:
            resting = sum(self._flat) + sum(self.frozen)
            padding = sum(self._flat) - self._num_trained
        return HeldElements(resting, padding, Counter(("", numel) for numel in self._owned_groups))

    def equivalence_key(self, rank: int) -> Hashable:
        return self._overlapping(rank) if self.stage < 3 else None

    def _gradient_bytes(self, moment: str, rank: int) -> int:
        if self._keeps_all:
            return self._compute * self._num_trained + self._reduce * sum(self._flat)
        if self.stage == 3 or self._compute != self._reduce:
            return self._reduce * self._owned
        if self.stage == 1 and moment == "after_forward":
            return self._compute * self._num_trained
        whole, padding = self._overlapping(rank)
        return self._compute * (whole + (padding if moment == "after_backward" else 0))

    def _buffer_bytes(self, moment: str, rank: int) -> int:
        """Return the bytes of buckets, and of rooms for gradients in which there are none."""
        room = self.stage == 3 or self._keeps_all
        numel = self._owned if self.stage == 3 else sum(self._flat)
        empty = self._reduce * numel if room and not self._has_gradients(moment) else 0
        if self.stage == 3:
            return empty + self._reduce * self.bucket
        # zero1 makes its buckets in every backward and drops them when the last one has reduced.
        waits = self.stage == 1 and moment == "after_forward" and self.accumulation > 1 and not room
        return empty + (1 + self.overlaps) * self.bucket * self._compute * waits

    def _has_gradients(self, moment: str) -> bool:
        return moment != "after_step" and super()._has_gradients(moment)

    def _overlapping(self, rank: int) -> tuple[int, int]:
        """Return the elements of all parameters that lie, if in part, in the rank's part; and its padding."""
        whole = padding = 0
        for group, flat in zip(self.groups, self._flat, strict=True):
            first, last = (flat // self.world_size * r for r in (rank, rank + 1))
            ends = list(accumulate(group))
            whole += sum(
                n for n, end in zip(group, ends, strict=True) if end - n < last and end > first
            )
            padding += last - max(first, min(last, ends[-1]))
        return whole, padding

    @property
    def _keeps_all(self) -> bool:
        """Whether DeepSpeed's BF16_Optimizer trains, which keeps all gradients in the dtype of reductions."""
        return self.stage == 1 and self._compute != self._reduce

    @property
    def _owned(self) -> int:
        """The elements that each rank's optimizer updates, padding included."""
        return sum(self._owned_groups)

    @property
    def _owned_groups(self) -> list[int]:
        if self.stage == 3:
            return [sum(map(self._part, group)) for group in self.groups]
        return [flat // self.world_size for flat in self._flat]

    @property
    def _flat(self) -> list[int]:
        unit = 2 * self.world_size
        return [-(-sum(group) // unit) * unit for group in self.groups]

    @property
    def _sizes(self) -> list[int]:
        return [*(size for group in self.groups for size in group), *self.frozen]

    @property
    def _num_trained(self) -> int:
        return sum(map(sum, self.groups))

    def _part(self, size: int) -> int:
        return -(-size // self.world_size)


def form_of_deepspeed(config: Config, model: BuiltModel) -> DeepSpeedForm:
    """Return the form of a point. Raises UndefinedCombination for settings that keep parameters gathered."""
    settings = {**SETTINGS, **config.strategy.settings}
    for key in (key for key in SETTINGS if key.startswith("stage3") and settings[key]):
        where = f"strategy.settings.{key}={settings[key]}"
        problem = "DeepSpeed decides as it goes what stays gathered, so that no plan can tell"
        raise UndefinedCombination(f"{where}: {problem}; run it instead")
    groups = [
        list(group["params"])
        for group in parameter_groups(model.module, config.optimizer, model.blocks)
    ]
    frozen = [p for p in model.module.parameters() if not p.requires_grad]
    sizes = [[p.numel() for p in group] for group in groups]
    return DeepSpeedForm(
        stage=int(config.strategy.name.removeprefix("zero")),
        groups=sizes,
        frozen=[p.numel() for p in frozen],
        gathers=_gathers(config, model, [p for group in (*groups, frozen) for p in group]),
        bucket=bucket_numel(settings, sum(map(sum, sizes))),
        overlaps=settings["overlap_comm"],
        **arguments_of_every_form(config),
    )


def _gathers(config: Config, model: BuiltModel, asked: Iterable[nn.Parameter]) -> list[int]:
    """Return how often a microbatch gathers each: for every module that holds it, in forward and in backward.

    A recomputed block gathers once more. What is listed before the first trained parameter has no backward.
    """
    modules, listed = model.module.modules(), model.module.parameters()
    holders = Counter(p for module in modules for p in module.parameters(recurse=False))
    forward_alone = {*takewhile(lambda p: not p.requires_grad, listed)}
    recomputed = recomputed_blocks(model.blocks, config.train)
    again = {p for name in recomputed for p in model.module.get_submodule(name).parameters()}
    return [holders[p] if p in forward_alone else 2 * holders[p] + (p in again) for p in asked]
