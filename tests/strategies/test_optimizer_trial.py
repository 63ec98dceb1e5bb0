"""Which optimizers may be given pieces, or some of the parameters: tried, and refused with the remedy."""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch import nn, optim

from tests.optimizers_for_tests import (
    Cautious,
    CountingAverage,
    FactorsLarge,
    KeepsElsewhere,
    LateFactors,
    Noisy,
    OldFashioned,
    OneDistance,
    OneNorm,
    OwnRate,
    Projecting,
    TrustRatio,
    Windowed,
)
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.interface import optimizer_trial
from zeroexp.interface.optimizer_trial import (
    make_optimizer,
    refuse_states_of_matrices,
    refuse_unless_elementwise,
)
from zeroexp.process.world import fake_world
from zeroexp.zero.options import Dtypes


def matrices():
    return [{"params": [nn.Parameter(torch.ones(7, 5)), nn.Parameter(torch.ones(300, 200))]}]


def mixed():
    """With options of their own, a frozen parameter, one of each number of dimensions, and no elements."""
    shapes = ((300,), (), (4, 3, 3, 3), (2, 40, 30), (0,))
    vectors = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    return [
        {"params": [*matrices()[0]["params"], frozen], "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 0.0},
    ]


ELEMENTWISE = {
    **{
        name: getattr(optim, name)
        for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD")
    },
    **{name: getattr(optim, name) for name in ("NAdam", "RAdam", "RMSprop", "Rprop", "SGD")},
    "nesterov": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "centered": lambda groups: optim.RMSprop(groups, centered=True, momentum=0.9),
    "amsgrad": lambda groups: optim.AdamW(groups, amsgrad=True, foreach=False),
    "foreach": lambda groups: optim.AdamW(groups, foreach=True),
    "fused": lambda groups: optim.AdamW(groups, fused=True),
    "fused_sgd": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, fused=True),
    "fused_adagrad": lambda groups: optim.Adagrad(groups, fused=True),
    "rate_is_a_tensor": lambda groups: optim.Adam(
        [{k: v for k, v in g.items() if k != "lr"} for g in groups], lr=torch.tensor(0.1)
    ),
    "option_of_several_numbers": lambda groups: optim.SGD(
        [{**group, "levels": torch.ones(3)} for group in groups], lr=0.1
    ),
    "counts_in_its_group": CountingAverage,
    "python_numbers": OldFashioned,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_treats_each_element_by_itself_may_be_cut(name, monkeypatch):
    monkeypatch.setattr(
        optimizer_trial, "ELEMENTWISE", set()
    )  # all steps, of those that are known too
    refuse_unless_elementwise(ELEMENTWISE[name], mixed(), layout="buffer", cut=True)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "foreach", TrustRatio, KeepsElsewhere, OneNorm])
def test_states_of_elements_rest_under_fsdp2(name):
    """Its tensors compute as whole ones, so that steps over whole matrices are right; states are cut by rows."""
    refuse_states_of_matrices(ELEMENTWISE.get(name, name), mixed())


@pytest.mark.parametrize("factory", [optim.Adafactor, LateFactors, FactorsLarge])
def test_states_of_matrices_are_refused_under_fsdp2(factory):
    with pytest.raises(ValueError, match=r"whole matrices, but FSDP2 .* use strategy.impl.*=param"):
        refuse_states_of_matrices(factory, matrices())


WHOLE = [optim.Adafactor, optim.Muon, TrustRatio, LateFactors, FactorsLarge]
WHOLE += [Cautious, Projecting, Windowed]


