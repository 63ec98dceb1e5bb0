"""Parameters and buffers of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from tests.strangers.lab import (
    BY_STAGE,
    EVERY,
    EVERY_WAY,
    WIDTH,
    Lab,
    Setting,
    adamw,
    each_of,
    scenario,
    variants,
)
from tests.strangers.models import Block, Net

REFUSED_DTYPE = r"dtype|int8|int32|complex|bool|float"


MAKES: dict[str, Callable[[], Tensor]] = {
    "zero_dim": lambda: torch.tensor(0.5),
    "one_element": lambda: torch.tensor([0.5]),
    "zero_size": lambda: torch.zeros(0),
    "zero_rows": lambda: torch.zeros(0, WIDTH),
    "transposed": lambda: torch.arange(12.0).view(3, 4).t() / 12,
    "channels_last": lambda: (
        (torch.arange(24.0) / 24).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    ),
    "sliced": lambda: (torch.arange(24.0) / 24).view(4, 6)[::2, 1::2],
    "expanded": lambda: torch.full((1, 3), 0.5).expand(4, 3).clone(),
    "large_prime": lambda: torch.linspace(0, 1, 257),
}


@variants([EVERY, *MAKES], EVERY_WAY, quick=[EVERY])
def a_parameter_of_kind(lab: Lab, kind: str) -> None:
    class Made(Block):
        def __init__(self) -> None:
            super().__init__()
            kinds = each_of(MAKES, kind)
            self.extra = nn.ParameterList(nn.Parameter(MAKES[each]()) for each in kinds)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.01 * sum(extra.sum() for extra in self.extra) * x

    t = lab.wrap(Net(Made), optimizer=adamw)
    lab.train(t, num_microbatches=2)
    with t.gathered():
        for extra in t.model.layers[1].extra:
            lab.note(extra)
            lab.note(tuple(extra.shape))


@scenario(EVERY_WAY)
def blocks_without_parameters(lab: Lab) -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    lab.train(lab.wrap(Net(Bare)))


@scenario(EVERY_WAY)
def everything_in_float64(lab: Lab) -> None:
    model = Net().double()
    t = lab.wrap(model)
    lab.train(t, lambda model, batch: batch.loss(model(batch.x.double()), batch.y.double()))


MIXED = r"dtypes=|dtype"


def _one_block(dtype: torch.dtype) -> Net:
    model = Net()
    model.layers[1].to(dtype)
    return model


def _norms_in_float64() -> Net:
    model = Net()
    for layer in model.layers:
        layer.norm.double()
    return model


@variants(["block", "norms", "frozen_block"], refused=MIXED, oracle=False)
def several_dtypes_in(lab: Lab, what: str) -> None:
    """Without `dtypes=` nobody said what they are to become."""
    model = _norms_in_float64() if what == "norms" else _one_block(torch.bfloat16)
    if what == "frozen_block":
        model.layers[1].requires_grad_(False)
    lab.wrap(model)


def with_a_frozen(dtype: str) -> Net:
    class Made(Block):
        def __init__(self) -> None:
            super().__init__()
            values = torch.ones(4).to(getattr(torch, dtype))
            self.extra = nn.Parameter(values, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * self.extra.float().sum() * x

    return Net(Made)


@variants(
    ["int8", "int64", "bool", "complex64", "complex128", "uint8"],
    refused=REFUSED_DTYPE,
    oracle=False,
)
def a_frozen_parameter_of(lab: Lab, name: str) -> None:
    """Quantised weights lie in integer parameters; turned into floats they would be something else."""
    lab.wrap(with_a_frozen(name))


@variants(["float8_e4m3fn", "float16"], may_refuse=r"dtype|float")
def a_frozen_parameter_beside_in(lab: Lab, name: str) -> None:
    lab.train(lab.wrap(with_a_frozen(name)))


@scenario(refused=r"meta|lazy|uninitiali[sz]ed|LazyLinear|materiali[sz]e", oracle=False)
def a_lazy_layer(lab: Lab) -> None:
    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.LazyLinear(3)

    lab.wrap(Lazy())


# -- the same weight in several places ----------------------------------------------------------------


@variants(["across_blocks", "block_and_root", "whole_module", "across_and_frozen"], EVERY_WAY)
def tied(lab: Lab, how: str) -> None:
    model = Net()
    if how == "across_blocks":
        model.layers[2].up.weight = model.layers[0].up.weight
    elif how == "block_and_root":
        model.extra = nn.Linear(WIDTH, 7)
        model.extra.weight = model.layers[1].up.weight
    elif how == "whole_module":
        model.layers[2].up = model.layers[0].up
    else:
        model.layers[2].up.weight = model.layers[0].up.weight
        model.layers[0].down.requires_grad_(False)
    t = lab.wrap(model, groups=[{"params": list(model.parameters())}])
    lab.train(t, num_microbatches=2)


class Shared(Net):
    """ALBERT: the same module stands twice in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = self.layers[0]


@scenario(EVERY_WAY)
def one_block_in_two_places(lab: Lab) -> None:
    lab.train(lab.wrap(Shared(), ["layers.0", "layers.1"]), num_microbatches=2)


@scenario(may_refuse=r"layers\.2|same|twice|blocks")
def one_block_named_twice(lab: Lab) -> None:
    lab.train(lab.wrap(Shared()))


