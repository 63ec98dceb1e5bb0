"""What ranks do in these tests: train under some engine and save, or load and go on; small, from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.oracle import Make, Outcome, Recipe, build_on_rank, pieces_of, run_steps
from zeroexp.checkpoint.folders import FOLDER
from zeroexp.checkpoint.load import load
from zeroexp.checkpoint.save import Saver
from zeroexp.config.keys import CheckpointConfig, Config
from zeroexp.interface.strategy import CanonicalState
from zeroexp.process.world import World

Answer = tuple[Outcome, CanonicalState]


def config_of(recipe: Recipe, *, keep: int = 10) -> Config:
    config = Config(checkpoint=CheckpointConfig(every=1, keep=keep))
    config.data.global_batch_size = recipe.accumulation * recipe.world_size
    config.train.warmup_steps, config.train.steps = 0, recipe.steps
    return config


def checkpoint(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:06d}"


def train_and_save(
    world: World, recipe: Recipe, make: Make, run: Path
) -> tuple[Outcome, list[CanonicalState]]:
    """(the run, the state behind each of its steps). Each is saved while the next step runs."""
    torch.manual_seed(7 + world.rank)
    strategy = build_on_rank(world, recipe, make)
    saver = Saver(run, strategy, config_of(recipe), world)
    outcome, states = Outcome(), []
    for step in range(recipe.steps):
        more = run_steps(strategy, world, recipe, range(step, step + 1))
        outcome.losses += more.losses
        outcome.norms += more.norms
        saver.async_save(step + 1)
        states.append(pieces_of(strategy))
    saver.finish()
    saver.close()
    return outcome, states


def resume_each(
    world: World, recipe: Recipe, make: Make, saved: Sequence[tuple[Path, bool]]
) -> list[tuple[CanonicalState, Answer | None]]:
    """(the state as loaded, the steps that were left and the state at their end) of each (checkpoint, trains on)."""
    return [_resume(world, recipe, make, *one) for one in saved]


def _resume(
    world: World, recipe: Recipe, make: Make, saved: Path, trains_on: bool
) -> tuple[CanonicalState, Answer | None]:
    strategy = build_on_rank(world, recipe, make)
    manifest = load(saved, strategy, world)
    loaded = pieces_of(strategy)
    if not trains_on:
        return loaded, None
    outcome = run_steps(strategy, world, recipe, range(manifest.step, recipe.steps))
    return loaded, (outcome, pieces_of(strategy))
