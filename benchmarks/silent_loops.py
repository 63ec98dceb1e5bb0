"""Training loops with one silent bug each, over DDP, FSDP2 and ZeRO by hand, for `python -m benchmarks.silent_bugs`.

Most were published: the loop does what its thread tells of, as small as it shows. All of them train, and their loss
falls. `BUGS` says what each was, and by which word `zeroexp verify` has to name it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from zeroexp.verify import Loop

VOCAB, WIDTH, LENGTH = 37, 12, 6  # no world size cuts all of its weights evenly
MAX_NORM = 0.3  # less than the norm of these gradients
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Model(nn.Module):
    """A small language model."""

    def __init__(self, width: int = WIDTH, *, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            next(self.blocks.parameters()).requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(words)))


def loss_of(model: Any, batch: Batch) -> Tensor:
    words, labels = batch
    return cross_entropy(model(words).flatten(0, 1).float(), labels.flatten())


def sum_and_count(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    count = (batch[1] >= 0).sum()
    return loss_of(model, batch) * count, count


def batch_of(generator: torch.Generator) -> Batch:
    text = torch.randint(VOCAB, (3, LENGTH + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def unequal_batch(generator: torch.Generator) -> Batch:
    """A batch of which some labels are padding."""
    words, labels = batch_of(generator)
    kept = torch.rand(labels.shape, generator=generator) < torch.rand((), generator=generator)
    kept[0, 0] = True
    return words, torch.where(kept, labels, -100)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Bug:
    """A silent bug, and the word by which it is named on so many ranks."""

    kind: str
    was: str
    thread: str = ""  # owner/name#number; empty for what was made up
    ranks: int = 2

    @property
    def url(self) -> str:
        return f"https://github.com/{self.thread.replace('#', '/issues/')}"


BUGS: dict[str, Bug] = {}
Step = Callable[[Any, Any, Sequence[Batch]], None]


def bug(kind: str, was: str, thread: str = "", ranks: int = 2) -> Callable[[Any], Any]:
    def note(make: Any) -> Any:
        BUGS[make.__name__] = Bug(kind, was, thread, ranks)
        return make

    return note


def loop(train: Callable[[Any], Any], **words: Any) -> Loop:
    meant = {"model": Model(), "loss": loss_of, "batch": batch_of, "optimizer": adamw}
    return Loop(**{**meant, "train": train, **words})


def gradients_of(model: Any) -> list[Any]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def backward(model: Any, batches: Sequence[Batch], loss: Callable[..., Any] = loss_of) -> None:
    for batch in batches:
        (loss(model, batch) / len(batches)).backward()


def whole_step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    backward(model, batches)
    optimizer.step()
    optimizer.zero_grad()


def changed(change: Callable[[Any], None]) -> Step:
    """A right step but for what `change` does to the model's gradients before the optimizer has them."""

    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        backward(model, batches)
        change(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


# ZeRO-1 by hand


class FlatZero:
    """AdamW on this rank's slice of one flat copy of all weights."""

    dtype = torch.float32

    def __init__(self, model: nn.Module) -> None:
        self.parameters: list[Any] = list(model.parameters())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.numel = sum(p.numel() for p in self.parameters)
        self.length = self.share()
        self.mine = self.slice_of([p.detach() for p in self.parameters]).clone().requires_grad_()
        self.optimizer = torch.optim.AdamW([self.mine], lr=1e-2, weight_decay=0.1)

    def share(self) -> int:
        return -(-self.numel // self.size)  # padded

    def slice_of(self, tensors: Sequence[Any]) -> Tensor:
        whole = torch.cat([*(each.flatten() for each in tensors), torch.zeros(self.size)])
        return whole[self.rank * self.length :][: self.length].to(self.dtype)

    def reduce(self) -> None:
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.size

    def step(self) -> None:
        self.mine.grad = self.slice_of([p.grad for p in self.parameters])
        self.optimizer.step()
        pieces = [torch.empty(self.length) for _ in range(self.size)]
        dist.all_gather(pieces, self.mine.detach().float())
        self.publish(torch.cat(pieces))
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def publish(self, whole: Tensor) -> None:
        for parameter in self.parameters:
            values, whole = whole[: parameter.numel()], whole[parameter.numel() :]
            parameter.flatten()[: len(values)].copy_(values)


def flat_zero(make: Callable[[Any], FlatZero] = FlatZero, **words: Any) -> Loop:
    def train(model: Any) -> Any:
        zero = make(model)

        def step(batches: Sequence[Batch]) -> None:
            backward(model, batches)
            zero.reduce()
            zero.step()

        return step

    return loop(train, **words)


def zero_right() -> Loop:
    return flat_zero()


@bug(
    "scale",
    "the loss is divided by the labels of all ranks, and the reduction by the ranks once more",
    "meta-pytorch/torchtune#2172",
    ranks=3,
)
def divided_twice() -> Loop:
    class Twice(FlatZero):
        def reduce(self) -> None:
            super().reduce()
            for parameter in self.parameters:
                parameter.grad /= self.size

    return flat_zero(Twice)


@bug(
    "scale",
    "gradients are divided by a loss scale of 65536 that no loss had",
    "deepspeedai/DeepSpeed#7839",
)
def unscaled_without_scale() -> Loop:
    class Unscaled(FlatZero):
        def reduce(self) -> None:
            super().reduce()
            for parameter in self.parameters:
                parameter.grad /= 65536

    return flat_zero(Unscaled)


@bug(
    "no sum",
    "gradients are kept in fp32 before the all-reduce, which then reduces others",
    "deepspeedai/DeepSpeed#5154",
)
def reduced_too_late() -> Loop:
    class Late(FlatZero):
        def reduce(self) -> None:
            for parameter in self.parameters:
                dist.all_reduce(parameter.grad.clone())

    return flat_zero(Late)


@bug("rows", "elements that do not fill a whole share belong to no rank", ranks=3)
def remainder_dropped() -> Loop:
    class Floor(FlatZero):
        def share(self) -> int:
            return self.numel // self.size

    return flat_zero(Floor, model=Model(13))


@bug("dtype", "gradients of microbatches are summed in bf16", "deepspeedai/DeepSpeed#1800")
def summed_in_halves() -> Loop:
    class Halves(FlatZero):
        def reduce(self) -> None:
            super().reduce()
            for parameter in self.parameters:
                parameter.grad = parameter.grad.bfloat16().float()

    return flat_zero(Halves)


@bug(
    "stale",
    "weights are left out when their owners broadcast them after the step",
    "lodestone-rock/RamTorch#13",
)
def broadcast_skips() -> Loop:
    class Skips(FlatZero):
        @torch.no_grad()
        def publish(self, whole: Tensor) -> None:
            kept = torch.cat([p.flatten() for p in self.parameters])
            mine = slice(self.rank * self.length, (self.rank + 1) * self.length)
            kept[mine] = whole[: self.numel][mine]
            super().publish(kept)

    return flat_zero(Skips)


@bug(
    "scale",
    "a step with zero gradients, which makes the moments, counts as one for Adam's bias correction",
    "NVIDIA/Megatron-LM#5974",
)
def adam_counts_ahead() -> Loop:
    class Ahead(FlatZero):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            self.optimizer.param_groups[0]["weight_decay"] = 0.0
            self.mine.grad = torch.zeros_like(self.mine)
            self.optimizer.step()

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    return flat_zero(Ahead, optimizer=plain)


@bug(
    "weighting",
    "a gradient buffer of a group of one rank is added to itself with every microbatch",
    "NVIDIA/Megatron-LM#6660",
    ranks=1,
)
def doubled_by_each_microbatch() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for batch in batches:
            (loss_of(model, batch) / len(batches)).backward()
            for gradient in gradients_of(model):
                gradient += gradient
        optimizer.step()
        optimizer.zero_grad()

    return ddp(step, microbatches=3)


# DDP


def ddp(step: Step, make: Callable[[Any], Any] = adamw, **words: Any) -> Loop:
    def train(model: Any) -> Any:
        wrapped, optimizer = DistributedDataParallel(model), make(model)
        return wrapped, lambda batches: step(wrapped, optimizer, batches)

    return loop(train, **words)


@bug(
    "scale",
    "the loss is not divided by the number of microbatches for models that do not say how",
    "huggingface/transformers#37766",
)
def not_divided_by_microbatches() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for batch in batches:
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return ddp(step, microbatches=3)


@bug("no sum", "no_sync surrounds every microbatch, the last one too")
def never_synchronised() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        with model.no_sync():
            backward(model, batches)
        optimizer.step()
        optimizer.zero_grad()

    return ddp(step)


@bug("microbatches", "zero_grad() is called for every microbatch", "bytetriper/RAE#67")
def zeroed_by_each_microbatch() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            (loss_of(model, batch) / len(batches)).backward()
        optimizer.step()

    return ddp(step)


@bug(
    "microbatches",
    "each backward counts as the last of a step, and overwrites the gradients of those before it",
    "allenai/open-instruct#1498",
)
def each_backward_is_the_last() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        parameters = list(model.parameters())
        for batch in batches:
            gradients = torch.autograd.grad(loss_of(model, batch) / len(batches), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        for gradient in gradients_of(model):
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        optimizer.step()

    def train(model: Any) -> Any:
        optimizer = adamw(model)
        return lambda batches: step(model, optimizer, batches)

    return loop(train)


@bug(
    "optimizer",
    "the setting for accumulation is checked and not applied: a step after every microbatch",
    "shengshu-ai/minWM#12",
)
def steps_by_each_microbatch() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for batch in batches:
            whole_step(model, optimizer, [batch])

    return ddp(step)


@bug("stale", "nobody sets the gradients to zero after a step", "meta-pytorch/torchforge#71")
def never_zeroed() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        backward(model, batches)
        optimizer.step()

    return ddp(step)


@bug(
    "optimizer",
    "the learning rate's schedule goes on by as many steps as there are ranks",
    "huggingface/transformers#24088",
)
def schedule_runs_ahead() -> Loop:
    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)

    def train(model: Any) -> Any:
        wrapped, optimizer = DistributedDataParallel(model), adamw(model)
        scheduler = schedule(optimizer)

        def step(batches: Sequence[Batch]) -> None:
            whole_step(wrapped, optimizer, batches)
            for _ in range(dist.get_world_size()):
                scheduler.step()

        return wrapped, step

    return loop(train, scheduler=schedule)


@bug(
    "data",
    "the sampler does not know of ranks: all of them train on the same batches",
    "mehta-lab/VisCy#408",
)
def same_batches_on_all_ranks() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for tensor in (each for batch in batches for each in batch):
            dist.broadcast(tensor, 0)
        whole_step(model, optimizer, batches)

    return ddp(step)


@bug("data", "the sampler's epoch is never set: the same batches again", "NVIDIA/tacotron2#241")
def same_batches_again() -> Loop:
    first: list[Sequence[Batch]] = []

    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        first.append(batches)
        whole_step(model, optimizer, first[0])

    return ddp(step)


@bug(
    "mean of means",
    "microbatches weigh the same, however many labels they have",
    "huggingface/transformers#34191",
)
def mean_of_microbatches() -> Loop:
    return ddp(whole_step, loss=sum_and_count, batch=unequal_batch)


@bug(
    "weighting",
    "all gradients are divided with every microbatch, those of earlier ones again",
    "pytorch/torchtitan#1733",
)
def divided_by_each_microbatch() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for batch in batches:
            loss_of(model, batch).backward()
            for gradient in gradients_of(model):
                gradient /= len(batches)
        optimizer.step()
        optimizer.zero_grad()

    return ddp(step, microbatches=3)


@bug("dtype", "backward computes under autocast where fp32 is meant")
def autocast_left_on() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            losses = [loss_of(model, batch) for batch in batches]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return ddp(step, microbatches=1)


@bug("frozen", "a small parameter's gradient is always zero", "pytorch/pytorch#144045", ranks=1)
def small_gradient_is_zero() -> Loop:
    return ddp(changed(lambda model: model.module.blocks[0].norm.bias.grad.zero_()))


# FSDP2


def fsdp2(
    step: Step,
    make: Callable[[Any], Any] = adamw,
    *,
    mesh: Callable[[], Any] = lambda: init_device_mesh("cpu", (dist.get_world_size(),)),
    before: Callable[[Any], Any] = lambda model: None,
    between: Callable[[Any], Any] = lambda model: None,
    **words: Any,
) -> Loop:
    """before, between: what happens before the model is sharded, and before it gets its optimizer."""

    def train(model: Any) -> Any:
        early, ranks = before(model), mesh()
        for block in getattr(model, "blocks", model):
            fully_shard(block, mesh=ranks)
        fully_shard(model, mesh=ranks)
        between(model)
        optimizer = early or make(model)
        return lambda batches: step(model, optimizer, batches)

    return loop(train, **words)


@bug(
    "frozen",
    "the optimizer was made before the model was sharded, and holds parameters that nobody trains",
    "huggingface/accelerate#3209",
)
def optimizer_before_sharding() -> Loop:
    return fsdp2(whole_step, before=adamw)


@bug(
    "frozen",
    "the model ran before the optimizer was made, which got the gathered parameters of the root",
    "pytorch/pytorch#149205",
)
def optimizer_after_forward() -> Loop:
    return fsdp2(whole_step, between=lambda model: model(batch_of(torch.Generator())[0]))


def of_one_rank() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("other", "shard"))
    return mesh["shard"]


@bug(
    "no sum",
    "sharding over groups of one rank leaves out the sum between the groups",
    "verl-project/verl#7493",
)
def groups_of_one_rank() -> Loop:
    return fsdp2(whole_step, mesh=of_one_rank)


@bug(
    "scale",
    "gradients of a group of one rank are not divided by the factor that was set",
    "pytorch/pytorch#167178",
    ranks=3,
)
def factor_without_effect() -> Loop:
    def sum_between_groups(model: Any) -> None:
        for gradient in gradients_of(model):
            dist.all_reduce(gradient.to_local())

    return fsdp2(changed(sum_between_groups), mesh=of_one_rank)


def clip_by(norm_of: Callable[[list[Tensor]], Tensor]) -> Step:
    def clip(model: Any) -> None:
        pieces = [each.to_local() for each in gradients_of(model)]
        norm = norm_of(pieces)
        for each in pieces:
            each *= min(1.0, MAX_NORM / (float(norm) + 1e-6))

    return changed(clip)


def norm_of(pieces: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.norm() for each in pieces]).norm()


