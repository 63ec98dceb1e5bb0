"""This file converts the engine's pieces to canonical tensors and back; every rank gives what it owns, ungathered.

The master is the canonical weight. Ranks that all hold a tensor whole give even shares of it, so that each element
comes from one rank. Values of a whole parameter (the optimizer's step, Python values) come from the rank that owns its
first element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from torch import Tensor
from torch.optim import Optimizer

from zeroexp.comm.collectives import Collectives
from zeroexp.cut.chunk import Span
from zeroexp.cut.stage import Placement, Stage
from zeroexp.interface.buffers import Buffers
from zeroexp.interface.canonical import (
    BUFFER,
    WEIGHT,
    SavedMoments,
    empty_moment,
    fill_from_canonical,
    first_missing,
    moments_of,
)
from zeroexp.interface.python_values import PythonValues, own_values
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor, Piece
from zeroexp.process.world import World
from zeroexp.sharding.state import ChunkTensors
from zeroexp.sharding.unit import Unit


def canonical_state(
    units: Sequence[Unit],
    stage: Stage,
    optimizer: Optimizer,
    world: World,
    python: PythonValues | None = None,
    buffers: Buffers | None = None,
) -> CanonicalState:
    """Return the canonical state; its pieces are views of live memory, so copy those kept past the next step."""
    state: CanonicalState = {} if buffers is None else buffers.canonical()
    for tensors in _chunks(units):
        sharded = _rests_sharded(tensors, stage)
        for member, shape in zip(tensors.chunk.members, tensors.shapes, strict=True):
            if shape.numel() == 0:  # no rank owns an element of an empty parameter
                state[member.name] = {
                    WEIGHT: CanonicalTensor(tuple(shape), tensors.piece.dtype, [])
                }
        for span, weight in tensors.weights():
            shape = tuple(tensors.shapes[span.member])
            name = tensors.chunk.members[span.member].name
            entry = state.setdefault(name, {})
            first = span.start == 0 and (sharded or world.rank == 0)
            moments = moments_of(optimizer.state.get(weight, {}))
            told = python.of(name, weight) if python is not None else {}
            entry.update(told if first else {})
            for key, tensor in {WEIGHT: weight, **moments}.items():
                if tensor.shape == weight.shape:
                    canonical = CanonicalTensor(shape, tensor.dtype, [])
                    piece = _piece_of(span, tensor, sharded, world)
                else:
                    canonical = CanonicalTensor(tuple(tensor.shape), tensor.dtype, [])
                    piece = Piece(0, tensor.detach().reshape(-1)[: None if first else 0])
                if piece.tensor.numel():
                    entry.setdefault(key, canonical).pieces.append(piece)
                else:
                    entry.setdefault(key, canonical)
    return state


def refuse_other_state(state: object, units: Sequence[Unit], wire: Collectives) -> None:
    """Raise ValueError on all ranks, before anything changes, for what is no state of this model, or lacks pieces."""
    problem = _problem_with(state, units)
    if wire.same_everywhere(int(problem is None)) and problem is None:
        return
    raise ValueError(
        f"strategy.load_state_dict: {problem or 'another rank was given what it can not load'}; give what "
        "strategy.state_dict() returned, of all ranks by merge(states)"
    )


def _problem_with(state: object, units: Sequence[Unit]) -> str | None:
    if not isinstance(state, dict):
        return f"the state is a {type(state).__name__}"
    for name, entry in state.items():
        if not isinstance(entry, dict):
            return f"the state holds a {type(entry).__name__} under {name!r:.80}"
        for key, tensor in entry.items():
            if not isinstance(tensor, CanonicalTensor):
                return f"the state holds a {type(tensor).__name__} under {name!r:.80}, {key!r:.40}"
    saved_moments = SavedMoments(state)
    for tensors in _chunks(units):
        for span, _ in tensors.weights():
            name, shape = tensors.chunk.members[span.member].name, tensors.shapes[span.member]
            if WEIGHT not in state.get(name, {}):
                return f"parameter {name} is not in the state"
            if tuple(state[name][WEIGHT].shape) != tuple(shape):
                return f"parameter {name} is {list(state[name][WEIGHT].shape)} in the state, {list(shape)} in the model"
            needed = [(WEIGHT, state[name][WEIGHT], span.start, span.numel)]
            for key, saved in saved_moments.of(name) if tensors.is_trainable else ():
                whole = (0, prod(saved.canonical.shape))
                start, numel = (span.start, span.numel) if saved.of_elements else whole
                needed.append((key, saved.canonical, start, numel))
            for key, canonical, start, numel in needed:
                if (first := first_missing(canonical, start, start + numel)) is not None:
                    return f"element {first} of {name}.{key} is in no piece"
    return None


def refuse_weights_alone(state: CanonicalState, optimizer: Optimizer, wire: Collectives) -> None:
    """Raise ValueError on all ranks for a state without moments where the optimizer has some, which would be lost."""
    has_moments = any(moments_of(own) for own in optimizer.state.values())
    # A rank may own nothing: then others tell.
    has_moments = not wire.same_everywhere(int(has_moments)) or has_moments
    if has_moments and not any(entry.keys() - {WEIGHT, BUFFER} for entry in state.values()):
        raise ValueError(
            "strategy.load_state_dict: the state holds weights and no moments, and the optimizer, which has taken "
            "steps, would start anew: load weights inside `with strategy.gathered(write=True):` by "
            "model.load_state_dict(), which keeps the moments, or build the engine again"
        )


def load_canonical(
    state: CanonicalState,
    units: Sequence[Unit],
    stage: Stage,
    optimizer: Optimizer,
    world: World,
    python: PythonValues | None = None,
    buffers: Buffers | None = None,
) -> None:
    """Fill buffers, masters, moments and frozen parameters; masters must be published afterwards."""
    if buffers is not None:
        buffers.load(state)
    if python is not None:
        python.load(state)
    saved_moments = SavedMoments(state)
    for tensors in _chunks(units):
        for span, weight in tensors.weights():
            name = tensors.chunk.members[span.member].name
            fill_from_canonical(
                weight.detach().view(-1), state[name][WEIGHT], start=span.start, name=name
            )
            if not tensors.is_trainable:
                continue
            own = optimizer.state[weight]
            own.clear()
            own.update(own_values(state[name], name))
            for key, saved in saved_moments.of(name):
                own[key] = empty_moment(saved, weight)
                start = span.start if saved.of_elements else 0
                fill_from_canonical(
                    own[key].view(-1), saved.canonical, start=start, name=f"{name}.{key}"
                )


def _chunks(units: Sequence[Unit]) -> Iterator[ChunkTensors]:
    return (tensors for unit in units for tensors in unit.chunks)


def _rests_sharded(tensors: ChunkTensors, stage: Stage) -> bool:
    rests = stage.optimizer if tensors.is_trainable else stage.parameters
    return rests is Placement.SHARD


def _piece_of(span: Span, tensor: Tensor, sharded: bool, world: World) -> Piece:
    """Return the piece this rank gives: all elements it holds, or an even share where every rank holds the same."""
    flat = tensor.detach().reshape(-1)
    if sharded:
        return Piece(span.start, flat)
    start, stop = (flat.numel() * rank // world.size for rank in (world.rank, world.rank + 1))
    return Piece(start, flat[start:stop])
