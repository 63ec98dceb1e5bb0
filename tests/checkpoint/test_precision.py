"""One precision's checkpoint in another's hands: the master is the weight, and what is rounded is rounded once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.checkpoint.saving import checkpoint, resume, train_and_save
from tests.engines import ENGINES
from tests.oracle import Recipe, assembled

FROZEN = "shift"  # rests in the dtype that computes, and is saved in it


def move(ranks, tmp_path, source: tuple[str, str], target: tuple[str, str]):
    """(state as saved after two steps, state as loaded); the target also makes the third step."""
    recipe = Recipe(steps=2, precision=source[1], fused=True)
    answers = ranks(train_and_save, recipe, ENGINES[source[0]].make, tmp_path)
    saved = assembled([state for _, state in answers])
    recipe = replace(recipe, steps=3, precision=target[1], world_size=3)
    path = checkpoint(tmp_path, 2)
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
def test_a_master_is_the_fp32_weight(ranks, tmp_path, target):
    saved, loaded = move(ranks, tmp_path, ("zero1_buffer", "bf16_master"), (target, "fp32"))
    assert saved["embedding.weight"]["weight"].dtype == torch.float32
    require(loaded, saved, torch.float32, frozen=torch.float32)


@pytest.mark.parametrize(
    ("source", "target"), [*(("fsdp2", target) for target in TARGETS), ("zero3_tensor", "ddp")]
)
def test_bf16_rounds_to_nearest_even_once(ranks, tmp_path, source, target):
    """Moments too: torch's fused AdamW takes those of the weight's dtype alone."""
    saved, loaded = move(ranks, tmp_path, (source, "bf16_master"), (target, "bf16"))
    require(loaded, saved, torch.bfloat16, frozen=torch.bfloat16)


@pytest.mark.parametrize("target", ["zero3_buffer", "fsdp2"])
def test_bf16_goes_into_a_master_exactly(ranks, tmp_path, target):
    saved, loaded = move(ranks, tmp_path, ("ddp", "bf16"), (target, "bf16_master"))
    frozen = torch.float32 if target == "fsdp2" else torch.bfloat16  # shards of the master's dtype
    require(loaded, saved, torch.float32, frozen=frozen)
