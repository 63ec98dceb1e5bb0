"""An engine must be called in this order: microbatches up to the last one, a step, zero_grad, and again.

Every other order would silently train another model, or wait for ranks that do something else. So it raises
RuntimeError, which names the missing call.
"""

from __future__ import annotations

from zeroexp.zero.engine import Engine
from zeroexp.zero.observer import Observer


class CallOrder(Observer):
    """The call that comes next."""

    _in_microbatch = _had_backward = False
    _failed = False  # an exception left reductions behind that peers may not know of
    _last_ended = False  # the last microbatch of a step has ended, and no step has come yet
    _stepped = False  # a step was taken with the gradients that still exist

    def built(self, engine: Engine) -> None:
        # Gradients that can be reduced only once in a step: a second last microbatch would sum again what was summed
        # between replicas.
        of_units = any(unit.reduces_for_hand_over for unit in engine.units)
        self._once = engine.wire.holders.size > 1 or of_units

    def begin_microbatch(self) -> None:
        if self._in_microbatch:
            raise RuntimeError(
                "a microbatch inside a microbatch: end the first one before the next"
            )
        self._refuse_after_failure()
        if self._stepped:
            raise RuntimeError(
                "gradients of the last step are still there: call strategy.zero_grad() between a step and the next "
                "microbatch"
            )
        if self._last_ended and self._once:
            raise RuntimeError(
                "a microbatch(last=True) has ended and another begins: call strategy.step() or "
                "strategy.zero_grad() between, or say last=False for all but the last"
            )
        self._last_ended = self._had_backward = False
        self._in_microbatch = True

    def backward_ended(self) -> None:
        self._had_backward = True

    def end_microbatch(self, *, last: bool) -> None:
        self._in_microbatch = False
        self._last_ended = last

    def abandon_microbatch(self, *, reduced: bool) -> None:
        self._in_microbatch = False
        self._failed = self._failed or reduced

    def step(self, *, is_gathered: bool) -> None:
        self._refuse_after_failure()
        if self._in_microbatch:
            raise RuntimeError(
                "strategy.step() inside a microbatch: call it after the `with` has ended"
            )
        if is_gathered:
            raise RuntimeError(
                "strategy.step() inside strategy.gathered(): call it after the `with` has ended"
            )
        if not self._last_ended:
            raise RuntimeError(
                "strategy.step() without a last microbatch: run one with `microbatch(last=True)`"
            )
        self._last_ended, self._stepped = False, True

    def loading(self) -> None:
        if self._in_microbatch:
            raise RuntimeError(
                "strategy.load_state_dict() inside a microbatch: backward needs the weights as they were; call it "
                "after the `with` has ended"
            )

    def zero_grad(self) -> None:
        if self._in_microbatch and self._had_backward:
            raise RuntimeError(
                "strategy.zero_grad() inside a microbatch whose gradients are on their way: call it after the `with` "
                "has ended"
            )
        self._last_ended = self._stepped = False

    def _refuse_after_failure(self) -> None:
        if self._failed:
            raise RuntimeError(
                "an exception ended a backward whose gradients had partly been reduced, so that ranks may differ: "
                "build the engine again and load the last checkpoint"
            )
