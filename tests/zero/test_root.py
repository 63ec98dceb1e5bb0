"""The root is freed once the head has had its backward, unless an earlier microbatch needed its weights again.

Where a gather needs all ranks it stays until the end of the microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.models.checkpointing import checkpoint_blocks
from zeroexp.process.world import World, barrier
from zeroexp.zero.options import Options

VOCABULARY, WIDTH = 40, 6
ROOT_BYTES = 4 * VOCABULARY * WIDTH + 64  # the norm's 48 are aligned


class Language(nn.Module):
    """A tied embedding and head around two blocks; `seen` gets what a hook before the embedding's backward sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.watch: Callable[[Language], Any] = lambda model: None
        self.seen: list[Any] = []

    def embedded(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedded(ids)
        x.register_hook(lambda _gradient: self.seen.append(self.watch(self)))
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


class Normed(Language):
    """The norm beside the embedding saves its weight until the end of backward."""

    def embedded(self, ids: Tensor) -> Tensor:
        return self.first(self.embed(ids))


class Recomputed(Language):
    def embedded(self, ids: Tensor) -> Tensor:
        inner = checkpoint(lambda i: self.first(self.embed(i)), ids, use_reentrant=False)
        assert isinstance(inner, Tensor)
        return inner


class CastAgain(Language):
    """What is recomputed casts the weight."""

    def embedded(self, ids: Tensor) -> Tensor:
        inner = checkpoint(self.wide, ids, use_reentrant=False)
        assert isinstance(inner, Tensor)
        return inner

    def wide(self, ids: Tensor) -> Tensor:
        return self.embed.weight.double()[ids].sin().float()


class SharedAndCounted(Language):
    """Blocks share a weight, which is of the root; torch counts the operators that they run again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight = self.blocks[0].weight
        checkpoint_blocks(self, ["blocks.0", "blocks.1"], kept=["aten.addmm"])


class Viewed(Language):
    """Its own function keeps a view of the weight where autograd does not see it."""

    def embedded(self, ids: Tensor) -> Tensor:
        return _Scaled.apply(self.embed(ids), self.first.weight.detach().view(1, 1, -1))


class _Scaled(torch.autograd.Function):
    """Keeps what it is given where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.scale, None


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, 5), generator=torch.manual_seed(7 * step + rank))


def sharded(model: nn.Module, world: World, transport: str) -> Sharded:
    return Sharded(
        model,
        blocks=["blocks.0", "blocks.1"],
        stage=STAGES["zero3"],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.1),
        world=world,
        options=Options(transport=transport),
    )


def train(world: World, kind: type[Language], watch: Callable[[Language], Any], transport: str):
    """What `watch` saw in each backward, and the weights after two steps of two microbatches."""
    model = kind()
    strategy = sharded(model, world, transport)
    root = strategy.units[0]
    assert root.full is not None
    memory = root.full.memory
    model.watch = lambda own: (watch(own), memory.untyped_storage().nbytes())
    for step in range(2):
        for last in (False, True):
            with strategy.microbatch(last=last):
                ids = tokens(2 * step + last, world.rank)
                strategy.backward(model(ids).square().sum() / world.size)
        strategy.step()
        strategy.zero_grad()
    with strategy.gathered():
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    barrier()
    return model.seen, weights


def train_plainly(kind: type[Language], watch: Callable[[Language], Any], world_size: int):
    """One process that sums the ranks' gradients; what `watch` saw in the backwards of rank 0."""
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(2):
        for last in (False, True):
            for rank in range(world_size):
                model.watch, model.seen = watch, []
                (model(tokens(2 * step + last, rank)).square().sum() / world_size).backward()
                seen += model.seen if rank == 0 else []
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: p.detach().clone() for name, p in model.named_parameters()}


def nothing(model: Language) -> None:
    """Look at nothing."""


def norm_of_weights(model: Language) -> float:
    return float(model.embed.weight.detach().double().norm())


EVERY_TRANSPORT = pytest.mark.parametrize("transport", ["direct", "gloo", "native"])


@EVERY_TRANSPORT
def test_the_embeddings_backward_finds_the_roots_memory_given_back(ranks, transport):
    """Only where a rank gathers without the others, since code of one rank alone may need it again."""
    there = 0 if transport == "direct" else ROOT_BYTES
    for seen, _ in ranks(train, Language, nothing, transport):
        assert [num_bytes for _, num_bytes in seen] == [there] * 4


@EVERY_TRANSPORT
@pytest.mark.parametrize(
    "kind", [Language, Normed, Recomputed, CastAgain, SharedAndCounted, Viewed]
)
def test_weights_are_those_of_one_process(ranks, kind, transport):
    _, expected = train_plainly(kind, nothing, world_size=2)
    for _, weights in ranks(train, kind, nothing, transport):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


