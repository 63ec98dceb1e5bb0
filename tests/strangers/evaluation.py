"""Forward passes that do not train: before, between, inside and beside the steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from tests.strangers.lab import (
    EVERY_WAY,
    WIDTH,
    Batch,
    Lab,
    adamw,
    next_word_loss,
    plain_loss,
    scenario,
    variants,
)
from tests.strangers.models import Language, Net, Shortened

MODES: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
}


def look(t: Any, lab: Lab, mode: str) -> None:
    with MODES[mode]():
        lab.note(t.model(torch.ones(2, WIDTH)))


@variants([*MODES], EVERY_WAY, quick=["no_grad", "inference_mode"])
def evaluated_before_the_first_step_in(lab: Lab, mode: str) -> None:
    t = lab.wrap(Net())
    for _ in range(3):
        look(t, lab, mode)
    lab.train(t, num_microbatches=2)


@variants([*MODES], EVERY_WAY)
def evaluated_between_steps_in(lab: Lab, mode: str) -> None:
    t = lab.wrap(Net(), optimizer=adamw)
    for step in range(3):
        lab.train(t, steps=[step])
        t.model.eval()
        look(t, lab, mode)
        look(t, lab, mode)
        t.model.train()


@scenario(EVERY_WAY)
def evaluated_with_gradients_before_the_step(lab: Lab) -> None:
    """The forward keeps what its backward would need, and the step changes it."""
    t = lab.wrap(Net(), optimizer=adamw)
    for step in range(3):
        for batch in lab.batches(step):
            with t.microbatch(last=batch.last):
                t.backward(plain_loss(t.model, batch))
        lab.note(t.model(torch.ones(2, WIDTH)))
        lab.note(t.step())
        t.zero_grad()


@variants([*MODES], quick=["no_grad", "inference_mode"])
def evaluated_between_microbatches_in(lab: Lab, mode: str) -> None:
    t = lab.wrap(Net())
    for step in range(2):
        for batch in lab.batches(step, 2):
            with MODES[mode]():
                batch.note(t.model(torch.ones(2, WIDTH)))
            with t.microbatch(last=batch.last):
                t.backward(plain_loss(t.model, batch))
        lab.note(t.step())
        t.zero_grad()


@variants([*MODES], quick=["no_grad", "inference_mode"])
def evaluated_inside_a_microbatch_in(lab: Lab, mode: str) -> None:
    """Before the forward, between forward and backward, after backward."""
    t = lab.wrap(Net())
    for batch in lab.microbatches(t, steps=range(2)):
        for part in range(3):
            if part == 0:
                loss = torch.zeros(())
            elif part == 1:
                loss = plain_loss(t.model, batch)
            else:
                t.backward(loss)
            with MODES[mode]():
                batch.note(t.model(torch.ones(2, WIDTH)))


@variants(["direct", "gloo"])
def a_shorter_forward_between_backward_and_the_step_over(lab: Lab, transport: str) -> None:
    """What was gathered ahead for it, and not used, is of weights that the step changes."""
    t = lab.wrap(Shortened(), transport=transport, prefetch=1)
    for step in range(3):
        lab.one_backward(t, step)
        for t.model.depth in (3, 1, 3, 2):
            look(t, lab, "no_grad")
        t.model.depth = 1
        look(t, lab, "no_grad")
        lab.note(t.step())
        t.zero_grad()
        t.model.depth = 3
        look(t, lab, "no_grad")


@scenario(EVERY_WAY)
def evaluated_at_other_sizes(lab: Lab) -> None:
    """A single sample, an empty batch, a long one."""
    t = lab.wrap(Net())
    for step in range(2):
        lab.train(t, steps=[step])
        with torch.no_grad():
            for size in (1, 0, 9):
                lab.note(t.model(torch.ones(size, WIDTH)))


@scenario(EVERY_WAY, may_refuse=r"rank")
def evaluated_on_rank_0_alone(lab: Lab) -> None:
    """Only rank 0 looks, as logging code does; under ZeRO-3 it would wait for the others: refused, never a hang."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    if 0 in lab.ranks:
        with torch.no_grad():
            value = t.model(torch.ones(2, WIDTH))
            for batch in lab.batches(7):
                if batch.rank == 0:
                    batch.note(value)
    lab.train(t, steps=[1])


def next_words(model: nn.Module, words: int) -> Tensor:
    ids = torch.tensor([[1, 2]])
    with torch.no_grad():
        for _ in range(words):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids


@variants(["gathered", "plain"], EVERY_WAY)
def text_made(lab: Lab, how: str) -> None:
    """Greedy decoding before the first step and after each; inside the context and without it."""
    t = lab.wrap(Language())
    for step in range(3):
        if how == "gathered":
            with t.gathered():
                lab.note(next_words(t.model, 4))
        else:
            lab.note(next_words(t.model, 4))
        lab.train(t, next_word_loss, steps=[step])


@scenario(may_refuse=r"rank|gathered")
def text_made_of_other_lengths_on_each_rank(lab: Lab) -> None:
    """Inside the context no forward has to wait for another rank."""
    t = lab.wrap(Language())
    lab.train(t, next_word_loss, steps=[0])
    with t.gathered():
        for batch in lab.batches(5):
            batch.note(next_words(t.model, 2 + 3 * batch.rank))
    lab.train(t, next_word_loss, steps=[1])


@scenario(may_refuse=r"inside strategy\.gathered")
def a_context_around_whole_steps(lab: Lab) -> None:
    """Somebody enters `gathered` once, around the loop: weights inside are those after each step, or it is refused."""
    t = lab.wrap(Net())
    with t.gathered():
        for step in range(2):
            lab.one_backward(t, step)
            t.step()
            t.zero_grad()
            lab.note(t.model.layers[1].up.weight)


@scenario(EVERY_WAY, may_refuse=r"microbatch")
def a_training_forward_that_goes_nowhere(lab: Lab) -> None:
    """A forward with a graph outside of any microbatch, dropped; then training."""
    t = lab.wrap(Net())
    for step in range(2):
        t.model(torch.ones(2, WIDTH))
        lab.train(t, steps=[step])


@scenario(may_refuse=r"thread")
def forward_in_another_thread(lab: Lab) -> None:
    """A worker thread runs forward and backward, the main thread waits and steps."""
    t = lab.wrap(Net())
    with ThreadPoolExecutor(1) as pool:
        for step in range(3):
            for batch in lab.batches(step):

                def work(batch: Batch = batch) -> None:
                    with t.microbatch(last=True):
                        t.backward(plain_loss(t.model, batch))

                pool.submit(work).result()
            lab.note(t.step())
            t.zero_grad()
