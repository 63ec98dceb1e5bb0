"""What ranks do in these tests: train under some engine and save, or load and go on; small, from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.engines import ENGINES
from tests.models_for_tests import MODELS
from tests.oracle import Make, Outcome, Recipe, build_on_rank, pieces_of, run_steps
from zeroexp.checkpoint.folders import FOLDER
from zeroexp.checkpoint.load import load
from zeroexp.checkpoint.save import Saver
from zeroexp.config.keys import CheckpointConfig, Config
from zeroexp.interface.strategy import CanonicalState
from zeroexp.process.world import World

# One engine of each family of layouts, ours and native.
FAMILIES = {
    "parameter": ENGINES["zero2_parameter"],
    "tensor": ENGINES["zero3_tensor"],
    "buffer": ENGINES["zero3_buffer"],
    "ddp": ENGINES["ddp"],
    "zero_redundancy": ENGINES["ddp_zero_redundancy"],
    "fsdp2": ENGINES["fsdp2"],
}

Answer = tuple[Outcome, CanonicalState]


def config_of(recipe: Recipe, *, keep: int = 10) -> Config:
    config = Config(checkpoint=CheckpointConfig(every=1, keep=keep))
    config.data.global_batch_size = recipe.accumulation * recipe.world_size
    config.train.warmup_steps, config.train.steps = 0, recipe.steps
    return config


def checkpoint(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:06d}"


def shapes_of(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    module = MODELS[recipe.model].build().module
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def train_and_save(world: World, recipe: Recipe, make: Make, run: Path) -> Answer:
    """A checkpoint behind every step, written while the next one runs."""
    torch.manual_seed(7 + world.rank)
    strategy = build_on_rank(world, recipe, make)
    saver = Saver(run, strategy, config_of(recipe), world)
    outcome = Outcome()
    for step in range(recipe.steps):
        _extend(outcome, run_steps(strategy, world, recipe, range(step, step + 1)))
        saver.save(step + 1)
    saver.finish()
    saver.close()
    return outcome, pieces_of(strategy)


def resume(world: World, recipe: Recipe, make: Make, saved: Path) -> tuple[Answer, CanonicalState]:
    """((the steps that were left, the state at the end), the state as it was loaded)."""
    strategy = build_on_rank(world, recipe, make)
    manifest = load(saved, strategy, shapes_of(recipe), world)
    loaded = pieces_of(strategy)
    outcome = run_steps(strategy, world, recipe, range(manifest.step, recipe.steps))
    return (outcome, pieces_of(strategy)), loaded


def load_each(
    world: World, recipe: Recipe, make: Make, saved: Sequence[Path]
) -> list[CanonicalState]:
    return [resume(world, recipe, make, one)[1] for one in saved]


def _extend(outcome: Outcome, more: Outcome) -> None:
    outcome.losses += more.losses
    outcome.norms += more.norms
