"""Blocks that give back what they like: backward has to be seen through all of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from tests.strangers.lab import (
    BY_STAGE,
    EVERY,
    EVERY_WAY,
    WIDTH,
    Batch,
    Lab,
    Setting,
    each_of,
    plain_loss,
    scenario,
    variants,
)
from tests.strangers.models import Block, Net


@dataclass
class Hidden:
    state: Tensor
    aux: Tensor


class Box:
    def __init__(self, state: Tensor, aux: Tensor) -> None:
        self.state, self.aux = state, aux


class Slotted:
    __slots__ = ("aux", "state")

    def __init__(self, state: Tensor, aux: Tensor) -> None:
        self.state, self.aux = state, aux


SHELF: list[Tensor] = []

PACK: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda s, a: (s, a), lambda o: o),
    "dict": (lambda s, a: {"s": s, "a": a}, lambda o: (o["s"], o["a"])),
    "nested": (
        lambda s, a: {"s": [(s, None)], "a": {"x": a}},
        lambda o: (o["s"][0][0], o["a"]["x"]),
    ),
    "dataclass": (Hidden, lambda o: (o.state, o.aux)),
    "object": (Box, lambda o: (o.state, o.aux)),
    "slots": (Slotted, lambda o: (o.state, o.aux)),
    "closure": (lambda s, a: lambda: (s, a), lambda o: o()),
    "generator": (lambda s, a: iter((s, a)), lambda o: (next(o), next(o))),
}


class Packing(Block):
    kind = "tuple"

    def forward(self, x: Tensor) -> Any:
        state = super().forward(x)
        aux = self.down(torch.sigmoid(self.up(x))).square().mean()
        return PACK[self.kind][0](state, aux)


class PackingNet(Net):
    """Blocks of one kind, or of each."""

    def __init__(self, kind: str) -> None:
        kinds = each_of(PACK, kind)
        super().__init__(Packing, depth=max(len(kinds), 3))
        self.names = [f"layers.{index}" for index in range(len(self.layers))]
        for layer, name in zip(self.layers, cycle(kinds), strict=False):
            layer.kind = name

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.inp(x), torch.zeros(())
        for layer in self.layers:
            x, aux = PACK[layer.kind][1](layer(x))
            total = total + aux
        return self.head(x), total


def loss_and_aux(model: nn.Module, batch: Batch) -> Tensor:
    output, aux = model(batch.x)
    return batch.loss(output) + 0.3 * aux


@variants([EVERY, *PACK], EVERY_WAY, quick=[EVERY])
def packed_in(lab: Lab, kind: str) -> None:
    model = PackingNet(kind)
    lab.train(lab.wrap(model, model.names), loss_and_aux, num_microbatches=2)


@variants([EVERY, *PACK], quick=[EVERY])
def packed_by_frozen_blocks_in(lab: Lab, kind: str) -> None:
    """Backward goes through the blocks on the way to `inp`, and no parameter of theirs tells of it."""
    model = PackingNet(kind)
    model.layers.requires_grad_(False)
    lab.train(lab.wrap(model, model.names), loss_and_aux)


# -- beside the output ---------------------------------------------------------------------------------


class Leaving(Block):
    """Leaves an auxiliary loss in an attribute, as load-balancing losses do."""

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.down(torch.sigmoid(self.up(x))).square().mean()
        return super().forward(x)


def loss_with_attributes(model: nn.Module, batch: Batch) -> Tensor:
    loss = batch.loss(model(batch.x))
    return loss + 0.3 * torch.stack([layer.aux for layer in model.layers]).sum()


class Probing(Block):
    """The auxiliary loss comes from a probe whose weights alone are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(WIDTH, 2)
        self.probe.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.aux = self.probe(x).square().mean()
        return x


BY_WHOM = ("blocks", "frozen_blocks", "a_frozen_probe")


@variants(BY_WHOM, EVERY_WAY, quick=BY_WHOM, first=True)
def left_in_an_attribute_by(lab: Lab, whom: str) -> None:
    model = Net(Probing if whom == "a_frozen_probe" else Leaving)
    if whom == "frozen_blocks":
        model.layers.requires_grad_(False)
    lab.train(lab.wrap(model), loss_with_attributes, num_microbatches=2)


class Appending(Block):
    def forward(self, x: Tensor, found: list[Tensor] | None = None) -> Tensor:
        x = super().forward(x)
        target = SHELF if found is None else found
        target.append(self.down(torch.sigmoid(self.up(x))).square().mean())
        return x


class AppendingNet(Net):
    def __init__(self, *, shelf: bool) -> None:
        super().__init__(Appending)
        self.shelf = shelf

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, found = self.inp(x), list[Tensor]()
        SHELF.clear()
        for layer in self.layers:
            x = layer(x) if self.shelf else layer(x, found)
        return self.head(x), torch.stack([*found, *SHELF]).sum()


@variants(["an_argument", "a_global"], EVERY_WAY)
def appended_to(lab: Lab, place: str) -> None:
    lab.train(lab.wrap(AppendingNet(shelf=place == "a_global")), loss_and_aux)


