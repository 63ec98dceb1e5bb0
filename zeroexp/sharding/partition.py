"""This file turns a module into units: it decides who moves together, cuts each unit and lays it in its memory.

Every parameter is claimed once, by identity. Tied weights are one parameter. A parameter that several modules share, or
that lies outside all of them, belongs to the root unit, whose parameters are there for the whole pass.

[Note: world of one] The piece of a single rank is the whole: parameters that rest sharded over one rank rest
replicated, and nothing is gathered or copied. Only `rows_for` decides this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from zeroexp.comm.collectives import Collectives
from zeroexp.comm.sizes import slot_bytes
from zeroexp.sharding.guard import watch
from zeroexp.sharding.layout import Chunk, ParameterSpec, Span, lay_out, pages
from zeroexp.sharding.placement import Placement, Stage
from zeroexp.sharding.unit import FROZEN, ChunkTensors, Dtypes, Unit, views_of
from zeroexp.strategies.values import Read, Values

# These modules compute with the weights of modules inside them whose forward they never call.
USES_ITS_PARTS = (nn.MultiheadAttention,)

Named = dict[str, nn.Parameter]


@dataclass
class Group:
    """A group is a module and the parameters that move with it, by their full name."""

    name: str
    module: nn.Module
    parameters: Named


def rows_for(stage: Stage, world_size: int) -> Stage:
    """Return the stage that `world_size` ranks carry out, see [Note: world of one]."""
    return stage if world_size > 1 else replace(stage, parameters=Placement.REPLICATE)


def group_parameters(module: nn.Module, blocks: Sequence[str], unit: str) -> list[Group]:
    """Return the root's group, then those of modules that move on their own, in the order of their definition."""
    names = {"model": [], "block": list(blocks), "module": list(_owners(module, blocks))}[unit]
    claims: dict[nn.Parameter, set[str]] = {}
    for full_name, parameter in module.named_parameters(remove_duplicate=False):
        claims.setdefault(parameter, set()).add(_home_of(full_name, names))
    members: dict[str, Named] = {name: {} for name in ["", *names]}
    for full_name, parameter in module.named_parameters():
        if not parameter.numel():
            continue  # an empty parameter has nothing to hold or to train
        homes = claims[parameter]
        members[homes.pop() if len(homes) == 1 else ""][full_name] = parameter
    return [Group(n, module.get_submodule(n), m) for n, m in members.items() if m or not n]


def make_units(
    groups: Sequence[Group],
    *,
    stage: Stage,
    family: str,
    owners: str,
    dtypes: Dtypes,
    wire: Collectives,
    bucket_bytes: int | None = None,
    deferred: bool = False,
) -> list[Unit]:
    """Cut every group and move its parameters into their memory, of which the modules' parameters become views.

    If `deferred`, the parameters have no values yet, and `put_in` follows.
    """
    world = wire.world
    specs = [specs_of(group) for group in groups]
    layout = lay_out(family, specs, world.size, owners=owners, page_bytes=wire.page_bytes)
    wire.reserve(*_bytes_to_reserve(layout, stage, dtypes, wire, bucket_bytes))
    units: list[Unit] = []
    for group, chunks in zip(groups, layout, strict=True):
        tensors = [
            _settle(chunk, group.parameters, stage, dtypes, wire, deferred) for chunk in chunks
        ]
        units.append(Unit(group.name, tensors, stage, dtypes, wire, bucket_bytes))
    return units


def _bytes_to_reserve(
    layout: Sequence[Sequence[Chunk]],
    stage: Stage,
    dtypes: Dtypes,
    wire: Collectives,
    bucket_bytes: int | None,
) -> tuple[int, int]:
    """Return the bytes of parameters at rest and of the largest reduction of a unit in flight.

    Each tensor at rest lies on pages of its own.
    """
    rank = wire.world.rank
    sharded = stage.parameters is Placement.SHARD
    rest = 0
    for chunk in (chunk for chunks in layout for chunk in chunks):
        section = chunk.section(rank)
        numel = section.stop - section.start if sharded else chunk.padded_numel
        rest += pages(numel * dtypes.compute.itemsize, chunk.page_bytes)
    trainable = [[chunk for chunk in chunks if chunk.kind != FROZEN] for chunks in layout]
    return rest, slot_bytes(trainable, stage, rank, dtypes.reduce.itemsize, bucket_bytes)


