"""torch.distributed.checkpoint, as FSDP2 trainers use it: what get_model_state_dict, get_optimizer_state_dict give.

model.<name>                        weights and buffers; the prefix is the trainer's own, or there is none (torchtitan)
optimizer.state.<name>.exp_avg      moments; "flatten_optimizer_state_dict" gives the same keys
optimizer.param_groups.0.lr         of each group, and
optimizer.param_groups.<name>.lr    of each parameter where it was flattened; both are written, neither is read
"""

from __future__ import annotations

import re
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from zeroexp.checkpoint.manifest import CheckpointError, Manifest
from zeroexp.checkpoint.weights import Weights
from zeroexp.config.keys import Config
from zeroexp.foreign.foreign_checkpoint import ForeignCheckpoint, Place, folder_of_step
from zeroexp.foreign.matching import names_of, of_torchtitan, param_groups
from zeroexp.foreign.megatron import ITERATION, LATEST, Plain, of_megatron
from zeroexp.interface.canonical import WEIGHT, is_moment
from zeroexp.models.module import build_empty

METADATA = ".metadata"
OF_OPTIMIZER = re.compile(r"(?:^|\.)state\.(?P<name>.+)\.(?P<key>[^.]+)$")
WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
# What stands beside weights that have no prefix, as torchtitan's.
BESIDE = re.compile(r"^(train_state|lr_scheduler|dataloader)\.|\bparam_groups\.|^freqs_cis$")


def is_dcp(folder: Path) -> bool:
    return (folder_of_step(folder, LATEST, ITERATION) / METADATA).is_file()


# -- in ---------------------------------------------------------------------------------------------


