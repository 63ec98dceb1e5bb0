"""Ctrl-C, SIGTERM and SIGHUP: the first ends the work in order, the next ends waiting for others, none says more."""

from __future__ import annotations

import signal
from types import FrameType

_num_asked = 0


def listen() -> None:
    """The first of these signals raises KeyboardInterrupt; one that is ignored stays so, as nohup has it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _ask)


def impatient() -> bool:
    """Whether somebody asked more than once."""
    return _num_asked > 1


def _ask(number: int, frame: FrameType | None) -> None:
    global _num_asked
    _num_asked += 1
    if _num_asked == 1:
        raise KeyboardInterrupt
