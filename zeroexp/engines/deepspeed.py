"""DeepSpeed's ZeRO-1, ZeRO-2 and ZeRO-3, with an optimizer of ours. docs/deepspeed.md says what differs.

             rests between steps                                    sent per step (x (N-1)/N of the parameters' bytes)
    zero1    parameters whole; masters and moments sharded          3: gradients are all-reduced, and each rank
    zero2    the same                                                  keeps its part of the result
    zero3    everything sharded; room for gradients and a bucket    3

Each parameter group of zero1 and zero2 is one flat buffer, cut evenly across tensors. zero3 cuts each tensor, and the
parts of a group are one flat tensor. Masters are copies, also in float32.

[Note: sums] DeepSpeed averages. zero1 and zero2 can be told to sum; zero3 divides by the number of ranks what was
multiplied by it before.

[Note: private] No public function shows the parts of parameters without gathering them. The private names here are
those of the version that pyproject.toml pins.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroexp.config.deepspeed_settings import LABELS, SETTINGS, bucket_numel
from zeroexp.config.keys import Config, UndefinedCombination
from zeroexp.engines.per_parameter_optimizer import Part, PerParameterOptimizer, SharedNumbers
from zeroexp.interface.canonical import moments_of
from zeroexp.interface.held_pieces import HeldPiece
from zeroexp.interface.optimizer_trial import (
    make_optimizer,
    moments_kept,
    refuse_unless_elementwise,
)
from zeroexp.interface.saved_state import SavedState, names_in
from zeroexp.interface.strategy import CanonicalState, ModelStates, OptimizerFactory
from zeroexp.interface.values import Values, fill_in
from zeroexp.models.module import BuiltModel
from zeroexp.process import world as worlds
from zeroexp.process.world import World
from zeroexp.zero.options import DTYPES, Dtypes

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
LINEAR = nn.functional.linear
Weights = Iterable[tuple[str, Callable[[int, int], Tensor]]]


def build_deepspeed(
    config: Config, model: BuiltModel, world: World, common: dict[str, Any]
) -> DeepSpeed:
    if world.is_fake:
        problem = "DeepSpeed reads values as it goes, so that it can not be rehearsed"
        raise UndefinedCombination(f"strategy.implementation=deepspeed: {problem}; run it instead")
    mode = config.precision
    return DeepSpeed(
        model.module,
        stage=int(config.strategy.name.removeprefix("zero")),
        dtypes=Dtypes(*(DTYPES[name] for name in (mode.compute, mode.reduce, mode.master))),
        settings=config.strategy.settings,
        world=world,
        **common,
    )


class DeepSpeed:
    """`module` in a DeepSpeedEngine. settings: keys of its `zero_optimization`, as in config/deepspeed_settings.py."""

    def __init__(
        self,
        module: nn.Module,
        *,
        stage: int,
        param_groups: Sequence[dict[str, Any]],
        optimizer_factory: OptimizerFactory,
        world: World,
        dtypes: Dtypes | None = None,
        settings: Mapping[str, Any] | None = None,
        max_grad_norm: float | None = None,
        values: Values | None = None,  # of a module on meta
    ):
        dtypes = dtypes or Dtypes(torch.float32, torch.float32, torch.float32)
        self._world, self._stage = world, stage
        self._named = dict(module.named_parameters())
        for name in (name for name, p in self._named.items() if p.ndim == 0):
            problem = f"strategy.implementation=deepspeed: {name} has no dimension"
            raise ValueError(f"{problem}, and DeepSpeed can not send it; give it one")
        refuse_unless_elementwise(optimizer_factory, param_groups, layout="deepspeed", cut=True)
        names = names_in(module, param_groups)
        kept = moments_kept(optimizer_factory, param_groups)
        unrounded = _unrounded_weights(self._named, dtypes, values)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtypes.compute)
        if values is not None:
            fill_in(module, values, world.device)
        self.optimizer = make_optimizer(optimizer_factory, list(param_groups))
        zero = {"stage": stage, **SETTINGS, **(settings or {})}
        trained = (p.numel() for p in self._named.values() if p.requires_grad)
        zero["reduce_bucket_size"] = bucket_numel(zero, sum(trained))
        self._engine = _initialize(module, self.optimizer, zero, dtypes, max_grad_norm, world)
        self._inner = self._engine.optimizer
        self.model: nn.Module = self._engine
        self.settings = {"engine": LABELS[f"zero{stage}"], "transport": world.backend}
        parts = _parts_of_zero3 if stage == 3 else _parts_of_groups
        self._parts = PerParameterOptimizer(
            self.optimizer, [*parts(self._inner, self._named, world.rank)]
        )
        _put_in(self._parts.parts, unrounded)
        self._has_gradients = False
        optimizer: Any = self._parts  # all that is read of it
        python = SharedNumbers(optimizer, names)
        self._saved = SavedState(module, world, optimizer, names, kept, python)

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        yield
        self._has_gradients = True

    def backward(self, loss: Tensor) -> None:
        factor = self._world.size if self._stage == 3 else 1  # [Note: sums]
        self._engine.backward(loss * factor, scale_wrt_gas=False)

    def step(self, *, drain: bool = False) -> Tensor:
        # Nothing is left in flight: what backward has sent it waits for, and the step ends with its gathers.
        with self._parts.step():
            self._engine.step()
        self._has_gradients = False
        self._saved.buffers.share()
        norm = self._engine.get_global_grad_norm()  # a float, infinity, where the step was skipped
        return torch.as_tensor(norm, dtype=torch.float32, device=self._world.device)

    def zero_grad(self) -> None:
        self._inner.zero_grad()
        # Else a parameter without gradient in the next step gets its last one again.
        if self._stage == 3:
            self._inner.grad_partitions_flat_buffer.zero_()
        self._has_gradients = False

    def model_states(self) -> ModelStates:
        """Return what this rank holds. Room that is kept for gradients counts as theirs while they are in it."""
        inner, parameters = self._inner, self._named.values()
        room = [
            *getattr(inner, "fp32_groups_gradients_flat", ()),  # zero1 in bfloat16
            getattr(inner, "grad_partitions_flat_buffer", None),  # zero3
        ]
        parts = [getattr(inner, name, {}) for name in ("averaged_gradients", "all_grad_tensors")]
        reduced = [tensors for groups in parts for tensors in groups.values()]
        buckets = [bucket.buffer for bucket in getattr(inner, "ipg_buckets", {}).values()]
        moments = [moments_of(state) for state in self.optimizer.state.values()]
        gradients = [*(p.grad for p in parameters), *(room if self._has_gradients else ())]
        return ModelStates(
            parameters=[getattr(p, "ds_tensor", p).detach() for p in parameters],
            gradients=_tensors([gradients, *reduced]),
            optimizer=[tensor for state in moments for tensor in state.values()],
            master=[part.flat.detach() for part in self._parts.parts],
            buffers=_tensors([list(parameters), room, *buckets]),  # parameters: gathered ones
        )

    def state_dict(self) -> CanonicalState:
        """Return this rank's parts of masters and moments, and even shares of frozen parameters that are whole."""
        self._parts.read()
        return self._saved.of(self._held())

    def load_state_dict(self, state: CanonicalState) -> None:
        self._parts.read()
        self._saved.load(state, self._held())
        self._parts.write()
        self._publish()

    def _held(self) -> list[HeldPiece]:
        """Return the parts, and the frozen parameters of zero1 and zero2, of which every rank holds all."""
        even = self._world.rank, self._world.size
        parts = [
            HeldPiece(p.name, p.shape, p.weight, p.start, p.is_trained) for p in self._parts.parts
        ]
        whole = [
            HeldPiece(name, tuple(p.shape), p, 0, False, even)
            for name, p in self._named.items()
            if not p.requires_grad and self._stage < 3
        ]
        return [*parts, *whole]

    def _publish(self) -> None:
        """Give the parameters what the masters hold."""
        inner = self._inner
        if self._stage < 3:
            inner.update_lp_params()
            return
        inner.parameter_offload.partition_all_parameters()
        masters = inner.fp32_partitioned_groups_flat
        for parameters, master in zip(inner.fp16_partitioned_groups_flat, masters, strict=True):
            parameters.data.copy_(master.data)
        if stays := inner.persistent_parameters:
            stays[0].all_gather(stays)


