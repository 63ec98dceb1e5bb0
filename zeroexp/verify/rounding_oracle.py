"""One process doing the obvious thing in plain PyTorch, and how far rounding alone moves what it computes.

The bound of every comparison is measured on the loop's own model: the oracle runs in the dtype in which the loop
computes and in float64, and what lies between the two is rounding. Another right program rounds in another order, by
about as much.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from zeroexp.verify.equal_ranks import EqualRanks
from zeroexp.verify.local_elements import LocalElements
from zeroexp.verify.loop_to_verify import (
    Loop,
    NoLoop,
    as_dtype,
    batch_of,
    optimizers_of,
    plain_model,
)
from zeroexp.verify.observe import Settings, settings_of

# How many times the measured rounding a right loop may be away: it adds its own to the oracle's, and both are one
# sample each. Of 100 right loops (tests/verify/loops.py) the farthest is at a quarter of this.
MARGIN = 8.0
Whole = dict[str, Tensor]  # flat, in float64, by the name of the weight
Expected = tuple[Whole, dict[str, float]]  # and how far from it a right loop may be


class Oracle:
    """Gradients of the plain model at any weights, for the batches of all ranks."""

    def __init__(self, loop: Loop, world_size: int, of_one: float = 0.0) -> None:
        """of_one: what `first_norm` is on one rank, where the loss is the mean over its labels whatever is summed."""
        self.loop, self.world_size = loop, world_size
        factors = (world_size, 1 / world_size) if of_one else ()
        found = [k for k in factors if math.isclose(first_norm(loop) * k, of_one, rel_tol=1e-6)]
        # A loss may divide by all ranks' labels alone, for gradients that are summed.
        self.scale = found[0] if found else 1.0
        self.shapes = {name: each.shape for name, each in loop.model.named_parameters()}
        self.initial = _flat_weights(loop.model)
        # Labels of each microbatch.
        self.counts = torch.ones(world_size, loop.microbatches).double()

    def contributions(
        self, weights: Whole, step: int, dtype: torch.dtype = torch.float64, *, untied: bool = False
    ) -> Whole:
        """Return for each weight a row for each rank's each microbatch; the gradient is the sum of the rows.

        untied: a weight that several modules share has a row for each of its uses.
        """
        model = plain_model(self.loop, dtype)
        _fill(model, weights)
        uses = _uses(model, untied)
        rows: dict[str, list[Tensor]] = {name: [] for name in uses}
        of_first: dict[int, list[Tensor]] = {}  # what rank 0 gives to collectives, by microbatch
        for rank, microbatch in torch.ones_like(self.counts).nonzero().tolist():
            EqualRanks.given = given = list[Tensor]()
            batch = as_dtype(batch_of(self.loop, step, rank, microbatch), dtype)
            result = self.loop.loss(model, batch)
            loss, count = result if isinstance(result, tuple) else (result, 1)
            self.counts[rank, microbatch] = float(count)
            model.zero_grad()
            loss.backward()
            _refuse_unequal(given, of_first.setdefault(microbatch, given))
            for name, each in rows.items():
                each += [_gradient(parameter) for parameter in uses[name]]
        scale = self.scale / self.counts.sum()
        return {name: torch.stack(each) * scale for name, each in rows.items()}

    def rounding(
        self, weights: Whole, step: int, exact: Whole, dtype: torch.dtype
    ) -> dict[str, float]:
        """Return how far from the sum of these rows a gradient may be that is computed in `dtype`."""
        worked = self.contributions(weights, step, dtype)
        unit = torch.finfo(dtype).eps / 2
        return {
            name: MARGIN
            * float((worked[name] - rows).sum(0).norm() + unit * rows.abs().sum(0).norm())
            for name, rows in exact.items()
        }

    def clipping(self, gradients: Whole) -> tuple[float, float]:
        """Return by what clipping multiplies these gradients, and how far from that a right loop may be.

        A norm in float32 is off by 1e-4 and more where one tensor has ten million elements. Some add torch's 1e-6 to
        it, and some do not.
        """
        most = self.loop.max_grad_norm
        if most is None:
            return 1.0, 0.0
        flat = torch.cat(list(gradients.values()))
        exact, worked = (
            min(1.0, most / (float(each.norm()) + 1e-6)) for each in (flat, flat.float())
        )
        of_adding = exact * 1e-6 / (float(flat.norm()) + 1e-6) if exact < 1 else 0.0
        return exact, MARGIN * abs(worked - exact) + of_adding


def _refuse_unequal(given: list[Tensor], of_first: list[Tensor]) -> None:
    shapes, meant = ([each.shape for each in of_rank] for of_rank in (given, of_first))
    if shapes != meant or not all(map(torch.equal, given, of_first)):
        raise NoLoop(
            "Loop(loss=...): sums or gathers over ranks what differs between them, as numbers of labels do: return "
            "(sum, count) of the microbatch alone, and leave out what is only logged"
        )


def first_norm(loop: Loop) -> float:
    """Return the norm of the gradient of rank 0's first microbatch."""
    oracle = Oracle(replace(loop, microbatches=1), 1)
    rows = oracle.contributions(oracle.initial, 0)
    return float(torch.cat([each.flatten() for each in rows.values()]).norm())


