"""Two models, two optimizers, and models that know of each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.strangers.lab import EVERY_WAY, WIDTH, Batch, Lab, adamw, scenario
from tests.strangers.models import Block, Net


class Generating(Net):
    def __init__(self) -> None:
        super().__init__(seed=11)
        self.head = nn.Linear(WIDTH, WIDTH)


@scenario(EVERY_WAY, may_refuse=r"backward|gradient|microbatch")
def two_networks_against_each_other(lab: Lab) -> None:
    """A GAN: the generator's loss goes through the discriminator, whose gradients of it are thrown away."""
    g, d = lab.wrap(Generating()), lab.wrap(Net())
    for step in range(3):
        for batch in lab.batches(step):
            with d.microbatch(last=True):
                with torch.no_grad():
                    fake = g.model(batch.x)
                d.backward(batch.loss(d.model(fake)) + batch.loss(d.model(batch.x), -batch.y))
        lab.note(d.step())
        d.zero_grad()
        for batch in lab.batches(step, 1):
            with g.microbatch(last=True), d.microbatch(last=True):
                loss = batch.loss(d.model(g.model(batch.x)), -batch.y)
                g.backward(loss)
        lab.note(g.step())
        g.zero_grad()
        d.zero_grad()


@scenario(EVERY_WAY)
def two_microbatches_entered_in_either_order(lab: Lab) -> None:
    """The hooks of the one that was entered last see what autograd saves of the weights of both, also in an output
    that is kept to be shown."""
    g, d = lab.wrap(Generating()), lab.wrap(Net())
    shown: list[Tensor] = []
    for step in range(4):
        outer, inner = (g, d) if step % 2 else (d, g)
        for batch in lab.batches(step):
            with outer.microbatch(last=True), inner.microbatch(last=True):
                shown.append(d.model(g.model(batch.x + 1)))
                loss = batch.loss(d.model(g.model(batch.x)))
                batch.note(loss)
                (g if step < 2 else d).backward(loss)
        lab.note(g.step())
        lab.note(d.step())
        g.zero_grad()
        d.zero_grad()


@scenario(EVERY_WAY)
def a_penalised_critic(lab: Lab) -> None:
    """WGAN-GP: the critic is penalised for its slope between real and fake."""
    g, d = lab.wrap(Generating()), lab.wrap(Net())
    for step in range(2):
        for batch in lab.batches(step):
            with d.microbatch(last=True):
                with torch.no_grad():
                    fake = g.model(batch.x)
                between = (0.3 * fake + 0.7 * batch.x).requires_grad_()
                score = d.model(between).mean(1)
                (slope,) = torch.autograd.grad(score.sum(), between, create_graph=True)
                penalty = (slope.norm(dim=1) - 1).square().mean()
                gap = d.model(fake).mean() - d.model(batch.x).mean()
                d.backward((gap + 10 * penalty) / batch.num_ranks)
        lab.note(d.step())
        d.zero_grad()


@scenario(EVERY_WAY)
def a_teacher_that_is_wrapped_too(lab: Lab) -> None:
    """Distillation: the teacher is frozen and large, so it is sharded as well."""
    teacher = lab.wrap(Net(seed=9).requires_grad_(False))
    t = lab.wrap(Net())

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = teacher.model(batch.x)
        return batch.loss(model(batch.x), target)

    lab.train(t, loss, num_microbatches=2)


@scenario(EVERY_WAY)
def two_models_in_turns(lab: Lab) -> None:
    """Nothing of one is in the way of the other: steps, evaluations and contexts alternate."""
    a, b = lab.wrap(Net(seed=3), optimizer=adamw), lab.wrap(Net(seed=4))
    for step in range(2):
        lab.train(a, steps=[step])
        with b.gathered():
            lab.note(b.model.layers[0].up.weight.norm())
        lab.train(b, steps=[step + 5], num_microbatches=2)
        with torch.no_grad():
            lab.note(a.model(torch.ones(2, WIDTH)))


@scenario(may_refuse=r"microbatch|backward")
def two_models_in_one_loss(lab: Lab) -> None:
    """Encoder and decoder wrapped apart, trained by one backward; both microbatches are open."""
    a, b = lab.wrap(Generating()), lab.wrap(Net(seed=4))
    for step in range(3):
        for batch in lab.batches(step):
            with a.microbatch(last=True), b.microbatch(last=True):
                loss = batch.loss(b.model(a.model(batch.x)))
                batch.note(loss)
                loss.backward()
        lab.note(a.step())
        lab.note(b.step())
        a.zero_grad()
        b.zero_grad()


@scenario()
def a_model_taken_out_and_wrapped_again(lab: Lab) -> None:
    """Trained weights go into a fresh model by its state dict, which is wrapped in its turn."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    with t.gathered():
        weights = {n: v.clone() for n, v in t.model.state_dict().items()}
    fresh = Net(seed=8)
    fresh.load_state_dict(weights)
    fresh.layers[1].requires_grad_(False)
    lab.train(lab.wrap(fresh, optimizer=adamw), steps=[1])


@scenario()
def blocks_inside_blocks(lab: Lab) -> None:
    """A stage of two blocks is a block, and so are the two."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()
            self.gain = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.gain * self.second(self.first(x))

    names = [f"layers.{i}{part}" for i in range(3) for part in ("", ".first", ".second")]
    lab.train(lab.wrap(Net(Stage), names), num_microbatches=2)
