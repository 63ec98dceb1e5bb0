"""Optimizers: torch's, other people's, and what scripts do with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.optimizers_for_tests import CountingAverage, OldFashioned, TrustRatio
from tests.strangers.lab import (
    BY_STAGE,
    EVERY_WAY,
    ONLY_ZERO3,
    Lab,
    Setting,
    adamw,
    plain_loss,
    scenario,
    variants,
)
from tests.strangers.models import Net

ELEMENTWISE: dict[str, Callable[[Any], Optimizer]] = {
    "sgd_nesterov": lambda g: torch.optim.SGD(
        g, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd_dampened": lambda g: torch.optim.SGD(g, lr=0.05, momentum=0.9, dampening=0.5),
    "sgd_foreach": lambda g: torch.optim.SGD(g, lr=0.05, momentum=0.9, foreach=True),
    "sgd_fused": lambda g: torch.optim.SGD(g, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda g: torch.optim.Adam(g, lr=0.01, weight_decay=0.1),
    "adam_amsgrad": lambda g: torch.optim.Adam(g, lr=0.01, amsgrad=True),
    "adam_fused": lambda g: torch.optim.Adam(g, lr=0.01, fused=True),
    "adamw_foreach": lambda g: torch.optim.AdamW(g, lr=0.01, foreach=True),
    "adam_tensor_lr": lambda g: torch.optim.Adam(g, lr=torch.tensor(0.01)),
    "adam_maximize": lambda g: torch.optim.Adam(g, lr=0.01, maximize=True),
    "nadam": lambda g: torch.optim.NAdam(g, lr=0.01),
    "radam": lambda g: torch.optim.RAdam(g, lr=0.01),
    "adamax": lambda g: torch.optim.Adamax(g, lr=0.01),
    "adagrad": lambda g: torch.optim.Adagrad(g, lr=0.05, lr_decay=0.1),
    "adadelta": lambda g: torch.optim.Adadelta(g, lr=1.0),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=0.005, momentum=0.9, centered=True),
    "rprop": lambda g: torch.optim.Rprop(g, lr=0.01),
    "asgd": lambda g: torch.optim.ASGD(g, lr=0.05, t0=1),
}


@variants(
    [*ELEMENTWISE],
    [*BY_STAGE, Setting("zero3", layout="parameter")],
    quick=["sgd_nesterov", "adam_amsgrad", "adamw_foreach", "adam_tensor_lr", "rprop"],
    tolerance=5e-6,
)
def stepping_with(lab: Lab, name: str) -> None:
    """Element by element: right on every cut, two groups, four steps."""
    model = Net()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay}, {"params": rest, "lr": 0.02}]
    t = lab.wrap(model, optimizer=ELEMENTWISE[name], groups=groups)
    lab.train(t, steps=range(4))


# -- other people's -----------------------------------------------------------------------------------


class CountingInTraining(CountingAverage):
    """Steps in one mode alone, as ScheduleFree does, which raises `Exception` itself."""

    training = False

    def train(self) -> None:
        self.training = True

    def step(self, closure: Any = None) -> None:
        if not self.training:
            raise Exception("Optimizer was not in train mode")
        super().step(closure)


class CountingInAttribute(Optimizer):
    """Counts its steps in an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / self.count)


