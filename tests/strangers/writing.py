"""Who writes into weights: loading, clamping, swapping, replacing, moving."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.strangers.lab import (
    EVERY,
    EVERY_WAY,
    WIDTH,
    Lab,
    Setting,
    adamw,
    each_of,
    scenario,
    variants,
)
from tests.strangers.models import Net

WRITE = r"gathered\(write=True\)"
REPLACED = r"gathered\(write=True\)|replaced|moved|added|parameter"


@scenario(EVERY_WAY)
def weights_clamped_in_the_context(lab: Lab) -> None:
    """A WGAN clips its weights after each step."""
    t = lab.wrap(Net())
    for step in range(3):
        lab.train(t, steps=[step])
        with t.gathered(write=True), torch.no_grad():
            for p in t.model.parameters():
                p.clamp_(-0.2, 0.2)


@scenario(EVERY_WAY)
def weights_loaded_in_the_context(lab: Lab) -> None:
    t = lab.wrap(Net(), optimizer=adamw)
    lab.train(t, steps=[0])
    with t.gathered(write=True):
        t.model.load_state_dict(Net(seed=7).state_dict())
    lab.train(t, steps=[1, 2])


@variants(["chance", "order"], EVERY_WAY, refused="ranks wrote different weights")
def written_differently_by_rank(lab: Lab, way: str) -> None:
    """Unseeded chance in an initialisation, and values that are the same but for their order."""
    t = lab.wrap(Net())
    rank = lab.ranks[0]
    with t.gathered(write=True), torch.no_grad():
        weight = t.model.layers[1].up.weight
        if way == "chance":
            weight.normal_(generator=torch.Generator().manual_seed(rank))
        else:
            weight.copy_(weight.flip(0) if rank else weight)
    lab.train(t)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "copy": lambda p: p.copy_(torch.full_like(p, 0.1)),
    "data": lambda p: p.data.mul_(0.5),
    "item": lambda p: p.__setitem__(0, 0.25),
    "view": lambda p: p.view(-1).add_(0.1),
    "out": lambda p: torch.mul(p.detach(), 0.5, out=p.detach()),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "numpy": lambda p: p.detach().numpy().__imul__(0.5),
    "assigned": lambda p: setattr(p, "data", torch.full(p.shape, 0.1)),
    "set": lambda p: p.set_(torch.full(p.shape, 0.1)),
    "init": lambda p: nn.init.constant_(p, 0.3),
}


@variants([EVERY, *WRITES], quick=[EVERY])
def written_inside_by(lab: Lab, way: str) -> None:
    """Whatever way it was written: kept on exit (or refused, where values can not be told apart from memory)."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    for each in each_of(WRITES, way):
        with t.gathered(write=True), torch.no_grad():
            WRITES[each](t.model.layers[1].up.weight)
            WRITES[each](t.model.head.weight)
        lab.train(t, steps=[1])
    lab.train(t, steps=[2])


@variants([EVERY, *WRITES], quick=[EVERY], oracle=False)
def written_without_saying_so_by(lab: Lab, way: str) -> None:
    """Without `write=True` the exit of the context raises; it would be undone, or done on one rank alone."""
    for each in each_of(WRITES, way):
        t = lab.wrap(Net())  # another, since a write that was refused is refused from then on
        lab.train(t, steps=[0])
        with lab.raises(WRITE), t.gathered(), torch.no_grad():
            WRITES[each](t.model.layers[1].up.weight)


@variants([*WRITES], quick=["copy", "data", "foreach", "set"], may_refuse=r"gathered\(")
def written_outside_by(lab: Lab, way: str) -> None:
    """A write between steps, without a context: kept, or refused at the latest at the next microbatch."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    with torch.no_grad():
        WRITES[way](t.model.layers[1].up.weight)
    lab.train(t, steps=[1, 2])


@variants(
    ["assigned", "set"],
    refused={"zero3": r"moved or given|written in place"},
    may_refuse="moved or given|written in place",
)
def a_frozen_weight_written_in_forward_by(lab: Lab, way: str) -> None:
    """A momentum encoder inside of the model. Under ZeRO-3 what is written would be lost when the block is freed."""
    model = Net()
    model.layers[1].requires_grad_(False)
    t = lab.wrap(model)

    def write(block: nn.Module, _args: object) -> None:
        with torch.no_grad():
            WRITES[way](block.up.weight)

    t.model.layers[1].register_forward_pre_hook(write)
    lab.train(t, steps=[0, 1])


@scenario([Setting("zero1"), Setting("zero2")], refused="written in place between two steps")
def written_while_peers_may_read(lab: Lab) -> None:
    """Weights are whole at rest, and a peer may not have taken its copy yet."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    with torch.no_grad():
        t.model.layers[1].up.weight.fill_(0.5)
    lab.train(t, steps=[1])


@scenario(may_refuse=r"gathered\(")
def loaded_outside_of_the_context(lab: Lab) -> None:
    t = lab.wrap(Net(), optimizer=adamw)
    lab.train(t, steps=[0])
    t.model.load_state_dict(Net(seed=7).state_dict())
    lab.train(t, steps=[1, 2])


