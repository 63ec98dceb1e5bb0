"""Ctrl-C, SIGTERM and SIGHUP: the first ends the work in order, the second also ends waits, further ones do nothing."""

from __future__ import annotations

import signal
from types import FrameType

_num_asked = 0


def handle_ctrl_c() -> None:
    """Have the first of these signals raise KeyboardInterrupt. One that is ignored, as under nohup, stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _ask)


def was_asked_twice() -> bool:
    """Return whether more than one of the signals came."""
    return _num_asked > 1


def _ask(number: int, frame: FrameType | None) -> None:
    global _num_asked
    _num_asked += 1
    if _num_asked == 1:
        raise KeyboardInterrupt
