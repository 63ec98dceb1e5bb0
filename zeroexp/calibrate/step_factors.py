"""Steps of small models: what they take on ranks of this machine, on what their rehearsals spend it, and the factors.

The points differ in width, depth, tokens, words, stage and layout, so that each thing a step spends seconds on is much
of some phase and little of another.

    measured seconds of a phase  =  sum of  factor x seconds by the rates

A rate is measured by itself, in a loop. In a step caches are cold, Python runs between operations, and ranks wait for
each other. The factors are those, none below 0, with which these steps come out with the least squares of relative
errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from zeroexp.config.keys import Config, DataConfig, ModelConfig, StrategyConfig
from zeroexp.data.batches import build_data
from zeroexp.engines.build import build_strategy
from zeroexp.models.module import build_deferred
from zeroexp.plan.changes import with_settings
from zeroexp.plan.rehearse import PHASES, rehearse
from zeroexp.plan.speed import Speed
from zeroexp.process.on_ranks import on_ranks
from zeroexp.process.world import World
from zeroexp.run.rank import keep_freed_memory
from zeroexp.training.loop import train

NUM_RANKS = 2  # on CPUs
NUM_WARMUP, NUM_STEPS, NUM_ROUNDS = 3, 7, 2
# A factor stays near 1 unless phases speak against it: as strong as an error of this share of one phase.
INERTIA = 0.01


@dataclass(frozen=True)
class SmallStep:
    """A small LLaMA under one strategy."""

    width: int
    depth: int
    words: int
    samples: int
    tokens: int
    stage: str
    layout: str

    @property
    def config(self) -> Config:
        shape = {
            "vocab_size": self.words,
            "hidden_size": self.width,
            "intermediate_size": 11 * self.width // 4,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.width // 64,
            "num_key_value_heads": self.width // 64,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        }
        data = DataConfig(kind="synthetic", seq_len=self.tokens, micro_batch_size=self.samples)
        data.global_batch_size, data.vocab_size = NUM_RANKS * self.samples, self.words
        config = Config(model=ModelConfig(name="practice", hf_config=shape), data=data)
        config.strategy = StrategyConfig(name="", implementation=self.layout)
        config.cluster.device, config.world_size = "cpu", NUM_RANKS
        config.train.warmup_steps, config.train.steps = NUM_WARMUP, NUM_STEPS
        return with_settings(config, {"strategy": self.stage})


POINTS = (
    SmallStep(256, 6, 512, 1, 64, "zero3", "buffer"),
    SmallStep(256, 2, 4096, 4, 64, "ddp", "buffer"),
    SmallStep(320, 4, 1024, 2, 192, "zero1", "buffer"),
    SmallStep(640, 3, 1024, 1, 64, "zero2", "buffer"),
    SmallStep(640, 4, 2048, 1, 128, "zero3", "buffer"),
    SmallStep(448, 5, 2048, 4, 96, "zero3", "tensor"),
    SmallStep(448, 3, 3072, 8, 64, "zero1", "parameter"),
    SmallStep(384, 6, 1024, 1, 256, "ddp", "tensor"),
    SmallStep(320, 8, 2048, 2, 96, "zero2", "tensor"),
    SmallStep(768, 2, 512, 1, 96, "zero3", "parameter"),
    SmallStep(768, 2, 1024, 2, 160, "zero1", "buffer"),
    SmallStep(128, 4, 2048, 8, 128, "ddp", "buffer"),
)


def run_small_steps(speed: Speed) -> list[tuple[dict[str, float], float]]:
    """Return (what is spent, measured seconds) of every phase of every point, and of its whole step."""
    rounds = [[measured_phases(each.config) for each in POINTS] for _ in range(NUM_ROUNDS)]
    pairs: list[tuple[dict[str, float], float]] = []
    for point, tries in zip(POINTS, zip(*rounds, strict=True), strict=True):
        spent = rehearsed_phases(point.config, speed)
        seconds = min(tries, key=lambda phases: sum(phases.values()))
        pairs += [(spent[phase], seconds[phase]) for phase in PHASES]
        names = {name for each in spent.values() for name in each}
        whole = {name: sum(each.get(name, 0.0) for each in spent.values()) for name in names}
        pairs.append((whole, sum(seconds.values())))
    return pairs


def rehearsed_phases(config: Config, speed: Speed) -> dict[str, dict[str, float]]:
    """Return, by phase, on what rank 0 spends the seconds of a step by the rates."""
    first = rehearse(config, speed=speed, ranks_per_host=NUM_RANKS)
    return {phase: seconds.spent for phase, seconds in first.seconds.items()}


def measured_phases(config: Config) -> dict[str, float]:
    """Train on ranks of this machine; return the seconds of each of PHASES in the fastest step.

    Whatever else goes on in a machine only slows a step down.
    """
    return on_ranks(lambda world: _train(config, world), NUM_RANKS)[0]


def _train(config: Config, world: World) -> dict[str, float]:
    keep_freed_memory()
    data = build_data(config.data, config.model, config.train.seed)
    model = build_deferred(config.model, seed=config.train.seed, vocab_size=data.vocab_size)
    strategy = build_strategy(config, model, world)
    records = list(train(strategy, data, config=config, world=world))
    fastest = min(records[NUM_WARMUP:], key=lambda record: record.step_seconds).phase_seconds
    in_step = fastest["optimizer"] + fastest["step"]
    return {"forward": fastest["forward"], "backward": fastest["backward"], "step": in_step}


def fit_factors(phases: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Return the factors; `phases` are (what is spent -> seconds by the rates, measured seconds)."""
    names = sorted({name for spent, _ in phases for name in spent})
    shares = [[spent.get(name, 0.0) / took for name in names] for spent, took in phases]
    inertia = INERTIA * np.eye(len(names))
    wanted = np.concatenate([np.ones(len(shares)), inertia.sum(axis=1)])
    factors, _ = nnls(np.vstack([shares, inertia]), wanted)
    return dict(zip(names, factors.tolist(), strict=True))
