"""Ctrl-C, SIGTERM and SIGHUP: the first ends the work in order, the second also ends waits, further ones do nothing.

Python drops what is raised in a destructor or a weak reference's callback, of which fake tensors have many. Where it
drops the first KeyboardInterrupt, another is raised a moment later.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any, TypeVar

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

Made = TypeVar("Made")
_num_asked = 0
_asked_by = signal.SIGINT  # the first of them


def handle_ctrl_c() -> None:
    """Have the first of these signals raise KeyboardInterrupt. One that is ignored, as under nohup, stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _ask)
    sys.unraisablehook = _ask_again_if_dropped


def was_asked() -> bool:
    """Return whether one of the signals came."""
    return _num_asked > 0


def was_asked_twice() -> bool:
    """Return whether more than one of the signals came."""
    return _num_asked > 1


def has_hung_up() -> bool:
    """Return whether the first of the signals said that the terminal is gone."""
    return was_asked() and _asked_by == signal.SIGHUP


def until_interrupted(each: Iterable[Made], what: str) -> list[Made]:
    """Return what is made one by one; of an interrupted work what there is, if anything, and say so."""
    made: list[Made] = []
    try:
        for one in each:
            made.append(one)
    except KeyboardInterrupt:
        if not made:
            raise
        print(f"zeroexp: interrupted; what follows is of the {what} before", file=sys.stderr)
    return made


def _ask(number: int, frame: FrameType | None) -> None:
    global _num_asked, _asked_by
    _num_asked += 1
    if _num_asked == 1:
        _asked_by = signal.Signals(number)
        raise KeyboardInterrupt


def _ask_again_if_dropped(dropped: Any) -> None:
    if not isinstance(dropped.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    global _num_asked
    seconds = 0.01
    while True:
        _num_asked = 0
        try:  # raised here it would be dropped as well, and a busy machine may be too late to leave
            threading.Timer(seconds, os.kill, (os.getpid(), _asked_by)).start()
            return
        except KeyboardInterrupt:
            seconds *= 2


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, or the thread of it that forked, ends in any way."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl took effect
        raise SystemExit(1)
