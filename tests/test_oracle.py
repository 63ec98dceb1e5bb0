"""The oracle against hand-made numbers: whoever trusts it may see why."""

from __future__ import annotations

import pytest
import torch

from tests.models_for_tests import MODELS, microbatch_of, num_valid
from tests.oracle import Recipe, Rules, train_oracle
from zeroexp.models.loss import loss_sum


def test_gradients_are_those_of_one_big_batch():
    """The first step's norm and loss, without the oracle's loop: all microbatches of all ranks in one forward."""
    recipe = Recipe(world_size=3, accumulation=2, steps=1)
    module = MODELS["toy"].build().module
    batches = [microbatch_of(0, m, r) for r in range(3) for m in range(2)]
    tokens, labels = (torch.cat(column) for column in zip(*batches, strict=True))
    loss = loss_sum(module(tokens), labels, "causal") / num_valid(0, 2, 3)
    loss.backward()
    squares = [p.grad.square().sum() for p in module.parameters() if p.grad is not None]
    outcome = train_oracle(recipe)
    assert outcome.losses == pytest.approx([loss.item()], rel=1e-6)
    assert outcome.norms == pytest.approx([torch.stack(squares).sum().sqrt().item()], rel=1e-6)


def test_a_missing_gradient_is_zero_or_skipped():
    before = (
        MODELS["moe_all_ranks"].build().module.get_parameter("blocks.0.experts.experts.0.up.weight")
    )
    zeros, skip = (
        train_oracle(Recipe(model="moe_all_ranks"), Rules(missing=rule)).state
        for rule in ("zeros", "skip")
    )
    name = "blocks.0.experts.experts.0.up.weight"
    torch.testing.assert_close(skip[name]["weight"], before.detach(), rtol=0, atol=0)
    decayed = before.detach() * (1 - 0.02 * 0.1) ** 3  # weight decay alone, three steps
    torch.testing.assert_close(zeros[name]["weight"], decayed, rtol=1e-6, atol=0)
    assert "exp_avg" in zeros[name] and "exp_avg" not in skip[name]


def test_clipping_scales_the_gradient_to_the_threshold():
    free = train_oracle(Recipe(optimizer="sgd", steps=1))
    threshold = free.norms[0] / 4
    clipped = train_oracle(Recipe(optimizer="sgd", steps=1, max_grad_norm=threshold))
    assert clipped.norms == free.norms
    name = "blocks.1.up.weight"
    # After one step the momentum is the gradient plus decay times the weight.
    before = MODELS["toy"].build().module.get_parameter(name).detach() * 0.1
    shrunk = clipped.state[name]["momentum_buffer"] - before
    torch.testing.assert_close(
        shrunk, (free.state[name]["momentum_buffer"] - before) / 4, rtol=1e-4, atol=1e-7
    )


def test_ranks_have_different_data():
    batches = [microbatch_of(s, m, r)[0] for s in range(3) for m in range(2) for r in range(3)]
    assert len({tuple(tokens.flatten().tolist()) for tokens in batches}) == len(batches)


def test_moe_models_skip_what_they_say():
    """`one_rank`: rank 0 runs no expert; `by_turns`: another one for every rank and step."""
    for name, rank, step, expected in (
        ("moe_one_rank", 0, 0, set()),
        ("moe_all_ranks", 1, 0, {1}),
        ("moe_by_turns", 0, 0, {0}),
        ("moe_by_turns", 1, 1, {2}),
    ):
        model = MODELS[name]
        module = model.build().module
        model.prepare(module, step, 0, rank)
        tokens, labels = microbatch_of(step, 0, rank)
        loss_sum(module(tokens), labels, "causal").backward()
        experts = module.get_submodule("blocks.0.experts.experts")
        used = {i for i, expert in enumerate(experts) if expert.up.weight.grad is not None}
        assert used == expected, name
