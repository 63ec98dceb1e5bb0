"""What one rank holds in each step, copied while its own code runs: hooks that read, and send nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zeroexp.measure.memory import local_tensor
from zeroexp.verify.local_elements import LocalElements, Places, add
from zeroexp.verify.loop_to_verify import NoLoop

Settings = tuple[str, dict[str, Any]]


@dataclass
class Seen:
    """One step of one rank."""

    weights: list[LocalElements]  # before it
    # Gradients as torch's clipping finds them.
    raw: list[LocalElements] = field(default_factory=list)
    gradients: list[LocalElements] = field(default_factory=list)  # as the optimizer finds them
    norm: float | None = None  # of all gradients, as the loop's own step tells it
    # As a step of torch's finds them inside of the optimizer's, which may have summed or changed them.
    inner: list[LocalElements] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)  # of optimizers, where more than one
    clips: dict[str, int] = field(default_factory=dict)  # calls of clipping, where more than one
    # Weights of optimizers whose step torch's GradScaler leaves out
    skipped: set[str] = field(default_factory=set)
    # Of each weight, the class of the optimizer that steps it and the settings of its group
    settings: dict[str, Settings] = field(default_factory=dict)


@dataclass
class Record:
    """Everything that one rank saw."""

    drawn: list[str] = field(default_factory=list)  # a hash of each microbatch
    steps: list[Seen] = field(default_factory=list)
    weights: list[LocalElements] = field(default_factory=list)  # after the last step
    has_strangers: bool = False  # gradients of tensors that are no weights of the model


class LoopRecorder:
    """Listens to torch's clipping and to every optimizer of this process."""

    def __init__(self, places: Places) -> None:
        self.record = Record()
        self._places = places
        self._depth = 0  # an optimizer may call another, as ZeroRedundancyOptimizer does
        self._read: set[Optimizer] = set()

    @contextmanager
    def recording_step(self) -> Generator[None]:
        self.record.steps.append(Seen(self._places.weights()))
        _listeners.append(self._clips)
        _scaled_steps.append(self._skips)
        with (
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
        ):
            yield
        _listeners.remove(self._clips)
        _scaled_steps.remove(self._skips)
        self.record.weights = self._places.weights()
        self.record.has_strangers = self._places.has_strangers

    def _clips(self, tensors: list[Tensor]) -> None:
        seen = self.record.steps[-1]
        _count_again(seen.clips, add(seen.raw, self._places.gradients(tensors)))

    def _skips(self, skipping: Optimizer) -> None:
        seen = self.record.steps[-1]
        names = {piece.name for piece in self._places.gradients(_tensors_of(skipping))}
        seen.skipped |= names
        add(seen.weights, self._places.held())
        # A fused optimizer is called all the same, and changes nothing.
        seen.gradients = [piece for piece in seen.gradients if piece.name not in names]
        seen.settings = {name: own for name, own in seen.settings.items() if name not in names}

    def _begins(self, stepping: Optimizer, *_: Any) -> None:
        self._depth += 1
        if stepping not in self._read:  # behind the optimizer's own hooks, which may clip
            self._read.add(stepping)
            stepping.register_step_pre_hook(self._reads)

    def _reads(self, stepping: Optimizer, *_: Any) -> None:
        seen = self.record.steps[-1]
        pieces = self._places.gradients(_tensors_of(stepping))
        # A fused optimizer divides by what torch's GradScaler sets, inside of its step.
        if (scale := getattr(stepping, "grad_scale", None)) is not None:
            for piece in pieces:
                piece.values /= scale
        if self._depth > 1:
            found = {(piece.name, len(piece.where)): piece for piece in pieces}
            seen.inner = [
                found.get((e.name, len(e.where)), e) for e in seen.inner or seen.gradients
            ]
        else:
            # Optimizers may hold parts of one weight; who finds a part again steps once more.
            _count_again(seen.calls, add(seen.gradients, pieces))
            add(seen.weights, self._places.held())  # from its first step on it is known
        seen.settings |= settings_of(stepping, self._places.names)

    def _ends(self, *_: Any) -> None:
        self._depth -= 1


def _tensors_of(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _count_again(calls: dict[str, int], found_again: list[LocalElements]) -> None:
    for name in {piece.name for piece in found_again}:
        calls[name] = calls.get(name, 1) + 1


def settings_of(
    stepping: Optimizer, names: Callable[[Tensor], Iterable[str]]
) -> dict[str, Settings]:
    """Return of each weight the optimizer's class and its settings, but for the choice among equal kernels."""
    kernels = ("foreach", "fused", "capturable", "differentiable")
    # Not names of parameters, nor a key of the user's own.
    used = [key for key in stepping.defaults if key not in kernels]
    return {
        name: (type(stepping).__name__, {key: group[key] for key in used if key in group})
        for group in stepping.param_groups
        for tensor in group["params"]
        for name in names(tensor)
    }


_listeners: list[Callable[[list[Tensor]], None]] = []
_scaled_steps: list[Callable[[Optimizer], None]] = []


def listen_to_clipping() -> None:
    """Have torch's clipping show the gradients that it is given; call it before a loop's file is imported."""
    clip: Any = clip_grad._clip_grads_with_norm_  # pyright: ignore[reportPrivateUsage]

    def shown(
        parameters: Tensor | Iterable[Tensor], max_norm: float, *args: Any, **kwargs: Any
    ) -> Any:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for listener in _listeners if max_norm < torch.inf else ():  # else it is a norm to log
            listener(tensors)
        return clip(tensors, max_norm, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = shown  # pyright: ignore[reportPrivateUsage]
    torch.nn.utils.clip_grads_with_norm_ = shown
    _refuse_clipping_by_value()
    _listen_to_scaling()


def _refuse_clipping_by_value() -> None:
    clip: Any = clip_grad.clip_grad_value_

    def clipped(
        parameters: Tensor | Iterable[Tensor], clip_value: float, *args: Any, **words: Any
    ) -> None:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        found = [local_tensor(each.grad) for each in tensors if each.grad is not None]
        if any(bool((each.abs() > clip_value).any()) for each in found):
            raise NoLoop("the loop clips by value, which the plain process does not: leave it out")
        clip(tensors, clip_value, *args, **words)

    clip_grad.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = clipped


def _listen_to_scaling() -> None:
    """Have torch's GradScaler tell of the steps that it leaves out."""
    scalers: Any = torch.amp.GradScaler
    scaled = scalers.step

    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = scaled(scaler, optimizer, *args, **kwargs)
        if scaler.is_enabled():
            found = scaler._found_inf_per_device(optimizer).values()
            for note in _scaled_steps if any(float(each) for each in found) else ():
                note(optimizer)
        return result

    scalers.step = step
