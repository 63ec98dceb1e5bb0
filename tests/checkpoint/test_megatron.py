"""A checkpoint as Megatron-LM's FSDP writes it (`--ckpt-format fsdp_dtensor`) is brought in bit for bit, or refused."""

from __future__ import annotations

import enum
import re
import sys
from argparse import Namespace
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.checkpoint.test_foreign import brought_in, config_of, save_quietly, stepped
from zeroexp.checkpoint.manifest import StoredPiece, StoredTensor, read_manifest
from zeroexp.checkpoint.weights import Weights
from zeroexp.config.keys import Config, ConfigError, ModelConfig, from_mapping
from zeroexp.export import export_whole
from zeroexp.foreign.megatron_writer import write_megatron
from zeroexp.interface.quantized_moments import encode
from zeroexp.measure.memory import AllocationMeter, count_cpu_allocations
from zeroexp.models.module import build_model
from zeroexp.process.content_hash import hash_of
from zeroexp.process.world import World

# What torch warns of where one process saves and loads.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
# Two groups of heads, each of two queries, a key and a value.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
LLAMA = {**HEADS, "hidden_size": 12, "vocab_size": 40}

ENUMS = "megatron.core.transformer.enums"


class AttnBackend(enum.Enum):
    """As in `megatron.core.transformer.enums`, which whoever reads the checkpoint does not have."""

    auto = 5


AttnBackend.__module__ = ENUMS


def in_megatrons_words(values: dict[str, Tensor], *, fused_norms: bool) -> dict[str, Tensor]:
    """What GPTModel's state_dict has for these tensors, after `handle_swiglu_in_state_dict`."""
    there = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
        "lm_head.weight": "output_layer.weight",
    }
    theirs: dict[str, Tensor] = {}
    for name, value in values.items():
        layer, _, last = name.partition("layers.")[2].partition(".")
        own = f"decoder.layers.{layer}."
        inside = {
            "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
            "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
            "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
            "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
            "mlp.gate_proj.weight": "mlp.linear_fc1.weight_w",
            "mlp.up_proj.weight": "mlp.linear_fc1.weight_v",
            "mlp.down_proj.weight": "mlp.linear_fc2.weight",
            "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"
            if fused_norms
            else "input_layernorm.weight",
            "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"
            if fused_norms
            else "pre_mlp_layernorm.weight",
        }
        if last in ("self_attn.q_proj.weight", "self_attn.q_proj.bias"):
            kind = last.rpartition(".")[2]
            k, v = (values[name.replace("q_proj", each)] for each in ("k_proj", "v_proj"))
            # q1 q2 k1 v1 | q3 q4 k2 v2, as in SelfAttention.get_query_key_value_tensors
            size = len(value) // 4
            q1, q2, q3, q4 = value.split(size)
            (k1, k2), (v1, v2) = (each.split(size) for each in (k, v))
            theirs[f"{own}self_attention.linear_qkv.{kind}"] = torch.cat(
                [q1, q2, k1, v1, q3, q4, k2, v2]
            )
        elif not last.startswith("self_attn.") or last in inside:
            theirs[there.get(name) or own + inside[last]] = value
    return theirs


def save_as_megatron(
    world: World, folder: Path, model: nn.Module, moments: dict[str, dict[str, Tensor]], fused: bool
) -> None:
    """As `generate_state_dict` and `preprocess_fsdp_dtensor_state_dict` make it, and `save_checkpoint` writes it."""
    mesh = init_device_mesh("cpu", (world.size,))

    def sharded(values: dict[str, Tensor]) -> dict[str, Any]:
        words = in_megatrons_words(values, fused_norms=fused)
        return {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in words.items()}

    weights = sharded({name: p.detach() for name, p in model.named_parameters()})
    state: dict[str, dict[str, Any]] = {}
    for key, values in moments.items():
        for name, each in sharded(values).items():
            state.setdefault(f"module.module.module.{name}", {})[key] = each
    group = {"lr": 0.02, "betas": (0.9, 0.95), "step": 1}  # its Adam counts steps by group
    heads = {"num_attention_heads": 4, "num_query_groups": 2, "group_query_attention": True}
    heads["rotary_interleaved"] = not fused
    whole = {
        "args": Namespace(**heads, attention_backend=AttnBackend.auto),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": {f"module.module.{name}": each for name, each in weights.items()},
        "optimizer": {"state": state, "param_to_group_meta": dict.fromkeys(state, group)},
        "rng_state": {"(0, 0)": [{"torch_rng_state": torch.get_rng_state()}]},
    }
    names = [ENUMS.rsplit(".", n)[0] for n in range(4)]
    modules = {name: ModuleType(name) for name in names}
    modules[ENUMS].AttnBackend = AttnBackend
    with mock.patch.dict(sys.modules, modules):
        dcp.save(whole, storage_writer=dcp.FileSystemWriter(folder))


