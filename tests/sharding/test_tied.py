"""The gradient of a tied embedding: bit for bit autograd's, with one dense tensor."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from zeroexp.sharding.tied import keep_rows_apart

VOCABULARY, WIDTH = 50, 6
IDS = torch.tensor([[3, 7, 3, 49], [0, 3, 7, 1]])  # some of them more than once


class Tied(nn.Module):
    def __init__(self, padding_idx: int | None = None):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight


def usual(model: Tied, ids: Tensor) -> Tensor:
    return model.head(model.between(model.embed(ids)).relu()).square().sum()


def embedding_alone(model: Tied, ids: Tensor) -> Tensor:
    return model.between(model.embed(ids)).square().sum()


def head_alone(model: Tied, ids: Tensor) -> Tensor:
    return model.head(model.other[ids]).square().sum()


def embedded_twice(model: Tied, ids: Tensor) -> Tensor:
    first = model.between(model.embed(ids)).relu()
    return model.head(model.between(first * model.embed(ids.flip(1)))).square().sum()


def one_of_two_unused(model: Tied, ids: Tensor) -> Tensor:
    model.embed(ids.flip(1))
    return usual(model, ids)


def looked_at_before(model: Tied, ids: Tensor) -> Tensor:
    with torch.no_grad():
        usual(model, ids)
    return usual(model, ids)


def recomputed(model: Tied, ids: Tensor) -> Tensor:
    inner = checkpoint(lambda i: model.between(model.embed(i)).relu(), ids, use_reentrant=False)
    assert isinstance(inner, Tensor)
    return model.head(inner).square().sum()


def gradient_shared_with_another(model: Tied, ids: Tensor) -> Tensor:
    """Autograd hands one tensor to both summands."""
    return model.embed(ids).square().sum() + (model.embed.weight + model.other).square().sum()


def expanded_gradient(model: Tied, ids: Tensor) -> Tensor:
    return model.embed(ids).square().sum() + model.embed.weight.sum()


def functional_head(model: Tied, ids: Tensor) -> Tensor:
    return linear(model.between(model.embed(ids)), model.embed.weight).square().sum()


LOSSES = [
    usual,
    embedding_alone,
    head_alone,
    embedded_twice,
    one_of_two_unused,
    looked_at_before,
    recomputed,
    gradient_shared_with_another,
    expanded_gradient,
    functional_head,
]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_as_autograd_does_it(
    loss: Callable[[Tied, Tensor], Tensor], padding_idx: int | None, dtype: torch.dtype
):
    plain = Tied(padding_idx).to(dtype)
    ours = deepcopy(plain)
    keep_rows_apart(ours)
    for microbatch in range(3):  # gradients add up
        values = [loss(model, (IDS + microbatch) % VOCABULARY) for model in (plain, ours)]
        assert torch.equal(*values)
        for value in values:
            value.backward()
        for name, gradient in gradients(ours).items():
            expected = gradients(plain)[name]
            same = gradient is expected is None or torch.equal(gradient, expected)
            assert same, f"{name} after microbatch {microbatch}"


def test_a_long_text_of_few_words():
    plain = Tied()
    ours = deepcopy(plain)
    keep_rows_apart(ours)
    ids = torch.randint(5, (16, 256), generator=torch.manual_seed(2))
    for model in (plain, ours):
        usual(model, ids).backward()
    assert torch.equal(ours.embed.weight.grad, plain.embed.weight.grad)


def test_compiled_it_is_autograds_own():
    plain = Tied()
    ours = deepcopy(plain)
    keep_rows_apart(ours)
    usual(plain, IDS).backward()
    compiled = torch.compile(usual, backend="aot_eager", fullgraph=True)
    compiled(ours, IDS).backward()
    assert torch.equal(ours.embed.weight.grad, plain.embed.weight.grad)


def dense_tensors_made(model: Tied) -> int:
    """In backward, of the weight's size."""
    loss = usual(model, IDS)
    with torch.profiler.profile(profile_memory=True) as profile:
        loss.backward()
    num_bytes = model.embed.weight.nbytes
    return sum(
        getattr(event, "nbytes", lambda: 0)() == num_bytes
        for event in profile.profiler.kineto_results.events()  # pyright: ignore
        if event.name() == "[memory]"
    )


def test_one_dense_tensor():
    model = Tied()
    assert dense_tensors_made(model) >= 2
    model.zero_grad(set_to_none=True)
    keep_rows_apart(model)
    assert dense_tensors_made(model) == 1


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


UNTOUCHED = {
    "subclass": Scaled(VOCABULARY, WIDTH),
    "max_norm": nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0),
    "scale_grad_by_freq": nn.Embedding(VOCABULARY, WIDTH, scale_grad_by_freq=True),
    "sparse": nn.Embedding(VOCABULARY, WIDTH, sparse=True),
}


@pytest.mark.parametrize("kind", UNTOUCHED)
def test_embeddings_of_another_kind_are_left_alone(kind: str):
    model = Tied()
    model.embed = UNTOUCHED[kind]
    model.head.weight = model.embed.weight
    keep_rows_apart(model)
    assert "forward" not in vars(model.embed)


@pytest.mark.parametrize("kind", ["untied", "frozen"])
def test_so_is_a_weight_that_has_no_two_gradients(kind: str):
    model = Tied()
    if kind == "untied":
        model.head.weight = nn.Parameter(torch.zeros(VOCABULARY, WIDTH))
    model.embed.weight.requires_grad_(kind == "untied")
    keep_rows_apart(model)
    assert "forward" not in vars(model.embed)
