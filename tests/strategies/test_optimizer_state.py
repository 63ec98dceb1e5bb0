"""Any optimizer's weights and state are the same bits for 1 to 4 ranks in any layout, and go on on any other number.

The reference are ranks that hold and step everything whole (`ddp`); tests/strategies/test_parity.py compares the steps
themselves with one process. What needs whole matrices or all parameters at once is refused where it would be cut
(tests/strategies/test_optimizer_trial.py), and Muon with 8-bit moments has a bound
(tests/strategies/test_rounded_moments.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch

from tests.oracle import Recipe, assembled, build_on_rank, pieces_of, run_steps, train_two_steps
from tests.strategies.engine import Ours
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.canonical import merge
from zeroexp.interface.strategy import CanonicalState, Strategy
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World
from zeroexp.zero.options import Options

SIZES, LAYOUTS = (1, 2, 3, 4), ("parameter", "tensor", "buffer")
RECIPES = {
    "adamw": Recipe(),
    "sgd": Recipe(optimizer="sgd"),
    "muon": Recipe(optimizer="muon"),
    "adamw in bfloat16": Recipe(moments="bfloat16"),
    "adamw in int8": Recipe(moments="int8", model="large"),
    "sgd in int8": Recipe(optimizer="sgd", moments="int8", model="large"),
    "adagrad": Recipe(),
    "nadam": Recipe(),
    "adafactor": Recipe(),
}
FACTORIES: dict[str, Callable[..., Any]] = {
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "adafactor": torch.optim.Adafactor,
    "plain sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
}
Saved = Callable[[str, int], CanonicalState]
# From how many ranks each optimizer goes on in `make test`: on another number, or in another cut. The others keep state
# as one of these does: two moments, one, rounded, or in codes.
ONE_SOURCE = dict(zip(RECIPES, (2, 4, 1) * 3, strict=True))
QUICK = ("adamw", "muon", "adamw in int8", "adagrad", "adafactor")
slow = pytest.mark.slow
MESHES = {"replicas": 2, "secondary_partition": 2}


@dataclass(frozen=True)
class Make:
    name: str
    stage: str
    layout: str
    mesh: str = ""  # a word of MESHES

    def __call__(self, built: BuiltModel, recipe: Recipe, world: World) -> Strategy:
        mesh: dict[str, Any] = {self.mesh: MESHES[self.mesh]} if self.mesh else {}
        options = Options(layout=self.layout, reduce_each="step", **mesh)
        if self.name not in FACTORIES:
            return Ours(self.stage, options)(built, recipe, world)
        return Sharded(
            built.module,
            blocks=built.blocks,
            stage=STAGES[self.stage],
            param_groups=parameter_groups(built.module, recipe.optimizer_config(), built.blocks),
            optimizer_factory=lambda groups: FACTORIES[self.name](groups, lr=0.02, foreach=False),
            world=world,
            options=options,
        )


def layouts_of(name: str) -> tuple[str, ...]:
    """Adafactor factors whole matrices, so that it is refused where they are cut."""
    return ("parameter",) if name == "adafactor" else LAYOUTS


def layouts_by_turns(name: str) -> tuple[str, ...]:
    """Whole parameters, and one way to cut them."""
    return tuple(dict.fromkeys(layouts_of(name)[i] for i in (0, -1 - [*RECIPES].index(name) % 2)))


def two_steps(world: World, makes: list[Make]) -> list[CanonicalState]:
    return [train_two_steps(world, recipe_of(make, world.size), make) for make in makes]


def third_steps(
    world: World, runs: list[tuple[Make, CanonicalState]]
) -> list[tuple[CanonicalState, CanonicalState]]:
    """What each run holds once it has loaded, and after another step."""
    states: list[tuple[CanonicalState, CanonicalState]] = []
    for make, state in runs:
        recipe = recipe_of(make, world.size)
        strategy = build_on_rank(world, recipe, make)
        strategy.load_state_dict(state)
        loaded = pieces_of(strategy)
        run_steps(strategy, world, recipe, range(2, 3))
        states.append((loaded, pieces_of(strategy)))
    return states


def recipe_of(make: Make, world_size: int) -> Recipe:
    return replace(RECIPES[make.name], world_size=world_size)


def require_equal(one: CanonicalState, other: CanonicalState, where: str) -> None:
    ours, expected = assembled([one]), assembled([other])
    assert ours.keys() == expected.keys()
    for name, tensors in expected.items():
        assert ours[name].keys() == tensors.keys(), f"{where}: {name}"
        for key, tensor in tensors.items():
            found = ours[name][key]
            assert found.dtype == tensor.dtype, f"{where}: {name}.{key}"
            assert torch.equal(found, tensor), f"{where}: {name}.{key}"


@pytest.fixture(scope="module")
def saved(ranks) -> Saved:
    """An optimizer's state after two steps on a number of ranks; every layout has the bits of whole parameters."""

    @cache
    def state_of(name: str, size: int) -> CanonicalState:
        cut = [Make(name, "zero3", layout) for layout in layouts_of(name)]
        answers = ranks(two_steps, [Make(name, "ddp", "tensor"), *cut], world_size=size)
        whole, *states = map(merge, zip(*answers, strict=True))
        for make, state in zip(cut, states, strict=True):
            require_equal(state, whole, f"{make} on {size}")
        return whole

    return state_of