@EVERY_TRANSPORT
def test_a_root_that_was_needed_again_stays_from_the_second_microbatch_on(ranks, transport):
    first = 0 if transport == "direct" else ROOT_BYTES
    for seen, _ in ranks(train, Normed, nothing, transport):
        assert [num_bytes for _, num_bytes in seen] == [first, *[ROOT_BYTES] * 3]


def test_bytes_that_somebody_views_stay(ranks):
    for seen, _ in ranks(train, Viewed, nothing, "direct"):
        assert all(num_bytes > 0 for _, num_bytes in seen)


@EVERY_TRANSPORT
def test_whoever_reads_a_parameter_finds_it_gathered_again(ranks, transport):
    looked_at, _ = train_plainly(Language, norm_of_weights, world_size=2)
    (seen, _), _ = ranks(train, Language, norm_of_weights, transport)
    assert [norm for norm, _ in seen] == pytest.approx(looked_at, rel=1e-5)
    assert all(num_bytes > 0 for _, num_bytes in seen)


def look_on_one_rank(world: World, transport: str) -> tuple[int, float]:
    """What rank 0 alone asks of the root after backward: a number of elements, and a value."""
    model = Language()
    strategy = sharded(model, world, transport)
    looked = (0, 0.0)
    for last in (False, True):
        with strategy.microbatch(last=last):
            strategy.backward(model(tokens(0, world.rank)).square().sum())
            if world.rank == 0:
                count = sum(parameter.numel() for parameter in model.parameters())
                looked = (count, float(model.embed.weight.detach().sum()))
    strategy.step()
    barrier()
    return looked


@EVERY_TRANSPORT
def test_one_rank_alone_may_look_at_the_root(ranks, transport):
    expected = Language()
    (count, value), _ = ranks(look_on_one_rank, transport)
    assert count == sum(parameter.numel() for parameter in expected.parameters())
    assert value == pytest.approx(float(expected.embed.weight.detach().sum()))


def hook_on_the_loss(world: World) -> Tensor:
    """A hook on the loss runs the backward of another loss before the step's own goes on."""
    model = Language()
    strategy = sharded(model, world, "direct")
    with strategy.microbatch(last=True):
        other = model(tokens(0, 0)).square().mean()
        loss = model(tokens(1, world.rank)).square().mean()
        loss.register_hook(lambda _gradient: other.backward())
        strategy.backward(loss)
    norm = strategy.step()
    barrier()
    return norm


def test_a_backward_in_a_hook_on_the_loss_is_not_the_closing_one(ranks):
    model = Language()
    for rank in range(2):
        model(tokens(0, 0)).square().mean().backward()
        model(tokens(1, rank)).square().mean().backward()
    expected = torch.linalg.vector_norm(
        torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    )
    for norm in ranks(hook_on_the_loss):
        torch.testing.assert_close(norm, expected)


class Asked(Language):
    """Its own function asks the root for a weight in backward."""

    def embedded(self, ids: Tensor) -> Tensor:
        return _Scaled.apply(self.embed(ids), self.first.weight)


def gathered_in_a_hook(world: World) -> Tensor:
    """A hook of a block's weight looks at all weights while the root is released."""
    model = Asked()
    strategy = sharded(model, world, "direct")

    def look(_gradient: Tensor) -> None:
        with strategy.gathered():
            assert float(model.first.weight.detach().sum()) == WIDTH

    model.blocks[0].weight.register_hook(look)
    with strategy.microbatch(last=True):
        strategy.backward(model(tokens(0, world.rank)).square().mean())
    norm = strategy.step()
    strategy.zero_grad()
    with strategy.gathered():
        pass
    with pytest.raises(
        RuntimeError, match=r"first\.weight is freed"
    ):  # outside of microbatches as before
        model.first.weight.sum()
    barrier()
    return norm


def test_the_root_stays_released_over_gathered(ranks):
    first, second = ranks(gathered_in_a_hook)
    assert first == second > 0


@torch.jit.script
def scripted_penalty(weight: Tensor) -> Tensor:
    return weight.square().sum()


def penalty_of_freed(world: World) -> tuple[list[int], float]:
    """Shape of a freed parameter, and what a function in C++, which no guard sees, makes of it."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    Sharded(
        model,
        blocks=["0", "1"],
        stage=STAGES["zero3"],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.1),
        world=world,
    )
    weight = model[0].weight
    return list(weight.shape), scripted_penalty(weight).item()


def test_code_that_no_guard_sees_makes_nan_of_a_freed_parameter(ranks):
    """And no sum of nothing, which is 0."""
    for shape, penalty in ranks(penalty_of_freed):
        assert shape == [WIDTH, WIDTH] and penalty != penalty
