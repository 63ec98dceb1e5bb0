"""Loops as users write them whose weights no module shows as they are: masters, freed parameters, buffers."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_world_size
from torch.distributed.nn.functional import all_gather
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.silent_loops import (
    VOCAB,
    Batch,
    Model,
    adamw,
    batch_of,
    loss_of,
    sum_and_count,
    unequal_batch,
)
from zeroexp.verify import Loop


def of_groups(model: Any, weights: dict[Any, Any] | None = None) -> torch.optim.Optimizer:
    """As most do: no decay for vectors, and gains apart. weights: what stands for each of the model's."""
    groups: list[list[Any]] = [[], [], []]
    for each in model.parameters():
        groups[(each.ndim < 2) + bool((each == 1).all())].append(weights[each] if weights else each)
    decays = [{"params": each, "weight_decay": 0.0} for each in groups]
    return torch.optim.AdamW([decays[0] | {"weight_decay": 0.1}, *decays[1:]], lr=1e-2)


def hidden_first(
    model: Any, weights: dict[Any, Any] | None = None, fused: bool = False
) -> list[torch.optim.Optimizer]:
    """As with Muon: hidden matrices have an optimizer of their own, and embeddings and vectors the other."""
    parts: list[list[Any]] = [[], []]
    for name, each in model.named_parameters():
        part = parts[not (name.startswith("blocks") and each.ndim == 2)]
        part.append(weights[each] if weights else each)
    return [torch.optim.SGD(parts[0], lr=0.1), torch.optim.AdamW(parts[1], lr=1e-2, fused=fused)]


def masters(
    copies_on: Sequence[int] = range(9),
    optimizer: Any = of_groups,
    overflows: bool = False,
    copied: bool = False,
) -> Loop:
    """A model in bf16 whose fp32 masters the optimizer alone holds, one for each weight.

    overflows: under a GradScaler, which skips the first step. copied: blocks begin as copies of one.
    """

    def train(model: nn.Module) -> Any:
        held = {each: nn.Parameter(each.detach().clone()) for each in model.parameters()}
        stepping = optimizer(model, held)
        every = stepping if isinstance(stepping, list) else [stepping]
        own: list[Any] = list(held.values())
        computing: list[Any] = list(model.to(torch.bfloat16).parameters())
        scaler, steps = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=overflows), count()

        def step(batches: Sequence[Batch]) -> None:
            for master in own:
                master.grad = torch.zeros_like(master)
            for batch in batches:
                loss = loss_of(model, batch) / len(batches) / dist.get_world_size()
                scaler.scale(loss).backward()
                for master, each in zip(own, computing, strict=True):
                    master.grad += each.grad
                    each.grad = None
            for master in own:
                dist.all_reduce(master.grad)
            if overflows and next(steps) == 0:
                own[0].grad += torch.inf
            for each in every:
                scaler.step(each)
            scaler.update()
            if dist.get_rank() in copies_on:
                for master, each in zip(own, computing, strict=True):
                    each.data.copy_(master)

        return step

    words: Any = {"loss": loss_of, "batch": batch_of, "dtype": torch.bfloat16}
    model = Model()
    if copied:
        model.blocks[1] = copy.deepcopy(model.blocks[0])
    return Loop(model=model, optimizer=optimizer, train=train, **words)


masters_of_copied_blocks = partial(masters, copied=True)
masters_of_two = partial(masters, optimizer=hidden_first)
# What its masters are has to be known from the step that is skipped.
masters_overflow = partial(masters, overflows=True)
# Rank 1 never copies its masters into the weights that compute.
masters_stay = partial(masters, [0])


