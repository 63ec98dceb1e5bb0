"""A checkpoint that is damaged or another model's: one line, the same on every rank, before anything is changed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saving import checkpoint, shapes_of, train_and_save
from tests.engines import ENGINES
from tests.oracle import Make, Recipe, build_on_rank, pieces_of
from zeroexp.checkpoint.load import Shapes, load
from zeroexp.checkpoint.manifest import CheckpointError, read_manifest
from zeroexp.process.world import World

RECIPE = Recipe(steps=2)
MAKE = ENGINES["zero3_buffer"].make


def try_to_load(world: World, make: Make, saved: Path, shapes: Shapes) -> tuple[str, bool]:
    """(what it says, whether the engine is as it was)."""
    strategy = build_on_rank(world, RECIPE, make)
    before = pieces_of(strategy)
    try:
        load(saved, strategy, shapes, world)
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
        shapes = {**shapes_of(RECIPE), **others}
        shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        answers = ranks(try_to_load, MAKE, saved, shapes)
        (line,) = {line for line, _ in answers}
        assert all(unchanged for _, unchanged in answers)
        assert line.startswith(str(saved)) and "\n" not in line and "; " in line
        return line

    return refused


def test_damaged_files(saved, refused):
    """Any flipped byte of any piece is found, whichever of the ranks checks it."""
    pieces = [(t, piece) for _, t in read_manifest(saved).tensors() for piece in t.pieces]
    for tensor, piece in random.Random(0).sample(pieces, 8):
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
    of_another = "of another model: "
    line = refused(**{"norm.weight": (6,)})
    assert f"{of_another}norm.weight is [5] in it, [6] in this model" in line
    assert f"{of_another}more is missing in it, [1] in this model" in refused(more=(1,))
    assert f"{of_another}unused is [3] in it, missing in this model" in refused(unused=None)
