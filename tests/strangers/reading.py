"""Who looks at weights between steps, and by which road."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.strangers.lab import (
    EVERY,
    EVERY_WAY,
    GATHERED,
    SAMPLES,
    WIDTH,
    Batch,
    Lab,
    Setting,
    adamw,
    each_of,
    plain_loss,
    scenario,
    variants,
)
from tests.strangers.models import Net

ROADS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda p: p.sum(),
    "data": lambda p: p.data.sum(),
    "numpy": lambda p: p.detach().numpy().sum(),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p.flatten()[0].item(),
    "iterated": lambda p: [row.sum() for row in p],
    "format": lambda p: f"{p}",
    "added": lambda p: p + 1,
    "equal": lambda p: torch.equal(p, p),
    "cat": lambda p: torch.cat([p, p]),
    "linear": lambda p: nn.functional.linear(torch.ones(p.shape[-1]), p),
    "foreach": lambda p: torch._foreach_norm([p]),
    "deepcopy": lambda p: copy.deepcopy(p).sum(),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)).sum(),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "bool": lambda p: bool((p == p).all()),
    "storage": lambda p: bytes(p.detach().untyped_storage())[:4],
    "array": lambda p: memoryview(p.detach().contiguous().numpy()),
    "to_parameter": lambda p: nn.Parameter(p.data).sum(),
    "under_inference_mode": lambda p: torch.inference_mode()(lambda: p.norm())(),
    "as_strided": lambda p: p.as_strided((2,), (1,)).sum(),
    "vmap": lambda p: torch.vmap(lambda row: row.sum())(p),
    "set_item": lambda p: torch.zeros(p.shape).__setitem__(slice(None), p),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).sum(),
}


# A method, an operator, what lists or writes values, what takes a list, what goes past torch's functions.
@variants([EVERY, *ROADS], [Setting("zero1"), Setting("zero3")], quick=[EVERY])
def read_by(lab: Lab, road: str) -> None:
    """A freed weight raises on every road, and names itself; a weight that is whole is read."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    weight = t.model.layers[1].up.weight
    for each in each_of([name for name in ROADS if name != "vmap"], road):
        before = len(lab.notes)
        if lab.frees:
            with lab.raises(rf"^(?=.*layers\.1\.up\.weight){GATHERED[1:]}"):
                ROADS[each](weight)
        else:
            note_tensor(lab, ROADS[each](weight))
        with t.gathered():
            note_tensor(lab, ROADS[each](weight))
        if lab.frees:
            lab.notes.insert(before, lab.notes[-1])  # what the first look would have told
    lab.train(t, steps=[1])


@scenario(refused={"zero3": "read as a NumPy array"})
def read_as_numpy_in_forward(lab: Lab) -> None:
    """PyTorch never frees memory that NumPy has seen."""
    t, seen = lab.wrap(Net()), list[float]()
    block = t.model.layers[1]
    block.up.register_forward_hook(
        lambda up, _args, _out: seen.append(up.weight.detach().numpy().sum())
    )

    def loss(model: Any, batch: Batch) -> Tensor:
        value = plain_loss(model, batch)
        batch.note(seen.pop())
        return value

    lab.train(t, loss)


@scenario()
def a_model_that_is_printed(lab: Lab) -> None:
    """Freed weights are printed as freed: a debugger must not stop, and must not show what is not there."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    assert "Linear" in repr(t.model)
    words = repr(t.model.layers[1].up.weight)
    assert ("freed" if lab.frees else "-0." if "-0." in words else "0.") in words
    with t.gathered():
        lab.note(repr(t.model.layers[1].up.weight))


def note_tensor(lab: Lab, value: Any) -> None:
    lab.note(value if isinstance(value, Tensor) else None)


@scenario(EVERY_WAY)
def what_a_weight_tells_at_rest(lab: Lab) -> None:
    """Shape and dtype are there, whoever holds the values."""
    t = lab.wrap(Net())
    for step in range(2):
        for name, p in t.model.named_parameters():
            lab.note((name, tuple(p.shape), p.size(), p.ndim, p.dim(), p.numel(), len(p)))
            lab.note((p.dtype, p.device.type, p.requires_grad, p.is_leaf, p.element_size()))
            lab.note((p.nelement(), p.is_floating_point(), p.stride(), p.is_contiguous()))
            lab.note((p.nbytes, p.retain_grad()))  # leaves retain theirs anyway
        lab.note(sum(p.numel() for p in t.model.parameters() if p.requires_grad))
        lab.train(t, steps=[step])


@scenario(may_refuse={"zero3": GATHERED})
def new_tensors_like_a_weight(lab: Lab) -> None:
    """Shape and dtype are all it takes."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    for p in t.model.parameters():
        for made in (torch.zeros_like(p), p.new_zeros(2), torch.ones_like(p), p.new_ones(p.shape)):
            lab.note(made)
    lab.train(t, steps=[1])


