"""Loops with one fault each, over DDP, FSDP2 and ZeRO written by hand, as people write them.

`FAULTS` says by which word `zeroexp verify` has to name each, and on how many ranks it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.verify.loops import Batch, Model, adamw, batch_of, loss_of
from zeroexp.verify import Loop


def loop(train: Callable[[Any], Any], **words: Any) -> Loop:
    meant = {"loss": loss_of, "batch": batch_of, "optimizer": adamw, **words}
    return Loop(**{"model": Model(), "train": train, **meant})


def shard(model: Model) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


class FlatZero:
    """ZeRO-1 by hand: AdamW on this rank's slice of one flat copy of all weights."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.parameters = list(model.parameters())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.numel = sum(p.numel() for p in self.parameters)
        self.length = -(-self.numel // self.size)  # padded
        whole = self.flat([p.detach() for p in self.parameters])
        self.mine = (
            whole[self.rank * self.length :][: self.length].to(dtype).clone().requires_grad_()
        )
        self.optimizer = torch.optim.AdamW([self.mine], lr=1e-2, weight_decay=0.1)

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        padding = torch.zeros(self.length * self.size - self.numel)
        return torch.cat([*(each.flatten() for each in tensors), padding])

    def reduced(self) -> Tensor:
        gradient = self.flat([p.grad for p in self.parameters if p.grad is not None])
        dist.all_reduce(gradient)
        return gradient / self.size

    def step(self, gradient: Tensor) -> None:
        self.mine.grad = gradient[self.rank * self.length :][: self.length].to(self.mine.dtype)
        self.optimizer.step()
        pieces = [torch.empty(self.length) for _ in range(self.size)]
        dist.all_gather(pieces, self.mine.detach().float())
        self.publish(torch.cat(pieces))
        for parameter in self.parameters:
            parameter.grad = None

    def publish(self, whole: Tensor) -> None:
        with torch.no_grad():
            for parameter, values in zip(
                self.parameters,
                whole[: self.numel].split([p.numel() for p in self.parameters]),
                strict=True,
            ):
                parameter.copy_(values.view_as(parameter))


def flat_zero(
    model: Model,
    *,
    change: Callable[[FlatZero, Tensor], Tensor] = lambda zero, gradient: gradient,
    make: Callable[[Model], FlatZero] = FlatZero,
) -> Any:
    zero = make(model)

    def step(batches: Sequence[Batch]) -> None:
        for batch in batches:
            (loss_of(model, batch) / len(batches)).backward()
        zero.step(change(zero, zero.reduced()))

    return step


def zero_right() -> Loop:
    return loop(flat_zero)


def zero_sum_for_mean() -> Loop:
    return loop(lambda model: flat_zero(model, change=lambda zero, gradient: gradient * zero.size))


def zero_mean_for_sum() -> Loop:
    """The loss is divided by the ranks already."""
    return loop(lambda model: flat_zero(model, change=lambda zero, gradient: gradient / zero.size))


def zero_no_sum() -> Loop:
    class NoSum(FlatZero):
        def reduced(self) -> Tensor:
            return self.flat([p.grad for p in self.parameters if p.grad is not None])

    return loop(lambda model: flat_zero(model, make=NoSum))


def zero_drops_the_remainder() -> Loop:
    """Elements that do not fill a whole share belong to nobody."""

    class Floor(FlatZero):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            self.length = self.numel // self.size
            mine = self.mine.detach()
            whole = torch.cat([p.detach().flatten() for p in self.parameters])
            mine = whole[self.rank * self.length :][: self.length].clone().requires_grad_()
            self.mine, self.optimizer = mine, torch.optim.AdamW([mine], lr=1e-2, weight_decay=0.1)

        def flat(self, tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat([each.flatten() for each in tensors])

        def publish(self, whole: Tensor) -> None:
            old = torch.cat([p.detach().flatten() for p in self.parameters])
            super().publish(torch.cat([whole, old[len(whole) :]]))

    return loop(lambda model: flat_zero(model, make=Floor), model=Model(13))


def zero_low_master() -> Loop:
    return loop(lambda model: flat_zero(model, make=lambda m: FlatZero(m, torch.bfloat16)))


def zero_stale() -> Loop:
    """Only rank 0 copies what all have gathered into its model."""

    class Stale(FlatZero):
        def publish(self, whole: Tensor) -> None:
            if self.rank == 0:
                super().publish(whole)

    return loop(lambda model: flat_zero(model, make=Stale))


def ddp(model: nn.Module, of: Callable[..., None], **words: Any) -> Any:
    wrapped = DistributedDataParallel(model, **words)
    optimizer = adamw(model)
    return wrapped, lambda batches: of(wrapped, optimizer, batches)


def ddp_not_divided() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for batch in batches:
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return loop(lambda model: ddp(model, step), microbatches=3)


def ddp_no_sync_always() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        with model.no_sync():
            for batch in batches:
                (loss_of(model, batch) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return loop(lambda model: ddp(model, step))


def ddp_zeroed_between() -> Loop:
    """zero_grad() stands in the wrong loop: only the last microbatch is left."""

    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            (loss_of(model, batch) / len(batches)).backward()
        optimizer.step()

    return loop(lambda model: ddp(model, step))


def ddp_steps_each_microbatch() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for batch in batches:
            (loss_of(model, batch) / len(batches)).backward()
            optimizer.step()
        optimizer.zero_grad()

    return loop(lambda model: ddp(model, step))


def ddp_batch_late() -> Loop:
    """What was fetched ahead is used one step later."""
    ahead: list[Any] = []

    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        ahead.append(batches)
        used = ahead[0] if len(ahead) < 2 else ahead[-2]
        for batch in used:
            (loss_of(model, batch) / len(used)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return loop(lambda model: ddp(model, step))


def ddp_one_ranks_data() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for words, labels in batches:
            words, labels = words.contiguous(), labels.contiguous()
            dist.broadcast(words, 0)
            dist.broadcast(labels, 0)
            (loss_of(model, (words, labels)) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return loop(lambda model: ddp(model, step))


def ddp_compressed() -> Loop:
    def halves(_, bucket):  # torch reads annotations here
        sent = (bucket.buffer() / dist.get_world_size()).bfloat16()
        reduced = dist.all_reduce(sent, async_op=True).get_future()
        return reduced.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    def train(model: nn.Module) -> Any:
        wrapped, step = ddp(model, whole_step)
        wrapped.register_comm_hook(None, halves)
        return wrapped, step

    return loop(train, microbatches=1)


def ddp_autocast() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch)
            (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return loop(lambda model: ddp(model, step))


def fsdp2(
    model: Any, of: Callable[..., None], make: Callable[[Any], Any] = adamw, *, first: bool = False
) -> Any:
    before = make(model) if first else None
    shard(model)
    optimizer = before or make(model)
    return lambda batches: of(model, optimizer, batches)


def whole_step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def fsdp2_optimizer_first() -> Loop:
    return loop(lambda model: fsdp2(model, whole_step, first=True))


def fsdp2_other_optimizer() -> Loop:
    """Adam's weight decay is another thing than AdamW's."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)

    return loop(lambda model: fsdp2(model, whole_step, make))


def fsdp2_local_norm() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for batch in batches:
            (loss_of(model, batch) / len(batches)).backward()
        gradients = [p.grad.to_local() for p in model.parameters()]
        norm = torch.stack([each.norm() for each in gradients]).norm()
        for each in gradients:
            each.mul_((0.3 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()

    return loop(lambda model: fsdp2(model, step), max_grad_norm=0.3)


def fsdp2_not_clipped() -> Loop:
    return loop(lambda model: fsdp2(model, whole_step), max_grad_norm=0.3)


def fsdp2_norm_of_sum() -> Loop:
    """The norm is summed over ranks that have summed it already."""

    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for batch in batches:
            (loss_of(model, batch) / len(batches)).backward()
        square = torch.stack([p.grad.full_tensor().norm() ** 2 for p in model.parameters()]).sum()
        dist.all_reduce(square)
        for parameter in model.parameters():
            parameter.grad.mul_(0.3 / (float(square) ** 0.5 + 1e-6))
        optimizer.step()
        optimizer.zero_grad()

    return loop(lambda model: fsdp2(model, step), max_grad_norm=0.3)


def fsdp2_seeded_by_rank() -> Loop:
    torch.manual_seed(dist.get_rank())
    return loop(lambda model: fsdp2(model, whole_step), model=Model())


def fsdp2_tied_detached() -> Loop:
    """The head's use of a tied weight gives no gradient."""

    def train(model: Any) -> Any:
        shard(model)
        optimizer = adamw(model)
        forward = model.head.forward
        del forward
        model.head.forward = lambda hidden: hidden @ model.head.weight.detach().T
        return lambda batches: whole_step(model, optimizer, batches)

    return loop(train, model=Model(tied=True))


def fsdp2_mean_of_means() -> Loop:
    """Each microbatch weighs the same, however many labels it has."""

    def unequal(generator: torch.Generator) -> Batch:
        words, labels = batch_of(generator)
        kept = torch.rand(labels.shape, generator=generator) < torch.rand((), generator=generator)
        kept[0, 0] = True
        return words, torch.where(kept, labels, -100)

    def meant(model: Any, batch: Batch) -> Any:
        words, labels = batch
        logits = model(words).flatten(0, 1)
        return cross_entropy(logits, labels.flatten(), reduction="sum"), (labels >= 0).sum()

    return loop(lambda model: fsdp2(model, whole_step), loss=meant, batch=unequal)


# name: (word, ranks)
FAULTS = {
    "zero_sum_for_mean": ("scale", 2),
    "zero_mean_for_sum": ("scale", 3),
    "zero_no_sum": ("no sum", 2),
    "zero_drops_the_remainder": ("rows", 3),
    "zero_low_master": ("dtype", 2),
    "zero_stale": ("stale", 2),
    "ddp_not_divided": ("scale", 2),
    "ddp_no_sync_always": ("no sum", 2),
    "ddp_zeroed_between": ("microbatches", 2),
    "ddp_steps_each_microbatch": ("optimizer", 2),
    "ddp_batch_late": ("data", 2),
    "ddp_one_ranks_data": ("data", 2),
    "ddp_compressed": ("dtype", 2),
    "ddp_autocast": ("dtype", 2),
    "fsdp2_optimizer_first": ("frozen", 2),
    "fsdp2_other_optimizer": ("optimizer", 2),
    "fsdp2_local_norm": ("norm", 2),
    "fsdp2_not_clipped": ("norm", 2),
    "fsdp2_norm_of_sum": ("norm", 2),
    "fsdp2_seeded_by_rank": ("start", 2),
    "fsdp2_tied_detached": ("tied", 2),
    "fsdp2_mean_of_means": ("mean of means", 2),
}
