"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) by peft: a model's weights rest, and thin matrices learn.

    y = W x + alpha / r * B A x        W [out, in] frozen; A [r, in] drawn, B [out, r] zeros: both trained

peft puts a layer of its own around each chosen one; W is `<layer>.base_layer.weight` from then on. A classifier's head
is trained as it is, since adapters of a head that was just drawn would learn little.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zeroexp.config.keys import ConfigError, ModelConfig
from zeroexp.interface.values import Read, Values
from zeroexp.models.deferred import Drawn, defer
from zeroexp.models.quantized import quantize_base

ADAPTER = "default"  # peft's name of the only adapter of a layer; its files do not say it
NAME_OF_ADAPTER = re.compile(rf"\.{ADAPTER}(?=\.|$)")
HEADS = ["classifier", "score"]  # as peft has them for classifiers
ALL_LINEAR = "all-linear"  # peft's word for all layers but the head
NOT_INSTALLED = "needs peft, which is not installed; pip install 'zeroexp[lora]', or leave it out"
REFUSED_BY_PEFT = (ValueError, TypeError, AttributeError, KeyError)


def add_adapters(
    module: nn.Module, config: ModelConfig, seed: int, values: Values | None = None
) -> Values | None:
    """Put the adapters of `model.lora` into the module and freeze its own parameters.

    values: of the module's own parameters, which are on meta; returned are those of all parameters then. The adapters
    are the same whether values are given or not. Raises ConfigError.
    """
    if config.lora.r is None:
        return values
    if values is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _inject(module, config)
    else:
        names = {parameter: name for name, parameter in module.named_parameters()}
        _, drawn = defer(lambda: _inject(module, config), seed, lambda _: module)
        now = {names[p]: name for name, p in module.named_parameters() if p in names}
        values = _WithAdapters(values, now, drawn)
    if config.lora.quantize is None:
        return values
    return quantize_base(module, f"model.lora.quantize={config.lora.quantize}", values)


class _WithAdapters:
    """The values of a module's own parameters, under the names that they have now, and those of its adapters."""

    def __init__(self, own: Values, names: dict[str, str], drawn: Drawn) -> None:
        self._own, self._names, self._drawn = own, names, drawn

    def __iter__(self) -> Iterator[tuple[str, Read]]:
        for name, read in self._own:
            yield self._names[name], read
        yield from self._drawn

    def fingerprint(self) -> int:
        return zlib.crc32(repr((self._own.fingerprint(), self._drawn.fingerprint())).encode())


def write_adapters(
    folder: Path, config: ModelConfig, module: nn.Module, read: Callable[[str], Tensor], dtype: Any
) -> None:
    """Fill the empty `folder` as peft does, with the adapters of `module`, which may be on meta, and trained heads.

    `read` returns a parameter by its name. `peft.PeftModel.from_pretrained(model, folder)` puts them around the model.
    """

    made: Any = module
    settings = made.peft_config[ADAPTER]
    settings.base_model_name_or_path = config.weights
    heads = _heads_of(module, config)
    settings.modules_to_save = heads or None
    settings.inference_mode = True
    owners = {p: n for n, p in module.named_parameters() if ".lora_" in n or _is_of(n, heads)}
    names = {
        n: owners[p] for n, p in module.named_parameters(remove_duplicate=False) if p in owners
    }
    # Otherwise peft makes two weights of one that is tied; it reads both.
    settings.ensure_weight_tying = len(names) > len(owners)
    tensors = {
        f"base_model.model.{NAME_OF_ADAPTER.sub('', name)}": read(owner).to(dtype).clone()
        for name, owner in names.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings.save_pretrained(folder)


def _inject(module: nn.Module, config: ModelConfig) -> None:
    settings = _settings_of(config)
    from peft import inject_adapter_in_model

    heads = _heads_of(module, config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transposed layers, which it finds by itself
            inject_adapter_in_model(settings, module, adapter_name=ADAPTER)
    except REFUSED_BY_PEFT as error:
        reason = " ".join(str(error).split())
        problem = f"model.lora.r={config.lora.r}: {reason[:200]}"
        raise ConfigError(f"{problem}; {_which_layers(module)}") from error
    for name, layer in module.named_modules():
        # It puts another weight into the layer in each forward.
        if type(layer).__name__ == "ParamWrapper":
            targets = config.lora.target_modules
            problem = f"model.lora.target_modules={targets}: {name} is no layer that multiplies by its weight alone"
            raise ConfigError(f"{problem}; {_which_layers(module)}")
    adapted = [name for name, layer in module.named_modules() if hasattr(layer, "lora_A")]
    for head in heads:
        if inside := next((name for name in adapted if _is_of(f"{name}.", [head])), None):
            key = f"modules_to_save={head}"
            if config.lora.modules_to_save is None:
                key = f"target_modules={config.lora.target_modules}"
            problem = f"adapters lie around {inside}, of the head {head} that is trained as it is"
            remedy = "name other layers, or other modules in model.lora.modules_to_save"
            raise ConfigError(f"model.lora.{key}: {problem}; peft would not load both; {remedy}")
        own = [p for name, p in module.named_parameters() if _is_of(name, [head])]
        if not own:
            problem = f"model.lora.modules_to_save={head}: it has no weight of its own"
            raise ConfigError(
                f"{problem}; name the module that its weight is tied to, or leave it out"
            )
        for parameter in own:
            parameter.requires_grad_(True)


def _which_layers(module: nn.Module) -> str:
    named = {n.removesuffix(".base_layer") for n, m in module.named_modules() if _is_linear(m)}
    layers = sorted({name.rpartition(".")[2] for name in named if ".lora_" not in name})
    return f"set model.lora.target_modules to some of {', '.join(layers)}"


def _settings_of(config: ModelConfig) -> Any:
    """Return peft's LoraConfig. Raises ConfigError."""
    if find_spec("peft") is None:
        raise ConfigError(f"model.lora.r={config.lora.r}: {NOT_INSTALLED}")
    from peft import LoraConfig

    task = "SEQ_CLS" if config.task == "classification" else "CAUSAL_LM"
    given = {key: value for key, value in asdict(config.lora).items() if value is not None}
    given.pop("modules_to_save", None)
    given.pop("quantize", None)
    if given.get("target_modules") == [ALL_LINEAR]:
        given["target_modules"] = ALL_LINEAR
    try:
        return LoraConfig(task_type=task, **given)
    except REFUSED_BY_PEFT as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        remedy = "leave one of the keys out"
        raise ConfigError(f"model.lora.r={config.lora.r}: {reason}; {remedy}") from error


def _heads_of(module: nn.Module, config: ModelConfig) -> list[str]:
    """Return the ends of names of modules that are trained as they are. Raises ConfigError for one that fits none."""
    asked = config.lora.modules_to_save
    there = [name for name, _ in module.named_modules() if name]
    for end in asked or ():
        if not any(name.endswith(end) for name in there):
            remedy = "name modules of the model, or leave it out"
            raise ConfigError(f"model.lora.modules_to_save={end}: no such module; {remedy}")
    if asked is not None or config.task != "classification":
        return list(asked or ())
    return [end for end in HEADS if any(name.endswith(end) for name in there)]


def _is_of(name: str, ends: Sequence[str]) -> bool:
    """Tell whether a parameter lies in a module whose name ends like one of these: norm means input_layernorm too."""
    modules = [name[:at] for at, letter in enumerate(name) if letter == "."]
    return any(module.endswith(tuple(ends)) for module in modules)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
