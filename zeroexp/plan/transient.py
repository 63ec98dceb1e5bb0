"""Memory that exists for a moment beside the model states: what our engine allocates in backward and in the step.

    backward    units gathered outside of pools, gradients that are not reduced yet, casts to the dtype that travels,
                messages in flight
    step        gradients cast to the master's dtype, all at once; messages of weights in flight

All terms are upper bounds, and so is their sum: the largest unit counts, with as many reductions in flight as the
transport allows. Activations, logits and what torch's operations need inside are not in here: they depend on the batch,
and no closed form knows them. tests/plan/test_bound.py compares the bound with rehearsals.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.cut.bucket import Bucket
from zeroexp.cut.chunk import Chunk
from zeroexp.cut.stage import Move, Placement
from zeroexp.plan.closed_forms import ITEMSIZE, ShardedForm, UnitsOfOneShape

PHASES = ("backward", "step")


def transient_bytes(form: ShardedForm, phase: str, rank: int) -> dict[str, int]:
    """Return an upper bound of the bytes that `rank` holds for a moment in one of PHASES, by name of the term."""
    if phase == "step":
        casts = form.precision.reduce != form.precision.master
        master = ITEMSIZE[form.precision.master]
        return {
            "cast to master": form.held_elements(rank).owned * master if casts else 0,
            "gather messages": max(_publish_messages(form, rank), _gather_messages(form, rank)),
            "pages": _unused_page_bytes(form),
        }
    return {
        "kept units": form.most_beside_pools,
        **_gradient_bytes(form),
        "messages": max((_messages_in_flight(form, u, rank) for u in _trained(form)), default=0),
        "gather messages": _gather_messages(form, rank),
        "pages": _unused_page_bytes(form),
    }


def _gradient_bytes(form: ShardedForm) -> dict[str, int]:
    """Return the bytes of gradients on their way to where they rest.

    A first gradient that is all-reduced, or reduced by one rank alone, stays where it is and becomes the sum.
    """
    compute, reduce = ITEMSIZE[form.precision.compute], ITEMSIZE[form.precision.reduce]
    left = form.gradient_itemsize
    schedule, units = form.schedule, _trained(form)
    accumulates = schedule.accumulation > 1
    adds_sums = accumulates and schedule.reduce_each == "microbatch"
    shards = form.stage.gradients is Placement.SHARD
    moves = shards and form.world_size > 1
    casts = left != reduce
    whole, unit = form.num_trainable, max((_numel(u.unit.trainable) for u in units), default=0)
    bucket = max((_numel_behind(b, u.unit.trainable) for u in units for b in u.buckets), default=0)
    in_flight = _most_in_flight(form) - 1
    holds_terms = adds_sums or (moves and not schedule.facts.is_collective)
    adds_up = accumulates and not adds_sums  # autograd does, until the last microbatch
    unreduced = (left if moves else left - reduce) * whole if adds_up else 0
    widened = left if accumulates and left > compute else 0  # beside what it is added to
    leaves_unit = (moves and not unreduced) or adds_sums or casts
    return {
        "unreduced gradients": unreduced,
        "unit's gradients": left * unit if leaves_unit else 0,
        "cast to reduce": reduce * unit if casts and (shards or adds_sums) else 0,
        "gradients in flight": reduce * bucket * in_flight if holds_terms else 0,
        "largest gradient": (compute * (accumulates or left > compute) + widened)
        * _largest_parameter(units),
    }


def _most_in_flight(form: ShardedForm) -> int:
    """Return how many reductions exist at once: the one just launched, and those in flight beside it."""
    schedule = form.schedule
    most = 1 + (schedule.facts.reductions_in_flight if schedule.overlap else 0)
    if schedule.accumulation > 1 and schedule.reduce_each == "microbatch":
        return most  # those of a microbatch may be in flight in the next one
    return min(most, sum(each.num_units * len(each.buckets) for each in _trained(form)) or 1)


def _messages_in_flight(form: ShardedForm, unit: UnitsOfOneShape, rank: int) -> int:
    """Return the bytes of messages of gradients in flight: what is sent, what arrives from peers, and their sum."""
    itemsize, facts = ITEMSIZE[form.precision.reduce], form.schedule.facts
    num, most = 1 if facts.moves_on_wait else _most_in_flight(form), 0
    for bucket in unit.buckets:
        chunks = _chunks_of(bucket)
        whole, own = sum(map(form.moved_numel, chunks)), _section_numel(chunks, rank)
        if facts.is_collective:
            held = whole if form.reduction is Move.ALL_REDUCE else whole + own
        elif form.world_size == 1:
            held = 0
        elif facts.shares_memory and facts.moves_on_wait:
            held = own  # the terms lie in slots that all peers read: they are among the buffers
        else:
            held = form.world_size * own
        most = max(most, held)
    return num * most * itemsize


def _gather_messages(form: ShardedForm, rank: int) -> int:
    """Return the bytes of messages of units that are gathered: the one that is needed, and those ahead of it."""
    if form.stage.gather is not Move.ALL_GATHER:
        return 0
    most = max(_message_bytes(form, each.unit.chunks, rank) for each in form.units_by_shape)
    return min(form.schedule.num_pools, len(form.units)) * most


def _publish_messages(form: ShardedForm, rank: int) -> int:
    """Return the bytes of messages of updated weights: a step starts those of all units before one is waited for."""
    if form.stage.publish is not Move.ALL_GATHER:
        return 0
    return sum(
        each.num_units * _message_bytes(form, each.unit.trainable, rank)
        for each in form.units_by_shape
    )


def _message_bytes(form: ShardedForm, chunks: Sequence[Chunk], rank: int) -> int:
    """Return the bytes in which the backend's collective moves several chunks at once: this rank's part and all."""
    if not form.schedule.facts.is_collective or len(chunks) < 2:
        return 0
    numel = _section_numel(chunks, rank) + sum(chunk.padded_numel for chunk in chunks)
    return numel * ITEMSIZE[form.precision.compute]


def _unused_page_bytes(form: ShardedForm) -> int:
    """Return the bytes by which the pages that hold a rank's weights for its peers are larger than these."""
    if not form.schedule.facts.shares_memory or form.world_size == 1:
        return 0
    return form.schedule.facts.page_bytes * sum(len(unit.chunks) for unit in form.units)


def _trained(form: ShardedForm) -> list[UnitsOfOneShape]:
    return [each for each in form.units_by_shape if each.unit.trainable]


def _chunks_of(bucket: Bucket) -> list[Chunk]:
    return [part.chunk for part in bucket.slices]


def _numel_behind(bucket: Bucket, chunks: Sequence[Chunk]) -> int:
    """Return the elements of the gradients of which the bucket has a part: each stays until all of it has gone."""
    members = (chunks[part.index].members[r.member] for part in bucket.slices for r in part.ranges)
    return sum(member.stop - member.start for member in members)


def _numel(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.unpadded_numel for chunk in chunks)


def _section_numel(chunks: Sequence[Chunk], rank: int) -> int:
    return sum(chunk.section(rank).stop - chunk.section(rank).start for chunk in chunks)


def _largest_parameter(units: Sequence[UnitsOfOneShape]) -> int:
    members = (m for each in units for chunk in each.unit.trainable for m in chunk.members)
    return max((member.stop - member.start for member in members), default=0)
