"""torch.compile around a block, in a block and around the model; tracing and scripting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.strangers.lab import (
    ONLY_ZERO3,
    WIDTH,
    Batch,
    Lab,
    Setting,
    plain_loss,
    scenario,
    variants,
)
from tests.strangers.models import Block, Net

SETTINGS = (Setting("zero1"), Setting("zero3"), Setting("zero3", unit="module"))
MAY_NOT = r"compile|OptimizedModule"


def by_aot_eager(function: Callable[[Lab, str], None]) -> None:
    """Each compiles for seconds on every rank; before a change tests/strategies/test_compiled_blocks.py is enough."""
    compiling(["aot_eager"])(function)


def compiling(names: Sequence[str]) -> Callable[[Callable[[Lab, str], None]], None]:
    words: dict[str, Any] = {
        "may_refuse": MAY_NOT,
        "tolerance": 5e-6,
        "mark": "slow",
        "first": True,
    }
    return variants(names, SETTINGS, **words)


PARTS = ("blocks", "the_model")


@compiling(
    [f"{part}_{how}" for part in PARTS for how in ("before", "after_wrapping", "by_inductor")]
)
def compiled_in_place_are(lab: Lab, which: str) -> None:
    torch._dynamo.reset()
    model = Net()
    t = lab.wrap(model) if which.endswith("after_wrapping") else None
    for each in [model] if which.startswith("the_model") else model.layers:
        each.compile(backend="inductor" if which.endswith("inductor") else "aot_eager")
    lab.train(t or lab.wrap(model), num_microbatches=2)


@scenario(SETTINGS, tolerance=5e-6)
def blocks_replaced_by_compiled_ones(lab: Lab) -> None:
    """Right, not refused: what `torch.compile(block)` returns has a forward, which its class lacks."""
    torch._dynamo.reset()
    model = Net()
    for index in range(3):
        model.layers[index] = torch.compile(model.layers[index], backend="eager")
    lab.train(lab.wrap(model), num_microbatches=2)


@by_aot_eager
def the_wrapped_model_compiled_by(lab: Lab, backend: str) -> None:
    """`compiled = torch.compile(strategy.model)`, and the loop calls `compiled`."""
    torch._dynamo.reset()
    t = lab.wrap(Net())
    compiled = torch.compile(t.model, backend=backend)

    def loss(_model: nn.Module, batch: Batch) -> Tensor:
        return batch.loss(compiled(batch.x))

    lab.train(t, loss, num_microbatches=2)


@by_aot_eager
def a_compiled_model_wrapped_by(lab: Lab, backend: str) -> None:
    """The door gets what `torch.compile(model)` returned: names begin with `_orig_mod`."""
    torch._dynamo.reset()
    compiled = torch.compile(Net(), backend=backend)
    blocks = [f"_orig_mod.layers.{index}" for index in range(3)]
    lab.train(lab.wrap(compiled, blocks), num_microbatches=2)


@by_aot_eager
def a_function_in_a_block_compiled_by(lab: Lab, backend: str) -> None:
    """The block's forward calls a compiled method that reads the block's weights."""
    torch._dynamo.reset()

    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.compile(self.inner, backend=backend)(x)

    lab.train(lab.wrap(Net(Inside)))


@scenario(ONLY_ZERO3, may_refuse=r"script|trace|jit")
def a_traced_block(lab: Lab) -> None:
    model = Net()
    model.layers[1] = torch.jit.trace(model.layers[1], torch.ones(4, 6))
    lab.train(lab.wrap(model))


@scenario()
def a_graph_module_as_a_block(lab: Lab) -> None:
    """torch.fx makes a module of its own of a block."""
    model = Net()
    model.layers[1] = torch.fx.symbolic_trace(model.layers[1])
    lab.train(lab.wrap(model))


@scenario(ONLY_ZERO3, may_refuse=r"gathered|export")
def an_exported_model(lab: Lab) -> None:
    """`torch.export` inside the context, to ship what was trained."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    with t.gathered():
        program = torch.export.export(t.model, (torch.ones(2, 6),))
        lab.note(program.module()(torch.ones(2, 6)))
        del program
    lab.train(t, plain_loss, steps=[1])


def _plain_affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(torch.nn.functional.linear(x, weight, bias))


@cache
def _scripted() -> Callable[..., Tensor]:
    return torch.jit.script(_plain_affine)


def _affine(x: Tensor, layer: nn.Linear) -> Tensor:
    return _scripted()(x, layer.weight, layer.bias)


class ByFunction(Block):
    """Its forward gives the weights of its parts to a function in C++, which no torch function of Python sees."""

    def inner(self, x: Tensor) -> Tensor:
        return self.down(_affine(self.norm(x), self.up))


# Where weights rest whole and are gathered after a step.
IN_FLIGHT = (*(Setting(s, unit=u) for s in ("zero1", "zero2") for u in ("block", "module")),)


@variants(["in_a_block", "in_the_loop", "before_the_forward", "behind_the_step"], IN_FLIGHT)
def a_scripted_function_is_the_first_to_use(lab: Lab, where: str) -> None:
    """Weights that are on their way after a step: the function must not see those of the step before."""
    t = lab.wrap(Net(ByFunction if where == "in_a_block" else Block))
    parts = [layer.up for layer in t.model.layers]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch.x
        if where == "before_the_forward":
            x = _affine(x, model.inp)
        if where == "in_the_loop":
            for part in parts:
                x = x + _affine(x, part)[:, :WIDTH]
        return batch.loss(model(x))

    for step in range(3):
        lab.train(t, loss, steps=[step])
        if where == "behind_the_step":
            lab.note(_affine(torch.ones(2, WIDTH), parts[-1]))