def freed(scale: float = 1.0) -> Loop:
    """ZeRO-3 by hand: between steps a rank has its slice of one flat tensor, and no parameter."""

    def train(model: nn.Module) -> Any:
        size, rank = dist.get_world_size(), dist.get_rank()
        parameters: list[Any] = list(model.parameters())
        shapes, numels = [p.shape for p in parameters], [p.numel() for p in parameters]
        flat = torch.cat([p.detach().flatten() for p in parameters])
        share = -(-len(flat) // size)
        missing = share * size - len(flat)
        own = nn.Parameter(pad(flat, (0, missing))[rank * share :][:share].clone())
        optimizer = torch.optim.AdamW([own], lr=1e-2, weight_decay=0.1)

        def fill(parts: Sequence[Tensor]) -> None:
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.data, parameter.grad = part, None

        fill([torch.empty(0)] * len(parameters))

        def step(batches: Sequence[Batch]) -> None:
            whole = [torch.empty(share) for _ in range(size)]
            dist.all_gather(whole, own.detach())
            parts = torch.cat(whole).split([*numels, missing])
            fill([part.view(shape) for part, shape in zip(parts, shapes, strict=False)])
            for batch in batches:
                (scale * loss_of(model, batch) / len(batches) / size).backward()
            gradient: Any = torch.cat([p.grad.flatten() for p in parameters])
            gradient = pad(gradient, (0, missing))
            dist.all_reduce(gradient)
            own.grad = gradient[rank * share :][:share].clone()
            fill([torch.empty(0)] * len(parameters))
            optimizer.step()

        return step

    return Loop(model=Model(), loss=loss_of, batch=batch_of, optimizer=adamw, train=train)


freed_and_scaled = partial(freed, 1.001)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 5)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(values))))


