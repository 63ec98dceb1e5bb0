"""A rank tells how far it is by a few numbers in memory that it shares with the process that started it.

That process looks whether they move, and so notices a rank that hangs (watchdog/hung.py). The rank writes them in less
than a microsecond and never waits. A thread of the rank looks too (watchdog/differs.py); without such a process the
numbers lie in a list.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
from collections.abc import Sequence

DESCRIPTOR = "ZEROEXP_ADVANCE"  # the variable that holds the shared memory's descriptor
LEAVES_STACK = signal.SIGUSR1  # has a rank write the stacks of its threads into its log

BEFORE, MEETING, BUILDING, DATA, FORWARD, BACKWARD, STEP, VALIDATION, SAVING, AFTER = PHASES = (
    *("the start", "the meeting of ranks", "the building of the model", "data"),
    *("forward", "backward", "step", "validation", "saving", "end"),
)
# A rank that stands still in one of these phases for long hangs. Saving and writing files may take any time.
MUST_ADVANCE = (DATA, FORWARD, BACKWARD, STEP, VALIDATION)
# Importing and loading may take any time too, as long as the process does anything at all.
STARTS = (BEFORE, MEETING, BUILDING)

# The places of the numbers: the step, the phases entered in it, the moves of this phase, the phase, "leaves its stack".
NUM_STEPS, NUM_PHASES, NUM_MOVES, PHASE, LISTENS = range(5)
NUM_BYTES = 5 * 8

_numbers: list[int] | memoryview[int] = [0] * 5


def create() -> tuple[int, memoryview[int]]:
    """Return a descriptor for a rank that is about to start, and its numbers."""
    descriptor = os.memfd_create("zeroexp-advance")
    os.ftruncate(descriptor, NUM_BYTES)
    return descriptor, _map(descriptor)


def share() -> None:
    """Share this rank's numbers from now on, and leave a stack when asked. Call it once the log is standard error."""
    global _numbers
    if descriptor := os.environ.get(DESCRIPTOR):
        _numbers = _map(int(descriptor))
        faulthandler.register(LEAVES_STACK, file=sys.stderr, all_threads=True)
        _numbers[LISTENS] = 1


def is_watched() -> bool:
    """Whether the process that started this rank looks at its numbers."""
    return isinstance(_numbers, memoryview)


def note_phase(step: int, phase: str) -> None:
    """Enter one of PHASES in this step."""
    numbers = _numbers
    numbers[NUM_PHASES] = numbers[NUM_PHASES] + 1 if numbers[NUM_STEPS] == step else 1
    numbers[NUM_STEPS], numbers[NUM_MOVES] = step, 0
    numbers[PHASE] = PHASES.index(phase)


def count_move() -> None:
    """Count a move between ranks that starts, or a wait for one that begins."""
    _numbers[NUM_MOVES] += 1


def done(numbers: Sequence[int] | None = None) -> tuple[int, int, int]:
    """Return the steps, phases of this step and moves of this phase that a rank has done; None is this one."""
    numbers = numbers or _numbers
    return numbers[NUM_STEPS], numbers[NUM_PHASES], numbers[NUM_MOVES]


def _map(descriptor: int) -> memoryview[int]:
    return memoryview(mmap.mmap(descriptor, NUM_BYTES)).cast("q")
