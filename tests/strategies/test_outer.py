"""Seldom synchronised replicas equal a plain loop over K models, and the synchronous run where arithmetic says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.comm.test_issued import a_step, engine_of_nine_units
from tests.models_for_tests import MODELS
from tests.oracle import (
    Outcome,
    Recipe,
    assembled,
    build_on_rank,
    configured,
    pieces_of,
    run_steps,
    train_on_ranks,
    train_oracle,
)
from tests.oracle import _loss as loss_of
from tests.strategies.engine import Ours
from tests.strategies.test_replicas import Backend, same_state, train_on
from zeroexp.comm.base import Pending
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.interface.canonical import merge
from zeroexp.interface.strategy import CanonicalState
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import Options, OuterOptimizer

CLOSE: Any = {"rtol": 2e-5, "atol": 2e-6}  # one sum more, and the outer update in another order


class PlainReplica:
    """One model of a plain loop, and the ranks whose samples it trains on."""

    def __init__(self, recipe: Recipe, ranks: Sequence[int], share: float):
        self.recipe, self.ranks, self.share = recipe, ranks, share
        built, config = MODELS[recipe.model].build(), recipe.optimizer_config()
        self.module = built.module
        self.parameters = [p for p in built.module.parameters() if p.requires_grad]
        groups = parameter_groups(built.module, config, built.blocks)
        self.optimizer = optimizer_factory(config)(groups)

    def step(self, step: int) -> tuple[float, float]:
        """Train on one step's samples; its summand of the global loss, and its norm before clipping."""
        total, recipe = 0.0, self.recipe
        sums: dict[Tensor, Tensor] = {}
        for rank in self.ranks:
            for m in range(recipe.accumulation):
                loss = loss_of(self.module, self.module, recipe, step, m, rank)
                total += loss.item()
                (loss / self.share).backward()
            for parameter in self.parameters:
                if parameter.grad is not None:
                    before = sums.get(parameter)
                    sums[parameter] = parameter.grad if before is None else before + parameter.grad
                    parameter.grad = None
        for parameter, gradient in sums.items():
            parameter.grad = gradient
        most = recipe.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, most)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, float(norm)


def plain_loop(recipe: Recipe, replicas: int, outer: OuterOptimizer) -> Outcome:
    """DiLoCo as its paper has it: K models, torch's SGD with Nesterov momentum on the mean of what they changed."""
    size = recipe.world_size // replicas
    models = [
        PlainReplica(recipe, range(first, first + size), 1 / replicas)
        for first in range(0, recipe.world_size, size)
    ]
    shared = [torch.nn.Parameter(p.detach().clone()) for p in models[0].parameters]
    sgd = torch.optim.SGD(shared, lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0)
    outcome = Outcome()
    for step in range(recipe.steps):
        numbers = [model.step(step) for model in models]
        outcome.losses.append(sum(loss for loss, _ in numbers))
        outcome.norms.append(numbers[0][1])
        if (step + 1) % outer.every:
            continue
        for index, parameter in enumerate(shared):
            moved = [parameter.detach() - m.parameters[index].detach() for m in models]
            parameter.grad = torch.stack(moved).mean(0)
        sgd.step()
        with torch.no_grad():
            for model in models:
                for parameter, now in zip(model.parameters, shared, strict=True):
                    parameter.copy_(now)
    named = dict(models[0].module.named_parameters())
    outcome.state = {name: {"weight": p.detach()} for name, p in named.items()}
    trained = [name for name, p in named.items() if p.requires_grad]
    for index, name in enumerate(trained):
        entry: dict[str, Tensor] = {"weight": shared[index].detach()}
        if outer.momentum:
            entry["outer.momentum"] = sgd.state[shared[index]]["momentum_buffer"]
        for number, model in enumerate(models):
            prefix = f"outer.{number}." if number else ""
            state = model.optimizer.state.get(model.parameters[index], {})
            entry |= {f"{prefix}{k}": v for k, v in state.items() if isinstance(v, Tensor)}
        outcome.state[name] = entry
    return outcome


def outcome_of_replicas(answers: Sequence[Any]) -> Outcome:
    outcomes = [outcome for outcome, _ in answers]
    losses = [sum(losses) for losses in zip(*(o.losses for o in outcomes), strict=True)]
    return Outcome(losses, outcomes[0].norms, assembled([state for _, state in answers]))


def assert_close(ours: Outcome, plain: Outcome) -> None:
    torch.testing.assert_close(ours.losses, plain.losses, **CLOSE)
    torch.testing.assert_close(ours.norms, plain.norms, **CLOSE)
    assert ours.state.keys() == plain.state.keys()
    for name, entry in plain.state.items():
        assert ours.state[name].keys() == entry.keys(), name
        for key, expected in entry.items():
            told = lambda text, where=f"{name}.{key}": f"{where}: {text}"  # noqa: E731
            torch.testing.assert_close(ours.state[name][key], expected, **CLOSE, msg=told)


