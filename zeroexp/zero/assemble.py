"""How an engine is built: ranks start alike, each unit is cut, its memory allocated, its values moved there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from zeroexp.comm.collectives import Collectives
from zeroexp.comm.shared_memory_sizes import slot_bytes, slot_bytes_of_sums
from zeroexp.cut.chunk import FROZEN, Chunk
from zeroexp.cut.layout import LAYOUTS, Units
from zeroexp.cut.stage import Placement, Stage
from zeroexp.interface.module_buffers import bytes_of, shares_elements
from zeroexp.interface.values import Read, Values
from zeroexp.process import world as worlds
from zeroexp.zero.grouping import Group, specs_of
from zeroexp.zero.held import Held, allocate
from zeroexp.zero.observer import Observer
from zeroexp.zero.options import Dtypes, Options
from zeroexp.zero.unit import Unit

AS_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by itemsize


def start_alike(
    module: nn.Module,
    settings: Sequence[Any],
    param_groups: Sequence[dict[str, Any]],
    values: Values | None,
    wire: Collectives,
) -> None:
    """Give all ranks the weights of rank 0. Raises ValueError on all of them if settings or models differ."""
    names = {parameter: name for name, parameter in module.named_parameters()}

    def told(option: Any) -> Any:
        """Tensors are read at the start, where nothing runs ahead; fake ones have no values."""
        return option if wire.world.is_fake else tree_map_only(Tensor, bit_checksum, option)

    groups = [
        {
            k: [names[p] for p in v] if k == "params" else comparable(told(v))
            for k, v in group.items()
        }
        for group in param_groups
    ]
    settings = [*settings, groups]
    if not wire.same_everywhere(settings):
        raise ValueError(
            "ranks were given different settings (stage, options, dtypes, max_grad_norm, blocks or param_groups): "
            f"give the same on each; here {settings[0]}, {settings[1]}"
        )
    agree_on_weights(module, wire.world, values, wire.same_everywhere)


def comparable(option: Any) -> Any:
    """Return an option of a parameter group, with the type alone of what ranks can not compare in it.

    Objects print addresses, sets another order on each rank, and to read a tensor on a GPU would stop the host.
    """
    plain = int | float | str | torch.dtype | None
    return tree_map(lambda each: each if isinstance(each, plain) else type(each).__name__, option)


def agree_on_weights(
    module: nn.Module,
    world: worlds.World,
    values: Values | None,
    same_everywhere: Callable[[object], bool] = worlds.same_everywhere,
) -> None:
    """Give every rank the weights of rank 0, as DistributedDataParallel does; they are sent only if they differ.

    Raises ValueError where names, shapes, dtypes or `requires_grad` differ, and where `values` do, since no rank has
    them all.
    """
    if world.size == 1 or world.is_fake:
        return
    shapes = [
        f"{name} {list(p.shape)} {p.dtype} {p.requires_grad}"
        for name, p in module.named_parameters()
    ]
    if not same_everywhere(shapes):
        raise ValueError(
            "ranks have different models (names, shapes, dtypes or what is frozen): build the same model on each"
        )
    tensors = [each for each in module.buffers() if each.layout is torch.strided]
    if values is None:
        tensors += module.parameters()
    elif not same_everywhere(values.fingerprint()):
        raise ValueError(
            "ranks would start from different weights: give each the same seed and the same files"
        )
    sums = [bit_checksum(tensor) for tensor in tensors]
    if same_everywhere(sums):
        return
    if world.rank == 0:
        warnings.warn("ranks start from different weights: all take those of rank 0", stacklevel=4)
    for tensor in tensors:
        sent = bytes_of(tensor).clone()  # bytes, since the backend lacks some dtypes
        worlds.broadcast(sent)
        if not torch.equal(sent, bytes_of(tensor)):
            _take(tensor, sent.view(tensor.dtype).view(tensor.shape))


def _take(tensor: Tensor, values: Tensor) -> None:
    """Write the values; a tensor whose elements share memory, as an expanded buffer, gets memory of its own."""
    if shares_elements(tensor):
        tensor.data = values
    else:
        tensor.detach().copy_(values)


def bit_checksum(tensor: Tensor) -> int:
    """Return a sum over the bits of the values, each times its place; other values almost certainly have another sum.

    A plain sum would be that of the same values in another order too. Products and sums wrap around. It is read once,
    since that stops the host, and taken in parts, since it needs 16 bytes for each element of one, and replicas are
    compared so after a step: with larger parts the first two steps would hold most then.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    as_integers = AS_INTEGERS.get(flat.itemsize, torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    numel = 1 << 16 if flat.device.type == "cpu" else 1 << 20  # of fewer a GPU waits for the host
    for index, part in enumerate(flat.view(as_integers).split(numel)):
        places = torch.arange(1, len(part) + 1, device=part.device)
        total.add_(places.mul_(part).sum(), alpha=2 * index + 1)
    return int(total)


def make_units(
    groups: Sequence[Group],
    stage: Stage,
    options: Options,
    dtypes: Dtypes,
    wire: Collectives,
    observer: Observer,
    values: Values | None = None,
) -> list[Unit]:
    """Cut every group and move its parameters, or their `values`, to where they rest."""
    specs = [specs_of(group) for group in groups]
    layout = _agreed_layout(options, specs, wire)
    bucket_bytes = options.bucket_bytes
    in_group = [[chunk.for_ranks(wire.group.size) for chunk in chunks] for chunks in layout]
    of_units = [dtypes.of_unit(group.name) for group in groups]
    _reserve(in_group, stage, of_units, wire, bucket_bytes)
    units: list[Unit] = []
    for group, chunks, of_unit in zip(groups, layout, of_units, strict=True):
        held: list[Held] = []
        for chunk in chunks:
            held.append(allocate(chunk, group.parameters, stage, of_unit, wire, observer.showing))
            _move_into(held[-1], deferred=values is not None)
            observer.held(held[-1])
        each = options.reduce_each == "microbatch"
        unit = Unit(group.name, held, stage, of_unit, wire, bucket_bytes, each_microbatch=each)
        units.append(unit)
    if values is not None:
        _load_values(values, units)
    for unit in units:
        unit.rest()
    return units


def _agreed_layout(options: Options, specs: Units, wire: Collectives) -> list[tuple[Chunk, ...]]:
    """Cut as all ranks do. Raises ValueError on all ranks where a rule of others cuts differently on one of them."""
    name, layout, refusal = options.layout, [], None
    try:
        layout = options.lay_out(specs, wire.world.size)
    except ValueError as error:
        refusal = error
    if not wire.same_everywhere((layout, refusal)):
        rule = (
            f"strategy.owners={options.owners} or its layout" if LAYOUTS[name].has_owners else "it"
        )
        raise ValueError(
            f"strategy.implementation={name}: ranks cut the parameters differently: {rule} must follow from names, "
            "sizes and the number of ranks alone (`hash` of a text, pids, time and unseeded chance differ by rank)"
        )
    if refusal is not None:
        raise refusal
    return layout


def _move_into(held: Held, *, deferred: bool) -> None:
    """Copy what the parameters hold, if anything, to where it rests; whole ones become views of that memory."""
    if not deferred:
        for member, parameter in enumerate(held.parameters):
            held.write_parameter(member, _ranges_of(parameter))
    if held.full is not None:
        held.place_in(held.full)
        held.point_at(held.views)


def _reserve(
    layout: Sequence[Sequence[Chunk]],
    stage: Stage,
    dtypes: Sequence[Dtypes],
    wire: Collectives,
    bucket_bytes: int | None,
) -> None:
    """Announce the bytes of each tensor of parameters at rest, and of the largest reductions of a unit in flight."""
    rank = wire.group.rank
    sharded = stage.parameters is Placement.SHARD
    resting = [
        (chunk.section_numel(rank) if sharded else chunk.padded_numel) * of_unit.compute.itemsize
        for chunks, of_unit in zip(layout, dtypes, strict=True)
        for chunk in chunks
    ]
    trainable = [[chunk for chunk in chunks if chunk.kind != FROZEN] for chunks in layout]
    reduce, master = dtypes[0].reduce, dtypes[0].master
    itemsize, holders, ranks = reduce.itemsize, wire.holders, (rank, wire.holders.rank)
    # Between replicas gradients are summed, or the weights' changes (outer.py).
    itemsizes = itemsize, itemsize if wire.sums_each_step else master.itemsize
    wire.reserve(
        resting,
        slot_bytes(trainable, stage, rank, itemsize, bucket_bytes),
        slot_bytes_of_sums(trainable, ranks, holders.size, itemsizes, bucket_bytes),
    )


def _load_values(values: Values, units: Sequence[Unit]) -> None:
    """Fill parameters that had no values yet, one after the other, with what this rank holds of each."""
    places = {
        member.name: (held, index)
        for unit in units
        for held in unit.held
        for index, member in enumerate(held.chunk.members)
    }
    for name, read in values:
        if name in places:  # no unit holds an empty parameter
            held, member = places.pop(name)
            held.write_parameter(member, read)
    if places:
        raise ValueError(
            f"values: there are none of {next(iter(places))}; give those of every parameter"
        )


def _ranges_of(parameter: nn.Parameter) -> Read:
    flat = parameter.detach().reshape(-1)
    return lambda start, stop: flat[start:stop]
