"""Pieces into what a rank holds of a tensor: every element from some piece, or the first in none is told."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zeroexp.config.keys import OptimizerConfig
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.interface.canonical import BUFFER, WEIGHT, canonical_of_one_rank, moments_of
from zeroexp.interface.held_pieces import HeldPiece, contributed_piece
from zeroexp.interface.reshard import SavedMoment, SavedMoments, empty_moment, fill_from_canonical
from zeroexp.interface.saved_state import SavedState
from zeroexp.interface.strategy import CanonicalTensor, Piece
from zeroexp.process.world import World

VALUES = torch.arange(12.0)


def pieces(*ranges: tuple[int, int]) -> CanonicalTensor:
    return CanonicalTensor((3, 4), torch.float32, [Piece(a, VALUES[a:b]) for a, b in ranges])


@pytest.mark.parametrize(
    ("ranges", "start", "stop", "missing"),
    [
        ([(0, 4), (5, 12)], 0, 12, "4 to 11"),  # a gap between two pieces
        ([(5, 12), (0, 4)], 2, 9, "4 to 8"),
        ([(0, 2), (3, 5), (6, 12)], 0, 12, "2 to 11"),
        ([(1, 12)], 0, 12, "0 to 11"),
        ([(0, 11)], 0, 12, "11 to 11"),
        ([], 3, 5, "3 to 4"),
        ([(0, 3), (5, 12)], 3, 5, "3 to 4"),
    ],
)
def test_what_is_in_no_piece_is_told(ranges, start, stop, missing):
    with pytest.raises(ValueError) as caught:
        fill_from_canonical(
            torch.empty(stop - start), pieces(*ranges), start=start, name="up.weight"
        )
    assert str(caught.value) == (
        f"state of up.weight: elements {missing} of [3, 4] are in no piece; "
        "load pieces that together cover what this rank holds, as merge(states) of all ranks' states does"
    )


spans = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted).map(tuple)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ranges=st.lists(spans, max_size=6), window=spans)
def test_what_the_pieces_cover_is_filled_and_else_refused(ranges, window):
    """They may overlap, come in any order and be empty."""
    start, stop = window
    flat = torch.full((stop - start,), -1.0)
    covered = set().union(*(range(*each) for each in ranges))
    if set(range(start, stop)) <= covered:
        fill_from_canonical(flat, pieces(*ranges), start=start)
        assert flat.tolist() == VALUES[start:stop].tolist()
    else:
        first = min(set(range(start, stop)) - covered)
        with pytest.raises(ValueError, match=rf"elements {first} to {stop - 1} of "):
            fill_from_canonical(flat, pieces(*ranges), start=start)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 20])
def test_shares_of_what_everyone_holds_are_it_once(world_size):
    held = [
        HeldPiece("a", (3, 4), VALUES.view(3, 4), 0, has_moments=True, share=(rank, world_size))
        for rank in range(world_size)
    ]
    shapes, told = zip(
        *(contributed_piece(each.tensor, each, each.share) for each in held), strict=True
    )
    assert set(shapes) == {(3, 4)}
    assert torch.cat([piece.tensor for piece in told]).tolist() == VALUES.tolist()
    assert all(piece.start == int(piece.tensor[0]) for piece in told if piece.tensor.numel())
    assert max(piece.tensor.numel() for piece in told) <= -(-12 // world_size)


def test_a_whole_tensor_is_one_piece():
    (piece,) = canonical_of_one_rank(VALUES.view(3, 4)).pieces
    assert (piece.start, piece.tensor.tolist()) == (0, VALUES.tolist())


def test_memory_for_a_moment():
    """Of elements in the parameter's dtype; a number of the whole parameter in its own."""
    parameter = torch.nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    moment = empty_moment(
        SavedMoment(pieces(), of_elements=True, follows=True, in_blocks=False), parameter
    )
    assert (moment.shape, moment.dtype) == ((3, 4), torch.bfloat16)
    assert not moment.any() and not moment.requires_grad
    number = SavedMoment(CanonicalTensor((), torch.float32, []), False, False, False)
    step = empty_moment(number, parameter)
    assert (step.shape, step.dtype, step.item()) == ((), torch.float32, 0.0)


@pytest.mark.parametrize(
    ("dtype", "follows"), [(torch.bfloat16, True), (torch.float32, False)], ids=["same", "wider"]
)
def test_a_moment_in_the_weights_dtype_becomes_the_weights_again(dtype, follows):
    shape = torch.Size([4])
    state = {"w": {"weight": CanonicalTensor(shape, torch.bfloat16, [])}}
    state["w"]["exp_avg"] = CanonicalTensor(shape, dtype, [])
    ((_, moment),) = SavedMoments(state).of("w")
    assert (moment.follows, moment.in_blocks) == (follows, False)


@pytest.mark.parametrize("moments", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("options", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
)
def test_a_loaded_number_of_steps_lies_where_a_step_of_torchs_makes_it(moments, options, device):
    """A meta tensor is one on a GPU: read there, it stops the host once a parameter in every step."""
    model = nn.Linear(3, 2, bias=False, device="meta")
    config = OptimizerConfig(fused=False, moments=moments)
    optimizer = optimizer_factory(config)([{"params": [model.weight]}])
    optimizer.param_groups[0].update(options)
    saved = SavedState(model, World(0, 1, model.weight.device, "nccl"), optimizer, [["weight"]])
    values = canonical_of_one_rank(torch.ones(2, 3))
    entry = {WEIGHT: values, "exp_avg": values, "exp_avg_sq": values, "step": _number(7.0)}
    held = HeldPiece("weight", (2, 3), model.weight, 0, has_moments=True)
    saved.load({"weight": entry}, [held], same_everywhere=lambda _: True)
    own = optimizer.state[model.weight]
    assert own["step"].device.type == device and own["exp_avg"].device.type == "meta"


def test_moments_are_the_tensors_of_a_state():
    assert moments_of({"exp_avg": VALUES, "step": 3}) == {"exp_avg": VALUES}


def test_what_is_a_number_is_told_by_parameters_that_have_dimensions():
    """A parameter without one has moments of no dimension too; a buffer, which has no weight, tells nothing."""
    vector = {
        WEIGHT: canonical_of_one_rank(torch.ones(3)),
        "exp_avg": canonical_of_one_rank(torch.ones(3)),
        "count": _number(7.0),
    }
    scalar = {WEIGHT: _number(1.0), "exp_avg": _number(2.0), "count": _number(7.0)}
    state = {
        "norm.mean": {BUFFER: canonical_of_one_rank(torch.ones(3))},
        "vector": vector,
        "scalar": scalar,
    }
    found = {key: moment.of_elements for key, moment in SavedMoments(state).of("scalar")}
    assert found == {"exp_avg": True, "count": False}


def _number(value: float) -> CanonicalTensor:
    return canonical_of_one_rank(torch.tensor(value))