@scenario(may_refuse=r"memory|storage|view|shar")
def parameters_that_are_views_of_one_tensor(lab: Lab) -> None:
    """Query and key weights cut out of one buffer: two Parameters, one storage, no overlap."""
    model = Net()
    flat = torch.linspace(-1, 1, 2 * 7 * WIDTH)
    model.layers[0].up.weight = nn.Parameter(flat[: 7 * WIDTH].view(7, WIDTH))
    model.layers[1].up.weight = nn.Parameter(flat[7 * WIDTH :].view(7, WIDTH))
    lab.train(lab.wrap(model))


@scenario()
def parameters_that_are_columns_of_one_matrix(lab: Lab) -> None:
    """They reach into each other's memory, and share no element."""
    model = Net()
    both = torch.linspace(-1, 1, 7 * 2 * WIDTH).view(7, 2 * WIDTH)
    for layer, columns in zip(model.layers[:2], both.split(WIDTH, dim=1), strict=True):
        layer.up.weight = nn.Parameter(columns)
    lab.train(lab.wrap(model))


@scenario(may_refuse=r"memory|storage|view|shar|tied")
def parameters_that_overlap(lab: Lab) -> None:
    """Tied by their memory alone: two Parameters over the same elements; torch moves them twice."""
    model = Net()
    model.layers[1].up.weight = nn.Parameter(model.layers[0].up.weight.detach())
    lab.train(lab.wrap(model, optimizer=lambda g: torch.optim.SGD(g, lr=0.05)))


@scenario(BY_STAGE, refused="parameter .*weight and buffer codes lie in the same memory")
def a_buffer_that_is_a_weight(lab: Lab) -> None:
    """Codes that shall follow the embedding: they would keep its first values."""
    model = Net()
    model.register_buffer("codes", model.layers[1].up.weight.data[1:])
    lab.train(lab.wrap(model))


@dataclass(slots=True)
class Slotted:
    of: Tensor


class Unregistered(nn.Module):
    """Of a plain list, which hides it from the model that it belongs to."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class KeepingAView(Block):
    """Its constructor keeps a view of a weight, which follows the weight as long as both lie in one memory."""

    def __init__(self, how: str) -> None:
        super().__init__()
        weight = self.down.weight
        views = {"transposed": weight.t(), "flat": weight.view(-1)}
        kept = views.get(how, weight.data)
        ways: dict[str, Any] = {
            "flat": {"of": [kept]},
            "object": SimpleNamespace(of=kept),
            "closure": lambda: kept,
            "partial": partial(torch.clone, kept),
            "default": lambda kept=kept: kept,
            "keyword": lambda *, kept=kept: kept,
            "bound": MethodType(lambda _: kept, "anything"),
            "slot": Slotted(kept),
            "module": [Unregistered(kept)],
        }
        self.kept = ways.get(how, kept)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept
        if isinstance(kept, dict):
            kept = kept["of"][0]
        elif isinstance(kept, SimpleNamespace | Slotted):
            kept = kept.of
        elif isinstance(kept, list):
            kept = kept[0].weight
        elif callable(kept):
            kept = kept()
        return super().forward(x) * kept.square().sum()


WAYS = ["transposed", "flat", "data", "object", "closure", "partial"]
WAYS += ["default", "keyword", "bound", "slot", "module"]


@variants(
    WAYS,
    (*BY_STAGE, Setting("zero2", world_size=1)),
    refused=r"parameter layers.\d.down.weight and attribute layers.\d.kept lie in the same memory",
)
def a_view_that_the_constructor_keeps(lab: Lab, how: str) -> None:
    """Forward would compute with the first values for ever."""
    lab.train(lab.wrap(Net(lambda: KeepingAView(how))))


@scenario()
def weights_and_copies_that_the_constructor_keeps(lab: Lab) -> None:
    """Weights themselves in a list, and their first values, are no views."""

    class Keeping(Block):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.first = [self.down.weight], self.down.weight.detach().clone()
            self.of_itself: list[Any] = [SimpleNamespace(module=self, weight=self.up.weight)]
            self.of_itself.append(self.of_itself)
            self.config = OmegaConf.create({"needed": "???", "of": "${nothing}"})
            self.like_a_dict = Mock(spec=dict)
            leaked: list[Tensor] = []  # without a storage that could be asked for
            torch.func.vmap(lambda x: (leaked.append(x), x)[1])(torch.ones(2, 2))
            self.leaked = leaked

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (self.own[0] - self.first).square().sum().exp()

    lab.train(lab.wrap(Net(Keeping)))


class Conjugating(Block):
    """Real weights that are used as complex ones: bits of what autograd saves say that it is conjugated or negated."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(WIDTH, WIDTH, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.view_as_complex(self.pairs)
        turned = (x.to(weight.dtype) @ weight.mH).abs()
        return (
            super().forward(x) + turned.sin() * weight.conj().imag.sin()[0] * weight.conj().imag[1]
        )


@scenario(EVERY_WAY, may_refuse="storage_offset divisible by 2")
def weights_that_are_used_as_complex_numbers(lab: Lab) -> None:
    """Unitary layers, state spaces, Fourier operators. Where parameters lie side by side torch may refuse the view."""
    lab.train(lab.wrap(Net(Conjugating)))


# -- buffers ------------------------------------------------------------------------------------------


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x))


@scenario(EVERY_WAY)
def batch_norm(lab: Lab) -> None:
    """Statistics are rank 0's after each step, as DistributedDataParallel's are; weights are trained as usual."""
    model = Net(Normed)
    t = lab.wrap(model, isolated=True)
    for step in range(3):
        lab.train(t, steps=[step])
        for buffer in t.model.buffers():
            lab.note(buffer)
    t.model.eval()
    with torch.no_grad():
        lab.note(t.model(torch.ones(2, WIDTH)))


# -- layers of torch ----------------------------------------------------------------------------------
