"""Gradients: who reads them, edits them, makes them in another order, or makes none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tests.strangers.lab import (
    BY_STAGE,
    EVERY_WAY,
    USUAL,
    Batch,
    Lab,
    Setting,
    adamw,
    next_word_loss,
    plain_loss,
    scenario,
    variants,
)
from tests.strangers.models import Block, Language, Net, Shortened

TAKEN = r"max_grad_norm|\.grad\b"


# -- p.grad is not there -----------------------------------------------------------------------------


def _clip(model: nn.Module) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def _clip_values(model: nn.Module) -> object:
    return nn.utils.clip_grad_value_(model.parameters(), 0.01)


def _sum(model: nn.Module) -> object:
    return sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)


def _add_noise(model: nn.Module) -> object:
    return [p.grad.add_(0.01) for p in model.layers.parameters() if p.grad is not None]


def _look(model: nn.Module) -> object:
    return model.layers[0].up.weight.grad


def _look_at_the_head(model: nn.Module) -> object:
    return model.head.weight.grad


def _assign(model: nn.Module) -> object:
    for p in model.parameters():
        p.grad = torch.full(p.shape, 0.1)
    return None


def _norm(model: nn.Module) -> object:
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


TOUCHES = {
    "clip_grad_norm": _clip,
    "clip_grad_value": _clip_values,
    "summed_for_the_log": _sum,
    "noise": _add_noise,
    "a_look": _look,
    "a_look_at_the_head": _look_at_the_head,
    "assigned": _assign,
    "total_norm": _norm,
}


@variants([*TOUCHES], EVERY_WAY, refused=TAKEN)
def gradients_touched_by(lab: Lab, way: str) -> None:
    """Between backward and the step: the engine took the gradient, `p.grad` as None would be a lie."""
    t = lab.wrap(Net())
    lab.one_backward(t)
    TOUCHES[way](t.model)
    t.step()


@variants([*TOUCHES], quick=["clip_grad_norm", "noise", "a_look"], refused=TAKEN)
def gradients_touched_inside_the_microbatch_by(lab: Lab, way: str) -> None:
    t = lab.wrap(Net())
    for batch in lab.batches(0):
        with t.microbatch(last=True):
            t.backward(plain_loss(t.model, batch))
            TOUCHES[way](t.model)
    t.step()


@scenario()
def no_gradient_before_the_first_backward(lab: Lab) -> None:
    """Before backward and after zero_grad there is none, as always."""
    t = lab.wrap(Net())
    lab.note([p.grad is None for p in t.model.parameters()])
    lab.train(t, steps=[0])
    lab.note([p.grad is None for p in t.model.parameters()])
    lab.train(t, steps=[1])


@variants(["model", "optimizer", "strategy", "model_set_to_none", "head_of_the_loop"], EVERY_WAY)
def zero_grad_of(lab: Lab, whose: str) -> None:
    """Whoever is asked to, gradients are gone; two microbatches, so that leftovers pile up visibly."""
    t = lab.wrap(Net())
    for step in range(3):
        if whose == "head_of_the_loop":
            t.optimizer.zero_grad()
        for batch in lab.batches(step, 2):
            with t.microbatch(last=batch.last):
                t.backward(plain_loss(t.model, batch))
        lab.note(t.step())
        if whose == "model":
            t.model.zero_grad()
        elif whose == "model_set_to_none":
            t.model.zero_grad(set_to_none=True)
        elif whose == "optimizer":
            t.optimizer.zero_grad()
        elif whose == "strategy":
            t.zero_grad()


@variants(["model", "optimizer"], may_refuse="zero_grad")
def zero_grad_between_microbatches_of(lab: Lab, whose: str) -> None:
    """A microbatch is thrown away (its loss was not finite): what was summed until then goes."""
    t = lab.wrap(Net())
    for step in range(2):
        for index in range(3):
            for batch in lab.batches(3 * step + index):
                with t.microbatch(last=index == 2):
                    t.backward(plain_loss(t.model, batch))
            if index == 0:
                (t.model if whose == "model" else t.optimizer).zero_grad()
        lab.note(t.step())
        t.zero_grad()


IN_ONE = (*BY_STAGE, Setting("zero2", world_size=1), Setting("zero3", world_size=1))


@variants(["dropped", "never_last"], IN_ONE)
def gradients_zeroed_and_not_dropped_behind_microbatches_that_are(lab: Lab, which: str) -> None:
    """No step takes them, and in the next one a block is not used: its momentum and decay move it all the same."""

    def optimizer(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1)

    t = lab.wrap(Shortened(), optimizer=optimizer, reduce_each="step")
    for step in range(3):
        t.model.depth = 2 if step == 2 else 3
        for batch in lab.batches(step, 2):
            if step != 1 or which == "dropped" or not batch.last:
                with t.microbatch(last=batch.last):
                    t.backward(plain_loss(t.model, batch))
        if step != 1:
            lab.note(t.step())
        t.zero_grad(set_to_none=step != 1)


@scenario(EVERY_WAY, may_refuse="zero_grad")
def zero_grad_forgotten(lab: Lab) -> None:
    """In PyTorch gradients of all steps pile up."""
    t = lab.wrap(Net())
    for step in range(3):
        lab.one_backward(t, step)
        lab.note(t.step())


@scenario(EVERY_WAY, refused=r"strategy\.step")
def optimizer_step_called_by_hand(lab: Lab) -> None:
    t = lab.wrap(Net())
    lab.one_backward(t)
    t.optimizer.step()


@scenario(refused=r"strategy\.step|scal")
def a_gradient_scaler(lab: Lab) -> None:
    """It reads gradients and steps the optimizer itself."""
    t = lab.wrap(Net())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for batch in lab.batches(0):
        with t.microbatch(last=True):
            t.backward(scaler.scale(plain_loss(t.model, batch)))
    try:
        scaler.step(t.optimizer)
    except AssertionError as error:  # torch's own word for gradients that are not there
        raise RuntimeError(f"the scaler says: {error}") from None


@scenario(may_refuse=r"step|gradient|backward")
def a_second_step_with_the_same_gradients(lab: Lab) -> None:
    t = lab.wrap(Net())
    lab.one_backward(t)
    t.step()
    t.step()


def wrapped(
    lab: Lab, model: nn.Module, register: Callable[[], None], when: str, **words: Any
) -> Any:
    """The model wrapped, with hooks that are registered before or after."""
    if when == "before":
        register()
    t = lab.wrap(model, **words)
    if when == "after":
        register()
    return t


# -- hooks ------------------------------------------------------------------------------------------


@variants(["before", "after"], EVERY_WAY)
def a_hook_that_scales_a_gradient_registered(lab: Lab, when: str) -> None:
    """`p.register_hook` before or after wrapping: discriminative learning rates."""
    model = Net()

    def register() -> None:
        for p in model.layers[1].parameters():
            p.register_hook(lambda grad: 0.5 * grad)
        model.head.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    t = wrapped(lab, model, register, when)
    lab.train(t, num_microbatches=2)


@variants(["before", "after"], may_refuse=r"hook|\.grad\b|max_grad_norm")
def a_hook_after_accumulation_that_scales_registered(lab: Lab, when: str) -> None:
    """`register_post_accumulate_grad_hook` edits `p.grad` in place."""
    model = Net()

    def register() -> None:
        for p in model.layers[1].parameters():
            p.register_post_accumulate_grad_hook(halve)

    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    t = wrapped(lab, model, register, when, isolated=True)
    lab.train(t)


@variants(["before", "after"], EVERY_WAY, may_refuse=r"reduced")
def a_hook_after_accumulation_that_assigns_registered(lab: Lab, when: str) -> None:
    """It puts a gradient of its own where, registered after, the engine has taken the one that came."""
    model = Net()

    def register() -> None:
        for p in model.layers[1].parameters():
            p.register_post_accumulate_grad_hook(assign)

    def assign(p: Tensor) -> None:
        p.grad = torch.full_like(p, 0.1)

    t = wrapped(lab, model, register, when, isolated=True)
    lab.train(t)


@variants(["before", "after"], refused=r"hook|\.grad\b|max_grad_norm|written", oracle=False)
def an_optimizer_inside_backward_registered(lab: Lab, when: str) -> None:
    """The LOMO trick: each weight is updated as soon as its gradient is there: by this rank's own alone."""
    model = Net()

    def register() -> None:
        for p in model.layers.parameters():
            p.register_post_accumulate_grad_hook(update)

    def update(p: Tensor) -> None:
        assert p.grad is not None
        p.data.sub_(0.01 * p.grad)
        p.grad = None

    t = wrapped(
        lab,
        model,
        register,
        when,
        groups=[{"params": [*model.head.parameters(), *model.layers.parameters()]}],
    )
    lab.train(t)


