"""Signals end the work, wherever they meet it."""

from __future__ import annotations

import subprocess
import sys

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


def test_an_interrupt_that_python_drops_comes_again():
    command = [sys.executable, "-c", CODE]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (run.stdout, run.stderr) == ("ended in order False\n", "")


def test_other_exceptions_that_are_dropped_are_shown():
    code = CODE.replace("os.kill(os.getpid(), signal.SIGTERM)", "raise ValueError('told')")
    code = code.replace("time.sleep(60)", "os.kill(os.getpid(), signal.SIGTERM)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert run.stdout.startswith("ended in order") and "told" in run.stderr
