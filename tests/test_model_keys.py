"""A key of model.hf_config either changes what is trained, or is refused: tried for every key of every family."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tests.composing import composed
from zeroexp.config.keys import ConfigError
from zeroexp.models.huggingface_keys import IDLE, SPELT_APART
from zeroexp.models.module import build_model

MODELS = ("tiny", "gpt2_tiny", "mixtral_tiny")
# Values unlike the default where adding one to it makes no model.
OTHER: dict[str, Any] = {
    **{"hidden_act": "gelu", "activation_function": "relu", "sliding_window": 3, "head_dim": 8},
    **{"n_inner": 100, "pad_token_id": 5, "num_attention_heads": 2, "num_key_value_heads": 4},
    **{"n_head": 2, "n_embd": 32, "hidden_size": 32, "num_experts_per_tok": 1},
    **{"intermediate_size": 256, "initializer_range": 0.5, "vocab_size": 64},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_theta": 77.0},
    **{"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
}
# They may have no effect on a batch of this test: they limit its length, are ids of words for a tokenizer, a head, or
# say how much of a head turns, which is all of it in these families.
NO_EFFECT_HERE = {"max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
NO_EFFECT_HERE |= {"partial_rotary_factor", "rotary_pct"}


def trained(model: str, **keys: Any) -> list[Tensor | None]:
    """The logits, and every gradient, of one batch; its words fit into every vocabulary of this file."""
    config = copy.deepcopy(composed(f"model={model}").model)
    config = replace(config, hf_config={**config.hf_config, "vocab_size": 128, **keys})
    module = build_model(config, seed=0).module
    logits = module(input_ids=(torch.arange(24) * 5 % 60).view(2, 12)).logits
    logits.square().mean().backward()
    return [logits, *(p for p in module.parameters()), *(p.grad for p in module.parameters())]


def equal(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    same = len(one) == len(other)
    return same and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def other_than(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else "other"


@pytest.mark.parametrize("model", MODELS)
def test_a_key_has_an_effect_or_is_refused(model):
    family = composed(f"model={model}").model.family
    usual = trained(model)
    assert equal(usual, trained(model))
    tried = 0
    known = AutoConfig.for_model(family).to_dict()
    for key, default in {**dict.fromkeys(SPELT_APART, 0), **known}.items():
        set_so_far = composed(f"model={model}").model.hf_config.get(key, default)
        value = OTHER.get(key, other_than(set_so_far))
        try:
            differs = not equal(usual, trained(model, **{key: value}))
        except ConfigError as error:
            named = f"model.hf_config.{key}"
            assert str(error).startswith((f"{named}={value}: ", f"{named}: GPT2Config has no such"))
            continue
        tried += 1
        assert differs or key in NO_EFFECT_HERE, key
    assert tried >= 15


def test_what_is_refused_has_no_effect_in_transformers(monkeypatch):
    """Let through, an idle key changes nothing; randomness would, and is switched off."""
    monkeypatch.setattr("zeroexp.models.huggingface.check_keys", lambda *_: None)
    usual = trained("gpt2_tiny")
    idle = {"output_attentions", "summary_type", "reorder_and_upcast_attn"}
    assert idle <= IDLE
    for key in (*idle, "attn_pdrop"):
        value = 0.5 if key == "attn_pdrop" else "mean" if key == "summary_type" else True
        assert equal(usual, trained("gpt2_tiny", **{key: value})), key
