"""How often a microbatch uses each module, and where its backward comes, by passes on the device `meta`.

A model may use one block several times (ALBERT), some of these without gradients (HRM), or recompute it by reentrant
checkpoints of its own: engines gather it for each use.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from zeroexp.config.keys import Config
from zeroexp.data.synthetic import width_of
from zeroexp.models.module import BuiltModel, patched_for_fake_tensors, without_backward
from zeroexp.zero.grouping import Group, outer_names
from zeroexp.zero.schedule import tensors_in

# Tokens by which short passes differ, and of the one that tells whether modules take chunks of more.
FEW_TOKENS, MANY_TOKENS = 4, 256


class Use(NamedTuple):
    """A use of a module by the model's forward, which may recompute it in backward."""

    name: str  # of the module, dotted
    has_backward: bool
    has_graph: bool  # whether autograd recorded it
    is_recomputed: bool  # its backward follows a forward of its own, inside of backward


# By module, and what else decides: the length and kind of what it is given.
_found: WeakKeyDictionary[nn.Module, dict[tuple[int, str], list[Use] | None]] = WeakKeyDictionary()


def uses_in_forward(config: Config, model: BuiltModel, units: Sequence[Group]) -> list[Use]:
    """Return the uses of modules in the order in which they end; `model` is on the device `meta`.

    units: the root first. Of a model that asks for values each of these is used once, the root last.
    """
    found, given = _found.setdefault(model.module, {}), (config.data.seq_len, config.data.task)
    if given not in found:
        found[given] = _uses_by_length(config, model.module)
    if (uses := found[given]) is not None:
        return uses
    return _listed(model, units)


def _listed(model: BuiltModel, units: Sequence[Group]) -> list[Use]:
    """Return one use of each unit, and of each block that holds several behind the last of them."""
    alone = without_backward(model.module)
    root, *others = units
    uses: list[Use] = []
    for unit, following in zip_longest(others, others[1:]):
        has_backward = not alone.issuperset(unit.parameters)
        ends = {*outer_names(unit.name)} - {*outer_names(following.name if following else "")}
        names = [unit.name, *(block for block in model.blocks if block in ends)]
        uses += [Use(name, has_backward, True, False) for name in names]
    return [*uses, Use(root.name, True, True, False)]


def _uses_by_length(config: Config, module: nn.Module) -> list[Use] | None:
    """Return the uses by all tokens, by passes of few where these tell: those of a recurrent model would take minutes.

    Modules that take tokens one by one are used as often more for each few tokens more. Chunks of more than the many
    tokens are not seen.
    """
    most, uses_of = config.data.seq_len, partial(_uses_of, config, module)
    times, rest = divmod(most, FEW_TOKENS)
    if times > 3:
        few, more = (uses_of(num * FEW_TOKENS + rest) for num in (1, 2))
        if few == more:
            return few if few == uses_of(min(most, MANY_TOKENS)) else uses_of(most)
        if few and more and _extended(few, more, 2) == uses_of(3 * FEW_TOKENS + rest):
            return _extended(few, more, times - 1)
    return uses_of(most)


def _extended(few: list[Use], more: list[Use], times: int) -> list[Use]:
    """Return the fewer uses, with what the longer pass has more of them so often."""
    at = next(
        (i for i, pair in enumerate(zip(few, more, strict=False)) if pair[0] != pair[1]), len(few)
    )
    return few[:at] + more[at : at + len(more) - len(few)] * times + few[at:]


def _uses_of(config: Config, module: nn.Module, num_tokens: int) -> list[Use] | None:
    modules = cast(Iterator[tuple[str, nn.Module]], module.named_modules())
    names = {each: name for name, each in modules}
    uses: list[Use] = []

    def note(each: nn.Module, _inputs: object, output: object) -> None:
        if each in names:
            place = len(uses)
            uses.append(Use(names[each], False, torch.is_grad_enabled(), False))
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(note_backward, place))  # pyright: ignore[reportUnknownMemberType]

    def note_backward(place: int, _gradient: torch.Tensor) -> None:
        uses[place] = uses[place]._replace(has_backward=True)

    shape = (1, num_tokens)
    if config.data.task == "regression":
        inputs = {"vectors": torch.empty(*shape, width_of(config.model), device="meta")}
    else:
        inputs = {"input_ids": torch.empty(shape, dtype=torch.int64, device="meta")}
    hook = register_module_forward_hook(note)
    try:
        with warnings.catch_warnings(action="ignore"), patched_for_fake_tensors(config.model):
            output = module(**inputs)
            num_of_forward = len(uses)
            getattr(output, "logits", output).sum().backward()
    except Exception:  # whatever code of others does without values
        return None
    finally:
        hook.remove()
        module.zero_grad()
    return _matched(uses[:num_of_forward], uses[num_of_forward:])


def _matched(uses: list[Use], in_backward: Sequence[Use]) -> list[Use]:
    """Return the uses of forward, with the backward of those that recompute."""
    for name in (use.name for use in in_backward if use.has_backward):
        places = [i for i, use in enumerate(uses) if use.name == name and not use.has_backward]
        if places:
            uses[places[-1]] = uses[places[-1]]._replace(has_backward=True, is_recomputed=True)
    return uses
