"""Every engine loads what each family saved, at other world sizes: the state bit for bit.

That every engine loads what it saved itself is in test_goes_on.py.

The model has all that can go wrong: tied weights, odd sizes, dimensions smaller than the world, frozen parameters, and
one that nobody uses, of which some engines have moments and others none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.saving import FAMILIES, checkpoint, load_each, train_and_save
from tests.engines import ENGINES, Engine
from tests.oracle import Recipe, assembled
from tests.ranks import Ranks

TWO_STEPS = Recipe(steps=2)
State = dict[str, dict[str, Tensor]]
Save = Callable[[Engine, int], tuple[Path, State]]


@pytest.fixture(scope="module")
def save(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Save:
    """(checkpoint, state) of an engine at a world size; each is saved once."""
    known: dict[str, tuple[Path, State]] = {}

    def saved(engine: Engine, world_size: int) -> tuple[Path, State]:
        key = f"{engine} {world_size}"
        if key not in known:
            run = tmp_path_factory.mktemp("run")
            recipe = replace(TWO_STEPS, world_size=world_size)
            answers = ranks(train_and_save, recipe, engine.make, run, world_size=world_size)
            known[key] = checkpoint(run, 2), assembled([state for _, state in answers])
        return known[key]

    return saved


def require_same(loaded: State, saved: State) -> None:
    assert loaded.keys() == saved.keys()
    for name, tensors in saved.items():
        assert loaded[name].keys() == tensors.keys(), name
        for key, tensor in tensors.items():
            assert loaded[name][key].dtype == tensor.dtype, f"{name}.{key}"
            assert torch.equal(loaded[name][key], tensor), f"{name}.{key}"


def check(
    ranks: Ranks, save: Save, engine: Engine, world_size: int, sources: list[tuple[Engine, int]]
) -> None:
    saved = [save(*source) for source in sources]
    recipe = replace(TWO_STEPS, world_size=world_size)
    answers = ranks(
        load_each, recipe, engine.make, [path for path, _ in saved], world_size=world_size
    )
    for number, (_, state) in enumerate(saved):
        require_same(assembled([loaded[number] for loaded in answers]), state)


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_loads_what_each_family_saved(ranks, save, name):
    """Each family at one of two world sizes, which is not that of the engine that loads."""
    target = 1 + list(ENGINES).index(name) % 3
    sources = []
    for number, family in enumerate(FAMILIES.values()):
        first, second = 1 + number % 3, 1 + (number + 1) % 3
        sources.append((family, first if first != target else second))
    check(ranks, save, ENGINES[name], target, sources)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("name", ENGINES)
def test_all_pairs(ranks, save, name, world_size):
    sources = list(product(ENGINES.values(), (1, 2, 3)))
    check(ranks, save, ENGINES[name], world_size, sources)
