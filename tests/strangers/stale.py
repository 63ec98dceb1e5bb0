"""Weights used by another road than their module's own forward."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from tests.strangers.lab import (
    EVERY_WAY,
    GATHERED,
    USUAL,
    VOCABULARY,
    WIDTH,
    Batch,
    Lab,
    Setting,
    scenario,
    variants,
)
from tests.strangers.models import Language, Net
from zeroexp.interface.canonical import merge
from zeroexp.process import world as worlds

BY_HAND = {"zero3": GATHERED}


@variants(["inner", "forward", "submodule", "sequence"], EVERY_WAY, may_refuse=BY_HAND)
def blocks_run_by_hand_through(lab: Lab, road: str) -> None:
    """A loss that calls what is inside of blocks: hooks of the block do not fire."""

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        if road == "inner":
            return x + layer.inner(x)
        if road == "forward":
            return layer.forward(x)
        if road == "submodule":
            return x + layer.down(torch.tanh(layer.up(layer.norm(x))))
        return x + nn.Sequential(layer.norm, layer.up, nn.Tanh(), layer.down)(x)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = model.inp(batch.x)
        for layer in model.layers:
            x = run(layer, x)
        return batch.loss(model.head(x))

    lab.train(lab.wrap(Net()), loss, num_microbatches=2)


@scenario(EVERY_WAY, may_refuse=BY_HAND)
def the_models_parts_called_one_by_one(lab: Lab) -> None:
    """The root's forward is never called; each part is."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = model.inp(batch.x)
        for layer in model.layers:
            x = layer(x)
        return batch.loss(model.head(x))

    lab.train(lab.wrap(Net()), loss, num_microbatches=2)


EVERYWHERE_BUT_ZERO3 = {"zero3": GATHERED}


@scenario(EVERY_WAY, may_refuse=EVERYWHERE_BUT_ZERO3)
def a_loss_in_chunks(lab: Lab) -> None:
    """The head is applied piece by piece after the body ran, to save the memory of logits."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        hidden = model.hidden(batch.ids)
        labels = batch.ids.roll(-1, 1)
        parts = zip(hidden.split(2, dim=1), labels.split(2, dim=1), strict=True)
        total = [
            cross_entropy(model.head(h).flatten(0, 1), y.flatten(), reduction="sum")
            for h, y in parts
        ]
        return torch.stack(total).sum() / labels.numel() / batch.num_ranks

    lab.train(lab.wrap(Language(tied=False)), loss)


@scenario(EVERY_WAY, may_refuse=EVERYWHERE_BUT_ZERO3)
def a_functional_head(lab: Lab) -> None:
    """`F.linear` with the head's weight: not even the head's own hooks fire."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return batch.loss(linear(model.body(batch.x), model.head.weight, model.head.bias))

    lab.train(lab.wrap(Net()), loss)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seq = self.norm(x).unsqueeze(0)
        return x + self.attend(seq, seq, seq, need_weights=False)[0][0]


@scenario(EVERY_WAY)
def multi_head_attention(lab: Lab) -> None:
    """`out_proj` is a module whose forward nobody calls: F.multi_head_attention_forward takes its weight."""
    lab.train(lab.wrap(Net(Attending)), num_microbatches=2)


@scenario(EVERY_WAY)
def a_transformer_encoder_layer(lab: Lab) -> None:
    """In evaluation it takes a fast path that reads all weights at once."""

    class Encoder(nn.TransformerEncoderLayer):
        def __init__(self) -> None:
            super().__init__(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    class EncoderNet(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.unsqueeze(0))[0]

    t = lab.wrap(EncoderNet(Encoder))
    for step in range(2):
        lab.train(t, steps=[step])
        t.model.eval()
        with torch.no_grad():
            lab.note(t.model(torch.ones(2, WIDTH)))
        t.model.train()


class Recurrent(nn.Module):
    """torch's own recurrent layers keep a flat list of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x.unsqueeze(0))[0][0]


@scenario(EVERY_WAY)
def recurrent_layers(lab: Lab) -> None:
    lab.train(lab.wrap(Net(Recurrent)), num_microbatches=2)


class Chooser(nn.Module):
    """Holds weights that another block uses: the block's inside borrows from outside."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = [owner]  # hidden from the module tree
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x) + self.owner[0].inner(x)


OF_WHOM = ("another", "a_later_one")


@variants(OF_WHOM, EVERY_WAY, quick=OF_WHOM, first=True, may_refuse=BY_HAND)
def a_block_that_borrows_from(lab: Lab, whom: str) -> None:
    """Weights read from inside another block may be freed by then; a later one is long done when its gradient comes."""

    class Borrowing(Net):
        def __init__(self) -> None:
            super().__init__(depth=2 if whom == "another" else 3)
            if whom == "another":
                self.layers.append(Chooser(self.layers[0]))
            else:
                self.layers[0] = Chooser(self.layers[2])

    lab.train(lab.wrap(Borrowing()))


