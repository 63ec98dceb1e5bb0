"""This file converts the engine's pieces to canonical tensors and back; every rank gives what it owns, ungathered.

The master is the canonical weight. Ranks that hold the same elements give even shares of them, so that each element
comes from one rank: all ranks what is whole, replicas what is sharded. Values of a whole parameter (the optimizer's
step, Python values) come from the first rank that owns its first element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from zeroexp.comm.collectives import Collectives
from zeroexp.cut.chunk import Span
from zeroexp.cut.stage import Placement, Stage
from zeroexp.interface.buffers import Buffers
from zeroexp.interface.canonical import WEIGHT, moments_of
from zeroexp.interface.load_state import Held
from zeroexp.interface.python_values import PythonValues
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor, Piece
from zeroexp.process.world import World
from zeroexp.sharding.state import ChunkTensors
from zeroexp.sharding.unit import Unit


def canonical_state(
    units: Sequence[Unit],
    stage: Stage,
    optimizer: Optimizer,
    wire: Collectives,
    python: PythonValues | None = None,
    buffers: Buffers | None = None,
) -> CanonicalState:
    """Return the canonical state; its pieces are views of live memory, so copy those kept past the next step."""
    state: CanonicalState = {} if buffers is None else buffers.canonical()
    for tensors in _chunks(units):
        holders = wire.holders if _rests_sharded(tensors, stage) else wire.world
        for member, shape in zip(tensors.chunk.members, tensors.shapes, strict=True):
            if shape.numel() == 0:  # no rank owns an element of an empty parameter
                state[member.name] = {
                    WEIGHT: CanonicalTensor(tuple(shape), tensors.piece.dtype, [])
                }
        for span, weight in tensors.weights():
            shape = tuple(tensors.shapes[span.member])
            name = tensors.chunk.members[span.member].name
            entry = state.setdefault(name, {})
            first = span.start == 0 and holders.rank == 0
            moments = moments_of(optimizer.state.get(weight, {}))
            told = python.of(name, weight) if python is not None else {}
            entry.update(told if first else {})
            for key, tensor in {WEIGHT: weight, **moments}.items():
                if tensor.shape == weight.shape:
                    canonical = CanonicalTensor(shape, tensor.dtype, [])
                    piece = _piece_of(span, tensor, holders)
                else:
                    canonical = CanonicalTensor(tuple(tensor.shape), tensor.dtype, [])
                    piece = Piece(0, tensor.detach().reshape(-1)[: None if first else 0])
                if piece.tensor.numel():
                    entry.setdefault(key, canonical).pieces.append(piece)
                else:
                    entry.setdefault(key, canonical)
    return state


def held_elements(units: Sequence[Unit]) -> list[Held]:
    """Return what this rank holds of each parameter; masters must be published after they are filled."""
    held: list[Held] = []
    for tensors in _chunks(units):
        for span, weight in tensors.weights():
            name, shape = tensors.chunk.members[span.member].name, tensors.shapes[span.member]
            held.append(Held(name, tuple(shape), weight, span.start, tensors.is_trainable))
    return held


def _chunks(units: Sequence[Unit]) -> Iterator[ChunkTensors]:
    return (tensors for unit in units for tensors in unit.chunks)


def _rests_sharded(tensors: ChunkTensors, stage: Stage) -> bool:
    rests = stage.optimizer if tensors.is_trainable else stage.parameters
    return rests is Placement.SHARD


def _piece_of(span: Span, tensor: Tensor, holders: World) -> Piece:
    """Return the piece this rank gives of a span: its even share of what all `holders` hold."""
    flat = tensor.detach().reshape(-1)
    first, last = (flat.numel() * rank // holders.size for rank in (holders.rank, holders.rank + 1))
    return Piece(span.start + first, flat[first:last])