def assert_megatron_reads(
    folder: Path, model: nn.Module, moments: dict[str, dict[str, Tensor]]
) -> None:
    """As its load_checkpoint does: what it compares, then tensors of its own names, each of which it finds."""
    told: dict[str, Any] = dict.fromkeys(("args", "iteration", "checkpoint_version"))
    dcp.load(told, checkpoint_id=folder, no_dist=True)
    assert (told["iteration"], told["checkpoint_version"]) == (7, 3.0)
    compared = {"num_layers": 2, "hidden_size": 12, "num_attention_heads": 4}
    assert compared.items() <= vars(told["args"]).items()
    weights = in_megatrons_words(dict(model.named_parameters()), fused_norms=True)
    expected: dict[str, Any] = {
        "model": {f"module.module.{name}": each.detach() for name, each in weights.items()},
        "optimizer": {"state": {f"module.module.module.{name}": {} for name in weights}},
    }
    for key, values in moments.items():
        for name, each in in_megatrons_words(values, fused_norms=True).items():
            expected["optimizer"]["state"][f"module.module.module.{name}"][key] = each
    group = {f"module.module.module.{name}": {"step": 7} for name in weights}
    expected["optimizer"]["param_to_group_meta"] = group
    read = tree_map(lambda each: each * 0, expected)
    dcp.load(read, checkpoint_id=folder, no_dist=True)
    for one, two in zip(tree_leaves(read), tree_leaves(expected), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(two))


def with_moments(config: Config) -> tuple[nn.Module, dict[str, dict[str, Tensor]]]:
    model, _ = stepped(config)
    torch.manual_seed(0)
    drawn = {
        key: {name: torch.rand_like(p) for name, p in model.named_parameters()}
        for key in ("exp_avg", "exp_avg_sq")
    }
    return model, drawn


