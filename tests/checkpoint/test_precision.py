"""One precision's checkpoint in another's hands: the master is the weight, and what is rounded is rounded once."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from tests.checkpoint.saving import checkpoint, resume, train_and_save
from tests.engines import ENGINES
from tests.oracle import Recipe, assembled

TWO_STEPS = Recipe(steps=2, fused=True)
FROZEN = "shift"  # rests in the dtype that computes, and is saved in it


@pytest.fixture(scope="module")
def save(ranks, tmp_path_factory):
    """(checkpoint, state) after two steps of an engine in a precision; each is saved once."""

    @functools.cache
    def saved(name: str, precision: str):
        run, recipe = tmp_path_factory.mktemp("run"), replace(TWO_STEPS, precision=precision)
        answers = ranks(train_and_save, recipe, ENGINES[name].make, run)
        return checkpoint(run, 2), assembled([state for _, state in answers])

    return saved


def move(ranks, save, source: tuple[str, str], target: tuple[str, str]):
    """(state as saved after two steps, state as loaded); the target also makes the third step."""
    path, saved = save(*source)
    recipe = replace(TWO_STEPS, steps=3, precision=target[1], world_size=3)
    answers = ranks(resume, recipe, ENGINES[target[0]].make, path, world_size=3)
    assert all(torch.tensor(norm).isfinite() for norm in answers[0][0][0].norms)
    return saved, assembled([loaded for _, loaded in answers])


def require(loaded, saved, dtype: torch.dtype, *, frozen: torch.dtype) -> None:
    for name, tensors in saved.items():
        for key, tensor in tensors.items():
            expected = tensor.to(frozen if name.endswith(FROZEN) else dtype)
            expected = tensor if key == "step" else expected
            assert loaded[name][key].dtype == expected.dtype, f"{name}.{key}"
            assert torch.equal(loaded[name][key], expected), f"{name}.{key}"


TARGETS = ["zero3_buffer", "zero2_parameter", "ddp", "ddp_zero_redundancy"]


@pytest.mark.parametrize("target", ["zero3_buffer", "ddp_zero_redundancy", "fsdp2"])
def test_a_master_is_the_fp32_weight(ranks, save, target):
    saved, loaded = move(ranks, save, ("zero1_buffer", "bf16_master"), (target, "fp32"))
    assert saved["embedding.weight"]["weight"].dtype == torch.float32
    require(loaded, saved, torch.float32, frozen=torch.float32)


@pytest.mark.parametrize(
    ("source", "target"), [*(("fsdp2", target) for target in TARGETS), ("zero3_tensor", "ddp")]
)
def test_bf16_rounds_to_nearest_even_once(ranks, save, source, target):
    """Moments too: torch's fused AdamW takes those of the weight's dtype alone."""
    saved, loaded = move(ranks, save, (source, "bf16_master"), (target, "bf16"))
    require(loaded, saved, torch.bfloat16, frozen=torch.bfloat16)


@pytest.mark.parametrize("target", ["zero3_buffer", "fsdp2"])
def test_bf16_goes_into_a_master_exactly(ranks, save, target):
    saved, loaded = move(ranks, save, ("ddp", "bf16"), (target, "bf16_master"))
    frozen = torch.float32 if target == "fsdp2" else torch.bfloat16  # shards of the master's dtype
    require(loaded, saved, torch.float32, frozen=frozen)
