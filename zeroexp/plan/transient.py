"""Memory that exists for a moment beside the model states: what our engine allocates in backward and in the step.

    backward    gradients of the unit that is being reduced, a cast to the dtype that travels, messages in flight
    step        gradients cast to the master's dtype, all at once

The largest unit counts, with as many reductions in flight as the transport allows. Activations, logits and what
torch's operations need inside are not in here: they depend on the batch, and no closed form knows them.
"""

from __future__ import annotations

from zeroexp.plan.closed_forms import ITEMSIZE, ShardedForm, UnitsOfOneShape
from zeroexp.sharding.placement import Move, Placement

PHASES = ("backward", "step")


def transient_bytes(form: ShardedForm, phase: str, rank: int) -> dict[str, int]:
    """Return an upper bound of the bytes that `rank` holds for a moment in one of PHASES, by name of the term."""
    reduce, master = ITEMSIZE[form.precision.reduce], ITEMSIZE[form.precision.master]
    if phase == "step":
        casts = form.precision.reduce != form.precision.master
        return {"cast to master": form.held_elements(rank).owned * master if casts else 0}
    units = [unit for unit in form.units_by_shape if unit.unit.trainable]
    compute = ITEMSIZE[form.precision.compute]
    largest = max((_numel(unit) for unit in units), default=0)
    alone = form.world_size == 1
    stays = alone or form.stage.gradients is not Placement.SHARD  # reduced gradients are as large
    casts = compute != reduce
    return {
        "kept units": form.kept_bytes,
        "unit's gradients": compute * largest if casts or not stays else 0,
        "cast to reduce": reduce * largest if casts and not stays else 0,
        "messages": 0
        if alone
        else max((_in_flight(form, unit, rank) for unit in units), default=0),
        "gather message": 0 if alone else _gather_message(form, rank),
    }


def _numel(unit: UnitsOfOneShape) -> int:
    return sum(chunk.unpadded_numel for chunk in unit.unit.trainable)


def _in_flight(form: ShardedForm, unit: UnitsOfOneShape, rank: int) -> int:
    """Return the bytes of messages of gradients in flight: what is sent, and what arrives from peers."""
    itemsize, facts = ITEMSIZE[form.precision.reduce], form.schedule.facts
    num = 1 + (facts.reductions_in_flight if form.schedule.overlap else 0)
    most = 0
    for bucket in unit.buckets:
        chunks = [part.chunk for part in bucket.slices]
        whole = sum(form.moved_numel(chunk) for chunk in chunks)
        own = sum(chunk.section(rank).stop - chunk.section(rank).start for chunk in chunks)
        if facts.is_collective:
            held = whole if form.reduction is Move.ALL_REDUCE else whole + own
        elif facts.shares_memory and facts.moves_on_wait:
            held = 0  # gradients lie in slots that all peers read: they are among the buffers
        else:
            held = (form.world_size - 1) * own
        most = max(most, held)
    return num * most * itemsize


def _gather_message(form: ShardedForm, rank: int) -> int:
    """Return the bytes in which the backend's collective moves several chunks at once."""
    gathers = Move.ALL_GATHER in (form.stage.gather, form.stage.publish)
    if not (gathers and form.schedule.facts.is_collective):
        return 0
    itemsize, most = ITEMSIZE[form.precision.compute], 0
    for alike in form.units_by_shape:
        chunks = alike.unit.chunks
        if len(chunks) > 1:
            sections = [chunk.section(rank) for chunk in chunks]
            own = sum(section.stop - section.start for section in sections)
            most = max(most, own + sum(chunk.padded_numel for chunk in chunks))
    return most * itemsize