def _initialize(
    module: nn.Module,
    optimizer: Optimizer,
    zero: Mapping[str, Any],
    dtypes: Dtypes,
    max_grad_norm: float | None,
    world: World,
) -> Any:
    reduce = DTYPE_NAMES[dtypes.reduce]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # it counts samples, which nobody reads
        "gradient_clipping": max_grad_norm or 0.0,
        "bf16": {"enabled": dtypes.compute is torch.bfloat16},
        "communication_data_type": reduce,
        "data_types": {"grad_accum_dtype": reduce},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": dict(zero),
        "steps_per_print": None,
    }
    if zero["stage"] < 3:
        config["gradient_allreduce_op"] = "sum"  # [Note: sums]
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    # It calls collectives by names that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed")
    # zero3 of an engine before has replaced it, for the whole process.
    nn.functional.linear = LINEAR
    with warnings.catch_warnings(), _local_rank_in_environment(world):
        warnings.simplefilter("ignore", DeprecationWarning)  # in what it imports
        deepspeed: Any = import_module("deepspeed")
        # No extension of it is needed, and it would compile one now.
        deepspeed.ops.__compatible_ops__ = defaultdict(bool)
        deepspeed.init_distributed(dist_backend=world.backend, auto_mpi_discovery=False)
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


@contextmanager
def _local_rank_in_environment(world: World) -> Iterator[None]:
    """Tell DeepSpeed the index of this rank's GPU by the variables it asks for, which Slurm does not set."""
    before = dict(os.environ)
    place = worlds.RankInfo(world.rank, world.size, local_rank=world.device.index or 0)
    os.environ.update(worlds.environment_of_rank(place))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _parts_of_groups(inner: Any, named: Mapping[str, nn.Parameter], rank: int) -> Iterator[Part]:
    for name, parameter in named.items():
        held = getattr(parameter, "_hp_mapping", None)
        if held is not None:
            flat = inner.optimizer.param_groups[held.param_group_index]["params"][0]
            start, here = held.lp_fragment_address.start, held.hp_fragment_address
            shape, weight = tuple(parameter.shape), held.hp_fragment.detach()
            yield Part(name, shape, start, flat, here.start, here.numel, True, weight)


