"""What a loop tells of itself: the plain model, what one process would do with it, and the code to verify."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import math
import random
import sys
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from zeroexp.models.expert_kernels import multiply_one_by_one

Step = Callable[[Sequence[Any]], object]  # takes this rank's microbatches


@dataclass(kw_only=True)
class Loop:
    """Return one from a function, and `zeroexp verify FILE:FUNCTION` runs it.

    `train` is your code as it is. Everything else says what it is meant to compute, and is what one process needs.
    """

    model: nn.Module  # as built, before it is sharded, replicated or cast
    # (model, microbatch): the mean over its labels, or (sum, count)
    loss: Callable[[Any, Any], Any]
    batch: Callable[[torch.Generator], Any]  # draws one microbatch of one rank
    optimizer: Callable[[nn.Module], Optimizer | Sequence[Optimizer]]  # of the plain model
    # shards the model; (sharded model, step) if it is another
    train: Callable[[Any], Step | tuple[Any, Step]]
    microbatches: int = 2  # of a rank in a step
    max_grad_norm: float | None = None
    dtype: torch.dtype = torch.float32  # in which forward and backward compute
    scheduler: Callable[[Optimizer], Any] | None = None  # of each optimizer
    # Whether step returns the norm of all gradients: of a clipping that is not torch's it shows what that hides.
    returns_norm: bool = False


class NoLoop(ValueError):
    """A loop that can not be run or judged, in one line."""


@dataclass(frozen=True)
class Source:
    """Where a loop comes from; ranks and the plain process each make their own."""

    name: str  # as on the command line
    make: Callable[[], Any]
    file: Path | None = None  # the user's, whose lines an error names
    why_not_on: Callable[[int], str | None] = lambda size: None  # what refuses it on so many ranks


def source_in(file: Path, function: str) -> Source:
    """Return the source of the loop that a function of a file returns."""
    return Source(f"{file.name}:{function}", lambda: _call(file, function), file)


def _call(file: Path, function: str) -> Any:
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    _seed()
    spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if not callable(make):
        raise NoLoop(f"{file.name}:{function}: no such function; name one that returns a Loop")
    _seed()
    return make()


def _seed() -> None:
    """Have every process draw the same: a fork seeds Python's own generator anew."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def make_loop(source: Source) -> Loop:
    """Make the loop, with the same random numbers in every process. Raises NoLoop for one that can not be judged."""
    loop = source.make()
    if not isinstance(loop, Loop):
        kind = type(loop).__name__
        raise NoLoop(f"{source.name}: returns {kind}; return a zeroexp.verify.Loop")
    _refuse_wrong_words(loop)
    make_weights_unlike(loop.model)
    _refuse_what_differs_by_itself(loop)
    return loop


