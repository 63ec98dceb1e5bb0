"""Training programs as a reader of docs/library.md writes them, each of several habits at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.strangers.lab import (
    BY_STAGE,
    Batch,
    Lab,
    Setting,
    adamw,
    next_word_loss,
    plain_loss,
    scenario,
    variants,
)
from tests.strangers.models import Block, Language, Net

ODD_WORLDS = (
    Setting("zero3"),
    Setting("zero1", world_size=3),
    Setting("zero3", world_size=1),
    Setting("zero2", layout="parameter", world_size=3),
    Setting("zero3", layout="tensor", world_size=3),
    Setting("zero3", unit="module", world_size=3),
)
IN_GROUPS = tuple(
    Setting(stage, layout=layout, world_size=4)
    for stage, layout in (("zero3", "buffer"), ("zero1", "tensor"), ("zero2", "parameter"))
)


# -- what is written inside a microbatch is refused there -------------------------------------------------


class Normalised(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.div_(self.up.weight.norm())
        return super().forward(x)


@scenario(BY_STAGE, refused=r"up\.weight was written in place inside a microbatch.*max_norm")
def a_block_that_normalises_its_weight(lab: Lab) -> None:
    """Weight normalisation by hand in a forward; the refusal names the weight, and where it was written."""
    lab.train(lab.wrap(Net(Normalised)))


# -- what is written into all weights ---------------------------------------------------------------------------------


@scenario(BY_STAGE)
def weights_from_one_vector_where_each_is_a_chunk(lab: Lab) -> None:
    """`vector_to_parameters` gives each parameter other memory: all of a unit's chunks are taken over."""
    t = lab.wrap(Net(), layout="tensor")
    lab.train(t, steps=[0])
    with t.gathered(write=True):
        vector = nn.utils.parameters_to_vector(t.model.parameters()).detach() * 0.5
        nn.utils.vector_to_parameters(vector, t.model.parameters())
    lab.train(t, steps=[1])


# -- rates, groups and decay ------------------------------------------------------------------------------


@scenario(ODD_WORLDS)
def another_number_of_microbatches_each_step(lab: Lab) -> None:
    """A batch that grows; gradients cleared to zeros as well as to None."""
    t = lab.wrap(Net(), optimizer=adamw, max_grad_norm=0.3)
    for step, num in enumerate((1, 3, 2, 5)):
        for batch in lab.batches(step, num):
            with t.microbatch(last=batch.last):
                value = plain_loss(t.model, batch) / num
                batch.note(value)
                t.backward(value)
        lab.note(t.step())
        if step % 2:
            t.model.zero_grad(set_to_none=False)
        else:
            t.optimizer.zero_grad()


@scenario(BY_STAGE)
def gradients_that_are_zeroed_and_not_dropped(lab: Lab) -> None:
    """A block that is left out later on has a gradient of zeros: its moments move it, and it decays."""

    class Skipping(Net):
        skips = False

        def body(self, x: Tensor) -> Tensor:
            return (
                super().body(x) if not self.skips else self.layers[2](self.layers[0](self.inp(x)))
            )

    t = lab.wrap(Skipping(), optimizer=adamw)
    for step in range(5):
        t.model.skips = step in (1, 2, 4)
        for batch in lab.batches(step):
            with t.microbatch(last=batch.last):
                t.backward(plain_loss(t.model, batch))
        t.step()
        (t, t.model, t.optimizer)[step % 3].zero_grad(set_to_none=step == 3)


# -- replicas ---------------------------------------------------------------------------------------------


def habits() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "plain", {}
    yield "each_microbatch", {"reduce_each": "microbatch"}
    yield "in_order", {"overlap": False}
    yield "small_buckets", {"bucket_mb": 0.001}


HABITS = dict(habits())


@variants([*HABITS], IN_GROUPS, quick=["plain"], may_refuse=r"reduce_each|overlap|bucket|prefetch")
def two_groups_of_two(lab: Lab, habit: str) -> None:
    """Tied weights, accumulation, clipping, an evaluation, a penalty and a decay by hand, under replicas=2."""
    t = lab.wrap(Language(), optimizer=adamw, max_grad_norm=0.3, replicas=2, **HABITS[habit])

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = next_word_loss(model, batch)
        with t.gathered():
            penalty = sum(p.square().sum() for p in model.parameters())
        return value + 0.01 * penalty / batch.num_ranks

    for step in range(3):
        lab.train(t, loss, steps=[step], num_microbatches=2)
        with torch.no_grad():
            for batch in lab.batches(100 + step):
                batch.note(next_word_loss(t.model, batch))
        with t.gathered(write=True), torch.no_grad():
            for p in t.model.parameters():
                p.mul_(0.999)


# -- weights that change places ---------------------------------------------------------------------------


@variants(["swapped", "converted", "loaded"], BY_STAGE, refused=r"swap", oracle=False)
def a_weight_that_changes_places_when(lab: Lab, what: str) -> None:
    """`swap_tensors`, which torch may use for conversions and for loading: the engine holds the other tensor."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    was = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if what == "converted":
            t.model.float()
        else:
            with t.gathered(write=True):
                if what == "loaded":
                    t.model.load_state_dict(Net(seed=9).state_dict())
                else:
                    zeros = nn.Parameter(torch.zeros(t.model.head.weight.shape))
                    torch.utils.swap_tensors(t.model.head.weight, zeros)
        lab.train(t, steps=[1])
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was)
