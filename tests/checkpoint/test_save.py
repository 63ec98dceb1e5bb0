"""Saving: beside training, from copies, never the whole on one rank; and what becomes of a save that fails."""

from __future__ import annotations

import errno
import io
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoint.saving import checkpoint, config_of
from tests.engines import ENGINES
from tests.oracle import Make, Recipe, build_on_rank, run_steps
from tests.plain_strategy import PlainStrategy
from zeroexp.checkpoint import folders, rng
from zeroexp.checkpoint.folders import LOG
from zeroexp.checkpoint.load import load
from zeroexp.checkpoint.manifest import CheckpointError, StoredPiece, StoredTensor, read_manifest
from zeroexp.checkpoint.save import Saver
from zeroexp.checkpoint.staging import Staging
from zeroexp.checkpoint.storage import Written, join_pieces
from zeroexp.comm.shared_memory_sizes import ALIGNMENT_BYTES
from zeroexp.config.keys import Config
from zeroexp.interface.strategy import CanonicalTensor, Piece
from zeroexp.process import world as worlds
from zeroexp.process.world import World
from zeroexp.tracking.json_files import write_json


@pytest.fixture
def world() -> Iterator[World]:
    with worlds.joined_process_group() as world:
        yield world


@pytest.fixture
def strategy() -> PlainStrategy:
    return PlainStrategy(nn.Linear(3, 2))


@pytest.fixture
def config() -> Config:
    return config_of(Recipe(steps=1, world_size=1))


@pytest.fixture
def saver(world, strategy, config, tmp_path) -> Saver:
    return Saver(tmp_path, strategy, config, world)


def log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / LOG).read_text().splitlines()]


def steps_of(run: Path) -> list[int]:
    return [folders.step_of(path) for path in folders.complete_checkpoints(run)]


def test_what_is_saved_is_the_state_when_save_was_called(world, strategy, saver, tmp_path):
    for step in (1, 2):
        strategy.model.weight.data.fill_(step)
        saver.async_save(step)
    strategy.model.weight.data.fill_(3.0)  # the next step, while the thread writes
    saver.finish()
    for step in (1, 2):
        loaded = PlainStrategy(nn.Linear(3, 2))
        assert load(checkpoint(tmp_path, step), loaded, world).step == step
        assert (loaded.model.weight == step).all()


def test_manifest_and_log_of_a_save(config, saver, tmp_path):
    config.data.global_batch_size = 12
    saver.save_now(20)
    manifest = read_manifest(checkpoint(tmp_path, 20))
    assert (manifest.step, manifest.samples_seen, manifest.world_size) == (20, 240, 1)
    assert manifest.config["data"]["global_batch_size"] == 12
    assert manifest.versions["torch"] == torch.__version__
    assert set(manifest.rng["0"]) == {"torch", "python", "numpy"}
    (saved,) = log(tmp_path)
    pieces = [(tensor, piece) for _, tensor in manifest.tensors() for piece in tensor.pieces]
    assert saved["num_bytes"] == sum(tensor.num_bytes(piece) for tensor, piece in pieces)
    assert saved["blocked_seconds"] > 0 and saved["write_seconds"] > 0 and saved["error"] is None
    assert [saver.take_blocked_seconds() for _ in range(2)] == [saved["blocked_seconds"], 0]


def test_when_it_is_due(world, strategy, config, tmp_path):
    config.checkpoint.every = 3
    config.train.warmup_steps, config.train.steps = 2, 7
    saver = Saver(tmp_path, strategy, config, world)
    assert [step for step in range(12) if step and saver.is_due(step)] == [3, 6]


def test_off_it_leaves_nothing(world, strategy, config, tmp_path):
    config.checkpoint.every = None
    saver = Saver(tmp_path, strategy, config, world)
    saver.finish()
    assert not any(saver.is_due(step) for step in range(12))
    assert list(tmp_path.iterdir()) == []


def test_after_a_failed_save_training_goes_on_and_any_later_one_tries_again(
    saver, tmp_path, capsys
):
    """Of a step that is saved nothing is saved twice: what stopped the run may come back to it."""
    saver.save_now(1)
    in_the_way = tmp_path / "checkpoint" / ".step-000002.0"
    in_the_way.touch()  # where a folder must be
    with pytest.raises(CheckpointError) as caught:
        saver.save_now(2)
    line = str(caught.value)
    assert re.match(r"checkpoint of step 2 failed: rank 0: FileExistsError: .*; the newest", line)
    assert line.endswith(f"the newest whole one is {checkpoint(tmp_path, 1)}")
    assert capsys.readouterr().err.count("\n") == 1
    in_the_way.unlink(missing_ok=True)
    for step in (2, 2, 3):
        saver.save_now(step)
    errors = [(saved["step"], saved["error"] is None) for saved in log(tmp_path)]
    assert errors == [(1, True), (2, False), (2, True), (3, True)]
    assert steps_of(tmp_path) == [1, 2, 3]


