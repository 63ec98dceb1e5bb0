"""The engine's pieces of parameters, of which states are made and into which they are loaded, ungathered.

The master is the canonical weight. Ranks that hold the same elements are all ranks for what is whole, and replicas for
what is sharded and equal (outer.py, [Note: states]).
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.interface.held_pieces import ALONE, HeldPiece
from zeroexp.zero.outer import OuterStep
from zeroexp.zero.unit import Unit


def held_pieces(units: Sequence[Unit], outer: OuterStep) -> list[HeldPiece]:
    """Return what this rank holds of each parameter; masters must be published after they are filled."""
    pieces: list[HeldPiece] = []
    for held in (held for unit in units for held in unit.held):
        share = held.shared_by.rank, held.shared_by.size
        for span, weight in held.weights():
            piece = HeldPiece(
                held.chunk.members[span.member].name,
                tuple(held.shapes[span.member]),
                weight,
                span.start,
                has_moments=held.is_trainable,
                share=share,
                share_of_moments=ALONE if outer.has_own_moments else None,
            )
            pieces.append(piece)
    return pieces