@pytest.mark.parametrize(
    ("size", "sources"),
    [
        pytest.param(3, [(n, ONE_SOURCE[n]) for n in QUICK], id="quick ones to 3", marks=slow),
        pytest.param(3, list(ONE_SOURCE.items()), id="one by turns to 3", marks=slow),
        *(
            pytest.param(
                n, list(product(RECIPES, SIZES)), id=f"each to {n}", marks=pytest.mark.wide
            )
            for n in SIZES
        ),
    ],
)
def test_a_state_of_any_number_of_ranks_goes_on(ranks, saved, size, sources):
    """In each layout by turns, as ranks that hold everything whole."""
    layouts = [layouts_of(name) for name, _ in sources]
    cut = [
        Make(name, "zero3", of_name[(i + size) % len(of_name)])
        for i, ((name, _), of_name) in enumerate(zip(sources, layouts, strict=True))
    ]
    whole = [Make(name, "ddp", "tensor") for name, _ in sources]
    states = [saved(*source) for source in sources]
    runs = [*zip(cut, states, strict=True), *zip(whole, states, strict=True)]
    answers = ranks(third_steps, runs, world_size=size)
    loaded, stepped = (
        [merge([answer[run][moment] for answer in answers]) for run in range(len(runs))]
        for moment in (0, 1)
    )
    for index, source in enumerate(sources):
        where = f"{source} on {size}, {cut[index]}"
        require_equal(loaded[index], states[index], where)
        require_equal(stepped[index], stepped[index + len(sources)], where)


@pytest.mark.parametrize(
    ("mesh", "names", "layouts"),
    [
        pytest.param("replicas", QUICK[2:3], layouts_by_turns, id="replicas, in int8", marks=slow),
        pytest.param("replicas", [*RECIPES], layouts_by_turns, id="replicas", marks=slow),
        pytest.param(
            "replicas", [*RECIPES], layouts_of, id="replicas, all", marks=pytest.mark.wide
        ),
        pytest.param("secondary_partition", [*RECIPES], layouts_of, id="copies", marks=slow),
    ],
)
def test_a_mesh_changes_no_bit_of_a_state_and_goes_on_from_any(ranks, saved, mesh, names, layouts):
    """On four ranks, as ranks that hold everything whole there; groups of replicas add up apart, so as whole parameters
    of the same groups, whose steps tests/strategies/test_replicas.py compares with one process."""
    makes = [Make(name, "zero3", each, mesh) for name in names for each in layouts(name)]
    answers = ranks(two_steps, makes, world_size=4)
    states = [merge(of_ranks) for of_ranks in zip(*answers, strict=True)]
    whole = {
        make.name: s for make, s in zip(makes, states, strict=True) if make.layout == LAYOUTS[0]
    }
    for make, state in zip(makes, states, strict=True):
        expected = saved(make.name, 4) if mesh != "replicas" else whole[make.name]
        require_equal(state, expected, f"{make}")
    runs = [(make, saved(make.name, ONE_SOURCE[make.name])) for make in makes]
    answers = ranks(third_steps, runs, world_size=4)
    for index, (make, state) in enumerate(runs):
        loaded, stepped = (merge([answer[index][i] for answer in answers]) for i in (0, 1))
        whole[make.name] = stepped if make.layout == LAYOUTS[0] else whole[make.name]
        require_equal(loaded, state, f"{make}")
        require_equal(stepped, whole[make.name], f"{make}")


# -- into another optimizer -------------------------------------------------------------------------


def load_into_new_ones(
    world: World, state: CanonicalState, names: list[str], num_steps: int = 0
) -> list[str | None]:
    """What an engine with each optimizer, after so many steps, says of the state; if it takes it, a step follows."""
    said: list[str | None] = []
    for name in names:
        make = Make(name, "zero3", "parameter")
        strategy = build_on_rank(world, Recipe(), make)
        run_steps(strategy, world, Recipe(), range(num_steps))
        try:
            strategy.load_state_dict(state)
        except ValueError as error:
            said.append(str(error))
            continue
        run_steps(strategy, world, Recipe(), range(1))
        said.append(None)
    return said


def test_moments_of_another_optimizer_are_refused(ranks, saved) -> None:
    """It would start anew with some of its moments, end in the next step, or hold moments that it never changes.

    Of small parameters Adafactor keeps others than of large ones.
    """
    names = ["momentum", "amsgrad", "adagrad", "adafactor", "nadam", "plain sgd", "adamw"]
    for answer in ranks(load_into_new_ones, saved("adamw", 2), names):
        *others, same = answer
        lacking = ["momentum_buffer", "max_exp_avg_sq", "sum", "col_var, row_var", "mu_product"]
        for said, key in zip(others, [*lacking, "none of it"], strict=True):
            assert f"and the optimizer keeps {key}: give the optimizer" in (said or "")
        assert same is None


def test_moments_without_their_step_are_refused(ranks, saved) -> None:
    state = saved("adamw", 2)
    cut = {name: {k: v for k, v in entry.items() if k != "step"} for name, entry in state.items()}
    for (said,) in ranks(load_into_new_ones, cut, ["adamw"]):
        assert said and "and the optimizer keeps step: give the optimizer" in said


def test_weights_alone_are_taken_where_no_moment_would_be_lost(ranks, saved) -> None:
    """Before the first step also by an optimizer that makes its moments with itself; after it by one without any."""
    weights = {name: {"weight": entry["weight"]} for name, entry in saved("adamw", 2).items()}
    assert ranks(load_into_new_ones, weights, ["adagrad", "adamw"]) == [[None] * 2] * 2
    for plain, kept in ranks(load_into_new_ones, weights, ["plain sgd", "adagrad"], 1):
        assert plain is None and "weights and no moments" in kept
