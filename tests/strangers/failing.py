"""Errors in the middle, and going on after them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tests.strangers.lab import (
    EVERY_WAY,
    GATHERED,
    ONLY_ZERO3,
    Batch,
    Lab,
    Setting,
    plain_loss,
    scenario,
    variants,
)
from tests.strangers.models import Block, Net


class Oops(Exception):
    """Somebody's own."""


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Oops("in backward")


class Failing(Block):
    where = ""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.where == "forward":
            raise Oops("in forward")
        return Raise.apply(x) if self.where == "backward" else x


PLACES = ["first_forward", "last_forward", "root", "loss", "last_backward", "first_backward"]


@variants(PLACES, EVERY_WAY, may_refuse=r"microbatch|abandoned|failed|gave up|exception")
def an_error_and_then_on(lab: Lab, place: str) -> None:
    """All ranks fail at the same place in the second step; the script catches it, clears gradients and goes on."""
    t = lab.wrap(Net(Failing))
    for step in range(4):
        try:
            for batch in lab.batches(step, 2):
                with t.microbatch(last=batch.last):
                    fails = step == 1 and batch.microbatch == 1
                    which = t.model.layers[0 if place.startswith("first") else 2]
                    word = place.rpartition("_")[2]
                    which.where = word if fails and "_" in place else ""
                    loss = plain_loss(t.model, batch)
                    if fails and place == "root":
                        raise Oops("in the loop")
                    if fails and place == "loss":
                        t.backward(loss + t.model.head(batch.x[:, :2]).sum())
                    t.backward(loss)
        except (Oops, RuntimeError) as error:
            if isinstance(error, RuntimeError) and place != "loss":
                raise
            for layer in t.model.layers:
                layer.where = ""
            if lab.frees:
                for p in t.model.parameters():  # nothing stays gathered
                    with lab.raises(GATHERED):
                        p.sum()
            t.zero_grad()
            continue
        lab.note(t.step())
        t.zero_grad()


@variants(
    ["forward", "backward"], may_refuse=r"microbatch|abandoned|failed|rank|exception", mark="slow"
)
def an_error_on_one_rank_and_then_on(lab: Lab, place: str) -> None:
    """A bad sample on rank 1 alone; the script leaves out the sample, and every rank makes the step."""
    t = lab.wrap(Net(Failing))
    for step in range(3):
        for batch in lab.batches(step):
            try:
                with t.microbatch(last=True):
                    fails = step == 1 and batch.rank == 1
                    t.model.layers[2].where = place if fails else ""
                    t.backward(plain_loss(t.model, batch))
            except Oops:
                if lab.plain and place == "backward":
                    raise
        t.model.layers[2].where = ""
        lab.note(t.step())
        t.zero_grad()


@variants(["direct", "gloo", "native"], [Setting(stage) for stage in ("zero3", "zero2")])
def a_microbatch_dropped_among_others_over(lab: Lab, transport: str) -> None:
    """The second of three fails before its backward; the step is made of the gradients of the other two."""
    t = lab.wrap(Net(Failing), transport=transport, reduce_each="microbatch")
    for step in range(3):
        for microbatch in range(3):
            for batch in lab.batches(step, 3):
                if batch.microbatch != microbatch:
                    continue
                fails = step == 1 and microbatch == 1
                t.model.layers[1].where = "forward" if fails else ""
                try:
                    with t.microbatch(last=batch.last):
                        t.backward(plain_loss(t.model, batch))
                except Oops:
                    batch.note("dropped")
        lab.note(t.step())
        t.zero_grad()


@scenario(EVERY_WAY)
def an_error_in_an_evaluation(lab: Lab) -> None:
    t = lab.wrap(Net(Failing))
    for step in range(3):
        lab.train(t, steps=[step])
        t.model.layers[1].where = "forward"
        try:
            with torch.no_grad():
                t.model(torch.ones(2, 6))
        except Oops:
            pass
        t.model.layers[1].where = ""
        with torch.no_grad():
            lab.note(t.model(torch.ones(2, 6)))


@scenario()
def control_flow_by_exceptions(lab: Lab) -> None:
    """Early exit: a block raises to leave the body, and the root catches it (features of a middle layer)."""

    class Exit(Exception):
        pass

    class Leaving(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if getattr(self, "leaves", False):
                error = Exit()
                error.value = x
                raise error
            return x

    class Early(Net):
        def body(self, x: Tensor) -> Tensor:
            try:
                return super().body(x)
            except Exit as error:
                return error.value

    model = Early(Leaving)
    model.layers[1].leaves = True
    lab.train(lab.wrap(model))


@scenario()
def a_backward_that_torch_refuses(lab: Lab) -> None:
    """The loss has no graph: torch's error, then the same batch once more."""
    t = lab.wrap(Net())
    for step in range(2):
        for batch in lab.batches(step):
            try:
                with t.microbatch(last=True):
                    t.backward(plain_loss(t.model, batch).detach())
                raise AssertionError("a loss without a graph went through")
            except RuntimeError as error:
                batch.note("does not require grad" in str(error))
            with t.microbatch(last=True):
                t.backward(plain_loss(t.model, batch))
        lab.note(t.step())
        t.zero_grad()


@scenario(ONLY_ZERO3, oracle=False)
def a_step_after_a_backward_that_failed_half_way(lab: Lab) -> None:
    """Some of its gradients have been reduced: no step may take them."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    t.model.layers[1].register_forward_pre_hook(lambda _, inputs: Raise.apply(*inputs))
    with suppress(Oops):
        lab.one_backward(t, 1)
    with lab.raises("partly been reduced"):
        t.step()


@scenario()
def a_context_inside_a_failing_microbatch(lab: Lab) -> None:
    """The error passes through `gathered` and `microbatch`."""
    t = lab.wrap(Net())

    def attempt(batch: Batch, *, fails: bool) -> None:
        with t.microbatch(last=True), t.gathered():
            loss = plain_loss(t.model, batch)
            if fails:
                raise Oops("in the context")
            t.backward(loss)

    for step in range(2):
        for batch in lab.batches(step):
            try:
                attempt(batch, fails=True)
            except Oops:
                t.zero_grad() if not lab.plain else None
        for batch in lab.batches(step):
            attempt(batch, fails=False)
        lab.note(t.step())
        t.zero_grad()
