"""Our engine behind the Strategy interface: every hand-written stage and implementation is this one class.

What differs between ZeRO-1, -2 and -3 is the `Stage` it is given; between parameter-, tensor- and buffer-level, the
family of its layout. The step below is the whole algorithm; each verb is told in `zeroexp/sharding/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.measure.record import Traffic
from zeroexp.sharding.collectives import Collectives
from zeroexp.sharding.hooks import attach
from zeroexp.sharding.housing import give_memory
from zeroexp.sharding.moves import Pending
from zeroexp.sharding.overlap import Schedule
from zeroexp.sharding.partition import group_parameters, make_units, rows_for
from zeroexp.sharding.placement import Placement, Stage
from zeroexp.sharding.tied import keep_rows_apart
from zeroexp.sharding.unit import Dtypes, Unit
from zeroexp.strategies.base import CanonicalState, ModelStates, OptimizerFactory
from zeroexp.strategies.sharded_state import canonical_state, load_canonical
from zeroexp.world import World

MIB = 1 << 20
BUCKET_BYTES_ON_ONE_HOST = 4 * MIB
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Options:
    """How the engine carries a stage out; none of it changes what is computed."""

    family: str = "buffer"  # parameter | tensor | buffer
    owners: str = "greedy"  # contiguous | greedy (family=parameter)
    unit: str = "block"  # model | block | module
    overlap: bool = True
    prefetch: int | None = None  # units gathered ahead; None: 1, or 0 where that gains nothing
    keep: str = "last"  # none | last | all: what stays gathered between forward and backward
    reduce_each: str = "step"  # microbatch | step
    bucket_mb: float | None = None  # MiB, the most one reduction takes; None: the transport's best
    transport: str = "auto"  # auto | direct | gloo | native


class Sharded:
    """`module` trained under one stage. The optimizer sees this rank's pieces only."""

    def __init__(
        self,
        module: nn.Module,
        *,
        blocks: Sequence[str],
        stage: Stage,
        param_groups: Sequence[dict[str, Any]],
        optimizer_factory: OptimizerFactory,
        world: World,
        dtypes: Dtypes | None = None,
        max_grad_norm: float | None = None,
        options: Options | None = None,
    ):
        options = options or Options()
        dtypes = dtypes or Dtypes(torch.float32, torch.float32, torch.float32)
        if stage.gradients is Placement.PARTIAL and options.reduce_each == "microbatch":
            raise ValueError(
                "reduce_each=microbatch: gradients that rest partial are reduced once, use step or zero2"
            )
        stage = rows_for(stage, world.size)
        self.model = module.to(world.device)
        self.label = f"{stage}, {options.family}-level"
        self._stage = stage
        self._max_grad_norm = max_grad_norm
        self._wire = Collectives(world, transport=options.transport)
        bucket_bytes = _bucket_bytes(options, one_host=self._wire.meet())
        groups = group_parameters(module, blocks, options.unit)
        self._units = make_units(
            groups,
            stage=stage,
            family=options.family,
            owners=options.owners,
            dtypes=dtypes,
            wire=self._wire,
            bucket_bytes=bucket_bytes,
        )
        prefetch = self._prefetch_depth(options)
        self._pools = give_memory(self._units, options.keep, 1 + prefetch, self._wire)
        self._schedule = Schedule(
            self._units,
            self._wire,
            overlap=options.overlap,
            prefetch=prefetch,
            keep=options.keep,
            reduce_each=options.reduce_each,
        )
        self._tied = keep_rows_apart(module)  # before the hooks that ask for the whole gradient
        for unit, group in zip(self._units, groups, strict=True):
            attach(unit, group.module, self._schedule)
        self.optimizer = optimizer_factory(_masters_in_groups(self._units, param_groups))

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        self._schedule.begin_microbatch(last=last)
        yield
        self._schedule.end_microbatch()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> Tensor:
        """Unit by unit in the order of the next forward: hand over, update, publish."""
        self._schedule.drain()
        gradients = {unit: unit.hand_over() for unit in self._units}
        self._wire.quiesce()
        squares, summed = self._sum_squares([g for pairs in gradients.values() for _, g in pairs])
        scale = None
        if self._max_grad_norm is not None:  # else the others' share may come while we update
            summed.wait()
            scale = self._clip_scale(_norm(squares), self._max_grad_norm)
        for unit, pairs in gradients.items():
            self._update(pairs, scale)
            self._schedule.publish(unit)
        summed.wait()
        return _norm(squares)

    def zero_grad(self) -> None:
        for unit in self._units:
            unit.zero_grad()
        for gradient in self._tied:
            gradient.clear()

    def drain(self) -> None:
        self._schedule.drain()

    def model_states(self) -> ModelStates:
        self.drain()
        states = ModelStates(
            buffers=[pool.memory for pool in self._pools],
            hidden_bytes=self._wire.staging_bytes,
            num_private_units=self._schedule.num_private,
        )
        for unit in self._units:
            for kind, tensors in unit.states().items():
                getattr(states, kind).extend(tensors)
        for state in self.optimizer.state.values():
            states.optimizer.extend(v for v in state.values() if isinstance(v, Tensor))
        return states

    @property
    def shared_bytes(self) -> int:
        return self._wire.shared_bytes + sum(pool.file_bytes for pool in self._pools)

    def take_traffic(self) -> Traffic:
        """What our collectives sent since the last call."""
        return self._wire.take_traffic()

    def _prefetch_depth(self, options: Options) -> int:
        """Without overlap, or where the gathering rank copies by itself, early is no better and costs a pool."""
        if not options.overlap:
            return 0
        if options.prefetch is None:
            return 0 if self._wire.moves_on_wait else 1
        return options.prefetch

    def state_dict(self) -> CanonicalState:
        return canonical_state(self._units, self._stage, self.optimizer, self._wire.world)

    def load_state_dict(self, state: CanonicalState) -> None:
        self.drain()
        self._wire.quiesce()
        load_canonical(state, self._units, self._stage, self.optimizer, self._wire.world)
        for unit in self._units:
            self._schedule.publish(unit)
        self.drain()
        self.take_traffic()

    def _sum_squares(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Pending]:
        """Of all ranks' pieces, in float64: every element counts once."""
        total = torch.zeros((), dtype=torch.float64, device=self._wire.world.device)
        if gradients:
            norms = torch._foreach_norm(list(gradients), dtype=torch.float32)  # bf16 keeps 3 digits
            total += torch.stack(list(norms)).double().square().sum()
        if self._stage.optimizer is not Placement.SHARD:
            return total, Pending([])
        return total, self._wire.sum_scalar_later(total, "norm")

    def _clip_scale(self, norm: Tensor, max_norm: float) -> Tensor | None:
        """What gradients are multiplied by; None while the norm is allowed, so that they stay bit for bit."""
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        on_host = norm.device.type == "cpu"  # elsewhere looking would stop the stream
        return None if on_host and float(scale) == 1.0 else scale

    def _update(self, pairs: list[tuple[nn.Parameter, Tensor]], scale: Tensor | None) -> None:
        """The optimizer's step on these masters alone: it skips whatever has no gradient."""
        if not pairs:
            return
        if scale is not None:
            torch._foreach_mul_([gradient for _, gradient in pairs], scale)
        for master, gradient in pairs:
            master.grad = gradient
        self.optimizer.step()
        for master, _ in pairs:
            master.grad = None


def _norm(squares: Tensor) -> Tensor:
    return squares.sqrt().float()


def _bucket_bytes(options: Options, *, one_host: bool) -> int | None:
    """On one host small buckets win: what is handed over is in the cache still, and little memory waits.

    Over messages a unit is one reduction, in which all ranks send and receive at once.
    """
    if options.bucket_mb is not None:
        return int(options.bucket_mb * MIB)
    return BUCKET_BYTES_ON_ONE_HOST if one_host else None


def _masters_in_groups(
    units: Sequence[Unit], param_groups: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The user's parameter groups, with each parameter replaced by the masters this rank holds of it."""
    masters: dict[nn.Parameter, list[nn.Parameter]] = {}
    for unit in units:
        for parameter, master in unit.masters():
            masters.setdefault(parameter, []).append(master)
    groups = [
        {**group, "params": [m for p in group["params"] for m in masters.get(p, ())]}
        for group in param_groups
    ]
    return groups
