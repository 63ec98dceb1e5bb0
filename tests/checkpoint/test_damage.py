"""A checkpoint that is damaged or another model's: one line, the same on every rank, before anything is changed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saving import checkpoint, train_and_save
from tests.engines import ENGINES
from tests.models_for_tests import MODELS
from tests.oracle import Make, Recipe, pieces_of
from zeroexp.checkpoint.load import load
from zeroexp.checkpoint.manifest import CheckpointError, read_manifest
from zeroexp.process.world import World

RECIPE = Recipe(steps=2)
MAKE = ENGINES["zero3_buffer"].make


Shapes = dict[str, tuple[int, ...] | None]


def try_to_load(world: World, make: Make, saved: Path, others: Shapes) -> tuple[str, bool]:
    """(what it says, whether the engine is as it was)."""
    built = MODELS[RECIPE.model].build()
    for name, shape in others.items():
        owner, _, key = name.rpartition(".")
        parameter = None if shape is None else torch.nn.Parameter(torch.ones(shape))
        built.module.get_submodule(owner).register_parameter(key, parameter)
    strategy = make(built, RECIPE, world)
    before = pieces_of(strategy)
    try:
        load(saved, strategy, world)
    except CheckpointError as error:
        after = pieces_of(strategy)
        return str(error), all(
            torch.equal(a.tensor, b.tensor)
            for name in before
            for a, b in zip(
                before[name]["weight"].pieces, after[name]["weight"].pieces, strict=True
            )
        )
    return "", False


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    ranks(train_and_save, RECIPE, MAKE, folder)
    return folder


@pytest.fixture
def saved(run, tmp_path) -> Path:
    """A copy of the newest, beside an older one."""
    shutil.copytree(run, tmp_path / "run")
    return checkpoint(tmp_path / "run", 2)


@pytest.fixture
def refused(ranks, saved) -> Callable[..., str]:
    """The one line that every rank says; the shapes of some parameters may be others, and None is no parameter."""

    def refused(**others: tuple[int, ...] | None) -> str:
        answers = ranks(try_to_load, MAKE, saved, others)
        (line,) = {line for line, _ in answers}
        assert all(unchanged for _, unchanged in answers)
        assert line.startswith(str(saved)) and "\n" not in line and "; " in line
        return line

    return refused


def test_damaged_files(saved, refused):
    """Any flipped byte of any piece is found, whichever of the ranks checks it."""
    pieces = [(t, piece) for _, t in read_manifest(saved).tensors() for piece in t.pieces]
    for tensor, piece in random.Random(0).sample(pieces, 4):
        original = (saved / piece.file).read_bytes()
        damaged = bytearray(original)
        damaged[piece.offset + tensor.num_bytes(piece) - 1] ^= 1
        (saved / piece.file).write_bytes(damaged)
        assert f"{piece.file}: damaged, " in refused()
        (saved / piece.file).write_bytes(original)
    (saved / "rank1.bin").unlink()
    assert refused() == f"{saved}/rank1.bin: No such file or directory; give another checkpoint"
    content = (saved / "manifest.json").read_text()
    (saved / "manifest.json").write_text(content.replace('"step": 2', '"step": 3'))
    assert "manifest.json: damaged" in refused()


def test_another_model_is_named_by_the_first_difference(refused):
    line = refused(**{"norm.weight": (6,)})
    assert "parameter norm.weight is [5] in the state, [6] in the model" in line
    assert line.endswith("; give one of this model")
    assert "parameter more is not in the state; give one of this model" in refused(more=(1,))
    assert "parameter unused of the state is not in the model" in refused(unused=None)