# -- odd outputs ---------------------------------------------------------------------------------------


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y.add_(x)
        return y.mul_(1.5)


class Identity(Block):
    """Gives its input back, and uses its weights for nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Viewing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x), x], dim=1)[:, :WIDTH].t().contiguous().t()


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Late(Block):
    """What it returns is written into by the next block."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if x.is_leaf else x
        return x.add_(self.inner(x.clone()))


BLOCKS = {"in_place": InPlace, "identity": Identity, "view": Viewing, "twice": Twice, "late": Late}


@variants([*BLOCKS], EVERY_WAY)
def block_of_kind(lab: Lab, kind: str) -> None:
    lab.train(lab.wrap(Net(BLOCKS[kind])), num_microbatches=2)


@variants([*BLOCKS], quick=["in_place", "view", "twice"])
def frozen_block_of_kind(lab: Lab, kind: str) -> None:
    model = Net(BLOCKS[kind])
    model.layers.requires_grad_(False)
    lab.train(lab.wrap(model))


class Skipped(Block):
    """Stochastic depth: it returns its input as it is."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skips else super().forward(x)


GATHERED_TOGETHER = (Setting("zero3"), Setting("zero3", world_size=3), Setting("zero2"))


@variants(["gloo", "native"], GATHERED_TOGETHER, mark=None)
def a_block_that_one_rank_alone_skips_over(lab: Lab, transport: str) -> None:
    """Blocks are of one size, so that a gather of another block would be taken for this one's."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        for index, layer in enumerate(model.layers):
            layer.skips = batch.rank == 1 and index == batch.step % 3
        return plain_loss(model, batch)

    t = lab.wrap(Net(Skipped), transport=transport)
    lab.train(t, loss, steps=range(4), num_microbatches=2)


class WrittenAfterUse(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        z = self.down(y)
        y.detach().mul_(0.5)
        return z


@scenario(BY_STAGE, refused="modified by an inplace operation")
def an_activation_that_is_written_after_backward_counts_on_it(lab: Lab) -> None:
    """Its gradient would be another one, without a word."""
    lab.train(lab.wrap(Net(WrittenAfterUse)))


@scenario()
def a_block_whose_output_nobody_uses(lab: Lab) -> None:
    """FSDP: unused forward module. Its weights get no gradient on any rank."""

    class Wasteful(Net):
        def body(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            self.layers[1](x)
            return self.layers[2](self.layers[0](x))

    lab.train(lab.wrap(Wasteful()))


@scenario(may_refuse={"zero3": r"view|outlive|gathered|kept"})
def a_weight_as_an_output(lab: Lab) -> None:
    """A block hands out its own weight, and the caller multiplies with it after the block is done."""

    class Lending(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.up.weight

    class Borrower(Net):
        def body(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for layer in self.layers:
                x, weight = layer(x)
                x = x + torch.tanh(x @ weight.t())[:, :WIDTH]
            return x

    lab.train(lab.wrap(Borrower(Lending)))


class Keeping(Block):
    """Leaves its weight in an attribute as this function shows it."""

    shown = staticmethod(lambda weight: weight.detach().view(-1))

    def forward(self, x: Tensor) -> Tensor:
        object.__setattr__(self, "kept", self.shown(self.up.weight))
        return super().forward(x)


SHOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda weight: weight.t(),
    "flat": lambda weight: weight.view(-1),
    "detached": lambda weight: weight.detach(),
    "parameter": lambda weight: weight,
}


@variants([*SHOWN], may_refuse={"zero3": r"view|outlive|gathered|kept|freed"})
def a_weight_left_in_an_attribute(lab: Lab, way: str) -> None:
    """`self.kept` is a view of a weight; the loss uses it after the block was freed."""

    class Shown(Keeping):
        shown = staticmethod(SHOWN[way])

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = plain_loss(model, batch)
        return (
            value + 0.1 * torch.stack([layer.kept.square().mean() for layer in model.layers]).sum()
        )

    lab.train(lab.wrap(Net(Shown)), loss)


@scenario(refused={"zero3": r"view|outlive|gathered|kept"})
def a_weight_left_in_an_attribute_and_read_later(lab: Lab) -> None:
    """Only the next step's microbatch looks at it: by then the memory is another block's."""
    t = lab.wrap(Net(Keeping))
    lab.train(t, steps=[0, 1])
    with torch.no_grad():
        lab.note(torch.stack([layer.kept.norm() for layer in t.model.layers]))


@scenario(refused={"zero3": r"view.*outlives"})
def a_weight_left_in_an_attribute_beside_a_dead_proxy(lab: Lab) -> None:
    """The search for the view meets whatever objects the process has; a dead weak proxy raises when it is asked."""

    class Gone:
        pass

    gone = Gone()
    proxies = [weakref.proxy(gone) for _ in range(2)]
    del gone
    lab.train(lab.wrap(Net(Keeping)))
    del proxies
