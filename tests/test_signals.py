"""Signals end the work, wherever they meet it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, signal, time
from zeroexp.process import signals

class Left:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass  # what is raised here is dropped

signals.handle_ctrl_c()
try:
    Left()
    time.sleep(60)
except KeyboardInterrupt:
    print("ended in order", signals.was_asked_twice())
"""


# A busy machine: whoever starts a thread goes on when a moment has passed.
BUSY = """
import threading
def start(thread, start=threading.Thread.start):
    start(thread)
    time.sleep(0.05)
threading.Thread.start = start
"""


@pytest.mark.parametrize("more", ["", BUSY], ids=["quiet", "busy"])
def test_an_interrupt_that_python_drops_comes_again(more):
    code = CODE.replace("signals.handle_ctrl_c()", f"signals.handle_ctrl_c(){more}")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (run.stdout, run.stderr) == ("ended in order False\n", "")


def test_other_exceptions_that_are_dropped_are_shown():
    code = CODE.replace("os.kill(os.getpid(), signal.SIGTERM)", "raise ValueError('told')")
    code = code.replace("time.sleep(60)", "os.kill(os.getpid(), signal.SIGTERM)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert run.stdout.startswith("ended in order") and "told" in run.stderr
