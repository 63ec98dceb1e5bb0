"""The closed form of a model's operations against torch's counter, for one model of each family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zeroexp.config.keys import ModelConfig, from_mapping
from zeroexp.models.flops import flops_per_sample
from zeroexp.models.module import build_model

CONF = Path(__file__).parent.parent / "conf" / "model"
SEQ_LEN = 16


@pytest.mark.parametrize("name", ["tiny", "gpt2_tiny", "mixtral_tiny", "moe_tiny", "mlp_tiny"])
def test_the_form_is_what_the_counter_of_torch_counts(name):
    config = from_mapping(ModelConfig, yaml.safe_load((CONF / f"{name}.yaml").read_text()))
    module = build_model(config, seed=0).module
    if name == "mixtral_tiny":
        module.config._experts_implementation = (
            "eager"  # the counter does not know grouped products
        )
    vectors = torch.randn(1, SEQ_LEN, config.mlp["width"]) if config.mlp else None
    inputs = torch.arange(SEQ_LEN)[None] if vectors is None else vectors
    # Flash attention on the CPU is not counted; its plain form has the same products.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module(inputs)
    assert flops_per_sample(module, config, SEQ_LEN) == 3 * counter.get_total_flops()


SMALL = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100},
    **{"num_attention_heads": 4, "num_key_value_heads": 4},
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
EXPERTS = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 8},
    "qwen2_moe": {
        **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 8}
    },
    "gpt_oss": {"num_local_experts": 8, "head_dim": 8},
    "granitemoe": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "deepseek_v3": {
        **{"moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 1, "v_head_dim": 16, **LATENT},
    },
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_of_transformers_count_by_the_share_of_positions_sent_to_them(kind):
    keys = {"model_type": kind, "num_experts_per_tok": 2, **SMALL, **EXPERTS[kind]}
    config = ModelConfig(name=kind, family="hf", hf_config=keys)
    module = build_model(config, seed=0).module
    module.config._experts_implementation = "eager"
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module(torch.arange(SEQ_LEN)[None])
    assert flops_per_sample(module, config, SEQ_LEN) == 3 * counter.get_total_flops()


@pytest.mark.parametrize(
    "freeze", [["model.embed_tokens.*"], ["model.embed_tokens.*", "*.layers.0.*"], ["model.*"]]
)
def test_what_comes_before_all_that_trains_has_no_backward(freeze):
    """The form counts the gradient of the input of a first product that trains, which nobody needs."""
    keys = {**SMALL, "num_hidden_layers": 4, "tie_word_embeddings": False}
    config = ModelConfig(name="begins_frozen", family="llama", hf_config=keys, freeze=freeze)
    module = build_model(config, seed=0).module
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module(torch.arange(SEQ_LEN)[None]).logits.sum().backward()
    counted = counter.get_total_flops()
    assert counted <= flops_per_sample(module, config, SEQ_LEN) < 1.1 * counted


@pytest.mark.parametrize(
    ("keys", "seen"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, 32),
        ({"model_type": "mistral", "sliding_window": 999}, 512),
        ({"model_type": "gemma2", "sliding_window": 32, "head_dim": 8}, (32 + 512) / 2),
    ],
)
def test_a_layer_with_a_window_looks_no_further(keys, seen):
    config = ModelConfig(name="slides", family="hf", hf_config={**SMALL, **keys})
    module = build_model(config, seed=0, device="meta").module
    apart = [flops_per_sample(module, config, length) / length for length in (512, 1)]
    # 12 x layers x width for each of the positions, of which the shorter sequence has one.
    assert apart[0] - apart[1] == 12 * 2 * 32 * (seen - 1)


def test_twice_the_sequence_is_twice_the_weights_and_four_times_the_attention():
    config = from_mapping(ModelConfig, yaml.safe_load((CONF / "tiny.yaml").read_text()))
    module = build_model(config, seed=0, device="meta").module
    once, twice = (flops_per_sample(module, config, length) for length in (64, 128))
    attention = 12 * 2 * 64 * 64 * 64  # layers, width, positions, and as many again
    assert twice - 2 * once == 2 * attention
