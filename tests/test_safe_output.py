"""Standard output and error that end no work."""

from __future__ import annotations

import os
import threading

from zeroexp.process import safe_output


def test_a_full_pipe_that_does_not_block_is_waited_for():
    """Node and ssh share such pipes with what they start."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        filled = os.write(writing, bytes(1 << 24))
        stream = safe_output._text(None, writing)
        reader = threading.Timer(0.05, os.read, (reading, filled))
        reader.start()
        print("all of it", file=stream, flush=True)
        reader.join()
        assert os.read(reading, 100) == b"all of it\n"
    finally:
        os.close(reading)
        os.close(writing)
