"""The gradient of a tied embedding: bit for bit autograd's, with one dense tensor."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.measure.memory import AllocationMeter, count_cpu_allocations
from zeroexp.models.tied_rows import keep_rows_apart
from zeroexp.process.world import World

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


IDS_OF_ALL_SHAPES = {
    "none": torch.empty(0, 3, dtype=torch.int64),
    "one": torch.tensor(7),
    "a column": IDS[:, :1],
    "transposed": IDS.t(),
    "int32": IDS.int(),
    "as many as words": torch.arange(2 * VOCABULARY) % VOCABULARY,
    "a long text of few words": torch.randint(5, (2, 24), generator=torch.manual_seed(2)) + 3,
}


@pytest.mark.parametrize("shape", IDS_OF_ALL_SHAPES)
def test_ids_of_any_shape(shape: str):
    plain = Tied(padding_idx=7)
    ours = deepcopy(plain)
    keep_rows_apart(ours)
    for model in (plain, ours):
        usual(model, IDS_OF_ALL_SHAPES[shape]).backward()
    assert torch.equal(ours.embed.weight.grad, plain.embed.weight.grad)


def test_nothing_is_left_of_a_backward_that_failed():
    plain = Tied()
    ours = deepcopy(plain)
    assert keep_rows_apart(ours) == 1

    def fail(_gradient: Tensor) -> None:
        raise MemoryError

    trigger = ours.embed.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        usual(ours, IDS).backward()
    trigger.remove()
    ours.zero_grad()
    for model in (plain, ours):
        usual(model, (IDS + 1) % VOCABULARY).backward()
    assert torch.equal(ours.embed.weight.grad, plain.embed.weight.grad)


def copied(model: Tied) -> Tied:
    return deepcopy(model)


def pickled(model: Tied) -> Tied:
    return pickle.loads(pickle.dumps(model))


def given_another_weight(model: Tied) -> Tied:
    model.embed.weight = nn.Parameter(model.embed.weight.detach().clone())
    return model


@pytest.mark.parametrize("made", [copied, pickled, given_another_weight])
def test_a_weight_without_our_hook_is_autograds(made: Callable[[Tied], Tied]):
    expected = made(Tied())
    model = Tied()
    keep_rows_apart(model)
    model = made(model)
    for each in (expected, model):
        usual(each, IDS).backward()
    assert torch.equal(model.embed.weight.grad, expected.embed.weight.grad)


def test_another_hook_sees_the_whole_gradient_though_it_was_there_before():
    """As in an engine that puts a parameter of its own in the place of the model's."""
    plain = Tied()
    ours = deepcopy(plain)
    keep_rows_apart(ours)
    weight = nn.Parameter(ours.embed.weight.detach().clone())
    seen: list[Tensor | None] = []
    weight.register_post_accumulate_grad_hook(lambda it: seen.append(deepcopy(it.grad)))
    ours.embed.weight = ours.head.weight = weight
    for model in (plain, ours):
        usual(model, IDS).backward()
    (gradient,) = seen
    assert gradient is not None and torch.equal(gradient, plain.embed.weight.grad)


def test_compiled_it_is_autograds_own():
    plain = Tied()
    ours = deepcopy(plain)
    keep_rows_apart(ours)
    usual(plain, IDS).backward()
    compiled = torch.compile(usual, backend="aot_eager", fullgraph=True)
    compiled(ours, IDS).backward()
    assert torch.equal(ours.embed.weight.grad, plain.embed.weight.grad)


def allocated_in_backward(model: Tied, ids: Tensor = IDS) -> int:
    loss = usual(model, ids)
    meter = AllocationMeter(torch.device("cpu"))
    loss.backward()
    allocated = meter.allocated_bytes()
    assert allocated is not None
    return allocated