@pytest.mark.parametrize(
    ("stage", "layout", "size", "replicas", "transport", "every"),
    [
        pytest.param("zero1", "buffer", 4, 2, "auto", 2, marks=pytest.mark.slow),
        ("zero2", "tensor", 4, 2, "gloo", 3),
        pytest.param("zero3", "parameter", 4, 2, "auto", 4, marks=pytest.mark.slow),
        pytest.param("zero3", "buffer", 4, 2, "native", 3, marks=pytest.mark.slow),
        pytest.param("zero1_allreduce", "buffer", 4, 2, "native", 2, marks=pytest.mark.slow),
        ("zero3", "buffer", 2, 2, "auto", 3),
        ("zero1", "tensor", 3, 3, "auto", 2),
    ],
)
def test_equals_a_plain_loop_over_models(ranks, stage, layout, size, replicas, transport, every):
    """AdamW inside, with clipping in each replica; a replica of one rank is local SGD's."""
    outer = OuterOptimizer(every, lr=0.7, momentum=0.9)
    clips = 0.5 if every == 3 else None
    recipe = Recipe(world_size=size, steps=2 * every, max_grad_norm=clips)
    options = Options(layout, replicas=replicas, outer=outer, transport=transport)
    answers = ranks(train_on_ranks, recipe, Ours(stage, options), world_size=size)
    assert_close(outcome_of_replicas(answers), plain_loop(recipe, replicas, outer))


def test_muon_steps_whole_matrices_inside_of_a_replica(ranks):
    recipe, outer = Recipe(world_size=4, steps=2, optimizer="muon"), OuterOptimizer(2)
    options = Options(replicas=2, outer=outer)
    answers = ranks(train_on_ranks, recipe, Ours("zero3", options), world_size=4)
    assert_close(outcome_of_replicas(answers), plain_loop(recipe, 2, outer))