@pytest.mark.parametrize(
    ("fused", "tied"),
    [(True, True), (False, False)],
    ids=["norms_inside_tied", "norms_beside_untied"],
)
def test_megatron_is_brought_in_bit_for_bit(ranks, tmp_path, fused, tied):
    config = config_of(**LLAMA, tie_word_embeddings=tied)
    model, moments = with_moments(config)
    ranks(save_as_megatron, tmp_path / "theirs", model, moments, fused)
    checkpoint, notes = brought_in(tmp_path / "theirs", tmp_path / "run", config)
    assert notes == ["left out, as neither weights nor moments: rng_state.(0, 0).0.torch_rng_state"]
    manifest = read_manifest(checkpoint)
    weights = Weights(checkpoint, manifest)
    assert manifest.step == 7
    assert manifest.state.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, values in {**moments, "weight": {name: parameter}}.items():
            expected = values[name]
            if not fused and name.endswith(("q_proj.weight", "k_proj.weight")):
                pairs = expected.unflatten(0, (-1, HEADS["head_dim"] // 2, 2))
                expected = pairs.transpose(1, 2).flatten(0, 2)  # from neighbours, half a head apart
            assert torch.equal(weights.read(name, key), expected), f"{name}.{key}"
        assert weights.read(name, "step") == 7

    if fused:
        out = tmp_path / "out"
        export_whole(checkpoint, out, "megatron")
        assert (out / "latest_checkpointed_iteration.txt").read_text() == "7"
        assert_megatron_reads(out / "iter_0000007", model, moments)
        of_fp16 = replace(manifest, step=9)  # two of its steps overflowed
        write_megatron(tmp_path / "fp16", from_mapping(Config, manifest.config), of_fp16, weights)
        key = (
            "optimizer.param_to_group_meta.module.module.module.decoder.final_layernorm.weight.step"
        )
        told: dict[str, Any] = {key: None, "iteration": None}
        dcp.load(told, checkpoint_id=tmp_path / "fp16" / "iter_0000009", no_dist=True)
        assert told == {key: 7, "iteration": 9}
        again, _ = brought_in(out, tmp_path / "back", config)  # of the iteration that it names
        back = Weights(again, read_manifest(again))
        for name in manifest.state:
            for key in ("weight", *moments):
                assert torch.equal(back.read(name, key), weights.read(name, key))

    for changes, problem in (
        ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight and 8 more of this"),
        ({"num_hidden_layers": 1}, "model.layers.1.* of it not in this model"),
        (
            {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
            "num_attention_heads is 4 in it and 2",
        ),
        (
            {"intermediate_size": 9},
            "model.layers.0.mlp.gate_proj.weight and 5 more of another shape",
        ),
    ):
        other = config_of(**{**LLAMA, **changes}, tie_word_embeddings=tied)
        with pytest.raises(ConfigError, match=problem):
            brought_in(tmp_path / "theirs", tmp_path / "again", other)
        assert not (tmp_path / "again").exists()


def test_biases_and_gains_of_queries_and_keys_turn_with_their_weights(tmp_path):
    """--rotary-interleaved --add-qkv-bias --qk-layernorm: what stays in pairs scores other tokens."""
    keys = {"model_type": "qwen3", **HEADS, "hidden_size": 12, "vocab_size": 40}
    keys |= {"intermediate_size": 8, "num_hidden_layers": 1, "tie_word_embeddings": True}
    config = config_of()
    config.model = ModelConfig(family="hf", hf_config={**keys, "attention_bias": True})
    torch.manual_seed(0)
    module = build_model(config.model, seed=1).module
    values = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    theirs = in_megatrons_words(values, fused_norms=True)
    heads = {"num_attention_heads": 4, "num_query_groups": 2, "rotary_interleaved": True}
    state = {"args": Namespace(**heads), "iteration": 7, "model": theirs}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    checkpoint, _ = brought_in(tmp_path / "theirs", tmp_path / "run", config)
    weights = Weights(checkpoint, read_manifest(checkpoint))
    turned = [name for name in values if re.search(r"\.[qk]_(proj|norm)", name)]
    assert len(turned) == 6
    for name, value in values.items():
        of_pairs = value.unflatten(0, (-1, 4))[:, [0, 2, 1, 3]] if name in turned else value
        assert torch.equal(weights.read(name), of_pairs.reshape(value.shape)), name


def test_moments_that_rest_in_8_bits_leave_decoded(tmp_path):
    config = config_of(**LLAMA, tie_word_embeddings=True)
    save_quietly(tmp_path / "alone", *stepped(config))
    checkpoint, _ = brought_in(tmp_path / "alone", tmp_path / "run", config)
    whole = Weights(checkpoint, manifest := read_manifest(checkpoint))
    state, content = deepcopy(manifest.state), bytearray()
    for name, key in ((name, key) for name in state for key in ("exp_avg", "exp_avg_sq")):
        codes = encode(whole.read(name, key))
        own = codes.numpy().tobytes()
        piece = StoredPiece("codes.bin", len(content), 0, codes.numel(), hash_of([own]))
        state[name][key] = StoredTensor(tuple(codes.shape), "int8", (piece,))
        content += own
    (checkpoint / "codes.bin").write_bytes(content)
    coded = replace(manifest, state=state)
    weights = Weights(checkpoint, coded)
    write_megatron(tmp_path / "out", config, coded, weights)
    again, _ = brought_in(tmp_path / "out", tmp_path / "back", config)
    back = Weights(again, read_manifest(again))
    for name, entry in state.items():
        assert back.read(name, "step") == 1
        for key in entry:
            assert torch.equal(back.read(name, key), weights.read(name, key)), f"{name}.{key}"


def test_the_momentum_of_outer_steps_stays_behind(tmp_path):
    config = config_of(**LLAMA, tie_word_embeddings=True)
    save_quietly(tmp_path / "alone", *stepped(config))
    checkpoint, _ = brought_in(tmp_path / "alone", tmp_path / "run", config)
    manifest = read_manifest(checkpoint)
    state = {n: {**each, "outer.momentum": each["weight"]} for n, each in manifest.state.items()}
    outer = replace(manifest, state=state)
    write_megatron(tmp_path / "out", config, outer, Weights(checkpoint, outer))
    again, _ = brought_in(tmp_path / "out", tmp_path / "back", config)
    back = read_manifest(again).state
    assert {n: each.keys() for n, each in back.items()} == {
        n: each.keys() for n, each in manifest.state.items()
    }


def save_each(world: World, saved: list[Any]) -> None:
    for each in saved:
        save_as_megatron(world, *each, True)


@pytest.mark.slow
def test_one_tensor_of_megatron_and_one_of_ours_are_in_memory_at_a_time(ranks, tmp_path):
    """Beside what is written: the largest one fused, one of ours, and the parts of two ranks that torch holds.

    It is larger than the 4 MB that the trial of an optimizer takes before.
    """
    num_ranks = 16
    small = {**LLAMA, "hidden_size": 256, "intermediate_size": 64}
    configs = {
        tmp_path / "fused_rows": config_of(**{**small, "head_dim": 1024}),
        tmp_path / "embedding": config_of(**{**small, "vocab_size": 8192}),
    }
    saved = [(folder, *with_moments(config)) for folder, config in configs.items()]
    ranks(save_each, saved, world_size=num_ranks)
    words = [
        in_megatrons_words(dict(model.named_parameters()), fused_norms=True)
        for _, model, _ in saved
    ]
    sizes = [max(tensor.nbytes for tensor in each.values()) for each in words]
    del saved, words
    assert count_cpu_allocations() is None
    for (folder, config), largest in zip(configs.items(), sizes, strict=True):
        before = AllocationMeter(torch.device("cpu")).peak_bytes()
        meter = AllocationMeter(torch.device("cpu"))
        brought_in(folder, folder.with_suffix(".run"), config)
        peak = meter.peak_bytes()
        assert before is not None and peak is not None
        assert peak - before <= (2 + 2 / num_ranks) * largest <= 2.2 * largest