def read_dcp(folder: Path, names: Collection[str]) -> ForeignCheckpoint:
    """Raises CheckpointError for a folder that torch can not read, or with two states of one parameter."""
    folder = folder_of_step(folder, LATEST, ITERATION)
    try:
        reader = _Reader(folder)
    except Exception as error:  # a pickle of torch's, which may be cut short anywhere
        problem = f"torch can not read it ({type(error).__name__}: {error})"
        raise CheckpointError(f"{folder / METADATA}: {problem}; give another checkpoint") from error
    stored = {
        key: each
        for key, each in reader.read_metadata().state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    is_titans = any("tok_embeddings." in key for key in stored)
    is_megatrons = any(".linear_qkv." in key for key in stored)
    renamed = of_torchtitan if is_titans else of_megatron if is_megatrons else str
    plain = {key: renamed(WRAPPERS.sub("", key)) for key in stored}
    step, arguments, left_out = _told_by_megatron(reader) if is_megatrons else (None, {}, [])
    prefix = _prefix_of_weights(plain.values(), names)
    keys: dict[Place, str] = {}
    for key in stored:
        place = _place_of(plain[key], prefix, names)
        if place is None:
            left_out.append(key)
            continue
        if place in keys:
            problem = f"{keys[place]} and {key} are both {place.key} of {place.name}"
            raise CheckpointError(f"{folder}: {problem}; give one with one model and one optimizer")
        keys[place] = key
    tensors = {
        place: torch.empty(stored[key].size, dtype=stored[key].properties.dtype, device="meta")
        for place, key in keys.items()
    }
    read = partial(_read, reader, keys)
    in_pairs = is_titans or bool(arguments.get("rotary_interleaved"))
    return ForeignCheckpoint(folder, tensors, read, step, left_out, arguments, in_pairs)


def _told_by_megatron(reader: _Reader) -> tuple[int | None, Mapping[str, Any], list[str]]:
    """Return the steps done, the trainer's arguments, and what of the two can not be read."""
    plain = Plain()
    held = {"iteration", "args"} & reader.read_metadata().state_dict_metadata.keys()
    with _alone():
        dcp.load(dict.fromkeys(held), storage_reader=reader, planner=plain, no_dist=True)
    arguments = vars(plain.values.get("args", Namespace()))
    return plain.values.get("iteration"), arguments, sorted(held - plain.values.keys())


def _prefix_of_weights(keys: Iterable[str], names: Collection[str]) -> str:
    """Return what stands before the model's names in most keys; where averages are beside it, the model's own."""
    prefixes = Counter(
        plain.removesuffix(name)
        for plain in keys
        if (name := next((s for s in _suffixes(plain) if s in names), None))
    )
    return max(prefixes, key=lambda p: (prefixes[p], ".model." in f".{p}", -len(p)), default="")


def _place_of(plain: str, prefix: str, names: Collection[str]) -> Place | None:
    """Return which tensor of the model or optimizer a key names; None for what is of neither."""
    if plain in names:
        return Place(plain, WEIGHT)
    own, _, moment = plain.rpartition(".")
    # A module around the model is in both names: model.net.<name> and optimizer.state.net.<name>.exp_avg.
    ends = tuple(f".state.{inner}" for inner in (*_suffixes(prefix), ""))
    for name in _suffixes(own):
        if name in names and f".{own.removesuffix(name)}".endswith(ends):
            return Place(name, moment)
    if prefix and plain.startswith(prefix):
        return Place(plain.removeprefix(prefix), WEIGHT)
    if found := OF_OPTIMIZER.search(plain):
        return Place(found["name"], found["key"])
    return None if prefix or BESIDE.search(plain) else Place(plain, WEIGHT)


def _suffixes(key: str) -> Iterator[str]:
    """Yield the key, and what remains of it after each of its dots."""
    while key:
        yield key
        key = key.partition(".")[2]


class _Reader(FileSystemReader):
    """Reads the metadata once, since it is asked for each tensor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _read(reader: _Reader, keys: Mapping[Place, str], place: Place, target: Tensor) -> None:
    try:
        with _alone():
            dcp.load({keys[place]: target}, storage_reader=reader, no_dist=True)
    except Exception as error:  # of a file that is missing, cut short or no pickle of torch's
        reason = f"{type(error).__name__}: {error}".partition(". ")[0]
        problem = f"torch can not read {keys[place]} ({reason})"
        raise CheckpointError(f"{reader.path}: {problem}; give another checkpoint") from error


@contextmanager
def _alone() -> Iterator[None]:
    """Let torch read or write without ranks, of which it warns, and raise what it wraps in an error of its own."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


# -- out --------------------------------------------------------------------------------------------


class _OneByOne(DefaultSavePlanner):
    """Reads each tensor when its turn to be written comes, in place of the one on meta in the state."""

    def __init__(self, reads: Mapping[str, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._reads, self._last = reads, torch.empty(0)

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn not in self._reads:
            return super().lookup_object(index)
        self._last.untyped_storage().resize_(0)  # the writer holds on to what it has written
        self._last = self._reads[index.fqn]()
        return self._last


def write_dcp(folder: Path, config: Config, manifest: Manifest, weights: Weights) -> None:
    """Fill the empty `folder`: dtypes and bits are the checkpoint's. Raises Damaged and OSError."""
    built = build_empty(config.model, weights.shapes)
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    reads: dict[str, Callable[[], Tensor]] = {}
    for name, all_names in names_of(built.module).items():
        for each in all_names:
            state["model"][each] = weights.empty(name)
            reads[f"model.{each}"] = partial(weights.read, name)
        moments = {key for key in manifest.state[name] if is_moment(key)}
        for key in sorted(moments):
            state["optimizer"]["state"].setdefault(name, {})[key] = weights.empty(name, key)
            reads[f"optimizer.state.{name}.{key}"] = partial(weights.read, name, key)
    groups = param_groups(config, manifest.step, built)
    state["optimizer"]["param_groups"] = groups
    for group in groups:
        for name in group["params"]:
            values = {f"param_groups.{name}.{key}": group[key] for key in group.keys() - {"params"}}
            state["optimizer"].update(values)
    save_one_by_one(folder, state, reads)


def save_one_by_one(
    folder: Path, state: dict[str, Any], reads: Mapping[str, Callable[[], Tensor]]
) -> None:
    """Write a state whose tensors are on meta, each with what the call under its key reads."""
    with _alone():
        dcp.save(
            state, storage_writer=FileSystemWriter(folder), planner=_OneByOne(reads), no_dist=True
        )