@variants(["before", "after"], EVERY_WAY)
def hooks_that_only_count_registered(lab: Lab, when: str) -> None:
    """Each fires once for each parameter and backward."""
    model, seen = Net(), list[str]()

    def register() -> None:
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _p, name=name: seen.append(name))
            p.register_hook(lambda _grad, name=name: seen.append(f"{name} hook"))

    t = wrapped(lab, model, register, when)
    lab.train(t, num_microbatches=2)
    counts = {name: seen.count(name) // len(lab.ranks) for name in sorted(set(seen))}
    lab.note(counts)


@scenario(EVERY_WAY)
def hooks_on_modules(lab: Lab) -> None:
    """Forward hooks that change inputs and outputs, backward hooks that change gradients."""
    model = Net()
    block = model.layers[1]
    block.register_forward_pre_hook(lambda _m, args: (args[0] * 0.9,))
    block.register_forward_hook(lambda _m, _args, output: output + 0.1)
    block.register_full_backward_hook(lambda _m, grads, _out: (grads[0] * 0.5,))
    t = lab.wrap(model)
    model.layers[2].register_forward_pre_hook(lambda _m, args: (args[0] * 0.9,))
    model.layers[2].register_forward_hook(lambda _m, _args, output: output + 0.1)
    model.layers[2].register_full_backward_hook(lambda _m, grads, _out: (grads[0] * 0.5,))
    model.layers[0].register_full_backward_pre_hook(lambda _m, grads: (grads[0] * 0.5,))
    model.layers[0].up.register_full_backward_hook(lambda _m, grads, _out: (grads[0] * 2,))
    lab.train(t, num_microbatches=2)


@scenario()
def a_hook_that_reads_its_modules_weights(lab: Lab) -> None:
    """A forward hook on a block looks at the block's weights: registered before and after wrapping."""
    model, seen = Net(), list[Tensor]()

    def look(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        seen.append(module.up.weight.detach().norm())
        return output * (1 + 0.1 * module.up.weight.square().mean())

    model.layers[0].register_forward_hook(look)
    lab.train(lab.wrap(model))
    lab.note(len(seen) // len(lab.ranks))


@scenario(may_refuse={"zero3": r"gathered"})
def a_hook_registered_later_that_reads_its_modules_weights(lab: Lab) -> None:
    """This one runs after the engine's own, which frees the block."""
    model = Net()
    t = lab.wrap(model)

    def look(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output * (1 + 0.1 * module.up.weight.square().mean())

    model.layers[0].register_forward_hook(look)
    lab.train(t)


# -- backward in other ways ---------------------------------------------------------------------------


@scenario(EVERY_WAY)
def loss_backward(lab: Lab) -> None:
    """As in every tutorial."""
    t = lab.wrap(Net())
    for batch in lab.microbatches(t, num_microbatches=2):
        plain_loss(t.model, batch).backward()


@scenario(EVERY_WAY)
def backward_to_some_weights(lab: Lab) -> None:
    """`loss.backward(inputs=...)`: of the head, then of a block and the head, and the first microbatch has no more."""
    t = lab.wrap(Net())
    for batch in lab.microbatches(t, steps=range(2), num_microbatches=2):
        some = [t.model.layers[1], t.model.head] if batch.last else [t.model.head]
        loss = plain_loss(t.model, batch)
        loss.backward(inputs=[p for module in some for p in module.parameters()])


# Parts of the model called by hand are freed under ZeRO-3, which its message says.
BACKWARDS = r"one backward|backward|microbatch|strategy\.gathered\("


@scenario(EVERY_WAY, may_refuse=BACKWARDS)
def two_backwards_of_one_graph(lab: Lab) -> None:
    """`retain_graph=True`, then once more: two losses over the same forward."""
    t = lab.wrap(Net())
    for batch in lab.microbatches(t):
        output = t.model(batch.x)
        batch.loss(output).backward(retain_graph=True)
        output.abs().mean().backward()


@scenario(EVERY_WAY, may_refuse=BACKWARDS)
def two_forwards_and_two_backwards(lab: Lab) -> None:
    """Two losses in one microbatch, each with its own forward and backward."""
    t = lab.wrap(Net())
    for batch in lab.microbatches(t):
        t.backward(plain_loss(t.model, batch))
        t.backward(t.model(batch.x * 2).abs().mean())


@scenario(EVERY_WAY, may_refuse=BACKWARDS)
def two_forwards_then_two_backwards(lab: Lab) -> None:
    """Both graphs are alive at once; FSDP: multi forward."""
    t = lab.wrap(Net())
    for batch in lab.microbatches(t):
        first = plain_loss(t.model, batch)
        second = t.model(batch.x * 2).abs().mean()
        t.backward(first)
        t.backward(second)


class Probed(Net):
    """Its head is a probe of detached features too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return self.head(features.detach()), self.head(features)


# The whole model is one unit, of which the first backward reaches a part.
WITH_ONE_UNIT = (*EVERY_WAY, *(Setting(stage, unit="model") for stage in ("ddp", "zero2")))


@variants(["its_own", "a_plain"], WITH_ONE_UNIT, may_refuse=BACKWARDS)
def a_probe_and_the_full_loss_with(lab: Lab, kind: str) -> None:
    """Each of the two losses has a backward, the second `strategy.backward` again, or a plain one."""
    t = lab.wrap(Probed())
    for batch in lab.microbatches(t):
        probe, output = t.model(batch.x)
        t.backward(batch.loss(probe))
        if kind == "its_own":
            t.backward(batch.loss(output))
        else:
            batch.loss(output).backward()


@scenario(WITH_ONE_UNIT, may_refuse=BACKWARDS)
def a_probe_and_the_full_loss_in_small_buckets(lab: Lab) -> None:
    """The head's gradients are on their way when its second ones come."""
    t = lab.wrap(Probed(), bucket_mb=2e-5)
    for batch in lab.microbatches(t):
        probe, output = t.model(batch.x)
        t.backward(batch.loss(probe))
        t.backward(batch.loss(output))


@scenario(EVERY_WAY)
def two_forwards_and_one_backward(lab: Lab) -> None:
    """Siamese: both outputs meet in one loss."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return batch.loss(model(batch.x), model(batch.x * 2))

    lab.train(lab.wrap(Net()), loss, num_microbatches=2)


@scenario(EVERY_WAY)
def a_forward_without_gradient_inside(lab: Lab) -> None:
    """Self-distillation: the target comes from the same weights under no_grad, between forward and backward."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        output = model(batch.x)
        with torch.no_grad():
            target = model(batch.x * 1.1)
        return batch.loss(output, target + batch.y)

    lab.train(lab.wrap(Net()), loss, num_microbatches=2)


@scenario(EVERY_WAY, may_refuse=BACKWARDS)
def detached_and_attached_again(lab: Lab) -> None:
    """Backward in two halves by hand: the upper half's gradient is handed to the lower one."""
    t = lab.wrap(Net())
    for batch in lab.microbatches(t):
        lower = t.model.layers[0](t.model.inp(batch.x))
        cut = lower.detach().requires_grad_()
        output = t.model.head(t.model.layers[2](t.model.layers[1](cut)))
        batch.loss(output).backward()
        lower.backward(cut.grad)


@scenario(may_refuse=BACKWARDS)
def a_loss_of_several_microbatches(lab: Lab) -> None:
    """Losses are kept over two microbatches and their sum goes backward in the last one."""
    t = lab.wrap(Net())
    losses = {rank: list[Tensor]() for rank in lab.ranks}
    for batch in lab.microbatches(t, steps=range(2), num_microbatches=2):
        losses[batch.rank].append(plain_loss(t.model, batch))
        if batch.last:
            t.backward(torch.stack(losses[batch.rank]).sum())
            losses[batch.rank].clear()


OUTSIDE = ("everything", "forward", "backward")


@variants(OUTSIDE, USUAL, quick=OUTSIDE, first=True, may_refuse=r"microbatch")
def outside_of_the_microbatch(lab: Lab, what: str) -> None:
    """Somebody forgot the context, or does not know of it, or of what belongs into it."""
    t = lab.wrap(Net())
    for step in range(2):
        for batch in lab.batches(step):
            with t.microbatch(last=True) if what == "backward" else nullcontext():
                loss = plain_loss(t.model, batch)
            with t.microbatch(last=True) if what == "forward" else nullcontext():
                loss.backward() if what == "everything" else t.backward(loss)
        lab.note(t.step())
        t.zero_grad()


@scenario(may_refuse=r"microbatch")
def microbatches_in_each_other(lab: Lab) -> None:
    t = lab.wrap(Net())
    for batch in lab.batches(0):
        with t.microbatch(last=True):
            t.backward(plain_loss(t.model, batch))
            with t.microbatch(last=True):
                t.backward(plain_loss(t.model, batch))
    lab.note(t.step())
    t.zero_grad()


@variants(["none", "each"], USUAL, may_refuse=r"microbatch|last")
def said_to_be_the_last_microbatch_was(lab: Lab, which: str) -> None:
    """There are two before the step."""
    t = lab.wrap(Net())
    for step in range(2):
        for batch in lab.batches(step, 2):
            with t.microbatch(last=which == "each"):
                t.backward(plain_loss(t.model, batch))
        lab.note(t.step())
        t.zero_grad()


@scenario(EVERY_WAY)
def a_microbatch_without_backward(lab: Lab) -> None:
    """The last microbatch of a step only looks at its loss."""
    t = lab.wrap(Net())
    for batch in lab.microbatches(t, num_microbatches=2):
        loss = plain_loss(t.model, batch)
        batch.note(loss)
        if not batch.last:
            t.backward(loss)


@scenario(EVERY_WAY)
def a_step_whose_microbatch_has_no_backward(lab: Lab) -> None:
    """No rank has a gradient: nothing moves."""
    t = lab.wrap(Net(), optimizer=adamw)
    for batch in lab.microbatches(t, steps=range(4)):
        loss = plain_loss(t.model, batch)
        if batch.step % 2 == 0:
            t.backward(loss)


@scenario(EVERY_WAY, may_refuse=r"microbatch")
def a_step_without_a_microbatch(lab: Lab) -> None:
    """Nothing moves, not even by momentum or decay."""
    t = lab.wrap(Net(), optimizer=adamw)
    t.step()
    lab.train(t, steps=[0])
    t.step()
    t.step()
    lab.train(t, steps=[1])


@scenario()
def a_loss_that_is_masked_on_one_rank(lab: Lab) -> None:
    """One rank's samples have no labels: its loss is zero, but it has a graph."""
    t = lab.wrap(Net())
    lab.train(t, lambda model, batch: plain_loss(model, batch) * (batch.rank != batch.step % 2))


@scenario()
def blocks_skipped_by_all_ranks(lab: Lab) -> None:
    """Stochastic depth by the step: the same block on every rank."""

    class Shallow(Net):
        skip = 0

        def body(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for index, layer in enumerate(self.layers):
                x = x if index == self.skip else layer(x)
            return x

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        model.skip = batch.step % 3
        return plain_loss(model, batch)

    lab.train(lab.wrap(Shallow(), optimizer=adamw), loss, steps=range(4))


# -- functions of one's own ---------------------------------------------------------------------------


class MyLinear(torch.autograd.Function):
    """Keeps the weight for backward, as a hand-written kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Careless(MyLinear):
    """Keeps the weight in an attribute of the context, past autograd's own book-keeping."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.weight, grad.t() @ ctx.x


class NoWeightGradient(MyLinear):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _, weight = ctx.saved_tensors
        return grad @ weight, None


class CarelessDetached(MyLinear):
    """Keeps an alias of the weight that no hook knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight.detach()
        return x @ weight.t()

    backward = Careless.backward


FUNCTIONS = {
    "saving_the_weight": MyLinear,
    "keeping_the_weight": Careless,
    "keeping_an_alias": CarelessDetached,
    "without_a_gradient": NoWeightGradient,
}


class OwnFunction(Block):
    function = MyLinear

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.function.apply(self.norm(x), self.up.weight)))


@variants([*FUNCTIONS], EVERY_WAY, may_refuse={"zero3": r"view|outlive|gathered|kept|freed"})
def a_function_of_ones_own(lab: Lab, kind: str) -> None:
    class Made(OwnFunction):
        function = FUNCTIONS[kind]

    lab.train(lab.wrap(Net(Made)), num_microbatches=2)


@variants(["before", "after"], may_refuse="hook")
def a_hook_on_a_tied_weight_registered(lab: Lab, when: str) -> None:
    """A hook on the weight sees the gradient of both uses."""
    model = Language()

    def register() -> None:
        model.embed.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    lab.train(wrapped(lab, model, register, when), next_word_loss)


@scenario(EVERY_WAY)
def gradients_by_weights(lab: Lab) -> None:
    """`torch.autograd.grad(loss, weights)` before the loss's own backward."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = plain_loss(model, batch)
        weights = [*model.layers[0].parameters(), *model.head.parameters()]
        for gradient in torch.autograd.grad(value, weights, retain_graph=True):
            batch.note(gradient)
        return value

    lab.train(lab.wrap(Net()), loss, num_microbatches=2)


class Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, gradient.sum(0)


@scenario(EVERY_WAY)
def a_function_of_ones_own_takes_weights_in_the_context(lab: Lab) -> None:
    """`Function.apply(x, *layer.parameters())` inside of `gathered()`, after the layer's block was freed."""
    t = lab.wrap(Net())

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = plain_loss(model, batch)
        with t.gathered():
            more = Affine.apply(batch.x, model.layers[0].up.weight, model.layers[0].up.bias)
        return value + 0.1 * more.square().mean() / batch.num_ranks

    lab.train(t, loss, num_microbatches=2)


class Adjoint(torch.autograd.Function):
    """As torchdiffeq's `odeint_adjoint`: weights are arguments for their gradients' sake, and a module computes."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.module, ctx.weights = module, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = ctx.module(x)
        return None, *torch.autograd.grad(output, (x, *ctx.weights), gradient)


@scenario(EVERY_WAY)
def a_function_of_ones_own_is_given_freed_weights(lab: Lab) -> None:
    """Their gradients have the shapes of weights, which are not there when they are given."""

    class ByAdjoint(Net):
        def body(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for layer in self.layers:
                x = Adjoint.apply(layer, x, *layer.parameters())
            return x

    lab.train(lab.wrap(ByAdjoint()), num_microbatches=2)


@scenario(EVERY_WAY)
def sparse_gradients(lab: Lab) -> None:
    """They are reduced as dense ones."""

    class Sparse(Language):
        def __init__(self) -> None:
            super().__init__(tied=False)
            self.embed = nn.Embedding.from_pretrained(
                self.embed.weight.detach(), freeze=False, sparse=True
            )

    def optimizer(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1)

    t = lab.wrap(Sparse(), optimizer=optimizer)
    for step in range(2):
        for batch in lab.batches(step, 2):
            with t.microbatch(last=batch.last):
                t.backward(next_word_loss(t.model, batch))
        if lab.plain:
            t.optimizer.step()
        else:
            t.step()
        t.zero_grad()


@scenario()
def gradients_that_are_not_finite(lab: Lab) -> None:
    """The norm says so on every rank, and the step is left out by the script."""
    t = lab.wrap(Net(), max_grad_norm=1.0)
    for step in range(3):
        for batch in lab.batches(step):
            with t.microbatch(last=True):
                loss = plain_loss(t.model, batch)
                if step == 1 and batch.rank == 1:
                    loss = loss * float("inf")
                batch.note(torch.isfinite(loss))
                t.backward(loss)
        if step == 1:
            t.zero_grad()
            continue
        lab.note(t.step())
        t.zero_grad()
