"""One of our checkpoints of a llama as Megatron-LM's --ckpt-format fsdp_dtensor, see megatron.py: weights and moments.

    iter_0000020/                       torch.distributed.checkpoint
    latest_checkpointed_iteration.txt   20

What Megatron finds of its own words (--load) is what it compares: layers, sizes, heads, and the iteration. Settings of
its optimizer, its schedule and its random states are those of its command line.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroexp.checkpoint.manifest import CheckpointError, Manifest
from zeroexp.checkpoint.weights import Weights
from zeroexp.config.keys import Config
from zeroexp.foreign.dcp import save_one_by_one
from zeroexp.foreign.matching import STEP
from zeroexp.foreign.megatron import ITERATION, LATEST, PARTS, heads_of, rows_of, to_megatron
from zeroexp.interface.canonical import WEIGHT, is_moment
from zeroexp.models.module import build_empty

IN_MODEL, IN_OPTIMIZER = "module.module.", "module.module.module."  # names of its wrappers
Parts = dict[str, str]  # q, k, v, or "" of a whole one -> our name


def write_megatron(folder: Path, config: Config, manifest: Manifest, weights: Weights) -> None:
    """Fill the empty `folder`, bit for bit. Raises Damaged, OSError, and CheckpointError for another model's names."""
    of_model: Any = getattr(build_empty(config.model, weights.shapes).module, "config", None)
    model: dict[str, Tensor] = {}
    states: dict[str, dict[str, Tensor]] = defaultdict(dict)
    groups: dict[str, dict[str, int]] = {}
    reads: dict[str, Callable[[], Tensor]] = {}
    for (theirs, key), parts in _their_tensors(manifest, of_model, weights).items():
        whole = partial(_whole, parts, key, of_model, weights)
        if key == WEIGHT:
            model[IN_MODEL + theirs] = whole("meta")
            reads[f"model.{IN_MODEL}{theirs}"] = whole
        else:
            states[IN_OPTIMIZER + theirs][key] = whole("meta")
            reads[f"optimizer.state.{IN_OPTIMIZER}{theirs}.{key}"] = whole
            # Its Adam counts steps by group.
            groups[IN_OPTIMIZER + theirs] = {
                "step": _num_updates(manifest, next(iter(parts.values())), weights)
            }
    optimizer = {"state": states, "param_to_group_meta": groups}
    state = {"model": model, "optimizer": optimizer, "checkpoint_version": 3.0}
    told = {"args": _arguments(of_model, manifest.samples_seen), "iteration": manifest.step}
    save_one_by_one(folder / ITERATION.format(manifest.step), {**state, **told}, reads)
    (folder / LATEST).write_text(f"{manifest.step}", encoding="utf-8")


def _their_tensors(
    manifest: Manifest, of_model: Any, weights: Weights
) -> dict[tuple[str, str], Parts]:
    """Return what each of their tensors is made of, by name and key."""
    tensors: dict[tuple[str, str], Parts] = defaultdict(dict)
    is_llama = hasattr(of_model, "num_key_value_heads")
    for name, entry in manifest.state.items():
        theirs = to_megatron(name) if is_llama else None
        if theirs is None:
            problem = f"{name} has no place in a GPTModel of Megatron-LM, as those of a llama have"
            raise CheckpointError(f"--format=megatron: {problem}; use --format dcp")
        part = PARTS.search(name)
        shape = entry[WEIGHT].shape
        kept = [each for each in entry if each == WEIGHT or is_moment(each)]
        for key in (each for each in kept if weights.empty(name, each).shape == shape):
            tensors[theirs, key][part[1] if part else ""] = name
    for (theirs, key), parts in tensors.items():
        if "" not in parts and len(parts) < len(heads_of(of_model)):
            problem = f"not all of queries, keys and values have {key}, as {theirs} would"
            raise CheckpointError(f"--format=megatron: {problem}; use --format dcp")
    return tensors


def _num_updates(manifest: Manifest, name: str, weights: Weights) -> int:
    """Return how often a parameter was updated: a step of fp16 whose gradients overflow updates nothing."""
    return int(weights.read(name, STEP)) if STEP in manifest.state[name] else manifest.step


def _whole(parts: Parts, key: str, of_model: Any, weights: Weights, device: str = "cpu") -> Tensor:
    """Return one of their tensors: queries, keys and values lie one behind the other, group of heads by group."""
    if "" in parts:
        return (weights.read if device == "cpu" else weights.empty)(parts[""], key)
    like = [weights.empty(name, key) for name in parts.values()]
    numel, (_, *rest) = sum(map(len, like)), like[0].shape
    whole = torch.empty((numel, *rest), dtype=like[0].dtype, device=device)
    for part, heads in heads_of(of_model).items() if device == "cpu" else ():
        rows = rows_of(whole, heads, of_model)
        rows.copy_(weights.read(parts[part], key).view(rows.shape))
    return whole


def _arguments(config: Any, samples_seen: int) -> Namespace:
    """Return the arguments that Megatron compares with its own, and the samples behind which its data go on."""
    return Namespace(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        group_query_attention=config.num_key_value_heads != config.num_attention_heads,
        add_position_embedding=True,
        max_position_embeddings=config.max_position_embeddings,
        padded_vocab_size=config.vocab_size,
        consumed_train_samples=samples_seen,
    )