class Centred(Optimizer):
    """Gradient centralisation: the mean over a matrix' rows is taken off."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad
                if grad.ndim > 1:
                    grad = grad - grad.mean(dim=1, keepdim=True)
                p.sub_(group["lr"] * grad)


@variants(["in_the_group", "in_an_attribute", "in_the_state"], EVERY_WAY)
def an_optimizer_that_counts(lab: Lab, where: str) -> None:
    kinds = {"in_the_group": CountingAverage, "in_an_attribute": CountingInAttribute}
    t = lab.wrap(Net(), optimizer=kinds.get(where, OldFashioned))
    lab.train(t, steps=range(4))
    if where == "in_the_group":
        lab.note(t.optimizer.param_groups[0]["k"])
    if where == "in_an_attribute":
        lab.note(t.optimizer.count)


@scenario()
def an_optimizer_with_a_mode_for_training(lab: Lab) -> None:
    t = lab.wrap(Net(), optimizer=CountingInTraining)
    t.optimizer.train()
    lab.train(t)


WHOLE = (
    *tuple(Setting(s, layout="parameter") for s in ("zero1", "zero2", "zero3")),
    Setting("zero3", unit="module", layout="parameter"),
    Setting("zero3", layout="parameter", world_size=3),
)


@variants(["trust_ratio", "centred", "adafactor", "muon"], WHOLE)
def an_optimizer_on_whole_parameters(lab: Lab, kind: str) -> None:
    """With layout="parameter" each parameter is whole on one rank."""
    kinds: dict[str, Callable[[Any], Optimizer]] = {
        "trust_ratio": TrustRatio,
        "centred": Centred,
        "adafactor": torch.optim.Adafactor,
        "muon": lambda g: torch.optim.Muon(g, lr=0.02),
    }
    model = Net()
    if kind == "muon":
        for p in model.parameters():
            p.requires_grad_(p.ndim == 2)
    trainable = [p for p in model.parameters() if p.requires_grad]
    lab.train(lab.wrap(model, optimizer=kinds[kind], groups=[{"params": trainable}]))


# -- what scripts do with an optimizer ------------------------------------------------------------------


@variants(["lambda", "one_cycle", "by_hand"], EVERY_WAY)
def a_schedule(lab: Lab, kind: str) -> None:
    model = Net()
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 0.1}, {"params": rest}]
    t = lab.wrap(model, groups=groups)
    schedulers = torch.optim.lr_scheduler
    made: dict[str, Callable[[], Any]] = {
        "lambda": lambda: schedulers.LambdaLR(t.optimizer, lambda step: 0.5**step),
        "one_cycle": lambda: schedulers.OneCycleLR(t.optimizer, max_lr=0.2, total_steps=6),
    }
    scheduler = made[kind]() if kind in made else None
    for step in range(4):
        lab.train(t, steps=[step])
        if scheduler is not None:
            scheduler.step()
        else:
            for group in t.optimizer.param_groups[:1]:
                group["lr"] *= 0.3
        lab.note([round(group["lr"], 6) for group in t.optimizer.param_groups])


@scenario(refused=r"ranks differ: lr of parameter group 0 is 0\.05 on rank 0 and 0\.005")
def a_schedule_by_a_rank_s_own_loss(lab: Lab) -> None:
    t = lab.wrap(Net())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(t.optimizer, patience=0)
    lab.train(t, steps=[0])
    for own_loss in (1.0, 0.5 + lab.ranks[0]):
        scheduler.step(own_loss)
    lab.train(t, steps=[1])


@scenario()
def hooks_of_the_optimizer(lab: Lab) -> None:
    """Pre and post hooks fire once for each step."""
    t = lab.wrap(Net(), optimizer=adamw)
    fired: list[str] = []
    t.optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    t.optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    lab.train(t, num_microbatches=2)
    lab.note(fired)


@scenario(may_refuse=r"group|optimizer")
def a_group_added_later(lab: Lab) -> None:
    """A new head joins the optimizer after wrapping."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    extra = nn.Linear(3, 3)
    torch.nn.init.eye_(extra.weight)
    t.optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.5})
    for step in (1, 2):
        for batch in lab.batches(step):
            with t.microbatch(last=True):
                t.backward(batch.loss(extra(t.model(batch.x))))
        t.step()
        t.zero_grad()
    lab.note(extra.weight)


@scenario()
def one_parameter_to_a_group(lab: Lab) -> None:
    """Layer-wise rates: as many groups as parameters."""
    model = Net()
    groups = [{"params": p, "lr": 0.1 / (index + 1)} for index, p in enumerate(model.parameters())]
    lab.train(lab.wrap(model, groups=[{**g, "params": [g["params"]]} for g in groups]))


@scenario(ONLY_ZERO3, may_refuse=r"group|params")
def a_single_parameter_for_params(lab: Lab) -> None:
    """torch takes a tensor where a list of one is meant."""
    model = Net()
    groups = [{"params": p} for p in model.parameters()]
    lab.train(lab.wrap(model, groups=groups))


@scenario(may_refuse=r"optimizer|closure")
def a_state_looked_at(lab: Lab) -> None:
    """`optimizer.state` by parameter: the model's own are no keys of it."""
    t = lab.wrap(Net(), optimizer=adamw)
    lab.train(t, steps=[0])
    steps = {float(state["step"]) for state in t.optimizer.state.values()}
    lab.note(sorted(steps))
    lab.train(t, steps=[1])


@scenario(EVERY_WAY, refused="holds weights and no moments", oracle=False)
def a_state_of_weights_alone_that_is_loaded(lab: Lab) -> None:
    """Fine before the first step, where there are no moments to lose."""
    from zeroexp.interface.canonical import merge
    from zeroexp.process import world as worlds

    t = lab.wrap(Net(), optimizer=adamw)
    lab.train(t, steps=[0])
    saved = merge(worlds.gather_objects(copy.deepcopy(t.state_dict())))
    weights = {name: {"weight": entry["weight"]} for name, entry in saved.items()}
    fresh = lab.wrap(Net(), optimizer=adamw)
    fresh.load_state_dict(weights)
    lab.train(fresh, steps=[1])
    t.load_state_dict(weights)


