"""Frozen weights of adapted layers in int8 (as QLoRA, Dettmers et al. 2023, arXiv 2305.14314, has them in 4 bits).

    w[row, :] = scale[row] * q[row, :]       q int8, scale = the row's largest magnitude / 127, in float32

Four of q lie in one float32 of a parameter [out, in / 4], as other libraries store them for FSDP ("quant storage"):
bytes that are only moved, which every engine cuts, gathers, saves and plans as it does any frozen parameter. So
nothing may cast or round them. A layer widens its weight when it multiplies, and once more in backward.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.config.keys import ConfigError
from zeroexp.interface.values import Read, Values

IN_ONE = 4  # int8 in a float32
BASE = "base_layer"  # peft's name of the layer inside of its own


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is frozen and packed."""

    weights_in_one = IN_ONE  # of an element of the parameter, for the number of operations

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        packed, scale = pack(layer.weight.detach())
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = layer.bias

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = _Product.apply(inputs, self.packed, self.scale)
        return outputs if self.bias is None else outputs + self.bias


class _Product(torch.autograd.Function):
    """Keeps the packed weight for backward, where autograd would keep the wide one."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(packed, scale)
        return inputs @ unpack(packed, scale).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] @ unpack(*ctx.saved_tensors), None, None


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed weight and its scales; equal for equal weights, wherever that is asked."""
    scale = weight.abs().amax(dim=1) / 127
    rounded = (weight / scale.clamp(min=torch.finfo(scale.dtype).tiny)[:, None]).round()
    return rounded.to(torch.int8).view(torch.float32), scale


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    return packed.view(torch.int8) * scale[:, None]


def quantize_base(module: nn.Module, key: str, values: Values | None) -> Values | None:
    """Pack the weights inside of adapted layers. `values` are those of all parameters on meta; returned are those then.

    Raises ConfigError, which names `key`, where there is no such layer, one does not fill whole floats or one is tied.
    """
    layers = {
        name: each
        for name, each in module.named_modules()
        if name.rpartition(".")[2] == BASE and isinstance(each, nn.Linear)
    }
    modules = [*module.modules()]  # one that stands in several places is one
    owners: Counter[Tensor] = Counter(p for m in modules for p in m.parameters(recurse=False))
    for name, layer in layers.items():
        if owners[layer.weight] > 1:
            problem = f"the weight of {name.removesuffix(f'.{BASE}')} is tied to another module's"
            raise ConfigError(f"{key}: {problem}; leave it out of model.lora.target_modules")
        if layer.in_features % IN_ONE:
            problem = f"{name} has {layer.in_features} inputs"
            raise ConfigError(f"{key}: {problem}; adapt layers with a multiple of {IN_ONE}")
        module.set_submodule(name, QuantizedLinear(layer))
    if not layers:
        raise ConfigError(f"{key}: adapters lie around no linear layer here; leave it out")
    return (
        None if values is None else _Packed(values, {f"{name}.weight" for name in layers}, module)
    )


class _Packed:
    """The values of a module's parameters, those of these weights packed."""

    def __init__(self, own: Values, weights: set[str], module: nn.Module) -> None:
        self._own, self._weights = own, weights
        self._shapes = {name: p.shape for name, p in module.named_parameters()}

    def __iter__(self) -> Iterator[tuple[str, Read]]:
        for name, read in self._own:
            if name not in self._weights:
                yield name, read
                continue
            layer = name.removesuffix(".weight")
            rows, columns = self._shapes[f"{layer}.packed"]
            weight = read(0, rows * columns * IN_ONE).view(rows, columns * IN_ONE)
            for key, tensor in zip(("packed", "scale"), pack(weight.float()), strict=True):
                flat = tensor.flatten()
                yield f"{layer}.{key}", lambda start, stop, flat=flat: flat[start:stop]

    def fingerprint(self) -> int:
        return zlib.crc32(repr(("int8", self._own.fingerprint())).encode())
