"""Losses that look at weights: decay written out, penalties on gradients, norms of what a layer holds."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from tests.strangers.lab import EVERY_WAY, GATHERED, Batch, Lab, plain_loss, scenario
from tests.strangers.models import Block, Net


def squares(model: nn.Module) -> Tensor:
    return torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()


@scenario(EVERY_WAY)
def penalty_around_everything(lab: Lab) -> None:
    """Forward, penalty and backward stand inside `gathered`."""
    t = lab.wrap(Net())
    for batch in lab.microbatches(t):
        with t.gathered():
            loss = plain_loss(t.model, batch) + 0.01 * squares(t.model)
            batch.note(loss)
            t.backward(loss)


@scenario(EVERY_WAY)
def penalty_between_forward_and_backward(lab: Lab) -> None:
    """Only the penalty and backward stand inside `gathered`."""
    t = lab.wrap(Net())
    for batch in lab.microbatches(t, num_microbatches=2):
        loss = plain_loss(t.model, batch)
        with t.gathered():
            loss = loss + 0.01 * squares(t.model)
            batch.note(loss)
            t.backward(loss)


@scenario(EVERY_WAY, may_refuse=GATHERED)
def penalty_whose_backward_comes_after_the_context(lab: Lab) -> None:
    """The graph keeps weights that are freed when the context ends."""
    t = lab.wrap(Net())

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = plain_loss(model, batch)
        with t.gathered():
            value = value + 0.01 * squares(model)
        return value

    lab.train(t, loss)


@scenario(refused=r"optimizer step has changed since the forward|modified by an inplace operation")
def penalty_from_before_the_step(lab: Lab) -> None:
    """The graph of a penalty is kept, and its backward runs in the next step: with which weights, nobody knows."""
    t = lab.wrap(Net())
    penalties: list[Tensor] = []
    for step in range(2):
        for batch in lab.batches(step):
            with t.microbatch(last=True), t.gathered():
                penalties.append(0.01 * squares(t.model))
                if step == 0:
                    t.backward(plain_loss(t.model, batch))
                else:
                    t.backward(plain_loss(t.model, batch) + penalties[0])
        t.step()
        t.zero_grad()


@scenario(EVERY_WAY, refused={"zero3": GATHERED})
def penalty_without_a_context(lab: Lab) -> None:
    t = lab.wrap(Net())
    lab.train(t, lambda model, batch: plain_loss(model, batch) + 0.01 * squares(model))


@scenario(refused={"zero3": GATHERED})
def penalty_on_one_weight_of_a_block(lab: Lab) -> None:
    t = lab.wrap(Net())

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return plain_loss(model, batch) + model.layers[1].up.weight.abs().mean()

    lab.train(t, loss)


class PenalisedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * self.up.weight.square().sum()


@scenario()
def penalty_inside_a_block(lab: Lab) -> None:
    """A block looks at its own weights in its own forward, beside the submodule that owns them."""
    lab.train(lab.wrap(Net(PenalisedBlock)))


class OrthogonalNet(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = [layer.up.weight for layer in self.layers]
        apart = [(w @ w.T - torch.eye(len(w))).square().sum() for w in weights]
        return super().forward(x), torch.stack(apart).mean()


@scenario(refused={"zero3": GATHERED})
def penalty_that_the_root_computes(lab: Lab) -> None:
    t = lab.wrap(OrthogonalNet())

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        output, apart = model(batch.x)
        return batch.loss(output) + 0.1 * apart

    lab.train(t, loss)


# -- penalties on gradients ---------------------------------------------------------------------------


def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    x = batch.x.requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return batch.loss(output) + (slope.norm(dim=1) - 1).square().mean() / batch.num_ranks


@scenario(EVERY_WAY)
def gradient_penalty_with_trainable_blocks(lab: Lab) -> None:
    lab.train(lab.wrap(Net()), gradient_penalty)


@scenario(EVERY_WAY)
def gradient_penalty_through_frozen_blocks(lab: Lab) -> None:
    model = Net()
    model.layers.requires_grad_(False)
    lab.train(lab.wrap(model), gradient_penalty)


@scenario()
def gradient_penalty_alone(lab: Lab) -> None:
    """The loss is the penalty: weights of the head get a gradient in the second backward only."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch.x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().mean() / batch.num_ranks

    lab.train(lab.wrap(Net()), loss)