class Updates:
    """The plain optimizer, which follows the loop's own weights and gradients, in the model's dtype and in float64."""

    def __init__(self, loop: Loop) -> None:
        self._models = [copy.deepcopy(loop.model), copy.deepcopy(loop.model).double()]
        self._optimizers = [optimizers_of(loop, model) for model in self._models]
        schedule = loop.scheduler
        # Of each optimizer, those of both models.
        self._schedulers = [
            [made for each in both if schedule and (made := schedule(each)) is not None]
            for both in zip(*self._optimizers, strict=True)
        ]
        if any(isinstance(each, ReduceLROnPlateau) for both in self._schedulers for each in both):
            raise NoLoop(
                "Loop(scheduler=...): ReduceLROnPlateau steps by what a loop logs; leave it out"
            )
        # Of each optimizer, steps that overflowed, in which its schedule in the loop goes on, or waits.
        self._behind = [0 for _ in self._optimizers[0]]

    def settings(self) -> dict[str, Settings]:
        """Return with what the next step updates each weight."""
        return {
            name: own
            for each in self._optimizers[0]
            for name, own in self._settings_of(each).items()
        }

    def _settings_of(self, optimizer: Optimizer) -> dict[str, Settings]:
        names: dict[Tensor, str] = {
            parameter: name for name, parameter in self._models[0].named_parameters()
        }
        return settings_of(optimizer, lambda p: [names[p]])

    def catch_up(self, used: Mapping[str, Settings]) -> None:
        """Go on in the schedules by as many steps that overflowed as bring the rates to those of the loop."""
        for index, optimizer in enumerate(self._optimizers[0]):
            while self._behind[index] and not _has_rates(self._settings_of(optimizer), used):
                self._go_on(index)
                self._behind[index] -= 1

    def _go_on(self, index: int) -> None:
        for scheduler in self._schedulers[index]:
            scheduler.step()

    def step(self, weights: Whole, gradients: Whole, overflows: bool = False) -> Expected:
        """Return what a step makes of these weights; a weight without a gradient is left as it is."""
        EqualRanks.given = given = list[Tensor]()
        for model, optimizers in zip(self._models, self._optimizers, strict=True):
            _fill(model, weights)
            for name, parameter in model.named_parameters():
                own = gradients.get(name)
                parameter.grad = None if own is None else own.view_as(parameter).to(parameter.dtype)
            for optimizer in optimizers:
                tensors = (each for group in optimizer.param_groups for each in group["params"])
                if any(each.grad is not None for each in tensors):
                    optimizer.step()
        if given:
            raise NoLoop(
                "Loop(optimizer=...): sums or gathers over ranks in its step, whose gradients are whole in one "
                "process: return the plain optimizer"
            )
        for index in range(len(self._behind)):
            self._behind[index] += overflows
            if not overflows:
                self._go_on(index)
        worked, exact = map(_flat_weights, self._models)
        units = {
            name: torch.finfo(each.dtype).eps / 2 if each.is_floating_point() else 0.0
            for name, each in self._models[0].named_parameters()
        }
        return exact, {
            name: MARGIN * float((worked[name] - each).norm() + units[name] * each.norm())
            for name, each in exact.items()
        }


def _has_rates(settings: Mapping[str, Settings], used: Mapping[str, Settings]) -> bool:
    rates = [(own[1].get("lr"), used[n][1].get("lr")) for n, own in settings.items() if n in used]
    return all(own is None or other is None or math.isclose(own, other) for own, other in rates)


def distance(piece: LocalElements, exact: Mapping[str, Tensor]) -> float:
    return float((piece.values.double() - exact[piece.name][piece.where]).norm())


def _flat_weights(model: nn.Module) -> Whole:
    return {name: each.detach().double().flatten() for name, each in model.named_parameters()}


def _fill(model: nn.Module, weights: Whole) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name].view_as(parameter))


def _gradient(parameter: Tensor) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.detach().double().flatten()


def _uses(model: nn.Module, untied: bool) -> dict[str, list[nn.Parameter]]:
    """Return the trained parameters by name; `untied` gives each module that shares one a copy of its own."""
    uses = {name: [each] for name, each in model.named_parameters() if each.requires_grad}
    names = {id(each[0]): name for name, each in uses.items()}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)) if untied else ():
        if id(parameter) in names and name != names[id(parameter)]:
            owner, _, attribute = name.rpartition(".")
            uses[names[id(parameter)]].append(nn.Parameter(parameter.detach().clone()))
            setattr(model.get_submodule(owner), attribute, uses[names[id(parameter)]][-1])
    return uses
