"""What optimizers keep beside tensors goes through every engine's state and the disk, type by type."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.crossed import crossed, every_nth
from tests.optimizers_for_tests import CountingAverage, KeepsElsewhere, LateFactors, OldFashioned
from tests.oracle import assembled, pieces_of
from tests.strategies.states_for_tests import STATEFUL, build, options, save, take_up, train
from zeroexp.interface.loss_scale import COUNT, SCALE
from zeroexp.interface.python_values import PythonValues


def uninterrupted(world, engine, factory, run):
    strategy = build(world, engine, factory)
    train(strategy, world, range(2))
    save(strategy, world, run)
    saved, at_save = pieces_of(strategy), options(strategy)
    train(strategy, world, range(2, 5))
    return saved, at_save, pieces_of(strategy), options(strategy)


def resumed(world, engine, factory, run, trained_before):
    strategy = build(world, engine, factory)
    train(strategy, world, range(trained_before))  # what is loaded takes the place of all of it
    take_up(strategy, world, run)
    loaded, at_load = pieces_of(strategy), options(strategy)
    train(strategy, world, range(2, 5))
    return loaded, at_load, pieces_of(strategy), options(strategy)


# What an optimizer keeps is read in one place, for all engines.
@crossed(
    "engine, factory",
    STATEFUL,
    [CountingAverage, OldFashioned],
    quick=lambda engine, factory: (factory is CountingAverage) == (engine != "zero3 buffer"),
)
def test_resumed_is_uninterrupted(ranks, tmp_path, engine, factory):
    expected = ranks(uninterrupted, engine, factory, tmp_path)
    for trained_before in (0, 3):
        found = ranks(resumed, engine, factory, tmp_path, trained_before)
        for state, said in ((0, 1), (2, 3)):
            torch.testing.assert_close(
                assembled([answer[state] for answer in found]),
                assembled([answer[state] for answer in expected]),
                rtol=0,
                atol=0,
            )
            assert [a[said] for a in found] == [a[said] for a in expected]


# FSDP2 takes no parameter without dimension.
CHAIN = [engine for engine in STATEFUL if engine != "zero3 torch"]


@pytest.mark.parametrize(
    "factory",
    [
        CountingAverage,
        pytest.param(OldFashioned, marks=pytest.mark.slow),
        # test_optimizer_state.py, and tests/checkpoint/test_pairs.py from engine to engine
        pytest.param(torch.optim.AdamW, marks=pytest.mark.slow),
    ],
)
def test_any_engine_takes_up_what_any_other_saved(ranks, tmp_path, factory):
    for number, (source, target) in enumerate(pairwise([*CHAIN, CHAIN[0]])):
        run = tmp_path / str(number)
        run.mkdir()
        saved = ranks(uninterrupted, source, factory, run)
        loaded = ranks(resumed, target, factory, run, 0, world_size=3)
        torch.testing.assert_close(
            assembled([state for state, *_ in loaded]),
            assembled([state for state, *_ in saved]),
            rtol=0,
            atol=0,
        )
        assert {said for _, said, *_ in loaded} == {said for _, said, *_ in saved}


def moments_of_the_scalar(world, engine, run, source):
    strategy = build(world, source, torch.optim.AdamW, torch.bfloat16)
    train(strategy, world, range(2))
    save(strategy, world, run)
    strategy = build(world, engine, torch.optim.AdamW, torch.bfloat16)
    take_up(strategy, world, run)
    entry = pieces_of(strategy).get("gain", {})
    return {key: (moment.shape, moment.dtype) for key, moment in entry.items()}


@every_nth(2, "source, target", pairwise([*CHAIN, CHAIN[0]]))
def test_the_step_of_a_parameter_without_dimension_is_no_moment(ranks, tmp_path, source, target):
    """In bfloat16 it would stop at 256."""
    expected = {
        **dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), ((), torch.bfloat16)),
        "step": ((), torch.float32),
    }
    found = {}
    for entry in ranks(moments_of_the_scalar, target, tmp_path, source):
        found.update(entry)  # one rank owns its element
    assert found == expected


def test_parameters_of_one_group_that_counted_apart_are_refused():
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    told = {}
    for name, parameter, steps in (("p", p, 1), ("q", q, 2)):
        optimizer = CountingAverage([parameter])
        values = PythonValues(optimizer, [[name]])
        for _ in range(steps):
            optimizer.step()
        told[name] = values.of(name, parameter)
    together = PythonValues(CountingAverage([p, q]), [["p", "q"]])
    for take in (together.require, together.load):  # before anything is changed, and then
        with pytest.raises(ValueError, match="use the param_groups that they were trained in"):
            take(told)


def test_a_loss_scale_is_not_taken_by_what_has_none():
    weight, told = torch.nn.Parameter(torch.ones(2)), {}
    for scale in ({SCALE: 8.0, COUNT: 3}, {}):
        optimizer = CountingAverage([weight])
        optimizer.param_groups[0].update(scale)
        values = PythonValues(optimizer, [["weight"]])
        told = told or {"weight": values.of("weight", weight)}
        values.load(told)
        assert {k: v for k, v in optimizer.param_groups[0].items() if k in (SCALE, COUNT)} == scale


@pytest.mark.parametrize("factory", [KeepsElsewhere, LateFactors])
def test_what_no_state_can_carry_is_refused_when_it_is_asked_for(factory):
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = factory([parameter])
    values = PythonValues(optimizer, [["p"]])
    assert values.of("p", parameter) == {}
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    with pytest.raises(ValueError, match=rf"optimizer {factory.__name__} keeps .* no checkpoint"):
        values.of("p", parameter)


def test_what_a_scheduler_sets_between_steps_is_no_value_of_the_optimizer():
    """The schedule gives it again, where the run goes on; what the optimizer's own step changes nothing else gives."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = CountingAverage([weight])
    values = PythonValues(optimizer, [["weight"]])
    for rate in (0.1, 0.2):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.ones(2)
        optimizer.step()
    assert "lr" not in values._numbers_of("weight") and values._numbers_of("weight")