@scenario(EVERY_WAY)
def a_block_that_calls_another(lab: Lab) -> None:
    """The other block's own forward is called inside this one's."""

    class Calling(Chooser):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.up(x) + self.owner[0](x)

    class CallingNet(Net):
        def __init__(self) -> None:
            super().__init__(depth=2)
            self.layers.append(Calling(self.layers[0]))

    lab.train(lab.wrap(CallingNet()))


@scenario(EVERY_WAY, may_refuse=BY_HAND)
def a_functional_call(lab: Lab) -> None:
    """`torch.func.functional_call` with the model's own weights inside the context."""
    t = lab.wrap(Net())
    for batch in lab.microbatches(t, steps=range(2)):
        with t.gathered():
            weights = dict(t.model.named_parameters())
            output = torch.func.functional_call(t.model, weights, (batch.x,))
            t.backward(batch.loss(output))


@scenario()
def gradients_that_are_read(lab: Lab) -> None:
    """Those of each sample, by vmap over grad over functional_call, and of all, beside the step that trains."""
    t = lab.wrap(Net())
    for step in range(2):
        for batch in lab.batches(step):
            with t.gathered():
                weights = {n: p.detach() for n, p in t.model.named_parameters()}

                def one(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
                    output = torch.func.functional_call(t.model, w, (x[None],))
                    return (output[0] - y).square().mean()

                each = torch.vmap(torch.func.grad(one), (None, 0, 0))(weights, batch.x, batch.y)
                batch.note(torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]))
                loss = batch.loss(t.model(batch.x))
                of_all = torch.autograd.grad(loss, list(t.model.parameters()))
                batch.note(torch.stack([g.norm() for g in of_all]))
                del loss, of_all
                del weights, each
        lab.train(t, steps=[step])


CHANGED = r"a step has changed its weights|modified by an inplace operation"


@variants(["a model", "a penalty"], [*USUAL, Setting("zero3", world_size=1)], refused=CHANGED)
def gradients_of_a_forward_before_a_step(lab: Lab, of: str) -> None:
    """Of a graph from before it, inside of another `gathered()`."""
    t = lab.wrap(Net())
    (batch, *_) = lab.batches(0)
    with t.gathered():
        loss = batch.loss(t.model(batch.x))
        if of == "a penalty":
            loss = sum(p.square().sum() for p in t.model.parameters())
    lab.train(t, steps=[0])
    with t.gathered():
        torch.autograd.grad(loss, list(t.model.parameters()))


@scenario([*USUAL, Setting("ddp", world_size=1), Setting("zero3", world_size=1)], refused=CHANGED)
def gradients_of_a_forward_before_a_load(lab: Lab) -> None:
    t = lab.wrap(Net())
    (batch, *_) = lab.batches(0)
    with t.gathered():
        loss = batch.loss(t.model(batch.x))
    if lab.plain:
        t.model.load_state_dict(copy.deepcopy(t.model.state_dict()))
    else:
        t.load_state_dict(merge(worlds.gather_objects(copy.deepcopy(t.state_dict()))))
    with t.gathered():
        torch.autograd.grad(loss, list(t.model.parameters()))


@scenario([each for each in USUAL if each.stage != "zero3"])
def gradients_that_are_read_without_a_context(lab: Lab) -> None:
    """Weights that rest whole are there, also for a transform."""
    t = lab.wrap(Net())
    for step in range(2):
        for batch in lab.batches(step):
            of_all = torch.autograd.grad(batch.loss(t.model(batch.x)), list(t.model.parameters()))
            batch.note(torch.stack([g.norm() for g in of_all]))
            del of_all
        lab.train(t, steps=[step])


@scenario(may_refuse=r"func|transform|forward.mode|gathered|microbatch")
def forward_mode_derivatives(lab: Lab) -> None:
    t = lab.wrap(Net())
    for step in range(2):
        for batch in lab.batches(step):
            value, tangent = torch.func.jvp(t.model, (batch.x,), (torch.ones_like(batch.x),))
            batch.note(value)
            batch.note(tangent)
        lab.train(t, steps=[step])


@scenario([Setting("zero3"), Setting("zero1"), *USUAL[-2:]])
def weights_used_from_the_embedding(lab: Lab) -> None:
    """Rows of the embedding's table are compared with hidden states, in the root's forward."""

    class Contrastive(Language):
        def forward(self, ids: Tensor) -> Tensor:
            return self.hidden(ids) @ self.embed.weight.t() / VOCABULARY

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch.ids).flatten(0, 1)
        return cross_entropy(logits, batch.ids.roll(-1, 1).flatten()) / batch.num_ranks

    lab.train(lab.wrap(Contrastive()), loss)


@scenario(refused={"zero3": GATHERED})
def a_block_without_its_hooks(lab: Lab) -> None:
    """Somebody took the hooks off (torch.fx, quantizers, `_forward_hooks.clear()`)."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    for layer in t.model.layers:
        layer._forward_pre_hooks.clear()
        layer._forward_hooks.clear()
    lab.train(t, steps=[1, 2])
