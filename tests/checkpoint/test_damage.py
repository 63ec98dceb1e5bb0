"""A checkpoint that is damaged or another model's: one line, the same on every rank, before anything is changed."""

from __future__ import annotations

import random
import shutil
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


def refused(ranks, saved: Path, shapes: Shapes | None = None) -> str:
    answers = ranks(try_to_load, MAKE, saved, shapes or shapes_of(RECIPE))
    lines = {line for line, _ in answers}
    assert len(lines) == 1 and all(unchanged for _, unchanged in answers), lines
    (line,) = lines
    assert line.startswith(str(saved)) and "\n" not in line and "; " in line
    return line


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


def test_a_missing_shard(ranks, saved):
    (saved / "rank1.bin").unlink()
    line = refused(ranks, saved)
    assert line == f"{saved}/rank1.bin: missing; give another checkpoint"


def test_any_flipped_byte_of_any_piece_is_found(ranks, saved):
    """Whichever of the ranks checks it."""
    pieces = [(t, piece) for _, t in read_manifest(saved).tensors() for piece in t.pieces]
    for tensor, piece in random.Random(0).sample(pieces, 8):
        position = piece.offset + tensor.num_bytes(piece) - 1
        original = (saved / piece.file).read_bytes()
        damaged = bytearray(original)
        damaged[position] ^= 1
        (saved / piece.file).write_bytes(damaged)
        assert f"{piece.file}: damaged, " in refused(ranks, saved)
        (saved / piece.file).write_bytes(original)


def test_a_damaged_manifest(ranks, saved):
    content = (saved / "manifest.json").read_text()
    (saved / "manifest.json").write_text(content.replace('"step": 2', '"step": 3'))
    assert "manifest.json: damaged" in refused(ranks, saved)


def test_another_shape_is_named(ranks, saved):
    shapes = {**shapes_of(RECIPE), "norm.weight": (6,)}
    line = refused(ranks, saved, shapes)
    assert "of another model: norm.weight is [5] in it, [6] in this model" in line


def test_another_parameter_is_named(ranks, saved):
    shapes = shapes_of(RECIPE)
    line = refused(ranks, saved, {**shapes, "more": (1,)})
    assert "more is missing in it, [1] in this model" in line
    fewer = {name: shape for name, shape in shapes.items() if name != "unused"}
    assert "unused is [3] in it, missing in this model" in refused(ranks, saved, fewer)
