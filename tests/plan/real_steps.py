"""Steps with real tensors, with which rehearsals and closed forms are compared: what a rank holds and sends."""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.composing import composed
from zeroexp.checkpoint.save import Saver
from zeroexp.comm import direct
from zeroexp.comm.collectives import held_shared_bytes
from zeroexp.config.keys import Config
from zeroexp.data import Microbatch
from zeroexp.data.batches import Data
from zeroexp.engines.build import build_strategy
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.strategy import Strategy
from zeroexp.measure.instruments import Instruments
from zeroexp.measure.memory import AllocationMeter, bytes_by_kind, count_cpu_allocations
from zeroexp.measure.record import MOMENTS, Traffic
from zeroexp.models.checkpointing import checkpoint_as_configured
from zeroexp.models.module import build_model
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.form_terms import ClosedForm
from zeroexp.plan.hidden_memory import product_scratch_bytes
from zeroexp.plan.rehearse import UNDISTURBED_STEP, RehearsedRank, config_to_rehearse
from zeroexp.plan.sent_bytes import EngineForm
from zeroexp.plan.stand_ins import NoData
from zeroexp.process.world import World, barrier, fake_world, joined_process_group
from zeroexp.training.loop import train

CPU = torch.device("cpu")
# By which a product takes more than its sums, and small messages that threads of gloo let go late.
SCRATCH_BYTES = 1024
ELEMENT_OF_BF16 = 2
NUM_RANKS = 4
MLP = ("model=mlp_tiny", "data=vectors", "data.seq_len=16")
LLAMA = ("model=tiny", "data=synthetic", "data.seq_len=64")
STAGES = ("ddp", "zero1_allreduce", "zero1", "zero2", "zero3")
LAYOUTS = ("parameter", "tensor", "buffer")
RNG_STATE_BYTES = 5056  # of the CPU's generator, kept by each block that is recomputed
ELEMENT_BYTES = 64  # of a tensor of one element, by which real ranks and torch's engines differ


def config_of(*words: str) -> Config:
    # Two microbatches of one sample for each rank.
    batch = (f"world_size={NUM_RANKS}", f"data.global_batch_size={2 * NUM_RANKS}")
    return composed(*batch, "data.micro_batch_size=1", *words)


def quick_or_slow(quick: list, more: list, wide: Sequence = ()) -> list:
    """Cases of a test with their marks; one that stands in several lists has that of the first."""
    marks: dict[tuple, Any] = {}
    for cases, mark in ((quick, ()), (more, pytest.mark.slow), (wide, pytest.mark.wide)):
        for each in cases:
            marks.setdefault(each, mark)
    return [pytest.param(*each, marks=mark) for each, mark in marks.items()]


def random_states_bytes(config: Config) -> int:
    """Return what real ranks keep for recomputation, and rehearsals do not."""
    recomputes = config.train.activation_checkpointing
    return RNG_STATE_BYTES * len(build_on_meta(config).blocks) if recomputes else 0


class Zeros(NoData):
    def microbatch(self) -> Microbatch:
        made = super().microbatch()
        inputs = {name: torch.zeros_like(tensor) for name, tensor in made.inputs.items()}
        return Microbatch(inputs, torch.zeros_like(made.labels))


@dataclass(frozen=True)
class Steps:
    """The three steps of a rehearsal, done by one rank. Bytes are its own."""

    rank: int
    held_bytes: dict[str, dict[str, int]]
    traffic: Traffic
    peak_bytes: int  # of the undisturbed step


def real_steps(world: World, config: Config, run: Path | None = None) -> Steps:
    """Train on this rank; run: the folder into which checkpoints are saved."""
    gc.collect()
    before = _allocated() + held_shared_bytes()
    model = build_model(config.model, seed=0, device="cpu", vocab_size=config.data.vocab_size)
    checkpoint_as_configured(model.module, model.blocks, config.train)
    strategy = build_strategy(config, model, world)
    instruments, data = Instruments(config.train, world, Path()), cast(Data, Zeros(config))
    saver, records = run and Saver(run, strategy, config, world), []
    for record in train(strategy, data, config=config, world=world, instruments=instruments):
        records.append(record)
        if saver and saver.is_due(record.step + 1):
            # What ranks tell each other of a save would else be counted with a step now and then.
            saver.save_now(record.step + 1)
    if saver:
        saver.close()
    undisturbed, held = records[UNDISTURBED_STEP], records[-1].memory_bytes or {}
    return Steps(world.rank, held, undisturbed.traffic, (undisturbed.peak_bytes or before) - before)


def one_step(
    strategy: Strategy,
    ids: Tensor,
    accumulation: int,
    held: dict | None = None,
    *,
    drain: bool = False,
) -> None:
    """Do one optimizer step; with `held`, the bytes of each moment are left there."""

    def read(moment: str) -> None:
        if held is not None:
            held[moment] = bytes_by_kind(strategy.model_states())

    for index in range(accumulation):
        last = index == accumulation - 1
        with strategy.microbatch(last=last):
            outputs = strategy.model(ids)
            loss = getattr(outputs, "logits", outputs).float().sum()
            if last:
                read("after_forward")
            strategy.backward(loss)
    read("after_backward")
    strategy.step(drain=drain)
    read("after_step")
    strategy.zero_grad()
    read("at_rest")


