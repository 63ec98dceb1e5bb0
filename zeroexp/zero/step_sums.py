"""One small sum over ranks carries what the ranks that step together tell each other before the optimizer's step.

    [ sum of squares of the gradients | for each trainable parameter: how many ranks have a gradient for it
      | where parameters are gathered by the backend: how many ranks, a checksum of what they issued, its square ]

The optimizer skips a parameter for which no rank has a gradient, as torch does in one process: the parameter does not
decay and its momentum does not move it. A rank that has a gradient for every parameter does not wait for the sum before
it updates, unless it clips.

[Note: without a stop] On a GPU the host runs ahead of the device, and reading a value stops it. So nothing is read
there in a step that has all gradients and clips: what tells whether ranks gathered the same is copied to the host, and
read in the next step, or before that by whoever drains the engine or saves its state.

[Note: same gathers] The backend pairs gathers by the order in which they are issued, not by what they gather: ranks
that use blocks of one size in different orders would compute with the weights of other blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch
from torch import Tensor, nn

from zeroexp.comm.collectives import Collectives, checksum_terms, checksums_were_equal
from zeroexp.cut.stage import Move, Stage
from zeroexp.zero.unit import OptimizerInput

ELEMENTS_OF_A_NORM = 1 << 17


class StepSums:
    """The sum of one step: it starts at once, and the methods that need its result wait for it."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        handed: Sequence[OptimizerInput],
        stage: Stage,
        wire: Collectives,
        has_gradient: Sequence[bool],
    ):
        """Start the sum.

        parameters: all trainable ones, in the same order on every rank.
        has_gradient: whether this rank has a gradient, for each of them.
        """
        self._parameters, self._handed = parameters, handed
        self._all_here = all(has_gradient)
        self._world = wire.world
        is_on_gpu = wire.world.device.type == "cuda" and not wire.world.is_fake
        issued = wire.issued_checksum if stage.gather is Move.ALL_GATHER else None
        self._compares = issued is not None
        checks = [] if issued is None else checksum_terms(issued)
        self._contributed = [0.0, *has_gradient, *checks]
        # Memory that is not pinned would be copied while the host waits.
        terms = torch.tensor(
            self._contributed, dtype=torch.float64, device="cpu", pin_memory=is_on_gpu
        )
        self._sums = terms.to(wire.world.device, non_blocking=True)
        # Of the ranks that update by the same gradients, all or the replicas, only the first contributes their squares;
        # where replicas step by themselves each has gradients of its own.
        counted = [
            each.gradient for each in handed if not wire.sums_each_step or each.shared_by.rank == 0
        ]
        if counted:
            # Norms in bfloat16 would keep three digits, and a sum in float32 not every element.
            dtypes = {each.dtype for each in counted}  # of several where a part is on the host
            dtype = reduce(torch.promote_types, dtypes, torch.float32)
            norms = torch._foreach_norm(_slices(counted), dtype=dtype)
            self._sums[0] = torch.stack(list(norms)).double().square().sum()
        self._summed = wire.sum_scalar_later(self._sums, "norm", wire.stepping)

    def norm(self) -> Tensor:
        """Return the norm of all gradients, 0-dim float32; float64 where the first parameter is."""
        self._summed.wait()
        is_double = any(each.dtype is torch.float64 for each in self._parameters[:1])
        return self._sums[0].sqrt().to(torch.float64 if is_double else torch.float32)

    def with_gradient(self) -> list[OptimizerInput]:
        """Return what was handed over of the parameters for which any rank has a gradient."""
        if self._all_here:
            return [*self._handed]
        self._summed.wait()
        # Ranks that do not exist say nothing.
        is_fake = self._world.is_fake
        summed = self._contributed if is_fake else self._world.read_later(self._sums)()
        counts = dict(zip(self._parameters, summed[1:], strict=False))
        return [each for each in self._handed if counts[each.parameter] > 0]

    def start_comparing_gathers(self) -> Callable[[], None]:
        """Start to read the sums; the call that is returned waits for them, and keeps no gradient alive until then.

        It raises RuntimeError on all ranks if they did not gather the same, see [Note: same gathers].
        """
        if not self._compares or self._world.is_fake:
            return lambda: None
        self._summed.wait()
        return partial(_expect_same_gathers, self._world.read_later(self._sums))


def _expect_same_gathers(read_sums: Callable[[], list[float]]) -> None:
    if not checksums_were_equal(read_sums()[-len(checksum_terms(0)) :]):
        raise RuntimeError(
            "the ranks do not do the same: at some time they used their blocks in different orders, so that "
            "they computed with the weights of other blocks; run the same blocks in one order on every rank, "
            "or use zero2"
        )


def _slices(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Cut large tensors on a CPU, where torch adds one square after the other: of 8 M in float32 0.7 % may be lost."""
    sliced: list[Tensor] = []
    for each in tensors:
        is_large = each.device.type == "cpu" and each.numel() > ELEMENTS_OF_A_NORM
        sliced += each.view(-1).split(ELEMENTS_OF_A_NORM) if is_large else [each]
    return sliced
