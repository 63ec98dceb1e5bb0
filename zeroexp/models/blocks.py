"""Find the repeated blocks of any module: what is gathered and freed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from zeroexp.config.keys import ConfigError


def find_blocks(module: nn.Module) -> list[str]:
    """Return the dotted names of the repeated blocks of `module`, in the order of their definition.

    They are the elements of its outermost lists whose class transformers names as one that is not to be split
    (`_no_split_modules`), else of all its outermost lists of several modules of one class.
    """
    lists = [(name, [*each]) for name, each in _outermost_lists(module)]
    whole = set(getattr(module, "_no_split_modules", None) or ())
    named = [(n, ms) for n, ms in lists if ms and {type(m).__name__ for m in ms} <= whole]
    repeated = [(n, ms) for n, ms in lists if len(ms) > 1 and len({type(m) for m in ms}) == 1]
    chosen = named or repeated
    return _each_once(module, [f"{name}.{i}" for name, ms in chosen for i in range(len(ms))])


def chosen_blocks(module: nn.Module, chosen: Sequence[str]) -> list[str]:
    """Return the blocks that `model.blocks` names; a list stands for its elements. Raises ConfigError."""
    modules = dict(module.named_modules())
    blocks: list[str] = []
    for name in chosen:
        if name not in modules or not name:
            lists = ", ".join(module_list_names(module)) or "none"
            raise ConfigError(
                f"model.blocks={name}: the model has no such module; its lists: {lists}"
            )
        one = modules[name]
        is_list = isinstance(one, nn.ModuleList)
        blocks += [f"{name}.{i}" for i in range(len(one))] if is_list else [name]
    return _each_once(module, blocks)


def _each_once(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the first name of each module among these, since one block may stand in several places, as ALBERT's."""
    first = {module.get_submodule(name): name for name in reversed(names)}
    return [name for name in dict.fromkeys(names) if first[module.get_submodule(name)] == name]


def module_list_names(module: nn.Module) -> list[str]:
    """Return the names of the lists that `model.blocks` may take."""
    return [name for name, _ in _outermost_lists(module)]


def _outermost_lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield lists of modules that hold parameters and lie in no other such list."""
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if isinstance(child, nn.ModuleList) and next(child.parameters(), None) is not None:
            yield name, child
        else:
            yield from _outermost_lists(child, f"{name}.")
