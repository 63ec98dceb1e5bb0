"""Under which names, and in which parts, transformers publishes the parameters and saved buffers of a model.

    model.layers.0.mlp.up_proj.weight          as it stands, under its own name or another
    model.layers.0.mlp.experts.down_proj       in parts: Mixtral's fused experts are one matrix for each expert
    layers.0.self_attn.{q,k,v}_proj.weight     together: one tensor of the file holds several parameters

transformers has the conversion of each architecture, and no table of what goes where. So the conversion is asked: of
one tensor at a time which names it gets, of tensors that hold the number of each element where each belongs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from zeroexp.interface.module_buffers import persistent_buffers


@dataclass(eq=False)
class Together:
    """Tensors of a model, with their shapes, and the published tensors that hold all of their elements."""

    shapes: dict[str, torch.Size] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    def cut(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of one flat tensor that holds them in their order."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        pieces = zip(self.shapes.items(), flat.split(sizes), strict=True)
        return {name: piece.view(shape) for (name, shape), piece in pieces}


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return what a model's files hold, by the model's own names; a tied parameter appears once."""
    return {**dict(module.named_parameters()), **persistent_buffers(module)}


def publish(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return some of the model's tensors under published names; of those published together all have to be given."""
    return revert_weight_conversion(cast(Any, module), dict(tensors))


def published_together(module: nn.Module) -> list[Together]:
    """Return the fewest tensors that can be published without others, in the order of the model; most stand alone."""
    groups: list[Together] = []
    group_of: dict[str, Together] = {}
    for name, tensor in saved_tensors(module).items():
        parts = list(publish(module, {name: torch.empty(tensor.shape, device="meta")}))
        group = next((group_of[part] for part in parts if part in group_of), Together())
        if not group.shapes:
            groups.append(group)
        group.shapes[name] = tensor.shape
        group.parts += [part for part in parts if part not in group_of]
        group_of.update(dict.fromkeys(parts, group))
    return groups


def elements_of_parts(module: nn.Module, group: Together) -> dict[str, Tensor]:
    """Return, for each published tensor, which element of the group's flat tensor each of its elements is."""
    small = group.numel <= torch.iinfo(torch.int32).max
    numbers = torch.arange(group.numel, dtype=torch.int32 if small else torch.int64)
    return publish(module, group.cut(numbers))
