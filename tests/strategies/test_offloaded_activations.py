"""Activations on the host: the same numbers, each saved tensor copied once and back, and no weight ever."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.crossed import crossed
from tests.engines import ENGINES, check
from tests.models_for_tests import MODELS, microbatch_of
from tests.oracle import Make, Recipe, build_on_rank, configured
from tests.strategies.engine import Ours
from zeroexp.engines import activation_offload
from zeroexp.engines.activation_offload import offload_blocks
from zeroexp.measure.memory import AllocationMeter, count_cpu_allocations
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import Options

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Offloading:
    """Makes the engine around blocks that save on the host; a class, since it travels to the ranks."""

    make: Make

    def __call__(self, built: BuiltModel, recipe: Recipe, world: World) -> Any:
        offload_blocks(built.module, built.blocks)
        return self.make(built, recipe, world)


@crossed(
    "name, checkpointing",
    ["ddp", "fsdp2", "zero2_parameter", "zero3_buffer"],
    [False, True],
    quick=lambda name, checkpointing: checkpointing == (name in ("ddp", "zero3_buffer")),
)
def test_numbers_are_those_of_one_process(ranks, name, checkpointing):
    engine = replace(ENGINES[name], make=Offloading(ENGINES[name].make))
    check(ranks, engine, Recipe(checkpointing=checkpointing))


def test_units_inside_of_blocks_are_gathered_as_before(ranks):
    make = Offloading(Ours("zero3", Options(unit="module", reduce_each="microbatch")))
    check(ranks, replace(ENGINES["zero3_buffer"], make=make), Recipe())


class SavedByBlocks:
    """The distinct tensors that blocks of a plain model save, but for views of their weights."""

    def __init__(self, module: nn.Module, blocks: list[str]):
        self.num_bytes = 0
        for name in blocks:
            block = module.get_submodule(name)
            block.forward = self._watched(block, block.forward)

    def _watched(self, block: nn.Module, forward: Any) -> Any:
        weights = {p.untyped_storage().data_ptr() for p in block.parameters()}

        def watched(x: Tensor) -> Tensor:
            kept: list[Tensor] = []

            def pack(tensor: Tensor) -> Tensor:
                begins = tensor.untyped_storage().data_ptr()
                if begins not in weights and not any(_is_alike(tensor, each) for each in kept):
                    kept.append(tensor)
                return tensor

            with saved_tensors_hooks(pack, lambda tensor: tensor):
                out = forward(x)
            self.num_bytes += sum(each.nbytes for each in kept)
            return out

        return watched


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def copied_in_a_step(strategy: Any) -> tuple[Counter[str], list[int], int]:
    """Bytes that go to the host and come back, what block units hold after forward, and the host's peak."""
    copied: Counter[str] = Counter()
    original = activation_offload.copy_over

    def counted(target: Tensor, source: Tensor) -> None:
        copied["forward" if copied.get("turn", 0) == 0 else "backward"] += source.nbytes
        original(target, source)

    activation_offload.copy_over = counted
    meter = AllocationMeter(CPU)
    try:
        with strategy.microbatch(last=True):
            output = strategy.model(microbatch_of(0, 0, 0)[0])
            units = [u for u in getattr(strategy, "units", ()) if u.full]
            held = [u.full.memory.untyped_storage().nbytes() for u in units if not u.is_root]
            copied["turn"] = 1
            strategy.backward(output.float().sum())
    finally:
        activation_offload.copy_over = original
    del copied["turn"]
    return copied, held, meter.host_peak_bytes() or 0


@pytest.mark.parametrize(
    ("make", "precision"),
    [
        (Ours("zero3", Options(prefetch=0)), "fp32"),
        (Ours("zero3", Options(prefetch=0, layout="tensor")), "bf16_master"),
        (Ours("zero2", Options()), "bf16_master"),
        (configured("zero3", "torch"), "bf16_master"),
    ],
)
def test_what_blocks_save_is_copied_once_and_weights_never(make, precision):
    """Blocks are freed after their forward: nothing keeps a view of what was gathered."""
    count_cpu_allocations()
    recipe = Recipe(precision=precision)
    with fake_world(0, 2) as world:
        strategy = build_on_rank(world, recipe, Offloading(make))
        copied, held, peak = copied_in_a_step(strategy)
    plain = MODELS[recipe.model].build()
    if precision == "bf16_master":
        plain.module.bfloat16()
    saved = SavedByBlocks(plain.module, plain.blocks)
    plain.module(microbatch_of(0, 0, 0)[0])
    assert copied["forward"] == saved.num_bytes > 0
    assert copied["backward"] >= saved.num_bytes  # what is used twice comes twice
    assert not any(held)
    assert peak >= saved.num_bytes


def held_after_forward(make: Make) -> int:
    """Bytes on the device that a forward leaves there for backward."""
    with fake_world(0, 2) as world:
        strategy: Any = build_on_rank(world, Recipe(), make)
        gc.collect()  # what other tests left counts in neither
        with strategy.microbatch(last=True):
            before = AllocationMeter(CPU).peak_bytes() or 0
            output = strategy.model(microbatch_of(0, 0, 0)[0])
            held = (AllocationMeter(CPU).peak_bytes() or 0) - before
            strategy.backward(output.float().sum())
    return held


def test_the_device_holds_nothing_of_what_blocks_saved():
    """But for what others hold too: the input of the first block, and the output of the last."""
    count_cpu_allocations()
    make = Ours("zero3", Options(prefetch=0))
    plain = MODELS["toy"].build()
    saved = SavedByBlocks(plain.module, plain.blocks)
    plain.module(microbatch_of(0, 0, 0)[0])
    freed = held_after_forward(make) - held_after_forward(Offloading(make))
    assert freed > 0.7 * saved.num_bytes
