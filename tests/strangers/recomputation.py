"""Activations that are computed again, offloaded or packed; weights that are computed from others."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.strangers.lab import EVERY_WAY, GATHERED, Batch, Lab, plain_loss, scenario, variants
from tests.strangers.models import Block, Net

MAY_NOT = r"checkpoint|recomput|reentrant"


# Blocks by number, one after another; those of a tuple run inside of one checkpoint.
PLACES: dict[str, tuple[Any, ...]] = {
    "each_block": ((0,), (1,), (2,)),
    "two_blocks": ((0, 1), 2),
    "two_groups": ((0, 1), (2,)),
    "all_blocks": ((0, 1, 2),),
    "a_block_twice": ((0,), 1, (0,)),
    "a_block_twice_in_one": ((0, 1, 0),),
    "one_in_another": ((0, (1,), 2),),
    "every_second": (0, (1,), 2),
}


class Recomputed(Net):
    """`where` says what stands inside a checkpoint."""

    def __init__(self, where: str, *, reentrant: bool, block: type[nn.Module] = Block) -> None:
        super().__init__(block)
        self.where = PLACES[where]
        self.run = partial(checkpoint, use_reentrant=reentrant)

    def body(self, x: Tensor) -> Tensor:
        return self.run_through(self.where, self.inp(x))

    def run_through(self, parts: tuple[Any, ...], x: Tensor) -> Tensor:
        for part in parts:
            is_block = isinstance(part, int)
            x = self.layers[part](x) if is_block else self.run(partial(self.run_through, part), x)
        return x


@variants(
    [*PLACES],
    EVERY_WAY,
    quick=["each_block", "two_groups", "a_block_twice_in_one", "one_in_another"],
)
def checkpoint_around(lab: Lab, where: str) -> None:
    lab.train(lab.wrap(Recomputed(where, reentrant=False)), num_microbatches=2)


@variants([*PLACES], EVERY_WAY, quick=["each_block", "two_groups", "a_block_twice_in_one"])
def reentrant_checkpoint_around(lab: Lab, where: str) -> None:
    lab.train(lab.wrap(Recomputed(where, reentrant=True)), num_microbatches=2)


SMALL = 2e-5  # MiB: each weight has a bucket of its own


class RecomputedAndShared(Net):
    """A block is in a reentrant checkpoint, and two of its three modules come again behind it."""

    def body(self, x: Tensor) -> Tensor:
        last = self.layers[2]
        x = checkpoint(last, self.layers[1](self.layers[0](self.inp(x))), use_reentrant=True)
        return last.down(last.up(x))


@scenario(EVERY_WAY, may_refuse=f"{MAY_NOT}|{GATHERED}")
def reentrant_checkpoint_of_what_others_use_too(lab: Lab) -> None:
    """Gradients come in two parts, of which the second finds the bucket reduced."""
    lab.train(lab.wrap(RecomputedAndShared(), bucket_mb=SMALL))


@scenario(EVERY_WAY, may_refuse=MAY_NOT)
def reentrant_checkpoints_and_a_penalty_on_matrices(lab: Lab) -> None:
    """As docs/library.md adds a penalty; norms have their gradient of the checkpoints alone."""
    t = lab.wrap(Recomputed("each_block", reentrant=True), bucket_mb=SMALL)
    for batch in lab.microbatches(t):
        loss = plain_loss(t.model, batch)
        with t.gathered():
            squares = [p.square().sum() for p in t.model.parameters() if p.ndim > 1]
            t.backward(loss + 0.01 * torch.stack(squares).sum() / batch.num_ranks)


class ReentrantInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=True)


@scenario(EVERY_WAY, may_refuse=MAY_NOT)
def reentrant_checkpoints_inside_blocks_and_a_penalty_on_all(lab: Lab) -> None:
    """The penalty's gradients are all that a block seems to wait for, before it is computed again."""
    t = lab.wrap(Net(ReentrantInside))
    for batch in lab.microbatches(t):
        loss = plain_loss(t.model, batch)
        with t.gathered():
            squares = [p.square().sum() for p in t.model.parameters()]
        t.backward(loss + 0.01 * torch.stack(squares).sum() / batch.num_ranks)


class RecomputedInside(Net):
    """One block runs in a checkpoint, and again beside another one in a checkpoint inside of that."""

    def body(self, x: Tensor) -> Tensor:
        run = partial(checkpoint, use_reentrant=False)
        first, second, _ = self.layers

        def outer(x: Tensor) -> Tensor:
            x = first(x)
            return x * run(lambda x: second(first(x)), x)

        return run(outer, self.inp(x))


@scenario()
def checkpoint_inside_a_checkpoint_of_one_block(lab: Lab) -> None:
    """Its block is recomputed, and needed again in another's backward before those values were used."""
    lab.train(lab.wrap(RecomputedInside()), num_microbatches=2)


@variants(["two_blocks", "all_blocks", "each_block"])
def checkpoint_with_frozen_blocks_around(lab: Lab, where: str) -> None:
    model = Recomputed(where, reentrant=False)
    model.layers.requires_grad_(False)
    lab.train(lab.wrap(model))


@variants(["non_reentrant", "reentrant"], EVERY_WAY)
def checkpoint_inside_blocks(lab: Lab, kind: str) -> None:
    """The block's own forward checkpoints its inside."""

    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(self.inner, x, use_reentrant=kind == "reentrant")

    lab.train(lab.wrap(Net(Inside)), num_microbatches=2)