def assert_as_planned(config: Config, transport: str = "native") -> ClosedForm:
    """Return the form of the config, of which every rank among fake peers holds and sends what it says."""
    form, tokens = form_of(config, build_on_meta(config), transport), torch.zeros(1, 4).long()
    for rank in range(config.world_size):
        with fake_world(rank, config.world_size) as world:
            strategy = build_strategy(config, build_model(config.model, seed=1), world)
            assert isinstance(strategy, Sharded)
            held: dict[str, dict[str, int]] = {}
            for _ in range(2):
                strategy.wire.take_traffic()
                one_step(strategy, tokens, 1, held, drain=True)
            assert strategy.wire.take_traffic() == form.traffic(rank)
        assert held == {moment: form.held_bytes(moment, rank) for moment in MOMENTS}
    return form


def _allocated() -> int:
    """Once no thread of gloo lets go of what an earlier collective moved, as one may that finds no free core."""
    count_cpu_allocations()
    last, now = None, AllocationMeter(CPU).peak_bytes() or 0
    while now != last:
        time.sleep(0.01)
        last, now = now, AllocationMeter(CPU).peak_bytes() or 0
    return now


def in_a_fake_world(config: Config, rank: int) -> Steps:
    with fake_world(rank, config.world_size) as world:
        return real_steps(world, config_to_rehearse(config))


def alone(config: Config) -> Steps:
    """As the only rank of a real group, whose reducer is the real one."""
    with joined_process_group() as world:
        return real_steps(world, config_to_rehearse(config))


def among_peers(
    world: World, config: Config, ranks_per_host: int = NUM_RANKS, run: Path | None = None
) -> Steps:
    """Among real peers, of hosts that have names of their own."""
    barrier()  # lets go of what the collective before it moved
    with host_of(world, ranks_per_host):
        steps = real_steps(world, config_to_rehearse(config), run)
        barrier()  # no rank closes its connections while another still reads
    return steps


@contextmanager
def host_of(world: World, ranks_per_host: int) -> Generator[None]:
    host = world.rank // ranks_per_host
    same_host, direct.neighbour_identity = direct.neighbour_identity, lambda: (host,)
    try:
        yield
    finally:
        direct.neighbour_identity = same_host  # these processes run other tests too


def packed_bytes(config: Config) -> int:
    """Return the most that this CPU's kernels allocate beyond what a plan has, in bf16.

    For a product: a CPU with instructions for bf16 packs the operands into blocks; others take `SCRATCH_BYTES` at most.
    Or where gradients are laid out in rows of fp32, which a GPU does without a copy.
    """
    precision = config.precision
    in_bf16 = precision.autocast or precision.compute == "bfloat16"
    if not in_bf16 and config.optimizer.name != "muon":
        return 0
    assert count_cpu_allocations() is None
    module = build_on_meta(config).module
    tokens = config.data.micro_batch_size * config.data.seq_len
    shapes = {tuple(each.shape) for each in module.parameters() if each.dim() == 2}
    of_muon = config.optimizer.name == "muon"
    return max(_packed_bytes(tokens, *shape, of_muon=of_muon) for shape in shapes)


@cache
def _packed_bytes(tokens: int, rows: int, columns: int, *, of_muon: bool) -> int:
    weight, samples, sums, square = (
        torch.ones(*shape, dtype=torch.bfloat16)
        for shape in ((rows, columns), (tokens, columns), (tokens, rows), (rows, rows))
    )
    products = [(samples, weight.T), (sums, weight), (sums.T, samples)]
    if of_muon:  # minutes for wide matrices, on a CPU without such instructions
        products += [(weight, weight.T), (weight.T, weight), (square, square), (square, weight)]
    packed = [SCRATCH_BYTES, bytes_to_lay_out(weight.view(-1))]
    for left, right in products:
        planned = left.shape[0] * right.shape[1] * (ELEMENT_OF_BF16 + product_scratch_bytes())
        packed.append(product_bytes(left, right) - planned)
    return max(packed)


def bytes_to_lay_out(gradient: Tensor) -> int:
    """Return what this CPU allocates to write a flat gradient of bf16 into a message of fp32."""
    message = torch.empty(1, gradient.numel())
    meter = AllocationMeter(CPU)
    before = meter.peak_bytes() or 0
    torch._chunk_cat([gradient], dim=0, num_chunks=1, out=message)
    return (meter.peak_bytes() or 0) - before


def product_bytes(left: Tensor, right: Tensor) -> int:
    """Return what this CPU holds at most while it multiplies, the product with it."""
    meter = AllocationMeter(CPU)
    before = meter.peak_bytes() or 0
    _ = left @ right
    return (meter.peak_bytes() or 0) - before


def agree(found: RehearsedRank | Steps, expected: EngineForm) -> None:
    """Compare the bytes of every named moment, and the bytes and calls of one step, by kind."""
    for moment, held in found.held_bytes.items():
        assert held == expected.held_bytes(moment, found.rank), moment
    of_form = expected.traffic(found.rank)
    sent, calls = dict(found.traffic.bytes_by_kind), dict(found.traffic.calls_by_kind)
    del sent["loss"], calls["loss"]
    assert (sent, calls) == (of_form.bytes_by_kind, of_form.calls_by_kind)
    assert found.traffic.bus_bytes == of_form.bus_bytes
