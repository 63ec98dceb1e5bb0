"""`with strategy.gathered():` shows every parameter whole and readable on every rank, whatever the stage.

It serves penalties on weights, inspection, generation, averages of weights and `model.state_dict()`. All ranks enter
and leave together. Inside a microbatch the backward of what is computed from parameters in the context runs in it too:

    with strategy.microbatch(last=True):
        loss = loss_of(strategy.model(batch))
        with strategy.gathered():
            penalty = sum(parameter.square().sum() for parameter in strategy.model.parameters())
            strategy.backward(loss + 0.01 * penalty / world_size)

With `write=True`, between two steps, values written into the parameters become the weights; every rank must write the
same, or all of them raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zeroexp.comm.collectives import Collectives
from zeroexp.cut.chunk import Span
from zeroexp.zero.assemble import AS_INTEGERS, bit_checksum
from zeroexp.zero.held import Held, unguarded
from zeroexp.zero.schedule import Schedule
from zeroexp.zero.unit import Unit


@contextmanager
def gathered(
    units: Sequence[Unit], schedule: Schedule, wire: Collectives, *, write: bool
) -> Iterator[None]:
    """Pin every unit inside; at the end take over what was written, or raise where `write` is False."""
    if write and schedule.in_microbatch:
        raise RuntimeError(
            "strategy.gathered(write=True) inside a microbatch: backward needs the weights as they were; write "
            "after strategy.step()"
        )
    if any(unit.is_pinned for unit in units):  # an outer `gathered` shows the parameters already
        yield
        return
    if write:
        schedule.drain_collectives()
    is_shown = False
    try:
        for unit in units:
            _pin(unit)
        is_shown = True
        if write:  # peers may still read pieces that are overwritten below
            wire.quiesce()
        yield
        chunks = [held for unit in units for held in unit.held]
        # `sum` visits every chunk, since `_was_written` also takes back parameters that were moved.
        written = sum(_was_written(held, wire.group.rank) for held in chunks) > 0
        if write and not _show_the_same(units, wire):
            raise RuntimeError(
                "ranks wrote different weights inside `with strategy.gathered(write=True):`: write the same on "
                "every rank (the same file, the same seed, or values broadcast from one rank)"
            )
        if write:
            for held in chunks:
                _copy_shown_to_weights(held, wire.group.rank)
    finally:
        for unit in units:
            _unpin(unit)
        schedule.announce_release()
        # After an error too, since peers can gather no piece before it is exposed again; not where memory ran out in a
        # gather, of which all that was gathered is right, and where peers, which go on, do not publish.
        if write and is_shown:
            for unit in units:
                schedule.gathers.publish(unit)
            schedule.gathers.await_published()
    if schedule.in_microbatch:  # ranks that lack gradients have reductions still to launch
        schedule.at_end_of_microbatch.append(lambda: _refuse_written(wire, written=written))
    elif not write:
        _refuse_written(wire, written=written)


def _show_the_same(units: Sequence[Unit], wire: Collectives) -> bool:
    """Tell whether the parameters show the same bits on all ranks, by a checksum; padding is not compared."""
    shown = [held.whole[: held.chunk.unpadded_numel] for unit in units for held in unit.held]
    sums = [bit_checksum(each) for each in shown]
    return wire.same_everywhere(sums, "`strategy.gathered(write=True)`")


def _refuse_written(wire: Collectives, *, written: bool) -> None:
    """Raise on all ranks if on any of them parameters were written."""
    if not wire.same_everywhere(written, "the end of `strategy.gathered()`") or written:
        raise written_while_reading()


def written_while_reading() -> RuntimeError:
    return RuntimeError(
        "parameters were written inside `with strategy.gathered():`, which is for reading; use "
        "strategy.gathered(write=True) to keep what is written"
    )


def _pin(unit: Unit) -> None:
    """Show whole parameters in memory of their own until `_unpin`, whatever the schedule does meanwhile."""
    unit.is_pinned = True
    if not unit.is_sharded:
        unit.arrive()
        return  # the parameters rest whole
    copies = [
        torch.empty(held.chunk.padded_numel, dtype=held.dtype, device=held.device)
        for held in unit.held
    ]
    unit.gather_into(copies)
    for held, copy in zip(unit.held, copies, strict=True):
        held.pinned = copy
    unit.show()


def _unpin(unit: Unit) -> None:
    for held in unit.held:
        held.pinned = None
    unit.is_pinned = False
    if unit.is_sharded:
        unit.show()


def _was_written(held: Held, rank: int) -> bool:
    """Tell whether this rank's part of the weights was changed through the parameters that are shown."""
    if _restore_moved(held):
        return True
    if held.pinned is not None:
        shown = held.pinned[held.chunk.real_section(rank)]
        return not _same_bytes(shown, held.piece[: len(shown)].to(shown))
    if held.master_flat is not None:
        shown = torch.cat([_shown_span(held, span) for span in held.owned])
        return not _same_bytes(shown, held.master_flat.to(shown))
    return False


def _copy_shown_to_weights(held: Held, rank: int) -> None:
    """Copy what was written into the shown parameters into the weights; the caller publishes them."""
    for master, span in zip(held.masters, held.owned, strict=False):
        if held.master_flat is not None:
            _write_over(master.detach().view(-1), _shown_span(held, span))
    if held.pinned is not None:
        shown = held.pinned[held.chunk.real_section(rank)]
        _write_over(held.piece[: len(shown)], shown)


def _write_over(weights: Tensor, shown: Tensor) -> None:
    """Copy the elements that were written; of the others a wider master keeps the digits that are not shown."""
    shown = shown.to(weights.device)
    if weights.dtype is not shown.dtype:
        before, integers = weights.to(shown.dtype), AS_INTEGERS[shown.itemsize]
        written = before.view(integers) != shown.view(integers)  # bit for bit, as nan equals itself
        shown = torch.where(written, shown.to(weights.dtype), weights)
    weights.copy_(shown)


def _restore_moved(held: Held) -> bool:
    """Copy values back from parameters that were given other memory (`.data = ...`); tell whether any was."""
    moved = False
    with unguarded():
        views = held.views_of(held.whole)
        for parameter, view in zip(held.parameters, views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
                parameter.data = view
                moved = True
    return moved


def _shown_span(held: Held, span: Span) -> Tensor:
    """Return the elements of a span in the memory that the parameters show."""
    start = held.chunk.members[span.member].start + span.start
    return held.whole[start : start + span.numel]


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Compare bit for bit, so that a weight that is nan equals itself."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
