"""A CPU rank is rehearsed with the peak that it has among real peers, on its host and on others, to the byte."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import cast

import pytest

from tests.plan.test_rehearse import (
    CPU,
    LAYOUTS,
    LLAMA,
    NUM_RANKS,
    RNG_STATE_BYTES,
    STAGES,
    Zeros,
    config_of,
)
from zeroexp.checkpoint.save import Saver
from zeroexp.comm import shared_memory
from zeroexp.comm.collectives import held_shared_bytes
from zeroexp.config.keys import Config
from zeroexp.engines.build import build_strategy
from zeroexp.measure.instruments import Instruments
from zeroexp.measure.memory import AllocationMeter, count_cpu_allocations
from zeroexp.measure.record import StepRecord
from zeroexp.models.checkpointing import checkpoint_blocks
from zeroexp.models.module import build_model
from zeroexp.plan.extrapolate_depth import depth_of
from zeroexp.plan.rehearse import UNDISTURBED_STEP, prepared, rehearse
from zeroexp.process.world import World, barrier
from zeroexp.training.loop import Data, train

# Ranks that really exist hold a tensor of one element more.
ELEMENT_BYTES = 64
QUICK = [
    ("zero3", "buffer", "block", "fp32", False),
]
MORE = [
    ("ddp", "tensor", "model", "fp32", False),
    ("zero2", "parameter", "block", "bf16_master", True),
    *itertools.product(STAGES, LAYOUTS, ("block",), ("fp32", "bf16_master"), (False,)),
    *itertools.product(("zero2", "zero3"), ("buffer",), ("model", "module"), ("fp32",), (True,)),
]


def real_peak(
    world: World, config: Config, ranks_per_host: int = NUM_RANKS, run: Path | None = None
) -> int:
    """Train among real peers of hosts that have names of their own; return the most bytes of a step.

    run: the folder into which checkpoints are saved.
    """
    host = world.rank // ranks_per_host
    same_host, shared_memory.host_identity = shared_memory.host_identity, lambda: (str(host), 0)
    try:
        return _peak_of_a_step(world, config, run)
    finally:
        shared_memory.host_identity = same_host  # these processes run other tests too


def _peak_of_a_step(world: World, config: Config, run: Path | None) -> int:
    assert count_cpu_allocations() is None
    gc.collect()
    before = AllocationMeter(CPU).peak_bytes()
    assert before is not None
    before += held_shared_bytes()
    model = build_model(config.model, seed=0, device="cpu", vocab_size=config.data.vocab_size)
    if config.train.activation_checkpointing:
        checkpoint_blocks(model.module, model.blocks)
    strategy = build_strategy(config, model, world)
    instruments, data = Instruments(config.train, world, Path()), cast(Data, Zeros(config))
    steps = train(strategy, data, config=config, world=world, instruments=instruments)
    records, saver = list[StepRecord](), run and Saver(run, strategy, config, world)
    for record in steps:
        records.append(record)
        if saver and saver.is_due(record.step + 1):
            # What ranks tell each other of a save would else be counted with a step now and then.
            saver.save_now(record.step + 1)
    if saver:
        saver.close()
    peak = records[UNDISTURBED_STEP].peak_bytes
    assert peak is not None
    barrier()  # no rank closes its connections while another still reads
    return peak - before


@pytest.mark.parametrize(
    ("stage", "layout", "unit", "precision", "recomputes"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE if each not in QUICK)],
)
def test_the_peak_is_that_among_real_neighbours(ranks, stage, layout, unit, precision, recomputes):
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    config = config_of(
        *LLAMA,
        *(f"strategy={stage}", f"strategy.implementation={layout}", f"strategy.unit={unit}"),
        *(f"precision={precision}", f"train.activation_checkpointing={recomputes}"),
    )
    measured = ranks(real_peak, prepared(config, None), world_size=NUM_RANKS)
    rehearsed = rehearse(config, reads=False, ranks_per_host=NUM_RANKS).ranks
    kept = ELEMENT_BYTES + (RNG_STATE_BYTES * depth_of(config) if recomputes else 0)
    errors = [measured[each.rank] - each.peak_bytes for each in rehearsed]
    assert all(0 <= error <= kept for error in errors), errors


FEW = [("zero2", "tensor", 1)]


@pytest.mark.parametrize(
    ("stage", "layout", "ranks_per_host"),
    [
        *FEW,
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in itertools.product(STAGES, LAYOUTS, (2, 1))
            if each not in FEW
        ),
    ],
)
def test_the_peak_is_that_among_peers_of_several_hosts(ranks, stage, layout, ranks_per_host):
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    config = config_of(*LLAMA, f"strategy={stage}", f"strategy.implementation={layout}")
    measured = ranks(real_peak, prepared(config, None), ranks_per_host, world_size=NUM_RANKS)
    found = rehearse(config, reads=False, ranks_per_host=ranks_per_host)
    errors = [measured[each.rank] - each.peak_bytes for each in found.ranks]
    assert all(0 <= error <= ELEMENT_BYTES for error in errors), errors