def _parts_of_zero3(inner: Any, named: Mapping[str, Any], rank: int) -> Iterator[Part]:
    for name, parameter in named.items():
        flat, offset, room = parameter.ds_tensor, 0, parameter.partition_numel()
        if parameter.requires_grad:
            group, offset, _ = inner.grad_position[inner.get_param_id(parameter)]
            flat = inner.fp32_partitioned_groups_flat[group]
        start, shape = rank * room, tuple(parameter.ds_shape)
        numel = min(room, parameter.ds_numel - start)
        if numel > 0:
            weight = flat.detach()[offset : offset + numel]
            yield Part(name, shape, start, flat, offset, numel, parameter.requires_grad, weight)


def _unrounded_weights(
    named: Mapping[str, nn.Parameter], dtypes: Dtypes, values: Values | None
) -> Weights:
    """Return what yields the trained weights as they are before the module is rounded; nothing where it is not."""
    if dtypes.compute == dtypes.master or values is not None:
        return values if values is not None and dtypes.compute != dtypes.master else ()
    kept = {n: p.detach().clone().view(-1) for n, p in named.items() if p.requires_grad}
    return [(name, lambda start, stop, flat=flat: flat[start:stop]) for name, flat in kept.items()]


def _put_in(parts: Sequence[Part], weights: Weights) -> None:
    """Give masters the unrounded weights: DeepSpeed makes them of the module's, which are rounded."""
    trained = {part.name: part for part in parts if part.is_trained}
    for name, read in weights:
        if part := trained.get(name):
            part.weight.copy_(read(part.start, part.start + part.numel))


def _tensors(groups: Sequence[Any]) -> list[Tensor]:
    """Return the tensors in these, each of which is one, a list of some, or None."""
    lists = [[group] if isinstance(group, Tensor) else group or () for group in groups]
    return [tensor.detach() for each in lists for tensor in each if tensor is not None]
