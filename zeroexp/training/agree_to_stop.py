"""Ending a run early at a step boundary: somebody asks one rank, and all ranks agree on the step.

A batch system signals ranks at different moments, and perhaps only some of them. The request therefore travels with the
loss, in the sum over ranks that every step makes anyway: a step whose sum contains a request is the last on every rank.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from types import FrameType

ASKS_TO_STOP = (signal.SIGUSR2, signal.SIGTERM)
SAVED = 75  # exit code of a rank that stopped as asked and left a checkpoint; EX_TEMPFAIL: try again later


@dataclass
class Stop:
    asked: bool = False  # this rank was asked to stop
    agreed: bool = False  # all ranks stop after the same step; only the training loop sets it

    def listen(self, *numbers: signal.Signals) -> None:
        """Set `asked` when one of these signals arrives.

        Signals that arrived while this process started count too, if its parent had blocked them.
        """
        for number in numbers:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
