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
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zeroexp.checkpoint.manifest import CheckpointError
from zeroexp.foreign.deepspeed_zero import Opaque
from zeroexp.foreign.found import Found, Place
from zeroexp.models.module import BuiltModel

LAYER, OURS = r"\bdecoder\.layers\.(\d+)\.", r"model.layers.\1."
# Megatron's names, behind those of its wrappers, and transformers' of a llama; qkv_proj is parted below.
NAMES = {
    r"^(model\.|optimizer\.(?:\d+\.)?state\.)(?:module\.)+": r"\1",
    r"\bembedding\.word_embeddings\.": "model.embed_tokens.",
    rf"{LAYER}self_attention\.linear_qkv\.layer_norm_": rf"{OURS}input_layernorm.",
    rf"{LAYER}input_layernorm\.": rf"{OURS}input_layernorm.",
    rf"{LAYER}self_attention\.linear_qkv\.": rf"{OURS}self_attn.qkv_proj.",
    rf"{LAYER}self_attention\.linear_proj\.": rf"{OURS}self_attn.o_proj.",
    rf"{LAYER}self_attention\.([qk])_layernorm\.": rf"{OURS}self_attn.\2_norm.",
    rf"{LAYER}mlp\.linear_fc1\.layer_norm_": rf"{OURS}post_attention_layernorm.",
    rf"{LAYER}pre_mlp_layernorm\.": rf"{OURS}post_attention_layernorm.",
    rf"{LAYER}mlp\.linear_fc1\.(weight|bias)_w\b": rf"{OURS}mlp.gate_proj.\2",
    rf"{LAYER}mlp\.linear_fc1\.(weight|bias)_v\b": rf"{OURS}mlp.up_proj.\2",
    rf"{LAYER}mlp\.linear_fc2\.": rf"{OURS}mlp.down_proj.",
    r"\bdecoder\.final_layernorm\.": "model.norm.",
    r"\boutput_layer\.": "lm_head.",
}
ONE = r"\.qkv_proj\."


def of_megatron(key: str) -> str:
    """Return the key with the parameter's name in transformers."""
    for theirs, ours in NAMES.items():
        key = re.sub(theirs, ours, key)
    return key


class Plain(DefaultLoadPlanner):
    """Reads what is no tensor, by key; objects of Megatron's classes are not made, and stand for themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        theirs = get_unsafe_globals_in_checkpoint(value)
        value.seek(0)
        stand_ins: list[Any] = [(type("Opaque", (Opaque,), {}), name) for name in theirs]
        with safe_globals(stand_ins), suppress(pickle.UnpicklingError):  # it is left out, and said
            self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def with_parted_rows(found: Found, built: BuiltModel) -> Found:
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
        for part, heads in _heads(config).items():
            own = Place(re.sub(ONE, f".{part}_proj.", place.name), place.key)
            parts[own] = place, heads
            rows = _rows(whole, heads, config)
            tensors[own] = rows.flatten(0, 2) if rows is not whole else whole

    def fill(targets: Mapping[Place, Tensor]) -> None:
        found.fill({place: each for place, each in targets.items() if place not in parts})
        of_whole: dict[Place, list[Place]] = defaultdict(list)
        for place in targets.keys() & parts.keys():
            of_whole[parts[place][0]].append(place)
        for place, own in of_whole.items():
            whole = torch.empty_like(found.tensors[place], device="cpu")
            found.fill({place: whole})
            for each in own:
                rows = _rows(whole, parts[each][1], config)
                targets[each].view(rows.shape).copy_(rows)
            whole.untyped_storage().resize_(0)  # torch holds on to the last that it has loaded

    return replace(found, tensors=tensors, fill=fill)


def _require_same_model(found: Found, config: Any) -> None:
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


def _heads(config: Any) -> dict[str, slice]:
    """Return which heads of a group are queries, its key and its value."""
    queries = config.num_attention_heads // config.num_key_value_heads
    return {
        "q": slice(0, queries),
        "k": slice(queries, queries + 1),
        "v": slice(queries + 1, queries + 2),
    }


def _rows(whole: Tensor, heads: slice, config: Any) -> Tensor:
    """Return the rows [group, head, row, ...] of these heads, a view of `whole`.

    A counter stays whole, and so does what then fits no parameter.
    """
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    in_group = config.num_attention_heads // config.num_key_value_heads + 2
    if whole.shape[:1] != (config.num_key_value_heads * in_group * size,):
        return whole
    return whole.unflatten(0, (-1, in_group, size))[:, heads]