@scenario()
def gradient_of_a_hidden_state(lab: Lab) -> None:
    """The penalty is on the gradient with respect to what the second block returns."""

    def loss(model: Net, batch: Batch) -> Tensor:
        kept: list[Tensor] = []
        handle = model.layers[1].register_forward_hook(lambda _m, _a, out: kept.append(out))
        output = model(batch.x)
        handle.remove()
        (slope,) = torch.autograd.grad(output.square().sum(), kept[0], create_graph=True)
        return batch.loss(output) + slope.square().mean() / batch.num_ranks

    lab.train(lab.wrap(Net()), loss)


@scenario()
def gradient_of_an_input_without_a_graph(lab: Lab) -> None:
    """An adversarial example (FGSM): a first backward for the input alone, a second one that trains."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch.x.requires_grad_()
        (slope,) = torch.autograd.grad(batch.loss(model(x)), x)
        return batch.loss(model(batch.x + 0.1 * slope.sign()))

    lab.train(lab.wrap(Net()), loss)


@scenario(EVERY_WAY)
def gradients_that_carry_a_graph(lab: Lab) -> None:
    """`create_graph=True` on the way to each weight's own gradient, of which the loss that follows is a penalty."""
    t = lab.wrap(Net(), isolated=True)
    for batch in lab.microbatches(t, steps=range(2)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
            plain_loss(t.model, batch).backward(create_graph=True)
        own = [p.grad.square().sum() for p in t.model.parameters()]
        t.backward(0.1 * torch.stack(own).sum())
        if lab.plain:  # which keeps these, and by them their graph
            for p in t.model.parameters():
                p.grad = p.grad.detach()


LOCAL = r"gradient|backward|gathered"


@scenario(may_refuse=LOCAL)
def gradient_of_weights_by_autograd_grad(lab: Lab) -> None:
    """`torch.autograd.grad` of weights gives this rank's own, as in one process."""
    t = lab.wrap(Net())
    for batch in lab.batches(0):
        with t.microbatch(last=True), t.gathered():
            loss = plain_loss(t.model, batch)
            grads = torch.autograd.grad(loss, list(t.model.parameters()), retain_graph=True)
            batch.note(torch.stack([g.norm() for g in grads]))
            t.backward(loss)
    lab.note(t.step())
    t.zero_grad()
    lab.train(t)


@scenario(EVERY_WAY)
def gradients_of_weights_made_where_there_are_none(lab: Lab) -> None:
    """`materialize_grads=True`: the loss does not reach a block, whose weights may be freed."""

    def loss(model: Net, batch: Batch) -> Tensor:
        kept: list[Tensor] = []
        handle = model.layers[1].register_forward_hook(lambda _m, _a, out: kept.append(out))
        output = model(batch.x)
        handle.remove()
        weights = [*model.layers[1].parameters(), *model.layers[2].parameters()]
        for graph in (False, True):
            options = {"create_graph": graph, "retain_graph": True, "materialize_grads": True}
            grads = torch.autograd.grad(kept[0].square().sum(), weights, **options)
            batch.note([g.requires_grad for g in grads])
            batch.note(torch.cat([g.detach().flatten() for g in grads]))
        return batch.loss(output)

    lab.train(lab.wrap(Net()), loss)


@scenario(may_refuse=LOCAL)
def penalty_on_the_gradients_of_weights(lab: Lab) -> None:
    """Implicit gradient regularisation: the norm of the weights' own gradients is part of the loss."""
    t = lab.wrap(Net())
    for batch in lab.microbatches(t, steps=range(2)):
        with t.gathered():
            loss = plain_loss(t.model, batch)
            weights = list(t.model.parameters())
            grads = torch.autograd.grad(loss, weights, create_graph=True)
            t.backward(loss + 0.1 * torch.stack([g.square().sum() for g in grads]).sum())