def _settle(
    chunk: Chunk, named: Named, stage: Stage, dtypes: Dtypes, wire: Collectives, deferred: bool
) -> ChunkTensors:
    """Make the memory in which one chunk rests and its masters, and put in what the parameters hold, if anything."""
    world = wire.world
    parameters = [named[member.name] for member in chunk.members]
    watch(parameters, [member.name for member in chunk.members])
    shapes = [parameter.shape for parameter in parameters]
    sharded = stage.optimizer is Placement.SHARD
    owned = chunk.spans(world.rank) if sharded else chunk.whole()
    section = chunk.section(world.rank)
    if stage.parameters is Placement.SHARD:
        piece = wire.empty(section.stop - section.start, dtypes.compute).zero_()
        tensors = ChunkTensors(chunk, parameters, shapes, piece, owned)
    else:
        full = wire.empty(chunk.padded_numel, dtypes.compute).zero_()
        tensors = ChunkTensors(chunk, parameters, shapes, full[section], owned, full=full)
    if tensors.trainable:
        _make_masters(tensors, dtypes, sharded=sharded)
    if not deferred:
        for index, parameter in enumerate(parameters):
            _put_in(tensors, index, _ranges_of(parameter))
    if tensors.full is not None:
        tensors.views = views_of(chunk, tensors.full, shapes)
        for parameter, view in zip(parameters, tensors.views, strict=True):
            parameter.data = view
    return tensors


def _make_masters(tensors: ChunkTensors, dtypes: Dtypes, *, sharded: bool) -> None:
    """Make masters: views of the parameters' own memory where dtypes agree, else memory of their own."""
    piece = tensors.piece if sharded or tensors.full is None else tensors.full
    values = [piece[s.offset : s.offset + s.numel] for s in tensors.owned]
    if dtypes.master is not dtypes.compute and values:
        sizes = [span.numel for span in tensors.owned]
        tensors.master_flat = piece.new_empty(sum(sizes), dtype=dtypes.master)
        values = list(tensors.master_flat.split(sizes))
    for value, span in zip(values, tensors.owned, strict=True):
        shape = tensors.shapes[span.member]
        tensors.masters.append(nn.Parameter(value.view(shape) if _covers(span, shape) else value))


def put_in(values: Values, units: Sequence[Unit]) -> None:
    """Fill parameters that had no values yet, one after the other, with what this rank holds of each."""
    places = {
        member.name: (tensors, index)
        for unit in units
        for tensors in unit.chunks
        for index, member in enumerate(tensors.chunk.members)
    }
    for name, read in values:
        if name in places:  # no unit holds an empty parameter
            _put_in(*places.pop(name), read)
    if places:
        raise ValueError(
            f"values: there are none of {next(iter(places))}; give those of every parameter"
        )


@torch.no_grad()
def _put_in(tensors: ChunkTensors, index: int, read: Read) -> None:
    """Copy one parameter to where it rests, and to its masters before any rounding."""
    member = tensors.chunk.members[index]
    if tensors.full is not None:
        tensors.full[member.start : member.stop].copy_(read(0, member.stop - member.start))
    for number, span in enumerate(tensors.owned):
        if span.member != index:
            continue
        if tensors.full is None:
            place = tensors.piece[span.offset : span.offset + span.numel]
            place.copy_(read(span.start, span.stop))
        if tensors.master_flat is not None:
            master = tensors.masters[number].detach().view(-1)
            master.copy_(read(span.start, span.stop))


def _ranges_of(parameter: nn.Parameter) -> Read:
    flat = parameter.detach().reshape(-1)
    return lambda start, stop: flat[start:stop]


def _covers(span: Span, shape: torch.Size) -> bool:
    """Tell whether a parameter is owned whole; then it keeps its shape, so that optimizers of matrices work."""
    return span.numel == shape.numel()


def specs_of(group: Group) -> list[ParameterSpec]:
    """Return what a layout needs to know of a group's parameters; they may be on the device `meta`."""
    return [
        ParameterSpec(name, p.numel(), p.itemsize, "trainable" if p.requires_grad else FROZEN)
        for name, p in group.parameters.items()
    ]


def _owners(module: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Yield the modules that hold parameters directly; a module that holds a list inside a block owns all within.

    Such a list holds experts or adapters. Its holder decides in its forward which of them run, and whether a router
    runs: if they had collectives of their own, a rank that skips them would make the others hang.
    """
    lists = [
        name for name, m in module.named_modules() if isinstance(m, nn.ModuleList | nn.ModuleDict)
    ]
    inside = [name for name in lists if any(name.startswith(block + ".") for block in blocks)]
    choosers = [name.rpartition(".")[0] for name in inside]  # named_modules yields outer ones first
    choosers += [name for name, m in module.named_modules() if isinstance(m, USES_ITS_PARTS)]
    taken: set[str] = set()
    for name, submodule in module.named_modules():
        # A list of parameters has no forward, so its parameters belong to the module that holds the list.
        is_list = isinstance(submodule, nn.ParameterList | nn.ParameterDict)
        user = name.rpartition(".")[0] if is_list else name
        owner = next((c for c in choosers if f"{user}.".startswith(c + ".")), user)
        if not owner or owner in taken or not list(submodule.parameters(recurse=False)):
            continue
        taken.add(owner)
        yield owner


def _home_of(full_name: str, names: Sequence[str]) -> str:
    """Return the innermost of the named modules that contains the parameter; "" is the root."""
    module_name = full_name.rpartition(".")[0]
    while module_name and module_name not in names:
        module_name = module_name.rpartition(".")[0]
    return module_name
