"""End the process of a rank at once when its work is done, without the interpreter's finalization.

Finalization kills threads that ask for the interpreter. If that hits a gloo thread just as it releases its last tensor,
the process dies (`terminate called without an active exception`, SIGABRT), and a finished run counts as failed.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def run_and_leave(run: Callable[[], object]) -> NoReturn:
    """Run and exit with the code of a raised SystemExit, 1 and a traceback for any other exception, else 0."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
