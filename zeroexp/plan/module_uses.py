"""How often a forward uses each module, and whether its backward comes there, by one forward on the device `meta`.

A model may use one block several times (ALBERT), some of these without gradients (HRM): engines gather it for each use.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from zeroexp.config.keys import Config
from zeroexp.data.synthetic import width_of
from zeroexp.models.module import BuiltModel, patched_for_fake_tensors, without_backward
from zeroexp.zero.grouping import Group
from zeroexp.zero.schedule import tensors_in

MOST_TOKENS = 16  # of the forward: some models take them one by one


class Use(NamedTuple):
    name: str  # of the module, dotted
    has_backward: bool


_found: WeakKeyDictionary[nn.Module, list[Use] | None] = WeakKeyDictionary()


def uses_in_forward(config: Config, model: BuiltModel, units: Sequence[Group]) -> list[Use]:
    """Return the uses of modules in the order in which they end; `model` is on the device `meta`.

    units: the root first. Of a model that asks for values each of these is used once, the root last.
    """
    if model.module not in _found:
        _found[model.module] = _uses_of(config, model.module)
    if (uses := _found[model.module]) is not None:
        return uses
    alone = without_backward(model.module)
    root, *others = units
    return [
        *(Use(e.name, not alone.issuperset(e.parameters)) for e in others),
        Use(root.name, True),
    ]


def _uses_of(config: Config, module: nn.Module) -> list[Use] | None:
    modules = cast(Iterator[tuple[str, nn.Module]], module.named_modules())
    names = {each: name for name, each in modules}
    uses: list[Use] = []

    def note(each: nn.Module, _inputs: object, output: object) -> None:
        if each in names:
            uses.append(Use(names[each], any(t.requires_grad for t in tensors_in(output))))

    shape = (1, min(config.data.seq_len, MOST_TOKENS))
    if config.data.task == "regression":
        inputs = {"vectors": torch.empty(*shape, width_of(config.model), device="meta")}
    else:
        inputs = {"input_ids": torch.empty(shape, dtype=torch.int64, device="meta")}
    hook = register_module_forward_hook(note)
    try:
        with warnings.catch_warnings(action="ignore"), patched_for_fake_tensors(config.model):
            module(**inputs)
    except Exception:  # whatever code of others does without values
        return None
    finally:
        hook.remove()
    return uses
