"""Which weight a tensor of an optimizer is; where that can not be told, none is guessed."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from zeroexp.verify.local_elements import LocalElements, Places, add
from zeroexp.verify.loop_to_verify import make_weights_unlike

WIDTH = 5


class Model(nn.Module):
    """As GPT-2 begins: biases of zeros, gains of ones; and a row of zeros behind the first weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.words, self.norm = (
            nn.Linear(WIDTH, WIDTH),
            nn.Embedding(3, WIDTH, padding_idx=0),
            nn.LayerNorm(WIDTH),
        )
        self.b = nn.Linear(WIDTH, WIDTH)
        for each in (self.a, self.b):
            nn.init.zeros_(each.bias)
        make_weights_unlike(self)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def claims(
    tensors: list[Tensor], initial: dict[str, Tensor]
) -> list[dict[str, tuple[list[int], int]]]:
    """Of each tensor, the elements of each weight and where they begin in it; a model elsewhere shows none."""
    places = Places(nn.Module(), initial)
    for each in tensors:
        each.grad = torch.zeros_like(each)
    places.gradients(tensors)
    return [
        {name: (where.tolist(), at.start) for name, where, at in places._known[id(each)][1]}
        for each in tensors
    ]


def test_masters_are_the_weights_whose_values_they_have():
    """In another order than the model's, and of layers that are copies of one."""
    copied = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 4), 2, enable_nested_tensor=False
    )
    make_weights_unlike(copied)
    initial = weights_of(Model()) | weights_of(copied)
    backwards = list(initial)[::-1]
    found = claims([initial[name].clone() for name in backwards], initial)
    assert [list(each) for each in found] == [[name] for name in backwards]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_slices_of_one_flat_tensor_are_found_with_their_constants(size: int):
    initial = weights_of(Model())
    flat = torch.cat([each.flatten() for each in initial.values()])
    share = -(-len(flat) // size)
    begin = dict(
        zip(initial, accumulate(map(torch.numel, initial.values()), initial=0), strict=False)
    )
    shards = pad(flat, (0, share * size - len(flat))).split(share)
    there: dict[str, list[int]] = {name: [] for name in initial}
    for rank, found in enumerate(claims([each.clone() for each in shards], initial)):
        for name, (where, at) in found.items():
            assert begin[name] + where[0] == rank * share + at
            there[name] += where
    assert there == {name: list(range(each.numel())) for name, each in initial.items()}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("whole", [4, 7])
def test_padding_between_weights_is_no_weight(size: int, whole: int):
    """Each weight is padded to whole shares: zeros before a weight are not the end of the bias before it."""
    initial = weights_of(Model())
    parts = [pad(each.flatten(), (0, -each.numel() % whole)) for each in initial.values()]
    begin = dict(zip(initial, accumulate(map(len, parts), initial=0), strict=False))
    flat = torch.cat(parts)
    share = -(-len(flat) // size)
    shards = pad(flat, (0, share * size - len(flat))).split(share)
    for rank, found in enumerate(claims([each.clone() for each in shards], initial)):
        for name, (where, at) in found.items():
            assert begin[name] + where[0] == rank * share + at


def test_padding_of_a_weights_own_shard_is_not_the_bias_behind_it():
    initial = weights_of(Model())
    shards = pad(initial["a.weight"].flatten(), (0, 1)).split(13)
    found = claims([each.clone() for each in shards], initial)
    assert found == [{"a.weight": (list(range(13)), 0)}, {"a.weight": (list(range(13, 25)), 0)}]


def test_a_flat_tensor_of_one_group_is_found_though_matrices_lie_elsewhere():
    initial = weights_of(Model())
    vectors = [name for name in initial if initial[name].ndim < 2]
    (found,) = claims([torch.cat([initial[name] for name in vectors])], initial)
    assert found == {n: (list(range(WIDTH)), WIDTH * i) for i, n in enumerate(vectors)}


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.text_module = nn.Linear(2, 2), nn.Linear(2, 2)
        self.a.module = nn.Linear(2, 2)


FRONTS = ["", "module.", "_orig_mod.module.", "_fsdp_wrapped_module."]
INSIDE = ("a.module.", "a.module._orig_mod.")  # the child itself is compiled


@pytest.mark.parametrize(("plain", "wrapped"), [*(("", front) for front in FRONTS), INSIDE])
def test_a_childs_own_name_is_no_wrappers(plain: str, wrapped: str):
    model = Named()
    initial = weights_of(model)
    holder: Any = nn.Module()
    named = [(n.replace(plain, wrapped, 1), each) for n, each in model.named_parameters()]
    holder.named_parameters = lambda: named
    shown = {each.name: each.values for each in Places(holder, initial).weights()}
    assert list(shown) == list(initial)
    assert all(torch.equal(each, initial[name].flatten()) for name, each in shown.items())


def test_a_weight_whose_storage_is_freed_is_not_read():
    """It keeps its shape, as under FSDP; what is read of it ended the process."""
    model = nn.Linear(3, 3)
    initial = weights_of(model)
    places = Places(model, initial)
    model.weight.grad = torch.zeros(3, 3)
    places.gradients([model.weight])
    model.weight.untyped_storage().resize_(0)
    assert [each.name for each in places.weights()] == ["bias"]


def test_further_elements_of_a_weight_are_added_and_the_same_ones_are_not():
    def rows(first: int, last: int, value: float) -> LocalElements:
        return LocalElements("w", torch.arange(first, last), torch.full((last - first,), value))

    pieces = [rows(0, 3, 1.0)]
    left_out = add(pieces, [rows(3, 6, 2.0), rows(0, 3, 3.0)])
    assert [each.values[0] for each in pieces] == [1.0, 2.0]
    assert [each.values[0] for each in left_out] == [3.0]