def test_an_outdated_attempt_saves_no_more(world, strategy, config, tmp_path):
    old = Saver(tmp_path, strategy, config, world, attempt=1)
    old.save_now(1)
    write_json(tmp_path / "attempts.json", {"attempts": [{"number": 2, "began_at": 0.0}]})
    new = Saver(tmp_path, strategy, config, world, attempt=2)
    begun = "attempt 2 of this run has begun"
    with pytest.raises(CheckpointError, match=f"failed: .*{begun}"):
        old.save_now(2)
    with pytest.raises(CheckpointError, match=begun):
        Saver(tmp_path, strategy, config, world, attempt=1)
    new.save_now(3)
    assert steps_of(tmp_path) == [1, 3]


def test_saves_whose_ranks_can_not_connect_fail_before_the_first_step(
    world, strategy, config, tmp_path, monkeypatch
):
    """Ranks on GPUs have met over NCCL, and use gloo for saves alone; runs that save nothing need none."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(CheckpointError, match=r"rank 0 .* gloo, .*; set GLOO_SOCKET_IFNAME to "):
        Saver(tmp_path, strategy, config, world)
    config.checkpoint.every = None
    Saver(tmp_path, strategy, config, world)


def test_pieces_of_all_ranks_make_each_tensor_whole():
    """Whoever answers first; elements that no rank wrote are an error."""

    def written(start: int, numel: int) -> Written:
        piece = StoredPiece(f"rank{start}.bin", 0, start, numel, "")
        return {"state/a.b/weight": StoredTensor((6,), "float32", (piece,))}

    state, random_states = join_pieces([written(4, 2), written(0, 4)])
    assert [piece.start for piece in state["a.b"]["weight"].pieces] == [0, 4]
    assert random_states == {}
    with pytest.raises(ValueError, match=r"state/a\.b/weight: 4 of 6 elements"):
        join_pieces([written(0, 4)])


def out_of_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


class FullDisk(io.StringIO):
    write = out_of_room


def test_what_is_wrong_with_older_ones_fails_no_save(saver, tmp_path, monkeypatch, capsys):
    stale = OSError(errno.ESTALE, "Stale file handle")
    monkeypatch.setattr(folders, "complete_checkpoints", Mock(side_effect=stale))
    saver.save_now(2)
    saver.close()
    assert read_manifest(checkpoint(tmp_path, 2)).step == 2
    assert "older checkpoints stay: " in capsys.readouterr().err


def test_a_save_that_fails_on_the_disk_of_its_log_ends_all_the_same(saver, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", FullDisk())
        patch.setattr(folders, "commit", out_of_room)
        saver.async_save(1)
        saver.async_save(2)  # waits for the one before
        with pytest.raises(CheckpointError, match=r"step 2 failed: .*No space left"):
            saver.finish()
    saver.save_now(3)
    assert steps_of(tmp_path) == [3]


# -- copies -----------------------------------------------------------------------------------------


def pieces(*sizes: int) -> dict[str, CanonicalTensor]:
    tensors = [torch.randn(size) for size in sizes]
    return {
        str(i): CanonicalTensor((len(t) + 4,), t.dtype, [Piece(4, t)])
        for i, t in enumerate(tensors)
    }


def test_copies_lie_in_memory_that_is_taken_once():
    staging = Staging(torch.device("cpu"))
    places = set()
    for _ in range(3):
        state = pieces(5, 100, 1)
        staged = staging.copy(state)
        for name, tensor in state.items():
            (copy,), (original,) = staged[name].pieces, tensor.pieces
            assert copy.start == 4 and torch.equal(copy.tensor, original.tensor)
            assert copy.tensor.data_ptr() != original.tensor.data_ptr()
        places.add(staged["0"].pieces[0].tensor.data_ptr())
        held = staged["0"].pieces[0].tensor.untyped_storage().nbytes()
        assert held == ALIGNMENT_BYTES + 448 + ALIGNMENT_BYTES  # 400 bytes in whole lines of 64
    assert len(places) == 1


def bytes_written(world: World, make: Make, run: Path) -> tuple[int, int]:
    """(bytes of this rank's file, bytes of the whole checkpoint)."""
    recipe = Recipe(steps=1, world_size=world.size)
    strategy = build_on_rank(world, recipe, make)
    run_steps(strategy, world, recipe, range(1))
    saver = Saver(run, strategy, config_of(recipe), world)
    saver.save_now(1)
    saver.close()
    sizes = read_manifest(checkpoint(run, 1)).file_bytes()
    return sizes[f"rank{world.rank}.bin"], sum(sizes.values())


@pytest.mark.parametrize("name", ["ddp", "zero3_buffer", "fsdp2"])
def test_every_rank_writes_its_share(ranks, tmp_path, name):
    """Replicated state too: no rank writes it all, and together they write it once."""
    answers = ranks(bytes_written, ENGINES[name].make, tmp_path, world_size=3)
    for mine, whole in answers:
        assert whole / 4 < mine < whole / 2


def test_random_states_are_restored(world):
    def draw() -> tuple[float, ...]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    states = rng.random_states(world)
    drawn = draw()
    rng.restore(states, world)
    assert draw() == drawn
