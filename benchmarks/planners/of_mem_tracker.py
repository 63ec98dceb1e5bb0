"""torch's FSDPMemTracker: one rank of FSDP2 trains on tensors without memory, beside ranks that do not exist."""

from __future__ import annotations

from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from benchmarks.planners.point import Answer, Point, need
from benchmarks.planners.points import config_of
from zeroexp.engines.build import build_strategy
from zeroexp.engines.torch_fsdp2 import TorchFSDP2
from zeroexp.models.checkpointing import checkpoint_as_configured
from zeroexp.models.loss import loss_sum
from zeroexp.models.module import build_model, materialize, patched_for_fake_tensors
from zeroexp.process.world import fake_world

STATES = ("Sharded Param", "Sharded Grad", "OptState")
NUM_STEPS = 2  # the first makes the optimizer's state


def answer(point: Point) -> Answer:
    point.needs_stage("zero2", "zero3")
    need(point.implementation == "torch", "FSDP2 alone")
    # The first time DTensor learns the shapes of its results from whole tensors without memory, which are counted.
    _tracked(point)
    return _tracked(point)


def _tracked(point: Point) -> tuple[float, float]:
    config = config_of(point)
    model = build_model(config.model, seed=0, device="meta")
    with (
        fake_world(0, point.world_size) as world,
        patched_for_fake_tensors(config.model),
        FakeTensorMode(),
    ):
        materialize(model.module, "cpu")
        checkpoint_as_configured(model.module, model.blocks, config.train)
        strategy = cast(TorchFSDP2, build_strategy(config, model, world))
        tokens = torch.zeros((point.micro_batch, point.seq_len), dtype=torch.int64)
        labels = tokens if config.model.task == "causal" else tokens[:, 0]
        tracker, held = FSDPMemTracker(strategy.model, strategy.optimizer), {}
        tracker.track_inputs((tokens, labels))
        with tracker:
            for _ in range(NUM_STEPS):
                tracker.reset_mod_stats()
                with strategy.microbatch(last=True):
                    output = strategy.model(input_ids=tokens)
                    strategy.backward(loss_sum(output, labels, config.model.task))
                held = tracker.get_tracker_snapshot("current")[world.device]
                strategy.optimizer.step()
                strategy.zero_grad()
        peak = tracker.get_tracker_snapshot("peak")[world.device]["Total"]
    return sum(held.get(kind, 0) for kind in STATES), peak