WRONG_STATES: dict[str, Callable[[Any], Any]] = {
    "own": lambda t: t.state_dict(),  # `step` of a cut parameter is given by one rank alone
    "of_the_model": lambda t: Net().state_dict(),
    "of_another_model": lambda t: {f"a.{name}": entry for name, entry in t.state_dict().items()},
    "path": lambda t: "state.pt",
}


@variants([*WRONG_STATES], BY_STAGE, refused=r"^strategy\.load_state_dict: .*merge", oracle=False)
def a_state_to_load_that_is_wrong(lab: Lab, kind: str) -> None:
    t = lab.wrap(Net(), optimizer=adamw)
    lab.train(t, steps=[0])
    t.load_state_dict(WRONG_STATES[kind](t))


# -- who reaches for the optimizer's own tensors --------------------------------------------------------

GRADIENTS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "clip_by_norm": lambda own: nn.utils.clip_grad_norm_(own, 0.1),
    "clip_by_value": lambda own: nn.utils.clip_grad_value_(own, 0.01),
    "scale": lambda own: [p.grad.mul_(0.5) for p in own if p.grad is not None],
    "set": lambda own: [setattr(p, "grad", torch.ones_like(p)) for p in own],
}


def _own(t: Any) -> list[nn.Parameter]:
    return [p for group in t.optimizer.param_groups for p in group["params"]]


@variants([*GRADIENTS], EVERY_WAY, quick=["clip_by_norm", "set"], refused="max_grad_norm")
def gradients_of_its_own_tensors(lab: Lab, way: str) -> None:
    """Between backward and step, over the optimizer's groups in place of the model's parameters."""
    t = lab.wrap(Net())
    lab.one_backward(t)
    GRADIENTS[way](_own(t))
    t.step()


@scenario(EVERY_WAY, refused="max_grad_norm")
def a_hook_that_clips_by_norm_before_the_step(lab: Lab) -> None:
    t = lab.wrap(Net())
    t.optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(_own(t), 0.1))
    lab.train(t)


WRITES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "decay": lambda own: [p.mul_(0.9) for p in own],
    "foreach": lambda own: torch._foreach_mul_(own, 0.9),
    "clamp_data": lambda own: [p.data.clamp_(-0.2, 0.2) for p in own],
    "alias": lambda own: [p.detach().view(-1).mul_(0.9) for p in own],
    "assign": lambda own: [setattr(p, "data", p.detach() * 0.9) for p in own],
}


@variants([*WRITES], EVERY_WAY, quick=["decay", "clamp_data"], refused=r"gathered\(write=True\)")
def its_own_tensors_written_between_steps(lab: Lab, way: str) -> None:
    """Weight decay by hand, or the clipping of a WGAN."""
    t = lab.wrap(Net())
    for step in (0, 1):
        lab.train(t, steps=[step])
        with torch.no_grad():
            WRITES[way](_own(t))


@variants([*WRITES], EVERY_WAY, quick=["alias"], refused=r"gathered\(write=True\)")
def its_own_tensors_written_before_the_step(lab: Lab, way: str) -> None:
    t = lab.wrap(Net())
    lab.one_backward(t)
    with torch.no_grad():
        WRITES[way](_own(t))
    t.step()


class Averaging(torch.optim.SGD):
    """Evaluates an average of the weights, which `eval` puts in their place, as schedule-free optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            p.mul_(0.99)  # behind the step of the class above it
            self.state[p].setdefault("mean", p.detach().clone()).lerp_(p, 0.3)
        return loss

    @torch.no_grad()
    def eval(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.copy_(self.state[p]["mean"])


@scenario(EVERY_WAY)
def an_optimizer_that_goes_on_after_its_step(lab: Lab) -> None:
    """Its pieces may be read between steps, and copied."""
    t = lab.wrap(Net(), optimizer=lambda groups: Averaging(groups, lr=0.05))
    t.optimizer.register_step_post_hook(lambda *_: [float(p.norm()) for p in _own(t)])
    lab.train(t)
    copied = copy.deepcopy(t.optimizer)
    with torch.no_grad():
        assert all(
            map(torch.equal, [p.detach() for p in _own(t)], copied.param_groups[0]["params"])
        )
        copied.param_groups[0]["params"][0].zero_()
    lab.train(t, steps=[3])


@scenario(EVERY_WAY, refused=r"gathered\(write=True\)")
def an_optimizer_that_swaps_weights_for_an_evaluation(lab: Lab) -> None:
    t = lab.wrap(Net(), optimizer=lambda groups: Averaging(groups, lr=0.05))
    lab.train(t)
    t.optimizer.eval()
    for batch in lab.batches(3):
        batch.note(plain_loss(t.model, batch))
