"""N to M: every rank reads the ranges it needs, counted by the kernel; random models of odd sizes arrive whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.checkpoint.saving import checkpoint, config_of
from tests.oracle import Recipe, assembled, configured, pieces_of
from zeroexp.checkpoint.load import load
from zeroexp.checkpoint.save import Saver
from zeroexp.interface.strategy import CanonicalState, Strategy
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World

Shapes = Sequence[tuple[int, ...]]
IMPLEMENTATIONS = [
    *[
        (stage, layout)
        for stage in ("zero1", "zero3")
        for layout in ("parameter", "tensor", "buffer")
    ],
    *[("ddp", "torch"), ("zero1", "torch"), ("zero3", "torch")],
]


class Bag(nn.Module):
    """Parameters of any shapes, in two blocks; the loss needs them all."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Module(), nn.Module()])
        for number, shape in enumerate(shapes):
            owner = (self, *self.blocks)[number % 3]
            owner.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape)))

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([(p * scale).square().sum() for p in self.parameters()]).sum()


def build(world: World, shapes: Shapes, stage: str, implementation: str) -> Strategy:
    torch.manual_seed(3)
    built = BuiltModel(Bag(shapes), [])
    return configured(stage, implementation)(built, Recipe(model="llama", fused=True), world)


def save_a_step(world: World, shapes: Shapes, words: tuple[str, str], run: Path) -> Any:
    strategy = build(world, shapes, *words)
    with strategy.microbatch(last=True):
        strategy.backward(strategy.model(torch.tensor(1.0 + world.rank)))
    strategy.step()
    strategy.zero_grad()
    saver = Saver(run, strategy, config_of(Recipe(steps=1)), world)
    saver.save_now(1)
    saver.close()
    return pieces_of(strategy)


def load_it(world: World, shapes: Shapes, words: tuple[str, str], saved: Path) -> Any:
    """(its pieces, bytes of the checkpoint's mapped files that were read)."""
    strategy = build(world, shapes, *words)
    read_bytes: list[int] = []

    def load_and_count(state: CanonicalState) -> None:
        read_bytes.append(-resident_bytes(saved))
        fill(state)
        read_bytes.append(resident_bytes(saved))

    fill, strategy.load_state_dict = strategy.load_state_dict, load_and_count
    load(saved, strategy, world)
    return pieces_of(strategy), sum(read_bytes)


def resident_bytes(saved: Path) -> int:
    """Of what is mapped from these files, the part this process has touched."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.partition(" ")[0]:
            inside = str(saved) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


sizes = st.integers(1, 7)
any_shape = st.lists(sizes, max_size=3).map(tuple)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    shapes=st.lists(any_shape, min_size=1, max_size=7),
    source=st.sampled_from(IMPLEMENTATIONS),
    target=st.sampled_from(IMPLEMENTATIONS),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_random_models_arrive_as_they_were(ranks, tmp_path_factory, shapes, source, target, worlds):
    if ("zero3", "torch") in (source, target):
        shapes = [shape or (1,) for shape in shapes]  # FSDP2 takes no parameter without dimension
    run = tmp_path_factory.mktemp("run")
    saved = assembled(ranks(save_a_step, shapes, source, run, world_size=worlds[0]))
    answers = ranks(load_it, shapes, target, checkpoint(run, 1), world_size=worlds[1])
    loaded = assembled([pieces for pieces, _ in answers])
    assert loaded.keys() == saved.keys()
    for name, tensors in saved.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(loaded[name][key], tensor, rtol=0, atol=0)


def test_a_rank_reads_what_it_needs_and_no_more(ranks, tmp_path):
    """Sharded state of 12 MB: a third for each of three ranks, whoever of two had saved it."""
    shapes = [(1000, 333), (701, 501), (317, 1009)]
    ranks(save_a_step, shapes, ("zero3", "buffer"), tmp_path, world_size=2)
    answers = ranks(load_it, shapes, ("zero3", "buffer"), checkpoint(tmp_path, 1), world_size=3)
    whole = 12 * sum(a * b for a, b in shapes)
    for _, num_bytes in answers:
        assert whole / 4 < num_bytes < whole / 2, (num_bytes, whole)
