"""Megatron-LM's --ckpt-format fsdp_dtensor: torch.distributed.checkpoint with names of its own, of a llama.

    model.module.module.decoder.layers.0.mlp.linear_fc1.weight_w             gate; weight_v: up
    model.module.module.decoder.layers.0.self_attention.linear_qkv.weight    q1 q2 k1 v1 | q3 q4 k2 v2 | ...
    optimizer.state.module.module.module.decoder....linear_qkv.weight.exp_avg
    iteration, args                                                          pickled: steps done, its arguments

Queries, keys and values of one group of heads lie one behind the other, so that rows of them are chosen here; all other
tensors have another name alone. Norms lie inside of the layer behind them (Transformer Engine), or beside it. Its
functions generate_state_dict, sharded_param_state_fsdp_dtensor and handle_swiglu_in_state_dict (2026) give the names.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner

from zeroexp.checkpoint.manifest import CheckpointError
from zeroexp.foreign.foreign_checkpoint import ForeignCheckpoint, Place, load_with_stand_ins
from zeroexp.models.module import BuiltModel

# A file above the iterations holds the number of the newest, and this is what the folder of one is called.
LATEST, ITERATION = "latest_checkpointed_iteration.txt", "iter_{:0>7}"
LAYER = re.compile(r"\bdecoder\.layers\.(\d+)\.")
# Megatron's names, behind those of its wrappers, and transformers' of a llama; linear_qkv, which no
# model of transformers has, is parted below. Of two names for one the last is written.
OUTSIDE = {
    "embedding.word_embeddings.": "model.embed_tokens.",
    "decoder.final_layernorm.": "model.norm.",
    "output_layer.": "lm_head.",
}
OF_LAYER = {
    "input_layernorm.": "input_layernorm.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_qkv.": "self_attn.linear_qkv.",
    "self_attention.linear_proj.": "self_attn.o_proj.",
    "self_attention.q_layernorm.": "self_attn.q_norm.",
    "self_attention.k_layernorm.": "self_attn.k_norm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "mlp.linear_fc1.weight_w": "mlp.gate_proj.weight",
    "mlp.linear_fc1.bias_w": "mlp.gate_proj.bias",
    "mlp.linear_fc1.weight_v": "mlp.up_proj.weight",
    "mlp.linear_fc1.bias_v": "mlp.up_proj.bias",
    "mlp.linear_fc2.": "mlp.down_proj.",
}
ONE = r"\.linear_qkv\."
PARTS = re.compile(r"\.([qkv])_proj\.")


def of_megatron(key: str) -> str:
    """Return the key with the parameter's name in transformers."""
    key = re.sub(r"^(model\.|optimizer\.(?:\d+\.)?state\.)(?:module\.)+", r"\1", key)
    if layer := LAYER.search(key):
        begin, end = key[: layer.start()], key[layer.end() :]
        return f"{begin}model.layers.{layer[1]}.{_renamed(end, OF_LAYER)}"
    return _renamed(key, OUTSIDE)


def to_megatron(name: str) -> str | None:
    """Return Megatron's name of a parameter, or of the fused one that it is a part of; None where there is none."""
    head, _, inside = name.removeprefix("model.layers.").partition(".")
    if head.isdecimal():
        inside = PARTS.sub(".linear_qkv.", inside)
        theirs = _renamed(inside, {ours: each for each, ours in OF_LAYER.items()})
        return None if theirs == inside else f"decoder.layers.{head}.{theirs}"
    theirs = _renamed(name, {ours: each for each, ours in OUTSIDE.items()})
    return None if theirs == name else theirs


def _renamed(key: str, names: Mapping[str, str]) -> str:
    """Return the key with the longest of these names that is in it replaced."""
    found = max((name for name in names if name in key), key=len, default=None)
    return key if found is None else key.replace(found, names[found])


class Plain(DefaultLoadPlanner):
    """Reads what is no tensor, by key; objects of Megatron's classes are not made, and stand for themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        with suppress(pickle.UnpicklingError):  # it is left out, and said
            self.values[read_item.dest_index.fqn] = load_with_stand_ins(value)


def with_parted_rows(found: ForeignCheckpoint, built: BuiltModel) -> ForeignCheckpoint:
    """Return the checkpoint as if queries, keys and values were tensors of their own; others' as they are.

    Raises CheckpointError for one of other heads than the model's.
    """
    config: Any = getattr(built.module, "config", None)
    fused = [place for place in found.tensors if re.search(ONE, place.name)]
    if not fused or not hasattr(config, "num_key_value_heads"):
        return found
    _require_same_model(found, config)
    parts: dict[Place, tuple[Place, slice]] = {}
    tensors = dict(found.tensors)
    for place in fused:
        whole = tensors.pop(place)
        for part, heads in heads_of(config).items():
            own = Place(re.sub(ONE, f".{part}_proj.", place.name), place.key)
            parts[own] = place, heads
            rows = rows_of(whole, heads, config)
            tensors[own] = rows.flatten(0, 2) if rows is not whole else whole

    def read(place: Place, target: Tensor) -> None:
        if place not in parts:
            found.read(place, target)
            return
        theirs, heads = parts[place]
        whole = torch.empty_like(found.tensors[theirs], device="cpu")
        found.read(theirs, whole)
        rows = rows_of(whole, heads, config)
        target.view(rows.shape).copy_(rows)
        whole.untyped_storage().resize_(0)  # torch holds on to the last that it has loaded

    return replace(found, tensors=tensors, read=read)


def _require_same_model(found: ForeignCheckpoint, config: Any) -> None:
    """Raise CheckpointError for what no shape tells: eight heads of 64 or sixteen of 32, gains less 1."""
    there = dict(found.arguments)
    heads = there.get("num_attention_heads", config.num_attention_heads)
    groups = there.get("num_query_groups") if there.get("group_query_attention", True) else None
    gains = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
    for name, theirs, ours in (
        ("num_attention_heads", heads, config.num_attention_heads),
        ("num_query_groups", groups or heads, config.num_key_value_heads),
        *((name, bool(there.get(name)), False) for name in gains),
    ):
        if there and theirs != ours:
            problem = f"of another model: {name} is {theirs} in it and {ours} here"
            raise CheckpointError(f"{found.folder}: {problem}; name the model that was trained")


def heads_of(config: Any) -> dict[str, slice]:
    """Return which heads of a group are queries, its key and its value."""
    queries = config.num_attention_heads // config.num_key_value_heads
    return {
        "q": slice(0, queries),
        "k": slice(queries, queries + 1),
        "v": slice(queries + 1, queries + 2),
    }


def rows_of(whole: Tensor, heads: slice, config: Any) -> Tensor:
    """Return the rows [group, head, row, ...] of these heads, a view of `whole`.

    A counter stays whole, and so does what then fits no parameter.
    """
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    in_group = config.num_attention_heads // config.num_key_value_heads + 2
    if whole.shape[:1] != (config.num_key_value_heads * in_group * size,):
        return whole
    return whole.unflatten(0, (-1, in_group, size))[:, heads]
