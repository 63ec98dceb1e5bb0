"""The engine's pieces as canonical tensors and back; every rank gives what it owns, ungathered.

The master is the canonical weight. Ranks that hold the same elements give even shares of them, so that each element
comes from one rank: all ranks what is whole, replicas what is sharded and equal (outer.py, [Note: states]). Values of a
whole parameter (the optimizer's step, Python values) come from the first rank that owns its first element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from torch.optim import Optimizer

from zeroexp.cut.chunk import Span
from zeroexp.cut.moment_blocks import bytes_of_elements
from zeroexp.interface.buffers import Buffers
from zeroexp.interface.canonical import WEIGHT, moments_of
from zeroexp.interface.load_state import LoadTarget
from zeroexp.interface.moment_codes import lies_in_blocks, shape_in_blocks
from zeroexp.interface.python_values import PythonValues
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor, Piece
from zeroexp.process.world import World
from zeroexp.zero.held import Held
from zeroexp.zero.outer import MOMENTUM, NoOuterStep, prefix_of
from zeroexp.zero.unit import Unit


def canonical_state(
    units: Sequence[Unit],
    optimizer: Optimizer,
    python: PythonValues,
    buffers: Buffers,
    outer: NoOuterStep,
) -> CanonicalState:
    """Return the canonical state; its pieces are views of live memory, so copy those kept past the next step."""
    state = buffers.canonical()
    for held in _chunks(units):
        holders = held.alike
        for span, weight in held.weights():
            shape = tuple(held.shapes[span.member])
            name = held.chunk.members[span.member].name
            entry = state.setdefault(name, {})
            if span.start == 0 and holders.rank == 0:
                entry.update(python.of(name, weight))
            moments = moments_of(optimizer.state.get(weight, {}))
            for key, tensor, givers in _given(weight, moments, holders, outer):
                whole, piece = _piece_of(tensor, weight, span, shape, givers)
                canonical = entry.setdefault(key, CanonicalTensor(whole, tensor.dtype, []))
                canonical.pieces.extend([piece] if piece.tensor.numel() else [])
    return state


def _given(
    weight: Tensor, moments: Mapping[str, Tensor], holders: World, outer: NoOuterStep
) -> Iterator[tuple[str, Tensor, World]]:
    """Yield what a state has of these elements, and the ranks that give even shares of it."""
    yield WEIGHT, weight, holders
    prefix = prefix_of(outer.replica)
    of_moments = replace(holders, rank=0, size=1) if outer.has_own_moments else holders
    if weight in outer.momentum_of:
        yield MOMENTUM, outer.momentum_of[weight], holders
    for key, moment in moments.items():
        yield f"{prefix}{key}", moment, of_moments


def load_targets(units: Sequence[Unit]) -> list[LoadTarget]:
    """Return what this rank holds of each parameter; masters must be published after they are filled."""
    held: list[LoadTarget] = []
    for each in _chunks(units):
        for span, weight in each.weights():
            name, shape = each.chunk.members[span.member].name, each.shapes[span.member]
            held.append(LoadTarget(name, tuple(shape), weight, span.start, each.is_trainable))
    return held


def _chunks(units: Sequence[Unit]) -> Iterator[Held]:
    return (held for unit in units for held in unit.held)


def _piece_of(
    tensor: Tensor, weight: Tensor, span: Span, shape: tuple[int, ...], holders: World
) -> tuple[tuple[int, ...], Piece]:
    """Return the shape of the whole, and the piece this rank gives: its even share of elements that all `holders` hold.

    Of what is one for the whole parameter, one rank gives all.
    """
    flat, whole, start = tensor.detach().reshape(-1), shape, span.start
    if lies_in_blocks(tensor.dtype, tensor.shape, weight.shape):
        whole, (start, _) = shape_in_blocks(shape), bytes_of_elements(start, start)
    elif tensor.shape != weight.shape:
        is_given = span.start == 0 and holders.rank == 0
        return tuple(tensor.shape), Piece(0, flat[: None if is_given else 0])
    first, last = (flat.numel() * rank // holders.size for rank in (holders.rank, holders.rank + 1))
    return whole, Piece(start + first, flat[first:last])
