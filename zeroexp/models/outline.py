"""The outline of a model: its modules, names and shapes on meta, all that a closed form asks for.

Building a model of transformers imports it, which takes longer than all else of a plan. So the outline of one that was
built is kept (`outlines/` in the cache) and read the next time. Its name is a hash of all that decides it: the config,
the vocabulary, the code of this folder, and the files of the architecture as they are installed. What was refused is
never kept, and neither is a model of which a check asks more than an outline has.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zeroexp.config.families import MODELS, shape_of
from zeroexp.config.keys import ConfigError, ModelConfig
from zeroexp.config.paths import cache_root
from zeroexp.models.module import BuiltModel, build_model
from zeroexp.process.content_hash import hash_of
from zeroexp.process.durable import replace_durably

POSITIONS = "max_position_embeddings"  # a key of the model's own config that plans read


def outline_of(config: ModelConfig, vocab_size: int | None) -> BuiltModel:
    """Return the model on meta, or its outline, whose modules can not be called. Raises ConfigError."""
    file = _file_of(config, vocab_size)
    if file is None:
        return build_model(config, seed=0, device="meta", vocab_size=vocab_size)
    with suppress(OSError):  # none yet
        digest, _, content = file.read_bytes().partition(b"\n")
        if digest.decode(errors="replace") == hash_of([content]):
            return _as_model(json.loads(content))
    built = build_model(config, seed=0, device="meta", vocab_size=vocab_size)
    if not any(hasattr(each, "is_concatenated") for each in built.module.modules()):
        with suppress(OSError):  # without a cache it is built each time
            file.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps(_as_json(built)).encode()
            replace_durably(file, hash_of([content]).encode() + b"\n" + content)
    return built


def longest_sequence(model: BuiltModel) -> int | None:
    """Return the most positions that the model's own config names; None where it names none, as Mamba's.

    RoBERTa and its relatives count them from the row of padding in their table, and leave the rows before it unused.
    """
    longest = getattr(getattr(model.module, "config", None), POSITIONS, None)
    for name, module in model.module.named_modules():
        padding = getattr(module, "padding_idx", None)
        if longest and padding is not None and name.endswith("position_embeddings"):
            return longest - padding - 1
    return longest


def _file_of(config: ModelConfig, vocab_size: int | None) -> Path | None:
    """Return where the outline is kept; None for a model that is quick to build or that others change."""
    library = find_spec("transformers")
    is_theirs = config.family in MODELS.own and MODELS[config.family].of_transformers
    if not is_theirs or library is None or config.lora.r is not None:
        return None
    kind = shape_of(config).get("model_type") or config.family
    installed = [*Path(str(library.origin)).parent.glob(f"models/{kind}/*.py")]
    code = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in [*_OURS, *installed]]
    try:
        folder = cache_root() / "outlines"
    except ConfigError:  # a user without a home
        return None
    decides = (asdict(config), vocab_size, sorted(code), version("transformers"), torch.__version__)
    return folder / f"{hash_of([repr(decides).encode()])}.json"


_OURS = [*Path(__file__).parent.glob("*.py")]


def _as_json(built: BuiltModel) -> dict[str, Any]:
    """Return the outline; what has several names is made of its first."""
    module, first = built.module, dict[Any, str]()
    modules = [
        (name, _kind_of(each), first.setdefault(each, name))
        for name, each in module.named_modules(remove_duplicate=False)
    ]
    first.clear()
    parameters: list[Any] = []
    for name, p in module.named_parameters(remove_duplicate=False):
        dtype, of = str(p.dtype).removeprefix("torch."), first.setdefault(p, name)
        parameters.append((name, [*p.shape], dtype, p.requires_grad, of))
    return {
        "blocks": built.blocks,
        POSITIONS: longest_sequence(built),
        "modules": modules,
        "parameters": parameters,
    }


def _kind_of(module: nn.Module) -> str:
    """Return the name of the module's class, or of the nearest one above it that is torch's."""
    of_torch = (each for each in type(module).__mro__ if each.__module__.startswith("torch.nn."))
    return next(each.__name__ for each in of_torch if hasattr(nn, each.__name__))


def _as_model(outline: dict[str, Any]) -> BuiltModel:
    modules: dict[str, nn.Module] = {}
    for name, kind, first in outline["modules"]:
        if name == first:
            modules[name] = getattr(nn, kind).__new__(getattr(nn, kind))
            nn.Module.__init__(modules[name])
        modules[name] = modules[first]
        parent, _, key = name.rpartition(".")
        if name:
            modules[parent].add_module(key, modules[name])
    parameters: dict[str, nn.Parameter] = {}
    for name, shape, dtype, is_trained, first in outline["parameters"]:
        if name == first:
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            parameters[name] = nn.Parameter(empty, is_trained)
        parent, _, key = name.rpartition(".")
        modules[parent].register_parameter(key, parameters[first])
    root: Any = modules[""]
    root.config = SimpleNamespace(**{POSITIONS: outline[POSITIONS]})
    return BuiltModel(root, outline["blocks"])
