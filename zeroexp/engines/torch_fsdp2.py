"""FSDP2: `fully_shard` wraps each block, or layer, and the root with all parameters outside of them.

                  rests between steps        between forward and backward    sent per step (x (N-1)/N)
    zero2         everything sharded         parameters stay gathered        2
    zero3         everything sharded         parameters are sharded again    3

The paper's ZeRO-2 keeps its parameters replicated and gathers after the step; FSDP2 without reshard gathers in the next
forward instead. Its parameters rest sharded, and the engine's label says so.

The root's own parameters stay gathered in both, because backward begins with them. Gradients are reduced in every
microbatch, since accumulating them unreduced would leave them replicated between microbatches. The gathered parameters
of zero2 live through all microbatches of a step.

With replicas (HSDP) a group of neighbours shards, and every microbatch's sums are summed between groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from zeroexp.cut.rank_grid import RankGrid
from zeroexp.interface.canonical import moments_of
from zeroexp.interface.held_pieces import HeldPiece
from zeroexp.interface.loss_scale import LossScale
from zeroexp.interface.optimizer_trial import (
    moments_kept,
    refuse_states_of_matrices,
    refuse_wrong_kernels,
)
from zeroexp.interface.overlapping_memory import refuse_overlaps
from zeroexp.interface.saved_state import SavedState, names_in
from zeroexp.interface.strategy import CanonicalState, ModelStates, OptimizerFactory
from zeroexp.interface.values import Values
from zeroexp.process.world import World
from zeroexp.zero.assemble import agree_on_weights
from zeroexp.zero.grouping import group_parameters, with_shared_in_root
from zeroexp.zero.options import Dtypes


class TorchFSDP2:
    """`module` under fully_shard: its shards have the master dtype and are gathered in the compute dtype.

    What is frozen has no master, and rests in the compute dtype.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        blocks: Sequence[str],
        param_groups: Sequence[dict[str, Any]],
        optimizer_factory: OptimizerFactory,
        world: World,
        reshard_after_forward: bool,
        unit: str = "block",  # block | layer, see group_parameters
        dtypes: Dtypes | None = None,
        max_grad_norm: float | None = None,
        values: Values | None = None,  # of a module on meta
        replicas: int = 1,  # groups of ranks that hold all states each
        scales_loss: bool = False,  # see interface/loss_scale.py
    ):
        rests = "everything rests" if reshard_after_forward else "without reshard parameters rest"
        self.settings = {"engine": f"FSDP2, {rests} sharded", "transport": world.backend}
        if replicas > 1:
            self.settings["engine"] += f" in {replicas} groups"
        self._world = world
        self._group, self._holders = world.split(RankGrid(world.size, replicas))
        if world.size > 1 and not world.is_fake:  # a trial compares values
            refuse_states_of_matrices(optimizer_factory, param_groups)
        self._reshards = reshard_after_forward
        self._max_grad_norm = max_grad_norm
        dtypes = dtypes or Dtypes(torch.float32, torch.float32, torch.float32)
        refuse_overlaps(module)
        if values is None and not world.is_fake:  # torch can not convert modules of fake tensors
            module.to(world.device)
        for parameter in module.parameters():
            dtype = dtypes.master if parameter.requires_grad else dtypes.compute
            parameter.data = parameter.data.to(dtype).contiguous()
        if values is None:
            agree_on_weights(module, world, None)
        names = {parameter: name for name, parameter in module.named_parameters()}
        self.model = module
        _, *others = with_shared_in_root(group_parameters(module, blocks, unit))
        units = [group.module for group in others]
        _shard(module, units, reshard_after_forward, dtypes, world, replicas)
        module.register_forward_hook(_free_without_backward)
        # fully_shard replaces the parameters by new ones; while gathered, the module shows yet other tensors.
        self._named = dict(self.model.named_parameters())
        if values is not None:
            self._put_in(values)
        groups = [
            {**group, "params": [self._named[names[p]] for p in group["params"]]}
            for group in param_groups
        ]
        self.optimizer = optimizer_factory(groups)
        refuse_wrong_kernels(self.optimizer)
        self._loss_scale = LossScale(self.optimizer, is_used=scales_loss, is_fake=world.is_fake)
        kept = moments_kept(optimizer_factory, groups)
        held_names = names_in(module, self.optimizer.param_groups)
        self._saved = SavedState(module, world, self.optimizer, held_names, kept)

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        if not self._reshards:
            cast(FSDPModule, self.model).set_reshard_after_backward(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self._loss_scale.multiply(loss).backward()

    def step(self, *, drain: bool = False) -> Tensor:
        # Nothing is left in flight: the end of backward waits for the last reduction, and nothing is sent after it.
        parameters = [p for p in self._named.values() if p.grad is not None]
        self._loss_scale.divide(_local(cast(Tensor, p.grad)) for p in parameters)
        norm = nn.utils.get_total_norm([cast(Tensor, p.grad).float() for p in parameters])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self._max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        if self._loss_scale.allows(lambda: norm):
            self.optimizer.step()
        self._saved.buffers.share()
        return norm

    def zero_grad(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None

    def model_states(self) -> ModelStates:
        """Return the shards, and the currently gathered full parameters as buffers."""
        moments = [moments_of(state) for state in self.optimizer.state.values()]
        return ModelStates(
            parameters=[p.detach() for p in self._named.values()],
            gradients=[p.grad for p in self._named.values() if p.grad is not None],
            optimizer=[tensor for state in moments for tensor in state.values()],
            buffers=[p.detach() for p in self.model.parameters() if not isinstance(p, DTensor)],
        )

    def state_dict(self) -> CanonicalState:
        """Return each rank's shards as contiguous ranges: dim 0 is cut, and rows are contiguous in memory."""
        return self._saved.of(self._held())

    def load_state_dict(self, state: CanonicalState) -> None:
        self._saved.load(state, self._held())

    def _held(self) -> list[HeldPiece]:
        share = self._holders.rank, self._holders.size
        starts = ((n, p, self._first_element(p)) for n, p in self._named.items())
        return [
            HeldPiece(name, tuple(p.shape), p, start, p.requires_grad, share, local=_local)
            for name, p, start in starts
        ]

    def _put_in(self, values: Values) -> None:
        """Make the memory of the shards, which are on meta, and copy this rank's rows there; buffers stay."""
        device = self._world.device
        self.model._apply(
            lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device)
        )
        agree_on_weights(self.model, self._world, values)
        self._named = dict(self.model.named_parameters())
        empty = dict(self._named)
        for name, read in values:
            tensor = empty.pop(name).detach()
            local, start = _local(tensor), self._first_element(tensor)
            local.view(-1).copy_(read(start, start + local.numel()))
        if empty:
            raise ValueError(f"values: there are none of {next(iter(empty))}; give those of all")

    def _first_element(self, tensor: Tensor) -> int:
        """Return the first flat element of this rank's shard; by torch.chunk's rule the last ranks may be short.

        This is pure arithmetic: slicing the tensor would communicate, and ranks without rows would not take part.
        """
        if not isinstance(tensor, DTensor):
            return 0
        num_rows = tensor.shape[0]
        rows_per_rank = -(-num_rows // self._group.size)
        row_numel = tensor.numel() // num_rows if num_rows else 0
        return min(self._group.rank * rows_per_rank, num_rows) * row_numel


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _free_without_backward(module: nn.Module, *_: object) -> None:
    """Free what a forward without gradients left gathered for a backward that will not come."""
    if not torch.is_grad_enabled():
        for each in module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()


def _shard(
    module: nn.Module,
    units: Sequence[nn.Module],
    reshard: bool,
    dtypes: Dtypes,
    world: World,
    replicas: int,
) -> None:
    mesh = _mesh(world, replicas)
    policy = MixedPrecisionPolicy()
    if dtypes.compute != dtypes.master or dtypes.reduce != dtypes.master:
        policy = MixedPrecisionPolicy(param_dtype=dtypes.compute, reduce_dtype=dtypes.reduce)
    for unit in reversed(units):  # what lies inside of another comes first
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            # Reduce to plain sums, see [Note: who divides]; the second line avoids an operation that gloo lacks.
            submodule.set_gradient_divide_factor(1.0)
            submodule.set_force_sum_reduction_for_comms(True)


def _mesh(world: World, replicas: int) -> DeviceMesh:
    """Return the mesh of these ranks, whose groups are as patient as the world: torch makes its own by its defaults."""
    group, holders = world.split(RankGrid(world.size, replicas))
    parts = {"replicate": holders, "shard": group} if replicas > 1 else {"shard": group}
    with unset_fake_temporarily():  # a mesh reads the ranks that it is made of
        for part in parts.values():
            part.join()
        ranks = torch.arange(world.size).view(replicas, -1) if replicas > 1 else None
        groups = [part.process_group for part in parts.values()]
        return DeviceMesh.from_group(
            groups if replicas > 1 else groups[0],
            world.device.type,
            ranks,
            mesh_dim_names=(*parts,),
        )
