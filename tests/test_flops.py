"""The closed form of a model's operations against torch's counter, for one model of each family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zeroexp.config import ModelConfig, from_mapping
from zeroexp.models.build import build_model
from zeroexp.models.flops import flops_per_sample

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


def test_twice_the_sequence_is_twice_the_weights_and_four_times_the_attention():
    config = from_mapping(ModelConfig, yaml.safe_load((CONF / "tiny.yaml").read_text()))
    module = build_model(config, seed=0, device="meta").module
    once, twice = (flops_per_sample(module, config, length) for length in (64, 128))
    attention = 12 * 2 * 64 * 64 * 64  # layers, width, positions, and as many again
    assert twice - 2 * once == 2 * attention
