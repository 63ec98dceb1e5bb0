"""Ending a run early at a step boundary: somebody asks one rank, and all ranks agree on the step.

A batch system signals ranks at different moments, and some of them only. The wish therefore travels beside the loss, in
the sum that every step makes anyway: a step whose sum holds a wish is the last one, on every rank.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from types import FrameType

ASKS_TO_STOP = (signal.SIGUSR2, signal.SIGTERM)
SAVED = 75  # exit code of a rank that stopped as asked and left a checkpoint; EX_TEMPFAIL: try again later


@dataclass
class Stop:
    asked: bool = False  # this rank
    agreed: bool = False  # by all ranks, after the same step; only the training loop sets it

    def listen(self, *numbers: signal.Signals) -> None:
        """To signals, also to those that came while this process started, if its parent blocked them."""
        for number in numbers:
            signal.signal(number, self._ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