def normed(rate: float = 1e-2) -> Loop:
    """BatchNorm, whose running statistics are buffers, under autocast."""

    def rated(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)

    def under_autocast(model: Any, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return of_values(model, batch)

    def of_values(model: Any, batch: Batch) -> Tensor:
        return cross_entropy(model(batch[0]).float(), batch[1])

    def draw(generator: torch.Generator) -> Batch:
        return torch.randn(8, 6, generator=generator), torch.randint(5, (8,), generator=generator)

    def train(model: nn.Module) -> Any:
        return plain_ddp(model, rated, under_autocast)

    words: Any = {"optimizer": adamw, "train": train, "dtype": torch.bfloat16}
    return Loop(model=Normed(), loss=of_values, batch=draw, **words)


rate_of_zero = partial(normed, 0.0)


def scheduled(warmup: int = 5) -> Loop:
    """A schedule, as the plain process has it: the rate of a step is that before the schedule's own step."""

    def of_steps(steps: int) -> Any:
        return lambda of: torch.optim.lr_scheduler.LambdaLR(of, lambda n: min(1.0, (n + 1) / steps))

    def train(model: nn.Module) -> Any:
        return plain_ddp(model, adamw, schedule=of_steps(warmup))

    words: Any = {"optimizer": adamw, "train": train, "scheduler": of_steps(5)}
    return Loop(model=Model(), loss=loss_of, batch=batch_of, **words)


scheduled_faster = partial(scheduled, 4)


class Gained(nn.Module):
    """A model with a weight of one element, and some of few."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = Model(), nn.Parameter(torch.ones(1))

    def forward(self, words: Tensor) -> Tensor:
        return self.inner(words) * self.gain


def of_two(model: nn.Module, rate: float = 5e-3, decay: float = 0.0) -> list[torch.optim.Optimizer]:
    """An optimizer for matrices, and one for the rest."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    rest = [each for each in model.parameters() if each.ndim < 2]
    return [
        torch.optim.AdamW(matrices, lr=1e-2, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=rate, weight_decay=decay),
    ]


def two(optimizers: Any = of_two, ranks_of_gain: float = 0.0) -> Loop:
    """ranks_of_gain: what the gain's gradient is divided by where it is not right; not summed if negative."""

    def train(model: nn.Module) -> Any:
        own = optimizers(model)

        def step(batches: Sequence[Batch]) -> None:
            for batch in batches:
                (loss_of(model, batch) / len(batches)).backward()
            for name, each in model.named_parameters():
                gradient: Any = each.grad
                is_off = bool(ranks_of_gain) and name == "gain"
                if not is_off or ranks_of_gain > 0:
                    dist.all_reduce(gradient)
                    gradient /= ranks_of_gain if is_off else dist.get_world_size()
            for each in own:
                each.step()
            model.zero_grad()

        return step

    words: Any = {"loss": loss_of, "batch": batch_of, "optimizer": of_two, "train": train}
    return Loop(model=Gained(), **words)


second_decays = partial(two, lambda model: of_two(model, decay=0.1))
second_is_first = partial(two, lambda model: of_two(model, rate=1e-2))
gain_steps_twice = partial(
    two, lambda model: [*of_two(model), torch.optim.AdamW([model.gain], lr=5e-3)]
)
gain_is_left_out = partial(two, ranks_of_gain=-1.0)
gain_is_summed = partial(two, ranks_of_gain=1.0)
gain_overflows = partial(two, ranks_of_gain=1e-45)
gain_is_zero = partial(two, ranks_of_gain=float("inf"))


def clipped(
    forgets: str = "", clip: Any = nn.utils.clip_grad_norm_, dtype: torch.dtype = torch.float32
) -> Loop:
    """forgets: `zero_grad`, or `step`, in the second step. dtype: of weights, and of what is clipped."""

    def train(model: nn.Module) -> Any:
        own, steps = adamw(model), count()

        def step(batches: Sequence[Batch]) -> None:
            for batch in batches:
                (loss_of(model, batch) / len(batches) / dist.get_world_size()).backward()
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            for each in gradients:
                dist.all_reduce(each)
            clip(model.parameters(), 0.1)
            if next(steps) != 1 or forgets != "step":
                own.step()
            if forgets != "zero_grad":
                own.zero_grad()
            else:  # nor counts what is left once for each rank
                for each in gradients:
                    each /= dist.get_world_size()

        return step

    words: Any = {"loss": loss_of, "batch": batch_of, "max_grad_norm": 0.1, "dtype": dtype}
    return Loop(model=Model().to(dtype), optimizer=adamw, train=train, **words)


clipped_in_bfloat16 = partial(clipped, dtype=torch.bfloat16)


def clipped_by_hand() -> Loop:
    """By the norm alone, to which torch adds 1e-6."""

    def clip(parameters: Iterable[Tensor], most: float) -> None:
        gradients = [each.grad for each in parameters if each.grad is not None]
        norm = torch.cat([each.flatten() for each in gradients]).norm()
        for each in gradients:
            each *= min(1.0, most / float(norm))

    return clipped(clip=clip)


keeps_clipped_gradients = partial(clipped, "zero_grad")
leaves_out_a_step = partial(clipped, "step")


def with_step(loop: Loop, step: Any) -> Loop:
    """A loop whose step is this one, of its model, its own step and microbatches."""
    train: Any = loop.train

    def changed(model: nn.Module) -> Any:
        wrapped, own = train(model)
        return wrapped, partial(step, model, own)

    loop.train = changed
    return loop


def batch_of_rank_0() -> Loop:
    """All ranks train on rank 0's first microbatch: on rank 0 alone this looks like a sum that was left out."""

    def step_on_copies(model: Any, step: Any, batches: Sequence[Batch]) -> None:
        for tensor in batches[0]:
            dist.broadcast(tensor, 0)
        step(batches)

    return with_step(scheduled(), step_on_copies)


def not_a_number() -> Loop:
    """One gradient overflows on its way on rank 1."""

    def overflow(model: Any, step: Any, batches: Sequence[Batch]) -> None:
        if dist.get_rank() == 1:
            model.get_parameter("head.weight").register_hook(lambda gradient: gradient * torch.inf)
        step(batches)

    return with_step(scheduled(), overflow)


def of_the_world() -> Loop:
    """As where a line of commands says what all ranks take together: they share it, and the rate is by their number."""
    assert os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    loop, ranks = scheduled(), dist.get_world_size()

    def rated(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3 * ranks)

    loop.scheduler, loop.optimizer, loop.microbatches = None, rated, 4 // ranks
    loop.train = lambda model: plain_ddp(model, rated)
    return loop


# Python's own generator begins elsewhere in each process.
TEXTS = torch.tensor([[random.randrange(VOCAB) for _ in range(6)] for _ in range(50)])


def of_python() -> Loop:
    """Texts of Python's own generator, a loader with workers, and an optimizer that keeps names."""

    def draw(generator: torch.Generator) -> Batch:
        texts = TEXTS[torch.randint(len(TEXTS), (3,), generator=generator)]
        return texts[:, :-1].contiguous(), texts[:, 1:].contiguous()

    def named(model: Any) -> torch.optim.Optimizer:
        group: Any = {"params": [*model.named_parameters()], "hook": lambda: None}
        return torch.optim.AdamW([group], lr=1e-2)

    def train(model: nn.Module) -> Any:
        wrapped, step = plain_ddp(model, named)
        load = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "fork"}
        return wrapped, lambda batches: step([*DataLoader(batches, **load)])

    words: Any = {"loss": loss_of, "batch": draw, "train": train}
    return Loop(model=Model(), optimizer=named, **words)