def test_codecs_round_inside_of_a_replica_and_replicas_are_equal_after_outer_steps(ranks):
    """Else a step raises: the weights of replicas are compared after the first two outer steps."""
    codecs = {"gather_codec": "int8", "reduce_codec": "int4"}
    recipe, outer = Recipe(world_size=4, steps=4), OuterOptimizer(2)
    options = Options(replicas=2, outer=outer, **codecs)
    answers = ranks(train_on_ranks, recipe, Ours("zero3", options), world_size=4)
    ours, exact = outcome_of_replicas(answers), plain_loop(recipe, 2, outer)
    assert ours.losses[0] != exact.losses[0]
    torch.testing.assert_close(ours.losses, exact.losses, rtol=0.05, atol=0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_joined_in_each_step_by_the_plain_mean_sgd_is_synchronous_and_adamw_is_not(
    ranks, optimizer
):
    """SGD (with momentum and decay) is linear in its gradients: the mean of K steps is the step of the mean."""
    recipe = Recipe(world_size=4, optimizer=optimizer)
    options = Options(replicas=2, outer=OuterOptimizer(1, lr=1.0, momentum=0.0))
    answers = ranks(train_on_ranks, recipe, Ours("zero3", options), world_size=4)
    ours, one = outcome_of_replicas(answers), train_oracle(recipe)
    weights = [(ours.state[name]["weight"], e["weight"]) for name, e in one.state.items()]
    apart = max(float((mine - theirs).abs().max()) for mine, theirs in weights)
    assert apart < 1e-6 if optimizer == "sgd" else apart > 1e-3
    assert not any("outer.momentum" in entry for entry in ours.state.values())
    if optimizer == "sgd":
        torch.testing.assert_close(ours.losses, one.losses, rtol=2e-6, atol=0)


def given_in_steps(stage: str, size: int, every: int, num_steps: int) -> list[Counter[Any]]:
    """What the backend of rank 0 was given in each step: bytes by collective and number of ranks."""
    given: list[Counter[Any]] = []
    with fake_world(0, size) as world:
        options = {"replicas": size // 2, "outer": OuterOptimizer(every), "transport": "native"}
        strategy = engine_of_nine_units(stage, "buffer", world, **options)
        for _ in range(num_steps):
            with Backend() as backend:
                a_step(strategy)
            given.append(backend.bytes)
        owned = sum(each.numel() for each in strategy.optimizer.param_groups[0]["params"])
        given.append(Counter({"owned": 4 * owned}))
    return given


@pytest.mark.parametrize("stage", ["zero1", "zero3", "zero1_allreduce"])
def test_between_replicas_bytes_are_sent_once_in_an_interval(stage):
    """An all-reduce of what a rank owns among its 4 holders, in each third step; in no other step a byte leaves the 2.

    A ring sends 2 (K-1)/K of it. The tally before a step stays inside of the replica too.
    """
    *steps, owned = given_in_steps(stage, 8, every=3, num_steps=6)
    for number, given in enumerate(steps, 1):
        between = {key: size for key, size in given.items() if key[1] != 2}
        expected = {("allreduce_", 4): owned["owned"]} if number % 3 == 0 else {}
        assert between == expected, number


def train_without_an_outer_sum(world: World, every: int) -> list[str]:
    """What the engine says in each step where the changes of a block are not summed between replicas."""
    recipe = Recipe(world_size=4, steps=1)
    outer = OuterOptimizer(every)
    strategy: Any = build_on_rank(world, recipe, Ours("zero3", Options(replicas=2, outer=outer)))
    summed, told = strategy.wire._sum_between, []

    def skip_a_block(sums: Any, what: str, shares: Any = ()) -> Pending:
        return Pending([]) if "blocks.1" in what else summed(sums, what, shares)

    strategy.wire._sum_between = skip_a_block
    for step in range(every):
        try:
            run_steps(strategy, world, recipe, range(step, step + 1))
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_replicas_may_differ_until_an_outer_step_and_not_after_it(ranks):
    for told in ranks(train_without_an_outer_sum, 3, world_size=4):
        assert told[:2] == ["", ""]
        assert "replicas differ: ranks 0 and 2" in told[2] and "blocks.1" in told[2], told


def go_on(
    world: World, recipe: Recipe, make: Ours, saved: CanonicalState | None, steps: range
) -> tuple[CanonicalState, list[float]]:
    """This rank's pieces after more steps from what was saved, if anything, and its losses."""
    strategy = build_on_rank(world, recipe, make)
    if saved is not None:
        strategy.load_state_dict(saved)
    losses = run_steps(strategy, world, recipe, steps).losses
    return pieces_of(strategy), losses


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16_master"])
def test_a_run_goes_on_bit_for_bit_from_an_outer_step(ranks, precision):
    """Moments are each replica's own, and the state holds all of them; weights before an interval are in none."""
    recipe = Recipe(world_size=4, precision=precision)
    make = Ours("zero3", Options(replicas=2, outer=OuterOptimizer(2)))
    through = ranks(go_on, recipe, make, None, range(6), world_size=4)
    half = merge([pieces for pieces, _ in ranks(go_on, recipe, make, None, range(2), world_size=4)])
    assert {"outer.momentum", "outer.1.exp_avg", "outer.1.step"} <= half["norm.weight"].keys()
    resumed = ranks(go_on, recipe, make, half, range(2, 6), world_size=4)
    same_state(*(assembled([pieces for pieces, _ in each]) for each in (through, resumed)))
    for (_, all_losses), (_, last) in zip(through, resumed, strict=True):
        assert last == all_losses[2:]


def test_a_state_of_replicas_loads_into_any_engine_and_back(ranks):
    """Others take weights and the first replica's moments; replicas that a state has none of begin with these."""
    recipe = Recipe(world_size=4)
    makes: list[Any] = [
        Ours("zero2", Options(replicas=2, outer=OuterOptimizer(1))),
        Ours("zero3", Options("tensor")),
        Ours("zero1", Options("parameter", replicas=4, outer=OuterOptimizer(1))),
        configured("zero1", "torch"),
        Ours("zero3", Options(replicas=2, outer=OuterOptimizer(1))),
    ]
    saved: CanonicalState | None = None
    for make in makes:
        answers = ranks(train_on, recipe, make, saved, world_size=4)
        if saved is not None:
            loaded, before = assembled([answer[0] for answer in answers]), assembled([saved])
            for name, entry in loaded.items():
                for key in (key for key in entry if not key.startswith("outer.")):
                    assert torch.equal(entry[key], before[name][key]), (name, key)
        saved = merge([answer[1] for answer in answers])


def ask_in_between(world: World) -> list[str]:
    recipe = Recipe(world_size=2)
    strategy = build_on_rank(
        world, recipe, Ours("zero3", Options(replicas=2, outer=OuterOptimizer(2)))
    )
    run_steps(strategy, world, recipe, range(1))
    with strategy.gathered():  # each rank sees its replica's
        pass
    lines: list[str] = []
    for call in (strategy.state_dict, strategy.gathered(write=True).__enter__):
        with pytest.raises(RuntimeError) as error:
            call()
        lines.append(str(error.value))
    return lines


def test_no_state_is_given_or_written_where_replicas_differ(ranks):
    """What is written in between would become a change, of which the outer step takes its own part."""
    for lines in ranks(ask_in_between, world_size=2):
        for told, call in zip(lines, ("state_dict()", "gathered(write=True)"), strict=True):
            assert told.startswith(f"strategy.{call} 1 steps after the last outer step")
            assert told.endswith("call it after a multiple of 2 steps")