def _refuse_wrong_words(loop: Loop) -> None:
    most, dtype = loop.max_grad_norm, loop.dtype
    is_real = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    meant = {
        "model": (isinstance(loop.model, nn.Module), "a torch.nn.Module as built"),
        "microbatches": (isinstance(loop.microbatches, int) and loop.microbatches > 0, "1 or more"),
        "max_grad_norm": (
            most is None or (isinstance(most, int | float) and most > 0),
            "more than 0",
        ),
        "dtype": (is_real, "torch.float32, torch.bfloat16 or torch.float16"),
    } | {
        key: (callable(getattr(loop, key)), "a function")
        for key in ("loss", "batch", "optimizer", "train")
    }
    for key, (is_right, remedy) in meant.items():
        if not is_right:
            value = repr(getattr(loop, key)).partition("\n")[0]
            raise NoLoop(f"Loop({key}={value}): give {remedy}")
    if any(parameter.is_meta for parameter in loop.model.parameters()):
        raise NoLoop("Loop(model=...): weights on meta have no values; build a small model plainly")
    embeddings = (m for m in loop.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    if any(module.sparse for module in embeddings):
        raise NoLoop(
            "Loop(model=...): an embedding's gradient is sparse; build it with sparse=False"
        )


def make_weights_unlike(model: nn.Module) -> None:
    """Change trained weights that begin with one value, as gains of ones, or as another, as of a copied layer.

    What a loop keeps of weights beside the model, as masters or a flat tensor, is known by its values alone.
    """
    generator, seen = torch.Generator().manual_seed(0), set[str]()
    for weight in (p.detach() for p in model.parameters() if p.requires_grad):
        if len(weight.unique()) < 2 or _digest(weight) in seen:
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
        seen.add(_digest(weight))


def _refuse_what_differs_by_itself(loop: Loop) -> None:
    """Run the plain model on one microbatch: twice as drawn, and drawn once more."""
    model = plain_model(loop, torch.float64)  # as the oracle; weights may have several dtypes
    batch, redraw = (as_dtype(batch_of(loop, 0, 0, 0), torch.float64) for _ in range(2))
    try:
        loss = _value(loop.loss(model, batch))
    except RuntimeError as error:
        # If this raises too, it is the loop's own error.
        loop.loss(copy.deepcopy(loop.model), batch_of(loop, 0, 0, 0))
        raise NoLoop(
            f"Loop(loss=...): {str(error).partition(chr(10))[0]}: the plain process computes in float64; have loss "
            "and model make their tensors in the dtype of others, as weight=weight.to(logits.dtype)"
        ) from error
    again, redrawn = (_value(loop.loss(model, each)) for each in (batch, redraw))
    # One iteration of a spectral norm changes less than 1e-6.
    if not math.isclose(loss, again, rel_tol=1e-12):
        raise NoLoop(
            f"Loop(loss=...): the same weights and microbatch give {loss:.9g} and {again:.9g}: dropout, "
            "another draw, or a buffer that forward changes; build the model without"
        )
    if not math.isclose(loss, redrawn, rel_tol=1e-6):
        raise NoLoop(
            "Loop(batch=...): equal generators give different microbatches; draw from the generator alone"
        )
    optimizers: Sequence[Any] = optimizers_of(loop, model)
    for each in optimizers or [optimizers]:
        if not isinstance(each, Optimizer):
            problem = f"returns {type(each).__name__}; return one torch.optim.Optimizer, or a list"
            raise NoLoop(f"Loop(optimizer=...): {problem}")
    groups = [group for each in optimizers for group in each.param_groups]
    held = {id(each) for group in groups for each in group["params"]}
    if not held <= {id(each) for each in model.parameters()}:
        raise NoLoop("Loop(optimizer=...): holds others than the weights of the model it is given")


def plain_model(loop: Loop, dtype: torch.dtype) -> nn.Module:
    """Return a copy of the loop's model, and of its buffers, that computes in `dtype`."""
    # Module.to drops the imaginary part of complex buffers, as rotary positions are.
    model = copy.deepcopy(loop.model)._apply(lambda tensor: _in_dtype(tensor, dtype))
    if dtype is torch.float64:
        multiply_one_by_one(model)
    return model


def optimizers_of(loop: Loop, model: nn.Module) -> Sequence[Optimizer]:
    """Return what steps the plain model, one after the other."""
    made: Any = loop.optimizer(model)
    return made if isinstance(made, list | tuple) else [made]


def _value(result: Any) -> float:
    loss = result[0] if isinstance(result, tuple) and len(result) == 2 else result
    if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
        kind = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise NoLoop(
            f"Loop(loss=...): returns {kind}; return one number that trained weights make, or (sum, count)"
        )
    if not loss.isfinite():
        raise NoLoop(f"Loop(loss=...): is {loss.item()} at the start; nothing can be compared")
    return loss.item()


def batch_of(loop: Loop, step: int, rank: int, microbatch: int) -> Any:
    """Return the same microbatch in every process that asks for it."""
    seed = (step * 1009 + rank) * 1009 + microbatch + 1
    return loop.batch(torch.Generator().manual_seed(seed))


def drawn_by(loop: Loop, rank: int, num_steps: int) -> list[str]:
    """Return a hash of each microbatch of a rank."""
    return [
        _digest(batch_of(loop, step, rank, microbatch))
        for step in range(num_steps)
        for microbatch in range(loop.microbatches)
    ]


def _digest(batch: Any) -> str:
    found = hashlib.sha256()

    def note(leaf: Any) -> None:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            plain = leaf.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
            found.update(plain.view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, int | float | str):
            found.update(repr(leaf).encode())

    _map_leaves(note, batch)
    return found.hexdigest()


def as_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Return a microbatch with its real numbers in `dtype`."""
    return _map_leaves(lambda leaf: _in_dtype(leaf, dtype), batch)


def _in_dtype(leaf: Any, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_complex():
        return leaf.to(torch.complex128 if dtype is torch.float64 else torch.complex64)
    return leaf.to(dtype) if leaf.is_floating_point() else leaf


def _map_leaves(change: Callable[[Any], Any], batch: Any) -> Any:
    """As torch's tree_map, also in dataclasses and in what transformers' tokenizers return."""

    def changed(leaf: Any) -> Any:
        parts = {}
        if is_dataclass(leaf) and not isinstance(leaf, type):
            named = [each.name for each in fields(leaf) if hasattr(leaf, each.name)]
            parts = {name: getattr(leaf, name) for name in named}
        elif isinstance(leaf, UserDict):
            parts = {"data": leaf.data}
        if not parts:
            return change(leaf)
        copied = copy.copy(leaf)
        for name, part in parts.items():
            object.__setattr__(copied, name, _map_leaves(change, part))
        return copied

    return tree_map(changed, batch)