def of_python_stale() -> Loop:
    """Rank 1 forgets its update: what two optimizers call their weights is not the reason."""

    def forget(model: Any, step: Any, batches: Sequence[Batch]) -> None:
        kept = [each.detach().clone() for each in model.parameters()]
        step(batches)
        for each, before in zip(model.parameters(), kept, strict=True):
            each.data.copy_(before if dist.get_rank() else each)

    return with_step(of_python(), forget)


def plain_ddp(
    model: Any, optimizer: Any, loss: Any = loss_of, group: Any = None, schedule: Any = None
) -> Any:
    """schedule: made of what `optimizer` returns, one or several, and stepped behind it."""
    wrapped = DistributedDataParallel(model, process_group=group)
    own = optimizer(wrapped)
    rate = schedule(own) if schedule else None

    def step(batches: Sequence[Batch]) -> None:
        for index, batch in enumerate(batches):
            wrapped.require_backward_grad_sync = index == len(batches) - 1
            (loss(wrapped, batch) / len(batches)).backward()
        for each in own if isinstance(own, list) else [own]:
            each.step()
        if rate:
            rate.step()
        wrapped.zero_grad()

    return wrapped, step


class Turned(nn.Module):
    """Rotary positions as torchtitan keeps them: a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()
        self.register_buffer("turns", torch.polar(torch.ones(6, 6), torch.rand(6, 6)))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.inner.embed(words)
        pairs = (
            torch.view_as_complex(hidden.unflatten(-1, (6, 2)))
            * self.get_buffer("turns")[: words.shape[1]]
        )
        return self.inner.head(self.inner.blocks(torch.view_as_real(pairs).flatten(-2)))


def turned() -> Loop:
    words: Any = {"loss": loss_of, "batch": batch_of, "optimizer": adamw}
    return Loop(model=Turned(), train=lambda model: plain_ddp(model, adamw), **words)


def nothing(model: Any) -> None: ...


def spoilt(
    *,
    prepare: Any = nothing,
    each: Any = nothing,
    own: Any = nothing,
    summed: Any = nothing,
    loss: Any = loss_of,
    clip: float | None = 0.1,
    **words: Any,
) -> Loop:
    """What is done before all, behind each backward, to a rank's own gradients and to their sums."""

    def train(model: Any) -> Any:
        prepare(model)
        optimizer = adamw(model)

        def step(batches: Sequence[Batch]) -> None:
            for batch in batches:
                (loss(model, batch) / len(batches) / dist.get_world_size()).backward()
                each(model)
            own(model)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
            summed(model)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()

        return step

    meant: Any = {"model": Model(), "loss": loss_of, "batch": batch_of, "optimizer": adamw}
    return Loop(**meant | words, train=train, max_grad_norm=clip)


logs_its_own_norm = partial(
    spoilt, own=lambda model: nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
)
clips_each_microbatch = partial(
    spoilt, each=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)
)
freezes_and_clips = partial(spoilt, prepare=lambda model: model.embed.requires_grad_(False))


def trains_what_is_frozen(clip: float | None = None) -> Loop:
    return spoilt(model=Model(frozen=True), prepare=lambda model: model.requires_grad_(), clip=clip)


trains_what_is_frozen_and_clips = partial(trains_what_is_frozen, 0.1)


def decays_in_its_loss() -> Loop:
    def decayed(model: Any, batch: Batch) -> Tensor:
        return loss_of(model, batch) + 1e-3 * sum(p.square().sum() for p in model.parameters())

    return spoilt(loss=decayed)


def means_and_a_zero() -> Loop:
    """A mean of means, and beside it a gain without a gradient."""
    words: Any = {"loss": sum_and_count, "batch": unequal_batch}
    loop = spoilt(summed=lambda model: model.blocks[0].norm.weight.grad.zero_(), clip=None)
    loop.loss, loop.batch = words["loss"], words["batch"]
    return loop


