"""Seldom synchronised replicas: each steps by itself, and every so often an outer optimizer joins them (DiLoCo).

    inner steps   1 ... H-1     each replica, on its own samples: reductions, norm and clipping are inside of it
    inner step    H             ... and then, of the elements that this rank owns, with the weights before the interval:
                                change   = mean over replicas of (before - weights)
                                momentum = mu * momentum + change
                                weights  = before - lr * (change + mu * momentum)

That is torch's SGD with Nesterov momentum, whose gradient is the mean change (Douillard et al. 2023, "DiLoCo"; lr = 1
and mu = 0 is local SGD, the plain mean). All replicas cut alike, so each rank sums what it owns with the ranks that own
the same, in the buckets of the reductions: 2 (K-1)/K P/S bytes from each rank in H steps instead of in each.

A replica's gradients count K times, since the loss is divided by K times the labels of its ranks (as many as all ranks
have, where each has as many): K * (sum of its ranks' terms / (K * labels)), so that a step of it is that of a world of
its ranks alone. What an inner optimizer keeps
stays the replica's own. Buffers of the module are shared when replicas are joined.

[Note: no memory in between] Nothing needs the weights that the change was taken from, so the change lies in their
place, and the sum over replicas too. `before` is copied when an interval begins: right after an outer step it equals
the weights, so that a checkpoint needs no copy of it, and weights that are loaded or written there are the new ones.

[Note: states] Between outer steps there is no one model. A state is asked for after an outer step, and holds beside
weights and moments (of the first replica, which any engine may load): the outer momentum, and each other replica's
moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zeroexp.comm.collectives import Collectives
from zeroexp.cut.bucket import Bucket
from zeroexp.interface.canonical import OUTER, is_moment
from zeroexp.interface.held_pieces import HeldPiece
from zeroexp.interface.reshard import fill_from_canonical
from zeroexp.interface.strategy import CanonicalState
from zeroexp.zero.options import OuterOptimizer
from zeroexp.zero.step_sums import StepSums
from zeroexp.zero.unit import Unit

MOMENTUM = f"{OUTER}momentum"


def prefix_of(replica: int) -> str:
    """Return what the names of a replica's moments begin with in a state; those of the first are any engine's."""
    return f"{OUTER}{replica}." if replica else ""


class OuterStep:
    """The outer optimizer of one rank's master weights, and how many steps of the interval are done.

    Without one (None) replicas are never apart, since each step sums over all ranks.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        wire: Collectives,
        outer: OuterOptimizer | None,
        dtype: torch.dtype,
    ):
        """`dtype`: of the masters, and of what is kept beside them."""
        self._units, self._wire, self._settings = units, wire, outer
        self._nothing = torch.empty(0, dtype=dtype, device=wire.world.device)
        masters: list[Tensor] = []
        if outer is not None:
            masters = [master for unit in units for _, master in unit.parameters_with_masters()]
        self._masters = [master.detach() for master in masters]
        self._before = [torch.empty_like(master) for master in self._masters]
        has_momentum = outer is not None and outer.momentum
        self._momenta = [torch.zeros_like(m) for m in self._masters] if has_momentum else []
        self.momentum_of = dict(zip(masters, self._momenta, strict=False))
        self.tensors = [*self._before, *self._momenta]  # that are kept beside the masters
        # Whether what the inner optimizer keeps differs between replicas, and which of these this rank belongs to.
        self.has_own_moments = outer is not None
        self.replica = wire.holders.rank if self.has_own_moments else 0
        self._num_replicas = wire.holders.size
        self._num_done = 0  # steps since the last outer one

    def norm(self, sums: StepSums) -> Tensor:
        """Return the norm of the gradients of the ranks that step together."""
        norm = sums.norm()
        return norm if self._settings is None else norm * self._num_replicas

    def factor(self, clips: Tensor | None) -> Tensor | None:
        """Return the factor for gradients of a replica, which count as those of all, given the one that clips them.

        None leaves them bit for bit.
        """
        if self._settings is None:
            return clips
        return (self._nothing.new_ones(()) if clips is None else clips) * self._num_replicas

    @torch.no_grad()
    def before_update(self) -> None:
        """Keep the weights that an interval begins with."""
        if self._masters and not self._num_done:
            torch._foreach_copy_(self._before, self._masters)

    @torch.no_grad()
    def after_update(self) -> bool:
        """Take the outer step if one is due, and return whether the replicas are equal now."""
        settings, masters = self._settings, self._masters
        if settings is None:
            return True
        self._num_done = (self._num_done + 1) % settings.every
        if self._num_done:
            return False
        if masters:  # [Note: no memory in between]
            torch._foreach_add_(masters, self._before, alpha=-1)
            torch._foreach_mul_(masters, -1 / self._num_replicas)
        for unit in self._units:
            for bucket in unit.buckets:
                changes = [*self._masters_in(unit, bucket)] or [self._nothing]
                self._wire.sum_between(changes, f"changes of {unit}")
        self._wire.finish_sums()
        if not masters:
            return True
        if settings.momentum:
            torch._foreach_mul_(self._momenta, settings.momentum)
            torch._foreach_add_(self._momenta, masters)
            torch._foreach_add_(masters, self._momenta, alpha=settings.momentum)
        torch._foreach_mul_(masters, -settings.lr)
        torch._foreach_add_(masters, self._before)
        return True

    def _masters_in(self, unit: Unit, bucket: Bucket) -> Iterator[Tensor]:
        """Yield this rank's master weights of a bucket, flat."""
        for part in bucket.parts:
            held = unit.trainable[part.index]
            for span in part.chunk.spans(self._wire.group.rank):
                index, elements = held.elements_of(part, span)
                yield held.masters[index].detach().view(-1)[elements]

    # -- states ------------------------------------------------------------------------------------

    def require_joined(self, call: str) -> None:
        """Raise RuntimeError where replicas hold different weights, of which there is no one state to give or write."""
        if self._settings is not None and self._num_done:
            raise RuntimeError(
                f"strategy.{call} {self._num_done} steps after the last outer step, where each replica holds "
                f"weights of its own: call it after a multiple of {self._settings.every} steps"
            )

    def own_state(self, state: CanonicalState) -> CanonicalState:
        """Return the state with the moments of this rank's replica, or the first one's if it was saved without it."""
        prefix = prefix_of(self.replica)
        if not prefix or not any(key.startswith(prefix) for e in state.values() for key in e):
            return state
        own: CanonicalState = {}
        for name, entry in state.items():
            own[name] = {k: v for k, v in entry.items() if not is_moment(k)}
            moments = {k: v for k, v in entry.items() if k.startswith(prefix)}
            own[name] |= {key.removeprefix(prefix): value for key, value in moments.items()}
        return own

    @torch.no_grad()
    def load(self, state: CanonicalState, targets: Sequence[HeldPiece]) -> None:
        """Begin an interval with the momentum of the state; a state of another engine has none."""
        self._num_done = 0
        for each in (each for each in targets if each.tensor in self.momentum_of):
            momentum, saved = self.momentum_of[each.tensor].view(-1), state[each.name].get(MOMENTUM)
            if saved is None:
                momentum.zero_()
            else:
                fill_from_canonical(momentum, saved, start=each.start, name=each.name)
