"""THE ORACLE: one process does the obvious thing, and every engine must arrive at the same numbers.

It runs each rank's microbatches one after the other, casts each gradient to the dtype of the wire, sums over ranks in
rank order, clips, steps the same optimizer kernel on whole master weights, and casts them back.

Some things are an engine's own choice, not right or wrong: `Rules` names them.

Bit for bit equal to our engine while the clip coefficient is 1: sums are taken in rank order there too, and a slice of
AdamW's update is the update of the slice. The latter holds for torch's loop over tensors and its foreach kernel. The
fused kernel computes what is left over behind the last full vector in other instructions, so that an odd cut moves
the last bit: with `Recipe.fused` equality has a tolerance. So it has where an engine sums in another order (gloo's
rings, from three ranks on) or multiplies by the world size and divides again (not a power of two).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor, nn

from tests.models_for_tests import MODELS, TestModel, microbatch_of, num_valid
from zeroexp.config.keys import (
    Config,
    ModelConfig,
    OptimizerConfig,
    OptimizerPlacement,
    PrecisionConfig,
    StatePlacement,
    StrategyConfig,
)
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.cut.stage import STAGES
from zeroexp.engines.build import build_strategy
from zeroexp.interface.canonical import merge
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor, Piece, Strategy
from zeroexp.models.checkpointing import checkpoint_blocks
from zeroexp.models.loss import loss_sum
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World

PRECISIONS = {
    "fp32": PrecisionConfig(),
    "bf16": PrecisionConfig("bf16", "bfloat16", "bfloat16", "bfloat16"),
    "bf16_master": PrecisionConfig("bf16_master", "bfloat16"),
    "paper16": PrecisionConfig("paper16", "bfloat16", "bfloat16"),
    "fp16_master": PrecisionConfig("fp16_master", "float16"),
    "autocast": PrecisionConfig("autocast", autocast=True),
}


@dataclass(frozen=True)
class Recipe:
    """What is trained. The same recipe means the same numbers, whatever the engine."""

    model: str = "toy"
    world_size: int = 2
    steps: int = 3
    accumulation: int = 2  # microbatches per rank and step
    precision: str = "fp32"
    optimizer: str = "adamw"
    fused: bool = False
    moments: str | None = None
    kinds: str = "{}"  # JSON: `optimizer.kinds`
    max_grad_norm: float | None = None
    checkpointing: bool = False

    def optimizer_config(self) -> OptimizerConfig:
        return OptimizerConfig(
            name=self.optimizer,
            lr=0.02,
            momentum=0.9,
            weight_decay=0.1,
            fused=self.fused,
            moments=self.moments,
            kinds=json.loads(self.kinds),
            max_grad_norm=self.max_grad_norm,
        )


@dataclass(frozen=True)
class Rules:
    """How an engine adds up a step."""

    reduce_each: str = "step"  # microbatch | step
    missing: str = "skip"  # zeros | skip: what a parameter without gradient on any rank gets
    # FSDP2: sums of microbatches are added in the master's dtype, gradients of several uses of a weight in its own;
    # else both are added in the wire's.
    added_in_master: bool = False
    replicas: int = (
        1  # groups of neighbouring ranks: each adds up its own, then these sums are added
    )
    groups_each: str = "step"  # microbatch | step: when the sums of groups are added


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)  # global, by step
    norms: list[float] = field(default_factory=list)  # before clipping; the oracle's in float64
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # name -> weight, moments


# -- one process ------------------------------------------------------------------------------------

Publish = Callable[[Mapping[nn.Parameter, Tensor], torch.dtype], None]


def train_oracle(recipe: Recipe, rules: Rules | None = None) -> Outcome:
    """Computed once for all tests that ask for the same: what it returns is not to be changed."""
    return _train_oracle(recipe, rules or Rules(), MODELS[recipe.model])


@cache
def _train_oracle(
    recipe: Recipe, rules: Rules, model: TestModel, publish: Publish | None = None
) -> Outcome:
    """`model`: what the recipe's word means now, since some tests register another under the same word.

    publish: makes parameters of weights; None: it casts them.
    """
    publish = publish or _publish
    precision = PRECISIONS[recipe.precision]
    built = model.build()
    config = recipe.optimizer_config()
    masters, optimizer = _masters(built, config, _dtype(precision.master))
    outcome = Outcome()
    frozen = {p: p.detach().clone() for p in built.module.parameters() if not p.requires_grad}
    publish({**masters, **frozen}, _dtype(precision.compute))
    for step in range(recipe.steps):
        gradients, loss = _summed_gradients(built.module, recipe, rules, step)
        for parameter, gradient in gradients.items():
            masters[parameter].grad = gradient.to(masters[parameter].dtype)
        _fill_missing(masters, rules)
        outcome.losses.append(loss)
        outcome.norms.append(_clip([m.grad for m in masters.values()], config.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()
        publish(masters, _dtype(precision.compute))
    for name, parameter in built.module.named_parameters():
        weight = frozen[parameter] if parameter in frozen else masters[parameter]
        moments = {} if parameter in frozen else optimizer.state.get(weight, {})
        tensors = {key: value for key, value in moments.items() if isinstance(value, Tensor)}
        outcome.state[name] = {"weight": weight.detach(), **tensors}
    return outcome


def _masters(
    built: BuiltModel, config: OptimizerConfig, dtype: torch.dtype
) -> tuple[dict[nn.Parameter, nn.Parameter], torch.optim.Optimizer]:
    """Each trainable parameter's weights as the optimizer updates them, before any rounding to compute."""
    groups = parameter_groups(built.module, config, built.blocks)
    dtype_of = {p: _dtype(g["master"]) for g in groups if "master" in g for p in g["params"]}
    masters = {
        parameter: nn.Parameter(parameter.detach().to(dtype_of.get(parameter, dtype), copy=True))
        for parameter in built.module.parameters()
        if parameter.requires_grad
    }
    groups = [{**group, "params": [masters[p] for p in group["params"]]} for group in groups]
    return masters, optimizer_factory(config)(groups)