@pytest.mark.parametrize("lr", [0.0, 0.1])  # a warm-up begins with 0
@pytest.mark.parametrize("factory", WHOLE)
def test_what_needs_whole_matrices_may_be_shared_and_not_cut(factory, lr):
    groups = [{**group, "lr": lr} for group in matrices()]
    refuse_unless_elementwise(factory, groups, layout="parameter", cut=False)
    told = (
        f"optimizer {factory.__name__} updates whole matrices, but strategy cuts them "
        "(layout tensor): use the layout parameter"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        refuse_unless_elementwise(factory, groups, layout="tensor", cut=True)


def decays_matrices(groups, decay=1e-2):
    return optim.AdamW(
        {**group, "weight_decay": decay if any(p.ndim > 1 for p in group["params"]) else 0.0}
        for group in groups
    )


def decays_matrices_a_little(groups):
    """What it does to a weight lies below what kernels may round."""
    return decays_matrices(groups, 1e-4)


@pytest.mark.parametrize("factory", [decays_matrices, decays_matrices_a_little])
def test_a_factory_that_gives_options_by_shape_gives_others_to_pieces(factory):
    """Torch's own optimizer, of which it is known that it treats each element by itself."""
    refuse_unless_elementwise(factory, mixed(), layout="parameter", cut=False)
    with pytest.raises(ValueError, match="AdamW updates whole matrices"):
        refuse_unless_elementwise(factory, mixed(), layout="buffer", cut=True)


def clips_all_after_five_steps(optimizer, *_):
    optimizer.seen = getattr(optimizer, "seen", 0) + 1
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    if optimizer.seen > 5:
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_div_(gradients, norm)


def changes_rates_by_all_after_five_steps(optimizer, *_):
    optimizer.seen = getattr(optimizer, "seen", 0) + 1
    if optimizer.seen == 5:
        for group in optimizer.param_groups:
            group["lr"] *= sum(p.grad.norm().item() for p in group["params"])


def with_hook_before(groups):
    optimizer = optim.AdamW(groups)
    optimizer.register_step_pre_hook(clips_all_after_five_steps)
    return optimizer


def with_hook_behind(groups):
    optimizer = optim.SGD(groups, momentum=0.9)
    optimizer.register_step_post_hook(changes_rates_by_all_after_five_steps)
    return optimizer


def with_another_step(groups):
    optimizer = optim.SGD(groups)
    own = optimizer.step
    vars(optimizer)["step"] = lambda: (clips_all_after_five_steps(optimizer), own())
    return optimizer


@pytest.mark.parametrize("factory", [with_hook_before, with_hook_behind, with_another_step])
def test_a_known_optimizer_whose_steps_somebody_changed_is_tried_in_full(factory):
    with pytest.raises(ValueError, match="lets the update of one parameter depend on others"):
        refuse_unless_elementwise(factory, matrices(), layout="buffer", cut=True)


@pytest.mark.parametrize("factory", [OneDistance, OneNorm, KeepsElsewhere, OwnRate])
def test_what_makes_one_update_of_all_parameters_needs_them_all(factory):
    with pytest.raises(ValueError, match=rf"optimizer {factory.__name__} lets .* strategy ddp"):
        refuse_unless_elementwise(factory, mixed(), layout="parameter", cut=False)


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        (optim.LBFGS, "LBFGS wants a closure"),
        (optim.SparseAdam, "SparseAdam can not make a step: .*dense gradients"),
        (lambda groups: Noisy(groups), "Noisy draws random numbers"),
    ],
)
def test_what_no_strategy_can_step_is_refused_by_name(factory, told):
    for cut in (True, False):
        with pytest.raises(ValueError, match=f"optimizer {told}.*: use another optimizer"):
            refuse_unless_elementwise(factory, matrices(), layout="parameter", cut=cut)


def test_what_wants_a_closure_is_refused_where_nothing_is_tried_too():
    with pytest.raises(ValueError, match=r"LBFGS wants a closure in step\(\), .*another optimizer"):
        make_optimizer(optim.LBFGS, [{"params": [torch.nn.Parameter(torch.zeros(3))]}])


def test_steps_to_infinity_are_told_as_such():
    with pytest.raises(ValueError, match=r"AdamW moves weights to infinity or NaN .*: lower its"):
        refuse_unless_elementwise(
            lambda groups: optim.AdamW(groups, lr=1e308), matrices(), layout="buffer", cut=True
        )


def test_a_factory_that_ignores_its_groups_is_refused():
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="makes SGD over other parameters than it is handed"):
        refuse_unless_elementwise(
            lambda groups: optim.SGD(model.parameters()), matrices(), layout="buffer", cut=True
        )
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["other parameters", "NoneType"])
def test_so_is_one_where_nothing_is_sharded(size, kind):
    """There no trial runs: the model's bf16 parameters beside their masters would be stepped, and nothing trained."""
    model = nn.Linear(3, 3)
    made = {"other parameters": lambda _: optim.SGD(model.parameters()), "NoneType": lambda _: None}
    with fake_world(0, size) as world, pytest.raises(ValueError, match=kind):
        Sharded(
            model,
            blocks=[],
            stage=STAGES["ddp"],
            param_groups=[{"params": list(model.parameters())}],
            optimizer_factory=made[kind],
            world=world,
            dtypes=Dtypes(torch.bfloat16, torch.float32, torch.float32),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fused_kernel_that_is_wrong_for_the_masters_is_refused(dtype):
    """The trial's tensors are in float32, for which torch's SGD has a right one; the weights may not be.

    Since torch 2.14 that of bfloat16 is right, too.
    """
    weight = nn.Parameter(torch.ones(64, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    optim.SGD([weight], lr=0.5, fused=True).step()
    weights = [{"params": [nn.Parameter(torch.ones(64, dtype=dtype))]}]
    if (weight == 0.5).all():
        assert make_optimizer(ELEMENTWISE["fused_sgd"], weights).defaults["fused"]
        return
    told = "^optimizer SGD has a fused kernel in this torch .*bfloat16 on cpu: make it with fused=F"
    with pytest.raises(ValueError, match=told):
        make_optimizer(ELEMENTWISE["fused_sgd"], weights)


class Drawing(optim.AdamW):
    """Makes its state from random numbers; torch's and Python's."""

    def __init__(self, groups):
        super().__init__(groups)
        torch.rand(3), random.random()


def test_the_real_optimizer_steps_as_if_nothing_had_been_tried():
    outcomes = []
    for tried in (True, False):
        torch.manual_seed(5)
        random.seed(5)
        groups = mixed()
        options = [dict(group) for group in groups]
        if tried:
            refuse_unless_elementwise(Drawing, groups, layout="buffer", cut=True)
        assert [dict(group) for group in groups] == options
        optimizer = Drawing(groups)
        for parameter in (p for group in groups for p in group["params"]):
            assert parameter.grad is None
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
        outcomes.append((torch.rand(3), random.random(), [p for g in groups for p in g["params"]]))
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=0, atol=0)