@scenario(EVERY_WAY)
def weights_read_in_the_context(lab: Lab) -> None:
    """Before the first step, between steps, between microbatches, at the end: never one step old."""
    t = lab.wrap(Net(), optimizer=adamw)

    def look() -> None:
        with t.gathered():
            for p in t.model.parameters():
                lab.note(p)

    look()
    for step in range(2):
        for batch in lab.batches(step, 2):
            if batch.rank == lab.ranks[0]:
                look()
            with t.microbatch(last=batch.last):
                t.backward(plain_loss(t.model, batch))
        look()
        t.step()
        look()
        t.zero_grad()
    look()


@scenario(refused={"zero3": GATHERED})
def weights_read_right_after_the_step(lab: Lab) -> None:
    """Nothing waits between the step and the look."""
    t = lab.wrap(Net())
    for step in range(3):
        lab.one_backward(t, step)
        t.step()
        for p in t.model.parameters():
            lab.note(p.data.sum())
            lab.note(p)
        t.zero_grad()


@scenario()
def a_look_between_forward_and_backward(lab: Lab) -> None:
    """The context opens and closes while activations wait for backward."""
    t = lab.wrap(Net())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = plain_loss(model, batch)
        with t.gathered(), torch.no_grad():
            batch.note(model.layers[0].up.weight.norm())
        return value

    lab.train(t, loss, num_microbatches=2)


@scenario()
def contexts_in_each_other(lab: Lab) -> None:
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    with t.gathered():
        with t.gathered():
            lab.note(t.model.layers[0].up.weight.norm())
        lab.note(t.model.layers[1].up.weight.norm())
    lab.train(t, steps=[1])


@scenario()
def an_error_inside_the_context(lab: Lab) -> None:
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    try:
        with t.gathered():
            raise KeyError("somebody's own")
    except KeyError:
        pass
    lab.train(t, steps=[1])
    if lab.frees:
        with lab.raises(GATHERED):
            t.model.layers[0].up.weight.sum()


# -- the whole model: state_dict, copies, averages -----------------------------------------------------


@scenario(EVERY_WAY, refused={"zero3": GATHERED})
def state_dict_of_the_model(lab: Lab) -> None:
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    for name, value in t.model.state_dict().items():
        lab.note(name)
        lab.note(value)
    lab.train(t, steps=[1])


@scenario(EVERY_WAY)
def state_dict_in_the_context_saved_and_loaded(lab: Lab) -> None:
    """`torch.save` inside; what was written goes into a fresh model that is nobody's."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0, 1])
    file = io.BytesIO()
    with t.gathered():
        torch.save(t.model.state_dict(), file)
    file.seek(0)
    fresh = Net(seed=5)
    fresh.load_state_dict(torch.load(file))
    lab.note(fresh(torch.ones(2, WIDTH)))
    lab.train(t, steps=[2])


@scenario(refused={"zero3": GATHERED})
def a_deep_copy_outside_of_the_context(lab: Lab) -> None:
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    lab.note(copy.deepcopy(t.model)(torch.ones(2, WIDTH)))
    lab.train(t, steps=[1])


@scenario(EVERY_WAY)
def a_deep_copy_is_a_model_of_its_own(lab: Lab) -> None:
    """A teacher: the copy made inside the context stays what it was, and runs at any time."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    with t.gathered():
        teacher = copy.deepcopy(t.model).requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            target = teacher(batch.x)
        batch.note(target)
        return batch.loss(model(batch.x), target + 0.1 * batch.y)

    lab.train(t, loss, steps=[1, 2])
    lab.note(teacher(torch.ones(2, WIDTH)))


@scenario()
def a_copy_that_trains_by_itself(lab: Lab) -> None:
    """Its gradients are autograd's own: it has nothing to do with the engine any more."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    with t.gathered():
        other = copy.deepcopy(t.model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        other(torch.ones(SAMPLES, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    lab.train(t, steps=[1])
    with torch.no_grad():
        lab.note(other(torch.ones(2, WIDTH)))


@scenario(EVERY_WAY)
def averaged_weights(lab: Lab) -> None:
    """torch's own moving average, made before wrapping and fed inside the context."""
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7)
    )
    t = lab.wrap(model)
    for step in range(3):
        lab.train(t, steps=[step])
        with t.gathered():
            average.update_parameters(t.model)
    with torch.no_grad():
        lab.note(average(torch.ones(2, WIDTH)))


# -- views that outlive the moment ---------------------------------------------------------------------

OUTLIVES = r"view|outlive|still|alive|kept|gathered"


@scenario(refused={"zero3": OUTLIVES})
def a_view_kept_from_the_context(lab: Lab) -> None:
    """`kept` looks into memory that other blocks use next: its reader would see their values."""
    t = lab.wrap(Net())
    lab.train(t, steps=[0])
    with t.gathered():
        kept = t.model.layers[0].up.weight.detach().view(-1)
    lab.train(t, steps=[1])
    with torch.no_grad():
        lab.note(kept.clone())