def _publish(weights: Mapping[nn.Parameter, Tensor], dtype: torch.dtype) -> None:
    for parameter, master in weights.items():
        parameter.data = master.detach().to(dtype, copy=True)


def _summed_gradients(
    module: nn.Module, recipe: Recipe, rules: Rules, step: int
) -> tuple[dict[nn.Parameter, Tensor], float]:
    """(gradient of the step by parameter, global loss). Where no rank has one there is none."""
    ranks, microbatches = range(recipe.world_size), range(recipe.accumulation)
    size = recipe.world_size // rules.replicas
    groups = [ranks[first : first + size] for first in range(0, recipe.world_size, size)]
    precision = PRECISIONS[recipe.precision]
    added_in = _dtype(precision.master if rules.added_in_master else precision.reduce)
    if not rules.added_in_master:
        for parameter in module.parameters():
            parameter.grad_dtype = _dtype(precision.reduce)
    turns = [[m] for m in microbatches] if rules.reduce_each == "microbatch" else [microbatches]
    totals: list[dict[nn.Parameter, Tensor]] = [{} for _ in groups]
    loss = 0.0
    for turn in turns:
        reduced: list[dict[nn.Parameter, Tensor]] = [{} for _ in groups]
        for rank in ranks:
            added: dict[nn.Parameter, Tensor] = {}
            for m in turn:
                loss += _backward(module, recipe, step, m, rank)
                _add(added, _taken_gradients(module, _dtype(precision.reduce)))
            _add(reduced[rank // size], added)
        if rules.groups_each == "microbatch":
            for of_group in reduced[1:]:
                _add(reduced[0], of_group)
            del reduced[1:]
        for total, of_group in zip(totals, reduced, strict=False):
            _add(total, {p: gradient.to(added_in) for p, gradient in of_group.items()})
    for total in totals[1:]:
        _add(totals[0], total)
    return totals[0], loss


def _backward(module: nn.Module, recipe: Recipe, step: int, microbatch: int, rank: int) -> float:
    """One rank's microbatch; leaves its gradients in the parameters."""
    loss = _loss(module, module, recipe, step, microbatch, rank)
    loss.backward()
    return loss.item()


def _loss(
    called: nn.Module, inner: nn.Module, recipe: Recipe, step: int, microbatch: int, rank: int
) -> Tensor:
    MODELS[recipe.model].prepare(inner, step, microbatch, rank)
    tokens, labels = microbatch_of(step, microbatch, rank)
    autocast = PRECISIONS[recipe.precision].autocast and called is inner
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        output = called(input_ids=tokens)
    return loss_sum(output, labels, "causal") / num_valid(
        step, recipe.accumulation, recipe.world_size
    )


def _taken_gradients(module: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Moved out of the parameters, in the dtype of the wire."""
    taken = {p: p.grad.to(dtype) for p in module.parameters() if p.grad is not None}
    module.zero_grad()
    return taken


def _add(total: dict[nn.Parameter, Tensor], more: dict[nn.Parameter, Tensor]) -> None:
    for parameter, gradient in more.items():
        total[parameter] = total[parameter] + gradient if parameter in total else gradient


def _fill_missing(masters: dict[nn.Parameter, nn.Parameter], rules: Rules) -> None:
    for master in masters.values():
        if master.grad is None and rules.missing == "zeros":
            master.grad = torch.zeros_like(master)


def _clip(gradients: Sequence[Tensor | None], max_norm: float | None) -> float:
    """Scale gradients to `max_norm` in place; the norm before that, summed in float64."""
    present = [gradient for gradient in gradients if gradient is not None]
    norm = sum(
        (g.double().square().sum() for g in present), torch.zeros((), dtype=torch.float64)
    ).sqrt()
    scale = 1.0 if max_norm is None else (max_norm / (norm.float() + 1e-6)).clamp(max=1.0)
    if scale != 1.0:
        for gradient in present:
            gradient.mul_(scale)
    return float(norm)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


# -- an engine on real ranks ------------------------------------------------------------------------

Make = Callable[[BuiltModel, Recipe, World], Strategy]


def configured(
    stage: str, implementation: str, **settings: object
) -> Callable[[BuiltModel, Recipe, World], Strategy]:
    """Makes the engine the product would make for this strategy."""
    return _Configured(stage, implementation, settings)


@dataclass(frozen=True)
class _Configured:
    """A class, since it travels to the ranks."""

    stage: str
    implementation: str
    settings: dict[str, object]

    def __call__(self, built: BuiltModel, recipe: Recipe, world: World) -> Strategy:
        rows, precision = STAGES[self.stage], PRECISIONS[recipe.precision]
        strategy = StrategyConfig(
            name=self.stage,
            parameters=StatePlacement(rows.parameters.value, precision.compute),
            gradients=StatePlacement(rows.gradients.value, precision.reduce),
            optimizer=OptimizerPlacement(rows.optimizer.value, precision.master),
            implementation=self.implementation,
            **self.settings,
        )
        # The family decides whether DistributedDataParallel looks for parameters without gradient.
        family = "moe" if MODELS[recipe.model].skips else "llama"
        config = Config(
            model=ModelConfig(family=family),
            strategy=strategy,
            precision=precision,
            optimizer=recipe.optimizer_config(),
        )
        return build_strategy(config, built, world)


def train_on_ranks(world: World, recipe: Recipe, make: Make) -> tuple[Outcome, CanonicalState]:
    """What one rank does: its share of losses, its norms, its pieces of the final state."""
    strategy = build_on_rank(world, recipe, make)
    outcome = run_steps(strategy, world, recipe, range(recipe.steps))
    return outcome, pieces_of(strategy)


def build_on_rank(world: World, recipe: Recipe, make: Make) -> Strategy:
    built = MODELS[recipe.model].build()
    if recipe.checkpointing:
        checkpoint_blocks(built.module, built.blocks)
    return make(built, recipe, world)


def run_steps(strategy: Strategy, world: World, recipe: Recipe, steps: range) -> Outcome:
    outcome = Outcome()
    inner = getattr(strategy.model, "module", strategy.model)
    for step in steps:
        total = 0.0
        for m in range(recipe.accumulation):
            with strategy.microbatch(last=m == recipe.accumulation - 1):
                loss = _loss(
                    strategy.model, inner, replace(recipe, precision="fp32"), step, m, world.rank
                )
                strategy.backward(loss)
            total += loss.item()
        outcome.losses.append(total)
        outcome.norms.append(float(strategy.step(drain=step == steps[-1])))
        strategy.zero_grad()
    return outcome


def train_two_steps(world: World, recipe: Recipe, make: Make) -> CanonicalState:
    """What a rank saves after two steps."""
    strategy = build_on_rank(world, recipe, make)
    run_steps(strategy, world, recipe, range(2))
    return pieces_of(strategy)


def train_third_step(
    world: World, recipe: Recipe, make: Make, state: CanonicalState
) -> tuple[Outcome, CanonicalState]:
    """What a rank does that goes on from there."""
    strategy = build_on_rank(world, recipe, make)
    strategy.load_state_dict(state)
    return run_steps(strategy, world, recipe, range(2, 3)), pieces_of(strategy)


def pieces_of(strategy: Strategy) -> CanonicalState:
    """The state, copied: pieces are views of live memory."""
    return {
        name: {
            key: CanonicalTensor(
                t.shape, t.dtype, [Piece(p.start, p.tensor.detach().clone()) for p in t.pieces]
            )
            for key, t in tensors.items()
        }
        for name, tensors in strategy.state_dict().items()
    }


def assembled(states: Sequence[CanonicalState]) -> dict[str, dict[str, Tensor]]:
    """Full tensors from all ranks' pieces; every element must come from exactly one of them."""
    return {
        name: {key: _assemble(tensor, f"{name}.{key}") for key, tensor in tensors.items()}
        for name, tensors in merge(states).items()
    }


def _assemble(canonical: CanonicalTensor, name: str) -> Tensor:
    flat = torch.empty(canonical.shape, dtype=canonical.dtype).view(-1)
    stop = 0
    for piece in sorted(canonical.pieces, key=lambda piece: piece.start):
        assert piece.tensor.ndim == 1 and piece.tensor.dtype == canonical.dtype, name
        assert piece.start == stop, (
            f"{name}: a piece begins at {piece.start}, the last ended at {stop}"
        )
        stop = piece.start + piece.tensor.numel()
        flat[piece.start : stop] = piece.tensor
    assert stop == flat.numel(), f"{name}: {stop} of {flat.numel()} elements"
    return flat.view(canonical.shape)


def outcome_of(answers: Sequence[tuple[Outcome, CanonicalState]]) -> Outcome:
    """One outcome of all ranks' answers: losses summed, norms the same everywhere, the state put together."""
    outcomes = [outcome for outcome, _ in answers]
    assert all(outcome.norms == outcomes[0].norms for outcome in outcomes), "norms differ by rank"
    losses = [sum(losses) for losses in zip(*(o.losses for o in outcomes), strict=True)]
    return Outcome(losses, outcomes[0].norms, assembled([state for _, state in answers]))


# -- are they the same ------------------------------------------------------------------------------


def assert_same(ours: Outcome, oracle: Outcome, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Weights and moments bit for bit by default; losses and norms to what one sum in float32 may differ.

    Frozen weights are compared in the dtype they rest in: nothing but forward needs them.
    """
    loose = max(rtol, 2e-6)
    torch.testing.assert_close(ours.losses, oracle.losses, rtol=loose, atol=atol)
    torch.testing.assert_close(ours.norms, oracle.norms, rtol=loose, atol=atol)
    assert ours.state.keys() == oracle.state.keys()
    for name, tensors in oracle.state.items():
        assert ours.state[name].keys() == tensors.keys(), (
            f"{name}: {list(ours.state[name])}, not {list(tensors)}"
        )
        for key, expected in tensors.items():
            torch.testing.assert_close(
                ours.state[name][key],
                expected if len(tensors) > 1 else expected.to(ours.state[name][key].dtype),
                rtol=rtol,
                atol=atol,
                msg=lambda text, where=f"{name}.{key}": f"{where}: {text}",
            )