@scenario(may_refuse=r"gathered\(|assign|replaced")
def loaded_by_assignment(lab: Lab) -> None:
    """`assign=True` puts other tensors into the module, which no optimizer knows; torch trains the old ones."""
    t = lab.wrap(Net(), optimizer=adamw)
    lab.train(t, steps=[0])
    t.model.load_state_dict(Net(seed=7).state_dict(), assign=True)
    lab.train(t, steps=[1, 2])


@scenario()
def loaded_with_a_master_of_another_dtype(lab: Lab) -> None:
    """The next step would cast the old master over what was loaded."""
    from zeroexp.zero.options import Dtypes

    t = lab.wrap(Net(), dtypes=Dtypes(torch.float32, torch.float32, torch.float64))
    lab.train(t, steps=[0])
    with t.gathered(write=True):
        t.model.load_state_dict(Net(seed=7).state_dict())
    with t.gathered():
        for p in t.model.parameters():
            lab.note(p)
    lab.train(t, steps=[1])
    with t.gathered():
        for p in t.model.parameters():
            lab.note(p)


@scenario()
def weights_swapped_inside_one_context(lab: Lab) -> None:
    """The forward pass runs inside the writing context."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    with t.gathered(write=True), torch.no_grad():
        live = copy.deepcopy(t.model.state_dict())
        for p in t.model.parameters():
            p.mul_(0.5)
        lab.note(t.model(torch.ones(2, WIDTH)))
        t.model.load_state_dict(live)
        lab.note(t.model(torch.ones(2, WIDTH)))
    lab.train(t, steps=[1])


def _replace_head(model: nn.Module) -> None:
    model.head = nn.Linear(WIDTH, 3)


def _replace_weight(model: nn.Module) -> None:
    model.layers[1].up.weight = nn.Parameter(torch.ones(7, WIDTH))


def _delete(model: nn.Module) -> None:
    model.layers[1].up.bias = None


def _add_parameter(model: nn.Module) -> None:
    model.register_parameter("extra", nn.Parameter(torch.ones(3)))


def _replace_block(model: nn.Module) -> None:
    model.layers[1] = type(model.layers[1])()


def _add_block(model: nn.Module) -> None:
    model.layers.append(type(model.layers[1])())


def _parametrize(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model.layers[1].up)


def _add_modules(model: nn.Module) -> None:
    model.layers[0].again, model.metric = model.layers[0].up, nn.Tanh()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "double": lambda model: model.double(),
    "half": lambda model: model.bfloat16(),
    "to_meta": lambda model: model.to("meta"),
    "a_new_head": _replace_head,
    "a_new_weight": _replace_weight,
    "a_new_block": _replace_block,
    "one_block_more": _add_block,
    "one_parameter_more": _add_parameter,
    "one_parameter_less": _delete,
    "a_parametrization": _parametrize,
}


@variants(
    [*CHANGES],
    quick=["double", "to_meta", "a_new_block", "one_parameter_more", "one_parameter_less"],
    refused=REPLACED,
    oracle=False,
)
def changed_after_wrapping_by(lab: Lab, way: str) -> None:
    """The engine's pieces belong to parameters that are not the model's any more: refused at the next microbatch."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    CHANGES[way](t.model)
    with t.microbatch(last=True):
        pass


SAME: dict[str, Callable[[nn.Module], object]] = {
    "to_the_same_device": lambda model: model.to("cpu"),
    "to_the_same_dtype": lambda model: model.to(torch.float32),
    "float": lambda model: model.float(),
    "cpu": lambda model: model.cpu(),
    "train": lambda model: model.train(),
    "requires_grad": lambda model: model.requires_grad_(True),
    "modules_without_new_parameters": _add_modules,
}


@variants([EVERY, *SAME], quick=[EVERY])
def changed_to_what_it_is_by(lab: Lab, way: str) -> None:
    """Calls that change nothing in PyTorch change nothing here."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    for each in each_of(SAME, way):
        SAME[each](t.model)
        lab.train(t, steps=[1])


@scenario(may_refuse=r"writ|gathered\(|max_norm")
def an_embedding_with_max_norm(lab: Lab) -> None:
    """`nn.Embedding(max_norm=...)` renormalises in place the rows it looks up: different ones on each rank."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, WIDTH, max_norm=1.0)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).sum(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.block = Lookup()
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.block(ids))

    t = lab.wrap(Model(), ["block"])
    lab.train(t, lambda model, batch: batch.loss(model(batch.ids)), steps=[0, 1])


@scenario(refused=r"load_state_dict\(\) inside a microbatch")
def a_state_loaded_between_forward_and_backward(lab: Lab) -> None:
    t = lab.wrap(Net())
    state = t.state_dict()
    for batch in lab.batches(0):
        with t.microbatch(last=True):
            loss = batch.loss(t.model(batch.x))
            t.load_state_dict(state)
            t.backward(loss)
    lab.note(t.step())


@scenario(refused=r"gathered\(write=True\) inside strategy\.gathered\(\)")
def written_in_a_context_inside_of_one_for_reading(lab: Lab) -> None:
    t = lab.wrap(Net())
    with t.gathered(), t.gathered(write=True), torch.no_grad():
        next(t.model.parameters()).mul_(2)
    lab.train(t, steps=[0])