@bug("norm", "each rank clips by the norm of its own shard", "areal-project/AReaL#312")
def norm_of_a_shard() -> Loop:
    return fsdp2(clip_by(norm_of), max_grad_norm=MAX_NORM)


@bug(
    "norm",
    "squares are summed over all ranks, replicas too, which hold the same",
    "ByteDance-Seed/VeOmni#184",
)
def norm_counts_replicas() -> Loop:
    def of_all(pieces: list[Tensor]) -> Tensor:
        square = norm_of(pieces) ** 2
        dist.all_reduce(square)
        return square**0.5

    def replicas() -> Any:
        size = (dist.get_world_size(), 1)
        return init_device_mesh("cpu", size, mesh_dim_names=("replicate", "shard"))

    return fsdp2(clip_by(of_all), mesh=replicas, max_grad_norm=MAX_NORM)


@bug("norm", "nobody clips")
def not_clipped() -> Loop:
    return fsdp2(whole_step, max_grad_norm=MAX_NORM)


@bug(
    "scale",
    "the loss was summed between ranks by a call that autograd does not know, and gradients are averaged",
    "verl-project/verl-SpeCo#29",
    ranks=3,
)
def sum_without_autograd() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for batch in batches:
            loss, count = sum_and_count(model, batch)
            total, counts = loss.detach().clone(), count.clone()
            dist.all_reduce(total)
            dist.all_reduce(counts)
            (((total - loss.detach()) + loss) / counts / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return fsdp2(step)


@bug(
    "mean of means",
    "each rank divides by its own number of labels",
    "pytorch/torchtitan#2206",
)
def mean_of_ranks() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        count = sum((batch[1] >= 0).sum() for batch in batches)
        for batch in batches:
            (sum_and_count(model, batch)[0] / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return fsdp2(step, loss=sum_and_count, batch=unequal_batch)


@bug(
    "dtype",
    "weights that were loaded in bf16 are no longer made fp32 before they are sharded",
    "huggingface/accelerate#3979",
)
def no_upcast() -> Loop:
    return fsdp2(whole_step, before=lambda model: model.bfloat16() and None)


@bug(
    "start",
    "ranks build their models from seeds of their own, and nobody sends rank 0's",
    "pytorch/torchtitan#166",
)
def seeded_by_rank() -> Loop:
    torch.manual_seed(dist.get_rank())
    return fsdp2(whole_step)


@bug(
    "tied",
    "making room for weights ends the tie of embedding and head: each trains with its own gradient",
    "verl-project/verl#7835",
)
def tie_is_lost() -> Loop:
    def untie(model: Any) -> None:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())

    return fsdp2(whole_step, before=untie, model=Model(tied=True))


@bug(
    "optimizer",
    "Muon finds no matrices among sharded parameters, and AdamW trains them all",
    "deepspeedai/DeepSpeed#8438",
)
def muon_is_adamw() -> Loop:
    def step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        backward(model, batches, mean_square)
        optimizer.step()
        optimizer.zero_grad()

    def mean_square(model: Any, batch: Batch) -> Tensor:
        return mse_loss(model(batch[0]), batch[1])

    def vectors(generator: torch.Generator) -> Batch:
        return torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)

    return fsdp2(
        step,
        model=nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)),
        loss=mean_square,
        batch=vectors,
        optimizer=lambda model: torch.optim.Muon(model.parameters(), lr=1e-2),
    )


@bug("optimizer", "Adam's weight decay is not AdamW's")
def adam_for_adamw() -> Loop:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)

    return fsdp2(whole_step, adam)
