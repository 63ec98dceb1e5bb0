"""Training programs as a reader of docs/library.md writes them, each of several habits at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.strangers.lab import (
    BY_STAGE,
    WIDTH,
    Batch,
    Factory,
    Lab,
    Setting,
    adamw,
    next_word_loss,
    plain_loss,
    scenario,
    variants,
)
from tests.strangers.models import Block, Language, Net
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.canonical import merge
from zeroexp.process import world as worlds
from zeroexp.zero.options import Options

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


def instead(lab: Lab, engine: Sharded) -> Sharded:
    """An engine that goes on where the only one so far stopped."""
    lab._wrapped[:] = [engine]
    return engine


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


# -- states that go round ---------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Factory] = {
    "adamw": adamw,
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True, momentum=0.5),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.05, t0=2),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
}


def other(stage: str) -> str:
    return {"zero3": "zero1", "zero1": "zero3"}.get(stage, "zero2")


@variants([*OPTIMIZERS], ODD_WORLDS, quick=["adamw", "nadam"])
def a_state_that_goes_on_elsewhere_with(lab: Lab, name: str) -> None:
    """Two steps, then an engine of another stage, layout and unit takes the state and goes on."""
    t = lab.wrap(Language(), optimizer=OPTIMIZERS[name], max_grad_norm=0.5)
    lab.train(t, next_word_loss, steps=[0, 1], num_microbatches=2)
    if not lab.plain:
        assert lab.world is not None
        state = merge(worlds.gather_objects(copy.deepcopy(t.state_dict())))
        model = Language()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float("nan"))  # nothing of it may stay
        t = instead(
            lab,
            Sharded(
                model,
                blocks=["layers.0", "layers.2"],
                stage=STAGES[other(lab.setting.stage)],
                param_groups=[{"params": list(model.parameters())}],
                optimizer_factory=OPTIMIZERS[name],
                max_grad_norm=0.5,
                world=lab.world,
                options=Options(layout="tensor"),
            ),
        )
        t.load_state_dict(state)
    lab.train(t, next_word_loss, steps=[2, 3], num_microbatches=2)


@scenario(ODD_WORLDS)
def the_best_weights_are_kept_and_taken_again(lab: Lab) -> None:
    """Early stopping: a copy of the weights is loaded between two steps, and the moments go on."""
    t = lab.wrap(Net(), optimizer=adamw)
    lab.train(t, steps=[0, 1])
    with t.gathered():
        best = {name: tensor.clone() for name, tensor in t.model.state_dict().items()}
    lab.train(t, steps=[2, 3])
    with t.gathered(write=True):
        t.model.load_state_dict(best)
    lab.train(t, steps=[4])


@scenario(BY_STAGE)
def weights_from_one_vector_where_each_is_a_chunk(lab: Lab) -> None:
    """`vector_to_parameters` gives each parameter other memory: all of a unit's chunks are taken over."""
    t = lab.wrap(Net(), layout="tensor")
    lab.train(t, steps=[0])
    with t.gathered(write=True):
        vector = nn.utils.parameters_to_vector(t.model.parameters()).detach() * 0.5
        nn.utils.vector_to_parameters(vector, t.model.parameters())
    lab.train(t, steps=[1])


@scenario(ODD_WORLDS)
def a_head_is_loaded_without_the_rest(lab: Lab) -> None:
    """`load_state_dict(strict=False)` of a part, before the first step and after."""
    t = lab.wrap(Net())
    theirs = Net(seed=9).head.state_dict()
    for steps in ([0, 1], [2]):
        with t.gathered(write=True):
            t.model.load_state_dict({f"head.{key}": v for key, v in theirs.items()}, strict=False)
        lab.train(t, steps=steps)


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


# -- models of odd sizes and habits -----------------------------------------------------------------------


class Odd(nn.Module):
    """Sizes that nothing divides: a scalar, fewer elements than ranks, nothing at all, a column, three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.two = nn.Parameter(torch.tensor([0.5, -0.5]))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.column = nn.Parameter(torch.linspace(-1, 1, WIDTH).view(WIDTH, 1))
        self.cube = nn.Parameter(torch.linspace(-0.5, 0.5, 7 * 1 * WIDTH).view(7, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.column) * self.gain + self.two.sum() + self.none.sum()
        return x + torch.tanh(y) * self.cube.sum((0, 1))


@scenario((*ODD_WORLDS, *IN_GROUPS))
def sizes_that_nothing_divides(lab: Lab) -> None:
    lab.train(lab.wrap(Net(Odd), optimizer=adamw, max_grad_norm=0.2), num_microbatches=3)


@scenario(ODD_WORLDS)
def unlike_batches_on_each_rank(lab: Lab) -> None:
    """Ranks have other numbers of labels: each divides by the number of all."""
    t = lab.wrap(Language(), max_grad_norm=0.3)
    sizes = [1 + 2 * rank for rank in range(lab.num_ranks)]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids = batch.ids[: sizes[batch.rank] % 4 + 1]
        total = sum((size % 4 + 1) * ids.shape[1] for size in sizes)
        logits = model(ids).flatten(0, 1)
        labels = ids.roll(-1, 1).flatten()
        return nn.functional.cross_entropy(logits, labels, reduction="sum") / total

    lab.train(t, loss, num_microbatches=2)


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