@variants(["non_reentrant", "reentrant"])
def checkpoint_around_the_whole_model(lab: Lab, kind: str) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch.x.requires_grad_()
        return batch.loss(checkpoint(model, x, use_reentrant=kind == "reentrant"))

    lab.train(lab.wrap(Net()), loss)


@scenario(may_refuse={"zero3": GATHERED})
def checkpoints_in_sequence(lab: Lab) -> None:
    """`checkpoint_sequential` in two segments over five modules."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), Block(), Block(), Block(), nn.Linear(6, 3))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return batch.loss(checkpoint_sequential(model, 2, batch.x, use_reentrant=False))

    lab.train(lab.wrap(model, ["1", "2", "3"]), loss)


@scenario(EVERY_WAY)
def a_checkpoint_wrapper(lab: Lab) -> None:
    """torch's own wrapper as a block, and a block inside it."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Net()
    for index in range(3):
        model.layers[index] = checkpoint_wrapper(model.layers[index])
    lab.train(lab.wrap(model), num_microbatches=2)


@scenario(EVERY_WAY)
def selective_checkpoints(lab: Lab) -> None:
    """Matrix products are kept, the rest is computed again."""

    def policy(_ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    class Selective(Net):
        def body(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            contexts = partial(create_selective_checkpoint_contexts, policy)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            return x

    lab.train(lab.wrap(Selective()), num_microbatches=2)


@scenario()
def a_checkpoint_whose_backward_stops_early(lab: Lab) -> None:
    """Only the first of two blocks in the checkpoint leads to the loss."""

    class Early(Net):
        def body(self, x: Tensor) -> Tensor:
            x = self.inp(x)

            def both(x: Tensor) -> tuple[Tensor, Tensor]:
                first = self.layers[0](x)
                return first, self.layers[1](first)

            first, _ = checkpoint(both, x, use_reentrant=False)
            return self.layers[2](first)

    lab.train(lab.wrap(Early()))


# -- saved tensors ------------------------------------------------------------------------------------


@variants(["offloaded", "doubled", "copied"], EVERY_WAY, may_refuse={"zero3": GATHERED})
def saved_tensors(lab: Lab, how: str) -> None:
    """Somebody's own hooks on what autograd saves, weights included."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        hooks = {
            "offloaded": lambda: torch.autograd.graph.save_on_cpu(),
            "doubled": lambda: torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.double(), lambda t: t.float()
            ),
            "copied": lambda: torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.clone(), lambda t: t
            ),
        }
        with hooks[how]():
            return plain_loss(model, batch)

    lab.train(lab.wrap(Net()), loss, num_microbatches=2)


# -- weights made of others ---------------------------------------------------------------------------


def old_weight_norm(block: nn.Module) -> None:
    nn.utils.weight_norm(block.up)


def old_spectral_norm(block: nn.Module) -> None:
    nn.utils.spectral_norm(block.up)


def new_weight_norm(block: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(block.up)


def new_spectral_norm(block: nn.Module) -> None:
    nn.utils.parametrizations.spectral_norm(block.up)


def orthogonal(block: nn.Module) -> None:
    nn.utils.parametrizations.orthogonal(block.up)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT if x.shape[0] == x.shape[1] else x * 2


def of_ones_own(block: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(block.down, "weight", Symmetric())


MADE = {
    "old_weight_norm": old_weight_norm,
    "old_spectral_norm": old_spectral_norm,
    "weight_norm": new_weight_norm,
    "spectral_norm": new_spectral_norm,
    "orthogonal": orthogonal,
    "of_ones_own": of_ones_own,
}
MADE_REFUSED = r"weight_norm|spectral_norm|parametri|hook|gathered"


@variants([*MADE], EVERY_WAY, may_refuse=MADE_REFUSED)
def weights_made_by(lab: Lab, way: str) -> None:
    model = Net()
    torch.manual_seed(5)
    for layer in model.layers:
        MADE[way](layer)
    lab.train(lab.wrap(model, isolated=True))


class Matrix(nn.Module):
    """A block that holds its weight itself, so that the block's own module is made of others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


OWN = {
    "old_weight_norm": lambda block: nn.utils.weight_norm(block),
    "old_spectral_norm": lambda block: nn.utils.spectral_norm(block),
    "weight_norm": lambda block: nn.utils.parametrizations.weight_norm(block),
    "spectral_norm": lambda block: nn.utils.parametrizations.spectral_norm(block),
    "orthogonal": lambda block: nn.utils.parametrizations.orthogonal(block),
}


@variants([*OWN], EVERY_WAY, may_refuse=MADE_REFUSED)
def the_blocks_own_weight_made_by(lab: Lab, way: str) -> None:
    """The old ones compute it in a forward-pre hook, which runs before or after the engine's own."""
    model = Net(Matrix)
    torch.manual_seed(5)
    for layer in model.layers:
        OWN[way](layer)
    lab.train(lab.wrap(model, isolated=True))


@scenario()
def autocast(lab: Lab) -> None:
    """bfloat16 inside, weights in float32; the cast of a weight is cached for the pass."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch.x)
        return batch.loss(output.float())

    lab.train(lab.wrap(Net()), loss, num_microbatches=2)