def test_two_dense_tensors_less():
    """The zeros that rows would be spread over, and the sum."""
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    model = Tied()
    model.embed = nn.Embedding(100 * VOCABULARY, WIDTH)
    model.head.weight = model.embed.weight
    plain = allocated_in_backward(model)
    model.zero_grad(set_to_none=True)
    keep_rows_apart(model)
    assert plain - allocated_in_backward(model) > 1.99 * model.embed.weight.nbytes


def test_no_rows_where_they_are_as_many_as_words():
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    plain = Tied()
    ours = deepcopy(plain)
    keep_rows_apart(ours)
    ids = torch.arange(4 * VOCABULARY) % VOCABULARY
    assert allocated_in_backward(ours, ids) == allocated_in_backward(plain, ids)


def norms_of_a_step(world: World) -> tuple[float, float]:
    """The engine's, after a backward that failed before its step; and autograd's own of the second backward."""
    model = Tied()
    plain = deepcopy(model)
    keep_rows_apart(model)
    strategy = Sharded(
        model,
        blocks=[],
        stage=STAGES["zero2"],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.1),
        world=world,
    )

    def fail(_gradient: Tensor) -> None:
        raise MemoryError

    trigger = model.embed.weight.register_hook(fail)
    with pytest.raises(MemoryError), strategy.microbatch(last=True):
        strategy.backward(usual(model, IDS))
    trigger.remove()
    strategy.zero_grad()
    with strategy.microbatch(last=True):
        strategy.backward(usual(model, (IDS + 1) % VOCABULARY))
    usual(plain, (IDS + 1) % VOCABULARY).backward()
    gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    return float(strategy.step()), float(torch.nn.utils.get_total_norm(gradients))


def test_an_engine_sees_no_rows_of_a_backward_that_failed(ranks):
    ((ours, autograds),) = ranks(norms_of_a_step, world_size=1)
    assert ours == pytest.approx(autograds, rel=1e-6)  # a sum of squares in another order


def test_two_embeddings_and_a_head():
    class Two(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.Embedding(VOCABULARY, WIDTH)
            self.decoder.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.between(self.decoder(ids.flip(1))) * self.embed(ids))

    plain = Two()
    ours = deepcopy(plain)
    assert keep_rows_apart(ours) == 1
    for model in (plain, ours):
        model(IDS).square().sum().backward()
    assert torch.equal(ours.embed.weight.grad, plain.embed.weight.grad)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def of_forward_replaced() -> nn.Embedding:
    embed = nn.Embedding(VOCABULARY, WIDTH)
    embed.forward = embed.forward
    return embed


OF_ANOTHER_KIND = {
    "subclass": lambda: Scaled(VOCABULARY, WIDTH),
    "forward replaced": of_forward_replaced,
    "max_norm": lambda: nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0),
    "scale_grad_by_freq": lambda: nn.Embedding(VOCABULARY, WIDTH, scale_grad_by_freq=True),
    "sparse": lambda: nn.Embedding(VOCABULARY, WIDTH, sparse=True),
}


@pytest.mark.parametrize("kind", OF_ANOTHER_KIND)
def test_embeddings_of_another_kind_are_left_alone(kind: str):
    model = Tied()
    model.embed = OF_ANOTHER_KIND[kind]()
    model.head.weight = model.embed.weight
    assert not keep_rows_apart(model)


def test_so_is_a_weight_that_one_of_them_shares():
    model = Tied()
    sparse = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
    sparse.weight = model.embed.weight
    model.add_module("sparse", sparse)
    assert not keep_rows_apart(model)


def test_so_is_a_weight_without_a_head():
    model = Tied()
    second = nn.Embedding(VOCABULARY, WIDTH)
    second.weight = model.embed.weight
    lookups = nn.ModuleList([model.embed, second])
    assert not keep_rows_apart(lookups)


def test_so_is_a_frozen_weight():
    model = Tied()
    model.embed.weight.requires_grad_(False)
    assert not keep_rows_apart(model)
