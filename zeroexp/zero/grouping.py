"""Which parameters of a module move together; nothing is allocated here.

Every parameter is claimed once, by identity. Tied weights are one parameter. A parameter that several modules share, or
that lies outside all of them, belongs to the root unit, whose parameters are there from the beginning of forward at
least until backward reaches its first block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor, nn

from zeroexp.cut.chunk import FROZEN, ParameterSpec

# These modules compute with the weights of modules inside them whose forward they never call.
USES_ITS_PARTS = (nn.MultiheadAttention,)

Named = dict[str, nn.Parameter]


@dataclass
class Group:
    """A module and the parameters that move with it, by their full name."""

    name: str
    module: nn.Module
    parameters: Named
    # Of parameters of every group of the optimizer that names one.
    kinds: Mapping[nn.Parameter, str]
    layouts: Mapping[nn.Parameter, str]  # likewise


def group_parameters(
    module: nn.Module,
    blocks: Sequence[str],
    unit: str,
    param_groups: Sequence[dict[str, Any]] = (),
    apart: Collection[str] = (),
) -> list[Group]:
    """Return the root's group, then those of modules that move on their own, in the order of their definition.

    apart: names of more modules that move on their own.
    """
    kinds, layouts = (named_in(param_groups, key) for key in ("kind", "layout"))
    modules = list(_parameter_modules(module, blocks))
    names = {
        "model": [],
        "block": list(blocks),
        "layer": list(dict.fromkeys(_block_around(name, blocks) or name for name in modules)),
        "module": modules,
    }[unit]
    if apart:
        names = [name for name, _ in module.named_modules() if name in {*names, *apart}]
    claims: dict[nn.Parameter, set[str]] = {}
    homes = set(names)
    for full_name, parameter in module.named_parameters(remove_duplicate=False):
        claims.setdefault(parameter, set()).add(_home_of(full_name, homes))
    members: dict[str, Named] = {name: {} for name in ["", *names]}
    for full_name, parameter in module.named_parameters():
        if not parameter.numel():
            continue  # an empty parameter has nothing to hold or to train
        claimed = claims[parameter]
        if len(claimed) > 1 and not claimed.isdisjoint(apart):
            one, other, *_ = sorted(claimed)
            raise ValueError(
                f"Dtypes(of_modules=...): {full_name} belongs to {one or 'the model'} and to {other}, "
                "which compute in dtypes of their own: leave both out"
            )
        members[claimed.pop() if len(claimed) == 1 else ""][full_name] = parameter
    lists = {n for n, m in module.named_modules() if isinstance(m, nn.ModuleList | nn.ModuleDict)}
    if nothing := sorted(n for n in apart if not n or n in lists or not members.get(n)):
        raise ValueError(
            f"Dtypes(of_modules=...): {nothing[0]!r} is no module of the model, is a list, or holds no parameter of "
            "its own: name modules inside, as model.named_modules() does"
        )
    named = (kinds, layouts)
    return [Group(n, module.get_submodule(n), m, *named) for n, m in members.items() if m or not n]


def with_shared_in_root(groups: Sequence[Group]) -> list[Group]:
    """Return the groups for an engine that moves all parameters of a module together, as FSDP2 does.

    A module that shares a parameter with others, and would have a group for the rest, moves with the root.
    """
    root, *others = groups
    shared = set(root.parameters.values())
    apart = [each for each in others if shared.isdisjoint(each.module.parameters())]
    moved = (each.parameters for each in others if each not in apart)
    parameters = dict(chain(root.parameters.items(), *(own.items() for own in moved)))
    return [replace(root, parameters=parameters), *apart]


def named_in(param_groups: Sequence[dict[str, Any]], key: str) -> dict[nn.Parameter, str]:
    """Return what groups name under this key, for each parameter in such a group."""
    return {p: group[key] for group in param_groups if key in group for p in group["params"]}


def groups_of_lists(
    param_groups: Sequence[dict[str, Any]], optimizer_factory: object
) -> list[dict[str, Any]]:
    """Return the groups, each with a list of its parameters, which may have been an iterator."""
    if not callable(optimizer_factory):
        raise ValueError(
            f"optimizer_factory is a {type(optimizer_factory).__name__}: give a function that takes parameter "
            "groups and makes the optimizer"
        )
    groups: list[dict[str, Any]] = []
    for group in param_groups:
        if not isinstance(group, dict) or "params" not in group:
            raise ValueError(
                f"param_groups hold a {type(group).__name__} without params: give a list of "
                '{"params": [...], ...}'
            )
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        if not all(isinstance(each, nn.Parameter) for each in params):
            raise ValueError(
                "param_groups hold what is no parameter: take them from model.parameters()"
            )
        groups.append({**group, "params": params})
    return groups


def specs_of(group: Group) -> list[ParameterSpec]:
    """Return what a layout needs to know of a group's parameters; they may be on the device `meta`."""
    specs: list[ParameterSpec] = []
    for name, p in group.parameters.items():
        kind = group.kinds.get(p, "trainable") if p.requires_grad else FROZEN
        layout = group.layouts.get(p, "") if p.requires_grad else ""
        specs.append(
            ParameterSpec(name, p.numel(), p.itemsize, kind, layout, len(p) if p.ndim else 1)
        )
    return specs


def _parameter_modules(module: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Yield the modules that hold parameters directly; a module that holds a list inside a block owns all within.

    Such a list holds experts or adapters. Its holder decides in its forward which of them run, and whether a router
    runs: if they had collectives of their own, a rank that skips them would make the others hang.
    """
    lists = [
        name for name, m in module.named_modules() if isinstance(m, nn.ModuleList | nn.ModuleDict)
    ]
    named_blocks = set(blocks)
    inside = [name for name in lists if not named_blocks.isdisjoint(outer_names(name))]
    choosers = {name.rpartition(".")[0] for name in inside}
    choosers |= {name for name, m in module.named_modules() if isinstance(m, USES_ITS_PARTS)}
    taken: set[str] = set()
    for name, submodule in module.named_modules():
        # A list of parameters has no forward, so its parameters belong to the module that holds the list.
        is_list = isinstance(submodule, nn.ParameterList | nn.ParameterDict)
        user = name.rpartition(".")[0] if is_list else name
        owner = next((name for name in [*outer_names(user), user] if name in choosers), user)
        if not owner or owner in taken or not list(submodule.parameters(recurse=False)):
            continue
        taken.add(owner)
        yield owner


def outer_names(name: str) -> list[str]:
    """Return the names of the modules around a module, the outermost first, without the root."""
    return [name[:end] for end, letter in enumerate(name) if letter == "."]


def _block_around(name: str, blocks: Collection[str]) -> str | None:
    return next((each for each in [*outer_names(name), name] if each in blocks), None)


def _home_of(full_name: str, names: Collection[str]) -> str:
    """Return the innermost of the named modules that contains the parameter; "" is the root."""
    return next((name for name in reversed(outer_names(full_name)) if name in names), "")
