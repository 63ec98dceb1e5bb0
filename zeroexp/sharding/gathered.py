"""`with strategy.gathered():` every parameter is whole and readable on every rank, whatever the stage.

For penalties on weights, inspection, generation, averages of weights, `model.state_dict()`. All ranks enter and leave
together. Inside a microbatch the context covers the backward of whatever was computed from the parameters in it:

    with strategy.microbatch(last=True):
        loss = loss_of(strategy.model(batch))
        with strategy.gathered():
            penalty = sum(parameter.square().sum() for parameter in strategy.model.parameters())
            strategy.backward(loss + 0.01 * penalty / world_size)

With `write=True`, between two steps, what is written into the parameters (the same on every rank) becomes the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zeroexp.comm.collectives import Collectives
from zeroexp.sharding.overlap import Schedule
from zeroexp.sharding.unit import Unit


@contextmanager
def gathered(
    units: Sequence[Unit], schedule: Schedule, wire: Collectives, *, write: bool
) -> Iterator[None]:
    """Pin every unit, meanwhile; then take over what was written, or refuse it."""
    if write and schedule.in_microbatch:
        raise RuntimeError(
            "strategy.gathered(write=True) inside a microbatch: backward needs the weights as they were; write "
            "after strategy.step()"
        )
    if any(unit.is_pinned for unit in units):  # one inside another
        yield
        return
    if write:
        schedule.drain()
    else:
        schedule.await_published()
    for unit in units:
        unit.pin()
    if write:  # every peer has read what it was handed of the weights that are overwritten now
        wire.quiesce()
    try:
        yield
        written = sum(unit.was_written() for unit in units) > 0  # each takes back what was moved
        written = not wire.same_everywhere(int(written)) or written
        if write:
            for unit in units:
                unit.take_over()
    finally:
        for unit in units:
            unit.unpin()
        if write:  # after an error too: nothing is on offer any more
            for unit in units:
                schedule.publish(unit)
    if written and not write:
        raise written_while_reading()


def written_while_reading() -> RuntimeError:
    return RuntimeError(
        "parameters were written inside `with strategy.gathered():`, which is for reading; use "
        "strategy.gathered(write=True) to keep what is written"
    )
