"""Units are assembled from groups of parameters: each group is cut, its memory allocated, its values moved there."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from torch import nn

from zeroexp.comm.collectives import Collectives
from zeroexp.comm.sizes import slot_bytes, slot_bytes_of_sums
from zeroexp.cut.chunk import FROZEN, Chunk
from zeroexp.cut.layout import LAYOUTS, Units, lay_out
from zeroexp.cut.stage import Placement, Stage
from zeroexp.interface.values import Read, Values
from zeroexp.sharding.dtypes import Dtypes
from zeroexp.sharding.grouping import Group, specs_of
from zeroexp.sharding.guard import guard_parameters
from zeroexp.sharding.options import Options, SettledOptions
from zeroexp.sharding.state import ChunkTensors, allocate
from zeroexp.sharding.unit import Unit


def make_units(
    groups: Sequence[Group],
    stage: Stage,
    options: Options,
    settled: SettledOptions,
    dtypes: Dtypes,
    wire: Collectives,
    values: Values | None = None,
) -> list[Unit]:
    """Cut every group and move its parameters, or their `values`, to where they rest."""
    specs = [specs_of(group) for group in groups]
    layout = _agreed_layout(options.family, specs, options.owners, wire)
    bucket_bytes = settled.bucket_bytes
    _reserve(layout, stage, dtypes, wire, bucket_bytes)
    units: list[Unit] = []
    for group, chunks in zip(groups, layout, strict=True):
        held: list[ChunkTensors] = []
        for chunk in chunks:
            held.append(allocate(chunk, group.parameters, stage, dtypes, wire))
            _move_into(held[-1], deferred=values is not None)
        units.append(Unit(group.name, held, stage, dtypes, wire, bucket_bytes))
    if values is not None:
        _load_values(values, units)
    for unit in units:
        unit.rest()
    return units


def _agreed_layout(
    family: str, specs: Units, owners: str, wire: Collectives
) -> list[tuple[Chunk, ...]]:
    """Cut as all ranks do. Raises ValueError on all ranks where a rule of others cuts differently on one of them."""
    size, layout, refusal = wire.group.size, [], None
    try:
        layout = lay_out(family, specs, size, owners=owners)
    except ValueError as error:
        refusal = error
    if not wire.same_everywhere(zlib.crc32(f"{layout} {refusal}".encode())):
        rule = f"strategy.owners={owners} or its layout" if LAYOUTS[family].has_owners else "it"
        raise ValueError(
            f"strategy.implementation={family}: ranks cut the parameters differently: {rule} must follow from names, "
            "sizes and the number of ranks alone (`hash` of a text, pids, time and unseeded chance differ by rank)"
        )
    if refusal is not None:
        raise refusal
    return layout


def _move_into(tensors: ChunkTensors, *, deferred: bool) -> None:
    """Copy what the parameters hold, if anything, to where it rests; whole ones become views of that memory."""
    guard_parameters(tensors.parameters, [member.name for member in tensors.chunk.members])
    if not deferred:
        for member, parameter in enumerate(tensors.parameters):
            tensors.write_parameter(member, _ranges_of(parameter))
    if tensors.full is not None:
        tensors.views = tensors.views_of(tensors.full)
        for parameter, view in zip(tensors.parameters, tensors.views, strict=True):
            parameter.data = view


def _reserve(
    layout: Sequence[Sequence[Chunk]],
    stage: Stage,
    dtypes: Dtypes,
    wire: Collectives,
    bucket_bytes: int | None,
) -> None:
    """Announce the bytes of each tensor of parameters at rest, and of the largest reductions of a unit in flight."""
    rank = wire.group.rank
    sharded = stage.parameters is Placement.SHARD
    resting = [
        (chunk.section_numel(rank) if sharded else chunk.padded_numel) * dtypes.compute.itemsize
        for chunks in layout
        for chunk in chunks
    ]
    trainable = [[chunk for chunk in chunks if chunk.kind != FROZEN] for chunks in layout]
    itemsize, holders = dtypes.reduce.itemsize, wire.holders
    wire.reserve(
        resting,
        slot_bytes(trainable, stage, rank, itemsize, bucket_bytes),
        slot_bytes_of_sums(trainable, (rank, holders.rank), holders.size, itemsize, bucket_bytes),
    )


def _load_values(values: Values, units: Sequence[Unit]) -> None:
    """Fill parameters that had no values yet, one after the other, with what this rank holds of each."""
    places = {
        member.name: (tensors, index)
        for unit in units
        for tensors in unit.chunks
        for index, member in enumerate(tensors.chunk.members)
    }
    for name, read in values:
        if name in places:  # no unit holds an empty parameter
            tensors, member = places.pop(name)
            tensors.write_parameter(member, read)
    if places:
        raise ValueError(
            f"values: there are none of {next(iter(places))}; give those of every parameter"
        )


def _ranges_of(parameter: nn.Parameter) -> Read:
    flat = parameter.detach().reshape(-1)
    return lambda start, stop: flat[start:stop]
