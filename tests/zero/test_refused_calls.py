"""Calls that would train another model in silence end in a line that names the remedy: one engine each, no ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero.test_world_of_one import (
    BF16_MASTER,
    WIDTH,
    engine,
    inputs_of,
    make_model,
    take_step,
)
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.canonical import merge, moments_of
from zeroexp.process.world import fake_world
from zeroexp.zero_safety.changed_parameters import is_compared


def loss_of(strategy: Sharded) -> Tensor:
    return strategy.model(inputs_of(0, 0)).square().sum()


def step_inside_a_microbatch(strategy: Sharded) -> None:
    with strategy.microbatch(last=True):
        strategy.backward(loss_of(strategy))
        strategy.step()


def clear_inside_a_microbatch(strategy: Sharded) -> None:
    with strategy.microbatch(last=True):
        strategy.backward(loss_of(strategy))
        strategy.zero_grad()


def clear_behind_a_backward_that_failed(strategy: Sharded) -> None:
    def fail(_: Tensor) -> None:
        raise ArithmeticError

    with strategy.microbatch(last=True):
        hidden = strategy.model[0](inputs_of(0, 0))
        hidden.register_hook(fail)
        with pytest.raises(ArithmeticError):
            strategy.backward(strategy.model[1:](hidden).square().sum())
        strategy.zero_grad()


def two_last_microbatches(strategy: Sharded) -> None:
    for _ in range(2):
        with strategy.microbatch(last=True):
            strategy.backward(loss_of(strategy))


def write_inside_a_microbatch(strategy: Sharded) -> None:
    with strategy.microbatch(last=True), strategy.gathered(write=True):
        pass


def microbatch_inside_of_writing(strategy: Sharded) -> None:
    with strategy.gathered(write=True):
        take_step(strategy, 0)


def step_inside_of_reading(strategy: Sharded) -> None:
    with strategy.gathered():
        take_step(strategy, 0)


def save_inside_of_writing(strategy: Sharded) -> None:
    with strategy.gathered(write=True), strategy.gathered():
        strategy.state_dict()


def load_inside_of_reading(strategy: Sharded) -> None:
    state = strategy.state_dict()
    with strategy.gathered():
        strategy.load_state_dict(state)


def backward_outside_of_the_microbatch(strategy: Sharded) -> None:
    with strategy.microbatch(last=True):
        loss = loss_of(strategy)
    loss.backward()


def add_a_module(strategy: Sharded) -> None:
    strategy.model.append(nn.Linear(WIDTH, WIDTH))
    take_step(strategy, 0)


def return_a_view_of_parameters(strategy: Sharded) -> None:
    strategy.model[2].forward = lambda _: strategy.model[2].weight.view(-1)
    take_step(strategy, 0)


def gradient_without_a_module(strategy: Sharded) -> None:
    strategy.model[1].weight.square().sum().backward()


# By stage; the others refuse the same.
CALLS: dict[Callable[[Sharded], None], tuple[str, str]] = {
    step_inside_a_microbatch: (
        "zero3",
        r"step\(\) inside a microbatch: call it after the `with` has",
    ),
    clear_inside_a_microbatch: (
        "zero2",
        r"zero_grad\(\) inside a microbatch whose gradients are on",
    ),
    clear_behind_a_backward_that_failed: (
        "zero2",
        r"zero_grad\(\) inside a microbatch whose gradients are on",
    ),
    two_last_microbatches: (
        "zero1",
        r"last=True\) has ended and another begins: .*or say last=False",
    ),
    write_inside_a_microbatch: (
        "zero3",
        r"write=True\) inside a microbatch: .*after strategy\.step",
    ),
    microbatch_inside_of_writing: (
        "zero3",
        r"a microbatch inside strategy\.gathered\(write=True\): begin it after",
    ),
    step_inside_of_reading: ("ddp", r"step\(\) inside strategy\.gathered\(\): call it after"),
    save_inside_of_writing: ("zero2", r"state_dict\(\) inside strategy\.gathered\(write=True\)"),
    load_inside_of_reading: ("ddp", r"load_state_dict\(\) inside strategy\.gathered\(\): call"),
    backward_outside_of_the_microbatch: (
        "zero3",
        r"outside of the microbatch in which its forward",
    ),
    gradient_without_a_module: ("zero2", r"got a gradient outside .*, where nobody reduces it"),
    add_a_module: ("zero3", r"module 4 was added after .* nobody would train it: change the model"),
    return_a_view_of_parameters: (
        "zero3",
        r"returns a view of its parameters \(shape \[64\]\).*clone",
    ),
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_that_trains_another_model_is_refused(call):
    stage, line = CALLS[call]
    with fake_world(0, 2) as world, pytest.raises(RuntimeError, match=line):
        call(engine(world, stage, "buffer"))


def test_replicas_sum_once_in_a_step():
    """A second last microbatch would sum between two replicas what they have summed already."""
    line = CALLS[two_last_microbatches][1]
    with fake_world(0, 4) as world, pytest.raises(RuntimeError, match=line):
        two_last_microbatches(engine(world, "zero2", "buffer", replicas=2))


def test_a_hook_that_takes_a_gradient_away_is_refused():
    """An optimizer inside backward may keep what it updates anywhere; here it is seen by the gradient alone."""
    model = make_model()
    model[2].bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    told = pytest.raises(RuntimeError, match=r"a hook of .* has taken a gradient before")
    with fake_world(0, 2) as world, told:
        take_step(engine(world, "zero2", "buffer", model=model), 0)


@pytest.mark.parametrize("inner_writes", [False, True])
@pytest.mark.parametrize("stage", ["ddp", "zero2", "zero3"])
def test_a_context_inside_of_one_that_writes_changes_nothing(stage, inner_writes):
    """A helper that saves or evaluates opens one of its own."""
    with fake_world(0, 2) as world:
        strategy = engine(world, stage, "buffer", dtypes=BF16_MASTER)
        with strategy.gathered(write=True), torch.no_grad():
            for value in (0.5, 0.25):
                with strategy.gathered(write=inner_writes):
                    strategy.model.get_parameter("0.bias").fill_(value)
        piece = strategy.state_dict()["0.bias"]["weight"].pieces[0].tensor
        assert torch.equal(piece, torch.full_like(piece, 0.25))


@pytest.mark.parametrize("stage", ["ddp", "zero2", "zero3"])
def test_memory_given_to_a_parameter_while_it_is_read_is_refused(stage):
    """Also to what another rank owns, which this one keeps nothing of to compare with."""
    with fake_world(1, 2) as world:
        strategy = engine(world, stage, "parameter")
        first = strategy.model.get_parameter("0.weight")
        with pytest.raises(RuntimeError, match="written inside"), strategy.gathered():
            first.data = first.detach() + 1


GROUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layout=rows: use parameter, tensor, buffer": ({"layout": "rows"}, {}),
    "master=float8: use ": ({"master": "float8", "kind": "vectors"}, {}),
    "master=bfloat16: use .*, in a group that has a kind": ({"master": "bfloat16"}, {}),
    "offload, masters_rest and outer take all masters in one": (
        {"master": "bfloat16", "kind": "vectors"},
        {"offload": "optimizer"},
    ),
    "hold what is no parameter: take them from model.parameters": ({"params": [torch.ones(2)]}, {}),
    r"a parameter of shape \[2\] that is none of the model's": (
        {"params": [nn.Parameter(torch.ones(2))]},
        {},
    ),
}


@pytest.mark.parametrize("line", GROUPS)
def test_a_group_of_parameters_is_refused_in_a_line(line):
    group, options = GROUPS[line]
    with fake_world(0, 2) as world, pytest.raises(ValueError, match=line):
        engine(world, "zero2", "buffer", group=group, **options)


@pytest.mark.parametrize("where", ["pre", "post"])
def test_hooks_around_the_optimizers_step_see_no_gradients_of_pieces(where):
    with fake_world(0, 2) as world:
        strategy = engine(world, "zero2", "buffer")
        register = getattr(strategy.optimizer, f"register_step_{where}_hook")
        register(lambda optimizer, *_: optimizer.param_groups[0]["params"][0].grad)
        with pytest.raises(
            RuntimeError, match=r"gradients of the optimizer's tensors.*are there while"
        ):
            take_step(strategy, 0)


@pytest.mark.parametrize(
    "parameter",
    [nn.UninitializedParameter(), nn.Parameter(torch.eye(2).to_sparse())],
    ids=["lazy", "sparse"],
)
def test_a_parameter_that_is_no_dense_tensor_is_refused(parameter):
    model = make_model()
    model.register_parameter("late", parameter)
    with (
        fake_world(0, 2) as world,
        pytest.raises(ValueError, match=r"late has no values yet.*sparse"),
    ):
        engine(world, "zero2", "buffer", model=model)


def test_a_state_with_a_sparse_buffer_is_refused():
    model = make_model()
    model.register_buffer("seen", torch.eye(2).to_sparse())
    with fake_world(0, 2) as world:
        strategy = engine(world, "zero2", "buffer", model=model)
        with pytest.raises(ValueError, match=r"seen is sparse.*register it with persistent=False"):
            strategy.state_dict()


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ([], "the state is a list; give what strategy.state_dict"),
        ({"0.weight": torch.ones(2)}, "holds a Tensor under '0.weight'; give"),
        ({"0.weight": {"weight": torch.ones(2)}}, "a Tensor under '0.weight', 'weight'; give"),
    ],
)
def test_what_is_no_state_is_not_loaded(state, line):
    with fake_world(0, 2) as world, pytest.raises(ValueError, match=line):
        engine(world, "zero2", "buffer").load_state_dict(state)


def test_states_of_two_models_are_not_merged():
    with fake_world(0, 2) as world:
        states = [engine(world, "zero2", "buffer").state_dict() for _ in range(2)]
    weight = states[1]["0.weight"]["weight"]
    states[1]["0.weight"]["weight"] = replace(weight, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"0\.weight\.weight is \[8, 8\] .*float32 in one .*bfloat16"
    ):
        merge(states)


def test_a_moment_whose_name_is_a_path_is_refused():
    assert moments_of({"exp_avg": torch.ones(2), "lr": 0.1}).keys() == {"exp_avg"}
    with pytest.raises(ValueError, match="a tensor under 'a/b': give it another name"):
        moments_of({"a/b": torch.ones(2)})


def test_a_freed_parameter_is_printed_by_name_and_copied_by_nobody():
    with fake_world(0, 2) as world:
        strategy = engine(world, "zero3", "buffer")
        weight = strategy.model.get_parameter("2.weight")
        assert repr(weight) == "Parameter 2.weight of shape [8, 8], freed"
        with pytest.raises(RuntimeError, match=r"2\.weight"):
            copy.deepcopy(weight)
        with strategy.gathered():
            assert repr(weight).startswith("Parameter containing")
            inside = copy.deepcopy(weight)
            assert type(inside) is nn.Parameter and inside.equal(weight)
            assert inside.data_ptr() != weight.data_ptr()


def test_values_are_compared_after_the_first_steps_and_after_every_hundredth():
    assert [number for number in range(301) if is_compared(number)] == [1, 2, 100, 200, 300]
