"""Run torch's own ddp and zero1: DistributedDataParallel, with ZeroRedundancyOptimizer for zero1.

                      parameters   gradients    optimizer        sent per step (x (N-1)/N of the parameters' bytes)
    ddp               replicate    replicate    replicate        2
    zero1             replicate    replicate    whole tensors,   3: the gradients are all-reduced although each
                                                each on one rank    rank needs only those of its own parameters

[Note: buckets] The reducer keeps the gradients' sum in C++ buckets that no tensor list shows. They are as large as the
trainable parameters. With `gradient_as_bucket_view` the gradients are views of the buckets from the end of the last
backward to `zero_grad`. The buckets are never freed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zeroexp.config.keys import ConfigError
from zeroexp.interface.canonical import moments_of
from zeroexp.interface.held_pieces import ALONE, NOTHING, HeldPiece
from zeroexp.interface.optimizer_trial import (
    moments_kept,
    refuse_unless_elementwise,
    refuse_wrong_kernels,
)
from zeroexp.interface.overlapping_memory import refuse_overlaps
from zeroexp.interface.python_values import PythonValues
from zeroexp.interface.saved_state import SavedState, names_in
from zeroexp.interface.strategy import CanonicalState, ModelStates, OptimizerFactory
from zeroexp.interface.values import Values, fill_in
from zeroexp.process.world import World


class TorchDDP:
    """DistributedDataParallel around `module`, whose parameters are converted to `dtype`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        param_groups: Sequence[dict[str, Any]],
        optimizer_factory: OptimizerFactory,
        world: World,
        dtype: torch.dtype = torch.float32,
        autocast: bool = False,  # the forward runs in bfloat16
        max_grad_norm: float | None = None,
        shard_optimizer: bool = False,  # ZeroRedundancyOptimizer
        gradient_as_bucket_view: bool = True,
        may_skip_parameters: bool = False,  # True costs a walk over the graph in every forward
        values: Values | None = None,  # of a module on meta
    ):
        self._world = world
        self._max_grad_norm = max_grad_norm
        self._must_use_all = world.size > 1 and not may_skip_parameters
        self._as_views = gradient_as_bucket_view
        self._grads_in_buckets = False
        refuse_overlaps(module)
        if values is None and not world.is_fake:  # torch can not convert modules of fake tensors
            module.to(world.device)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype).contiguous()  # shares are of flat elements
        if values is not None:
            fill_in(module, values, world.device)
        self._named = dict(module.named_parameters())
        self._trainable = [p for p in self._named.values() if p.requires_grad]
        if autocast:
            module.forward = torch.autocast(world.device.type, torch.bfloat16)(module.forward)
        self._ddp = DistributedDataParallel(
            module,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=may_skip_parameters,
        )
        # Backward finds the module through a weak reference that torch's graph holds. A garbage collection in another
        # thread, as one that saves, can take that reference for garbage while backward runs, and clear it. Python hands
        # out the same one as long as it lives, and one that is held here is never garbage.
        self._held_reference = weakref.ref(self._ddp)
        # module_buffers.py sends them; torch renamed the argument.
        self._ddp.broadcast_buffers = False
        self.model: nn.Module = self._ddp
        engine = "DDP, everything replicated"
        if shard_optimizer:
            engine = "DDP and ZeroRedundancyOptimizer, gradients replicated"
        self.settings = {
            "engine": engine,
            "transport": world.backend,
            "bucket_mb": self._ddp.bucket_bytes_cap / (1 << 20),
        }
        self.optimizer, self._inner = _make_optimizer(
            list(param_groups), optimizer_factory, shard_optimizer
        )
        refuse_wrong_kernels(self._inner)
        self._shards_optimizer = shard_optimizer
        names = names_in(module, self.optimizer.param_groups)
        mirrors = [self.optimizer] if shard_optimizer else []
        kept = moments_kept(optimizer_factory, param_groups)
        python = PythonValues(self._inner, names, mirrors)
        self._saved = SavedState(module, world, self._inner, names, kept, python)

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        with nullcontext() if last else self._ddp.no_sync():
            yield
        self._grads_in_buckets = last and self._as_views

    def backward(self, loss: Tensor) -> None:
        # The reducer divides by the world size, see [Note: who divides]; undoing it is cheapest on a scalar.
        (loss * self._world.size).backward()

    def step(self, *, drain: bool = False) -> Tensor:
        # Nothing is left in flight: the reducer already waits in backward, and the optimizer waits for its broadcasts.
        gradients = [p.grad for p in self._trainable if p.grad is not None]
        if self._must_use_all and len(gradients) < len(self._trainable):
            unused = [n for n, p in self._named.items() if p.requires_grad and p.grad is None]
            raise ConfigError(
                f"strategy.implementation=torch: {len(unused)} parameters got no gradient (the first is {unused[0]}), "
                f"so that DDP did not reduce all others; use buffer, model.freeze=[{unused[0]}], or skips_modules=True "
                "where a plugin adds the family"
            )
        norm = torch.stack([_norm(gradient) for gradient in gradients]).norm()
        if self._max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(self._trainable, self._max_grad_norm, norm)
        self.optimizer.step()
        self._saved.buffers.share()
        return norm

    def zero_grad(self) -> None:
        for parameter in self._trainable:
            parameter.grad = None
        self._grads_in_buckets = False

    def model_states(self) -> ModelStates:
        buckets = sum(p.nbytes for p in self._trainable)
        return ModelStates(
            parameters=[p.detach() for p in self._named.values()],
            gradients=[p.grad for p in self._trainable if p.grad is not None],
            optimizer=[t for s in self._inner.state.values() for t in moments_of(s).values()],
            hidden_bytes=0 if self._grads_in_buckets else buckets,  # [Note: buckets]
        )

    def state_dict(self) -> CanonicalState:
        """Return even shares, or with sharded moments whole parameters from the rank that updates them."""
        return self._saved.of(self._held())

    def load_state_dict(self, state: CanonicalState) -> None:
        self._saved.load(state, self._held())

    def _held(self) -> list[HeldPiece]:
        own = {p for group in self._inner.param_groups for p in group["params"]}
        even = self._world.rank, self._world.size
        pieces: list[HeldPiece] = []
        for name, parameter in self._named.items():
            is_own, is_trained, share = parameter in own, parameter.requires_grad, even
            if self._shards_optimizer and is_trained:
                share = ALONE if is_own else NOTHING
            shape, has_moments = tuple(parameter.shape), is_own and is_trained
            pieces.append(HeldPiece(name, shape, parameter, 0, has_moments, share))
        return pieces


def _make_optimizer(
    groups: list[dict[str, Any]], factory: OptimizerFactory, shard: bool
) -> tuple[Optimizer, Optimizer]:
    """Return (the optimizer to step, the optimizer with the state): ZeroRedundancyOptimizer's own state stays empty."""
    if not shard:
        optimizer = factory(groups)
        return optimizer, optimizer
    refuse_unless_elementwise(factory, groups, layout="torch", cut=False)
    with warnings.catch_warnings():
        # ZeroRedundancyOptimizer's package uses functions that torch itself deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    outer = ZeroRedundancyOptimizer(
        groups,
        optimizer_class=factory,  # pyright: ignore[reportArgumentType]: it is called, never subclassed
        parameters_as_bucket_view=True,  # one broadcast per rank instead of one per tensor
    )
    return outer, outer.optim


def _norm(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.float32)
