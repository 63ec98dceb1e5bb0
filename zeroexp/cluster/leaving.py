"""How the process of a rank ends: at once when its work is done, without the interpreter's own end.

That end kills threads that ask for the interpreter; one of gloo's, letting go of its last tensor just then, takes the
process with it (`terminate called without an active exception`, SIGABRT), and a run that is over counts as failed.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def run_and_leave(run: Callable[[], object]) -> NoReturn:
    """Exit code: that of the SystemExit it raises, 1 and a traceback for any other exception, else 0."""
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