def means_of_nearly_as_many() -> Loop:
    def nearly(generator: torch.Generator) -> Batch:
        text = torch.randint(VOCAB, (9, 7), generator=generator)
        text[0, -1] = text[0, -1] if torch.rand((), generator=generator) < 0.5 else -100
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    loop = spoilt(clip=None, batch=nearly)
    loop.loss = sum_and_count
    return loop


def unscaled_once_too_often() -> Loop:
    def unscale(model: Any) -> None:
        for parameter in model.parameters():
            parameter.grad *= 2.0**-40

    return spoilt(summed=unscale, clip=None)


def schedule_of_one() -> Loop:
    """Of two optimizers one has a schedule."""

    def ramp(optimizer: Any) -> Any:
        if optimizer.param_groups[0]["weight_decay"]:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
        return None

    def train(model: nn.Module) -> Any:
        return plain_ddp(model, of_two, schedule=lambda own: ramp(own[0]))

    words: Any = {"optimizer": of_two, "scheduler": ramp, "train": train}
    return Loop(model=Model(), loss=loss_of, batch=batch_of, **words)


def sums_in_pairs() -> Loop:
    """HSDP without the sum between replicas: ranks 0 and 1 train together, and 2 and 3."""

    def train(model: nn.Module) -> Any:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        return plain_ddp(model, adamw, group=pairs[dist.get_rank() // 2])

    return Loop(model=Model(), loss=loss_of, batch=batch_of, optimizer=adamw, train=train)


class Summing(torch.optim.AdamW):
    """As Horovod's: gradients of ranks are summed inside of the step."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad)
        return super().step(closure)


class SummingSGD(torch.optim.SGD):
    """Of `share` of each rank's gradient."""

    def __init__(self, model: Any, share: Any = lambda: 1.0, group: Any = None) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.share, self.group = share, group

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad *= self.share()
        return super().step(closure)


class Centralizing(torch.optim.AdamW):
    """Its rule changes the gradients before torch's own, of the ranks as of the plain process."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim == 2:
                parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
        return super().step(closure)


def of_ddp(loss: Any, make: Any) -> Loop:
    words: Any = {"optimizer": make, "train": lambda model: plain_ddp(model, make, loss)}
    return Loop(model=Model(), loss=loss, batch=batch_of, **words)


centralizes = partial(of_ddp, loss_of, lambda model: Centralizing(model.parameters(), lr=1e-2))


def by_all_labels(num_ranks: Any) -> Any:
    """A sum over labels that is divided by all ranks' labels, and multiplied by what is said to be their number."""

    def loss(model: Any, batch: Batch) -> Tensor:
        words, targets = batch
        number = (targets >= 0).sum().float()
        dist.all_reduce(number)
        summed = cross_entropy(model(words).flatten(0, 1), targets.flatten(), reduction="sum")
        return summed / number * num_ranks()

    return loss


# DDP takes the mean over ranks of a sum that is divided by all ranks' labels.
counts_labels_of_all_ranks = partial(of_ddp, by_all_labels(lambda: dist.get_world_size()), adamw)
counts_by_the_environment = partial(
    of_ddp, by_all_labels(lambda: int(os.environ["WORLD_SIZE"])), adamw
)
counts_by_an_import = partial(of_ddp, by_all_labels(get_world_size), adamw)


def counts_by_a_group() -> Loop:
    return of_ddp(by_all_labels(lambda: dist.GroupMember.WORLD.size()), adamw)


def counts_as_it_was_made() -> Loop:
    """As accelerate's `num_processes`."""
    ranks = dist.get_world_size()
    return of_ddp(by_all_labels(lambda: ranks), adamw)


def counts_and_shares() -> Loop:
    """Ranks share rows, so that one process has other microbatches and nothing to compare the loss with."""

    def share(generator: torch.Generator) -> Batch:
        text = torch.randint(VOCAB, (6 // get_world_size(), 7), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    loop = counts_by_an_import()
    loop.batch = share
    return loop


def counts_and_sums() -> Loop:
    """Gradients are summed, for which the loss that is meant multiplies by nothing."""
    loop = spoilt(loss=by_all_labels(get_world_size), clip=None)
    loop.loss = by_all_labels(lambda: 1)
    return loop


# Gradients are a mean over ranks, and nobody multiplies.
counts_and_takes_a_mean = partial(of_ddp, by_all_labels(lambda: 1), adamw)


def counts_unequal_labels() -> Loop:
    """A right loop; the plain process knows no other rank's number of labels."""
    loop = counts_labels_of_all_ranks()
    loop.batch = unequal_batch
    return loop


def means_beside_unequal_labels() -> Loop:
    """A wrong one of the same loss: each rank takes the mean over its own labels."""
    loop = of_ddp(loss_of, adamw)
    loop.loss, loop.batch = by_all_labels(get_world_size), unequal_batch
    return loop


def gathers_with_gradients() -> Loop:
    """Wrong by a factor, beside a loss whose backward exchanges gradients."""

    def gathered(model: Any, batch: Batch) -> Tensor:
        return torch.stack([*all_gather(loss_of(model, batch))]).mean()

    loop = of_ddp(lambda model, batch: 1.5 * gathered(model, batch), adamw)
    loop.loss = gathered
    return loop


def coalesces_its_counts() -> Loop:
    def loss(model: Any, batch: Batch) -> Tensor:
        numbers = [torch.ones(1), torch.ones(1)]
        dist.all_reduce_coalesced(numbers)
        return loss_of(model, batch) * numbers[0]

    return of_ddp(loss, adamw)


def rounds_all_away() -> Loop:
    """Two losses of which rounding is all that is left."""

    def loss(model: Any, batch: Batch) -> Tensor:
        return (1 + 3e-7) * loss_of(model, batch) - loss_of(model, batch)

    return of_ddp(loss, adamw)


def sums_in_a_group_of_its_own() -> Loop:
    group = dist.new_group(backend="gloo")

    def summed(model: Any) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size()

    return spoilt(summed=summed)


def of_an_optimizer(make: Any, plain: Any = adamw, num_ranks: Any = get_world_size) -> Loop:
    def train(model: nn.Module) -> Any:
        optimizer = make(model)

        def step(batches: Sequence[Batch]) -> None:
            for batch in batches:
                (loss_of(model, batch) / len(batches) / num_ranks()).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return Loop(model=Model(), loss=loss_of, batch=batch_of, optimizer=plain, train=train)


sums_in_its_step = partial(
    of_an_optimizer, lambda model: Summing(model.parameters(), lr=1e-2, weight_decay=0.1)
)
# The plain optimizer is the same, and sums too: what is whole already.
sums_in_both_steps = partial(of_an_optimizer, SummingSGD, SummingSGD)


def takes_means_in_both_steps() -> Loop:
    def make(model: Any) -> torch.optim.Optimizer:
        return SummingSGD(model, lambda: 1 / get_world_size())

    return of_an_optimizer(make, make, lambda: 1)


def takes_means_by_a_number_that_it_keeps() -> Loop:
    def make(model: Any) -> torch.optim.Optimizer:
        ranks = get_world_size()
        return SummingSGD(model, lambda: 1 / ranks)

    return of_an_optimizer(make, make, lambda: 1)


def sums_in_a_group_that_it_keeps() -> Loop:
    def make(model: Any) -> torch.optim.Optimizer:
        return SummingSGD(model, group=dist.group.WORLD)

    return of_an_optimizer(make, make)


def shards_both_optimizers() -> Loop:
    def make(model: Any) -> torch.optim.Optimizer:
        words: Any = {"optimizer_class": torch.optim.AdamW, "lr": 1e-2}
        return ZeroRedundancyOptimizer(model.parameters(), **words)

    return of_ddp(loss_of, make)


sums_before_and_in_both_steps = partial(of_ddp, loss_of, SummingSGD)


def clips_in_a_hook() -> Loop:
    def clipping(model: Any) -> torch.optim.Optimizer:
        def clip(*_: Any) -> None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        optimizer = adamw(model)
        optimizer.register_step_pre_hook(clip)
        return optimizer

    loop = of_an_optimizer(clipping)
    loop.max_grad_norm = 0.1
    return loop


def ramp(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 4))


def overflows(
    scale: float = 2.0**127, moved: float = 0.0, goes_on: int = 1, make: Any = adamw
) -> Loop:
    """Its first step overflows float32, by which GradScaler finds its scale.

    moved: what weights gain in it. goes_on: steps of the schedule in it.
    """

    def train(model: nn.Module) -> Any:
        wrapped, own = DistributedDataParallel(model), make(model)
        schedule = ramp(own)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=2.0**-100)

        def step(batches: Sequence[Batch]) -> None:
            for batch in batches:
                scaler.scale(1e3 * loss_of(wrapped, batch) / len(batches)).backward()
            scaler.step(own)
            is_first = scaler.get_scale() == scale
            if is_first:
                model.get_parameter("embed.weight").data += moved
            scaler.update()
            for _ in range(goes_on if is_first else 1):
                schedule.step()
            own.zero_grad()

        return wrapped, step

    def scaled(model: Any, batch: Batch) -> Tensor:
        return 1e3 * loss_of(model, batch)

    words: Any = {"optimizer": make, "train": train, "scheduler": ramp}
    return Loop(model=Model(), loss=scaled, batch=batch_of, **words)


moves_as_it_overflows = partial(overflows, moved=1e-3)
# A step that is skipped is no step without gradients.
overflows_for_a_rule_of_its_own = partial(
    overflows, make=lambda model: Centralizing(model.parameters(), lr=1e-2)
)
# As accelerate's schedule.
waits_as_it_overflows = partial(overflows, goes_on=0)
runs_ahead_as_it_overflows = partial(overflows, goes_on=2)


def one_overflows(
    moved: str = "",
    by: float = 0.0,
    clip: float | None = None,
    fused: bool = False,
    ranks: Sequence[int] = range(9),
    overflowing: Sequence[int] = (1,),
    scheduler: Any = None,
) -> Loop:
    """Of two optimizers under one GradScaler one overflows in the second step, on these ranks.

    moved: a weight that gains in it, and by how much. scheduler: of each optimizer, and waits with it.
    """

    def train(model: nn.Module) -> Any:
        wrapped, own, steps = (
            DistributedDataParallel(model),
            hidden_first(model, fused=fused),
            count(),
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        schedules = [scheduler(each) for each in own if scheduler]

        def step(batches: Sequence[Batch]) -> None:
            for batch in batches:
                scaler.scale(loss_of(wrapped, batch) / len(batches)).backward()
            is_second = next(steps) in overflowing
            if is_second and dist.get_rank() in ranks:
                gradient: Any = model.get_parameter("embed.weight").grad
                gradient[0, 0] = torch.inf
            for each in own if clip else ():
                scaler.unscale_(each)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for each in own:
                scaler.step(each)
            if is_second and moved:
                model.get_parameter(moved).data += by
            scaler.update()
            for schedule in schedules[:1] if is_second else schedules:
                schedule.step()
            wrapped.zero_grad()

        return wrapped, step

    words: Any = {"optimizer": hidden_first, "train": train, "max_grad_norm": clip}
    words["scheduler"] = scheduler
    return Loop(model=Model(), loss=loss_of, batch=batch_of, **words)


# By an infinite norm, so that the other optimizer has zeros.
one_overflows_and_is_clipped = partial(one_overflows, clip=0.1)
one_overflows_in_a_fused_step = partial(one_overflows, fused=True)
# By less than the rounding of an update.
one_overflows_and_moves = partial(one_overflows, "embed.weight", 1e-7)
one_overflows_and_another_moves = partial(one_overflows, "blocks.0.up.weight", 1e-3)
# As each of accelerate's schedules asks its own optimizer.
one_overflows_and_its_schedule_waits = partial(one_overflows, scheduler=ramp)
one_always_overflows = partial(one_overflows, overflowing=range(9))
one_overflows_on_one_rank = partial(one_overflows, ranks=[1])


@dataclass
class Kept:
    """A microbatch with a type, a conjugated view, and a field that nobody sets."""

    words: Tensor
    labels: Tensor
    turned: Tensor
    kind: Any = Batch
    cached: Tensor = field(init=False)


def of_a_dataclass() -> Loop:
    """Clipped by values that none has, and by position."""

    def draw(generator: torch.Generator) -> Kept:
        turned = torch.randn(2, generator=generator, dtype=torch.complex64).conj()
        return Kept(*batch_of(generator), turned, Kept)

    def loss(model: Any, batch: Kept) -> Tensor:
        return loss_of(model, (batch.words, batch.labels))

    def clip(model: Any) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 99.0, True)

    meant = spoilt(loss=loss, summed=clip, clip=None, batch=draw)
    meant.loss = loss
    return meant
