"""What an update that is no other one looks like."""

from __future__ import annotations

import pytest
import torch

from zeroexp.verify.explain_difference import UpdateLook
from zeroexp.verify.local_elements import LocalElements
from zeroexp.verify.observe import Seen


def test_what_is_no_number_is_said_to_be_none() -> None:
    before, shapes = {"w": torch.ones(4).double()}, {"w": torch.Size([4])}
    pieces = [(1, LocalElements("w", torch.arange(4), torch.full((4,), torch.nan)))]
    look = UpdateLook(before, {"w": before["w"] + 1}, {}, [Seen([]), Seen([])], shapes)
    assert next(look.stories(pieces)) == ("unknown", "it is not finite on rank 1")


@pytest.mark.parametrize(
    ("factor", "off", "kind", "said"),
    [
        (3.0, 0.0, "scale", "the update is x 3 of"),
        (1.005, 1e-5, "scale", "the update is x 1.005 of"),
        (1.0, 1e-3, "optimizer", "gradients, though near it, as where an optimizer that needs"),
        (1.0, 0.5, "optimizer", "from the same gradients"),
    ],
)
def test_an_update_is_a_multiple_or_near_or_another_one(factor, off, kind, said):
    random = torch.Generator().manual_seed(0)
    before, update, noise = torch.randn(3, 64, generator=random, dtype=torch.float64).unbind()
    moved = factor * update + off * noise * update.norm() / noise.norm()
    pieces = [(0, LocalElements("w", torch.arange(64), before + moved))]
    whole, shapes = {"w": before}, {"w": torch.Size([8, 8])}
    look = UpdateLook(whole, {"w": before + update}, {}, [Seen([])], shapes)
    found = next(iter(look.stories(pieces)))
    assert found[0] == kind and said in found[1]
    assert ("near" in found[1]) == ("near" in said)
