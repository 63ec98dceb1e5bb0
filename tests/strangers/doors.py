"""What is refused when the engine is built, and what ranks must agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.strangers.lab import BY_STAGE, EVERY_WAY, Lab, Setting, adamw, scenario, sgd, variants
from tests.strangers.models import Block, Net
from zeroexp.cut.chunk import Chunk
from zeroexp.cut.layout import LAYOUTS, Layout, by_parameter
from zeroexp.cut.owners import OWNERS

TWO = (Setting("zero1"), Setting("zero3"))


def built(settings: Any = TWO, *, refused: str) -> Callable[[Callable[[Lab], None]], Any]:
    """Refused when built: there is nothing to compare."""
    return scenario(settings, refused=refused, oracle=False)


BLOCKS: dict[str, tuple[Any, str]] = {
    "unknown": (["layers.0", "layers.7"], r"layers\.7"),
    "misspelt": (["layer.0"], r"layer\.0"),
    "module_list": (["layers"], r"layers.*ModuleList"),
    "one_word": ("layers.0", r"blocks|layers|'l'"),
    "parameter": (["layers.0.up.weight"], r"layers\.0\.up\.weight"),
    "twice": (["layers.0", "layers.0"], r"layers\.0|twice|same"),
    "root": (["", "layers.0"], r"blocks"),
    "number": ([0, 1, 2], r"blocks|0"),
    "modules": (None, r"blocks|name"),
}


@variants([*BLOCKS], TWO, refused=r"blocks|layer", oracle=False)
def blocks_that_are(lab: Lab, kind: str) -> None:
    model = Net()
    blocks, pattern = BLOCKS[kind]
    with lab.raises(pattern):
        lab.wrap(model, list(model.layers) if blocks is None else blocks)
    raise ValueError("blocks refused as they should be")


GROUPS: dict[str, Callable[[Net], Any]] = {
    "of_another_model": lambda model: [{"params": list(Net().parameters())}],
    "of_a_copy_beside": lambda model: [
        {"params": [*model.parameters(), *nn.Linear(2, 2).parameters()]}
    ],
    "twice": lambda model: [{"params": list(model.parameters())}] * 2,
    "names": lambda model: [{"params": [name for name, _ in model.named_parameters()]}],
    "without_params": lambda model: [{"lr": 0.1}],
    "no_group": lambda model: [],
}


@variants([*GROUPS], BY_STAGE, refused=r"param", oracle=False)
def groups_that_are(lab: Lab, kind: str) -> None:
    model = Net()
    lab.wrap(model, groups=GROUPS[kind](model))


@built(EVERY_WAY, refused=r"param_groups hold a parameter of shape \[3, 6\] twice")
def one_parameter_in_two_groups(lab: Lab) -> None:
    """The head's weight is trained at a rate of its own too: its owner alone would be told by torch."""
    model = Net()
    lab.wrap(
        model, groups=[{"params": [*model.parameters()]}, {"params": model.head.weight, "lr": 1}]
    )


@built(EVERY_WAY, refused=r"head\.weight has a gradient already.*zero_grad")
def a_model_with_a_gradient(lab: Lab) -> None:
    """Something has tried a backward before: all ranks would add the same gradient."""
    model = Net()
    model.head(torch.ones(2, 6)).sum().backward(inputs=[model.head.weight])
    lab.wrap(model)


@scenario(may_refuse=r"param")
def one_parameter_twice_in_a_group(lab: Lab) -> None:
    """torch warns, and moves it twice."""
    model = Net()
    lab.train(lab.wrap(model, groups=[{"params": [*model.parameters(), model.head.weight]}]))


@scenario(may_refuse=r"param_groups|groups")
def groups_that_are_plain_parameters(lab: Lab) -> None:
    """`param_groups=model.parameters()`, as torch.optim takes them."""
    model = Net()
    lab.train(lab.wrap(model, groups=list(model.parameters())))


@built(refused=r"optimizer")
def an_optimizer_where_a_factory_is_meant(lab: Lab) -> None:
    model = Net()
    lab.wrap(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


OTHER_GROUPS: dict[str, Callable[[Any], Any]] = {
    "joined": lambda groups: [p for group in groups for p in group["params"]],
    "split": lambda groups: [{**g, "params": [p]} for g in groups for p in g["params"]],
    "turned": lambda groups: groups[::-1],
}


@variants(
    [*OTHER_GROUPS],
    EVERY_WAY,
    refused=r"optimizer_factory makes AdamW in other groups",
    oracle=False,
)
def groups_that_the_factory_has(lab: Lab, how: str) -> None:
    """States name what groups count, and a rank may hold nothing of the later ones."""
    model = Net()
    body = [p for name, p in model.named_parameters() if not name.startswith("head")]
    groups = [{"params": body}, {"params": [*model.head.parameters()]}]
    t = lab.wrap(model, groups=groups, optimizer=lambda g: torch.optim.AdamW(OTHER_GROUPS[how](g)))
    lab.train(t)
    t.state_dict()


class Counting(torch.optim.SGD):
    """It keeps a number of its own in each group, also in those of which a rank holds nothing."""

    def __init__(self, groups: Any) -> None:
        super().__init__([{**group} for group in groups], lr=0.05)
        for group in self.param_groups:
            group["steps"] = 0

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            group["steps"] += 1


@scenario([Setting(stage, layout="parameter", world_size=3) for stage in ("zero1", "zero3")])
def groups_in_which_an_optimizer_counts(lab: Lab) -> None:
    model = Net()
    body = [p for name, p in model.named_parameters() if not name.startswith("head")]
    groups = [{"params": [*model.head.parameters()]}, {"params": body}]
    lab.train(lab.wrap(model, groups=groups, optimizer=Counting))


@scenario([Setting(stage, layout="parameter", world_size=3) for stage in ("zero1", "zero3")])
def groups_without_those_of_which_this_rank_holds_nothing(lab: Lab) -> None:
    """torch warns of an empty group, and some factories leave it out."""
    model = Net()
    head = [*model.head.parameters()]
    body = [p for name, p in model.named_parameters() if not name.startswith("head")]
    groups = [{"params": head, "lr": 0.03}, {"params": body}]
    lab.train(
        lab.wrap(model, groups=groups, optimizer=lambda g: adamw([x for x in g if x["params"]]))
    )


@variants(
    ["whole", "part", "around"], EVERY_WAY, refused=r"engine|again|already|wrapped", oracle=False
)
def wrapped_twice(lab: Lab, what: str) -> None:
    model = Net()
    lab.wrap(model)
    if what == "whole":
        lab.wrap(model)
    elif what == "part":
        lab.wrap(model.layers[0], [])
    else:
        lab.wrap(nn.Sequential(model, nn.Linear(3, 3)), ["0"])


@scenario(EVERY_WAY)
def ranks_with_different_weights(lab: Lab) -> None:
    """Nobody seeded: rank 0's weights, one of them transposed, and buffers are everyone's, as under torch's DDP."""

    class Counted(Net):
        def __init__(self, seed: int) -> None:
            super().__init__(seed=seed)
            self.register_buffer("offset", torch.full((3,), float(seed)))

        def forward(self, x: Any) -> Any:
            return super().forward(x) + self.offset

    model = Counted(20 + lab.ranks[0])
    model.layers[1].requires_grad_(False)
    weight = model.layers[0].up.weight
    model.layers[0].up.weight = nn.Parameter(weight.detach().t().contiguous().t())
    lab.train(lab.wrap(model))


@built(refused=r"module \(root\) is a DistributedDataParallel, .*the module inside")
def a_model_that_is_wrapped_by_ddp(lab: Lab) -> None:
    lab.wrap(nn.parallel.DistributedDataParallel(Net()), [])


@built(refused=r"parameter layers\.0\.\S+ is a DTensor.*fully_shard")
def a_model_that_is_sharded_by_fsdp(lab: Lab) -> None:
    model = Net()
    fully_shard(model.layers[0], mesh=init_device_mesh("cpu", (lab.num_ranks,)))
    lab.wrap(model)


TENSOR_PARALLEL: dict[str, dict[str, ParallelStyle]] = {
    "columns_and_rows": {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()},
    "head": {"head": ColwiseParallel(output_layouts=Replicate())},
    "sequence": {"layers.*.norm": SequenceParallel()},
}


@variants(
    [*TENSOR_PARALLEL], TWO, refused=r"parameter \S+ is a DTensor.*parallelize_module", oracle=False
)
def a_model_that_is_tensor_parallel(lab: Lab, kind: str) -> None:
    """It is refused: its ranks hold other pieces, which are no replicas that the engine could shard."""
    model = Net()
    parallelize_module(model, init_device_mesh("cpu", (lab.num_ranks,)), TENSOR_PARALLEL[kind])
    lab.wrap(model)


@built(refused=r"buffer offset is a DTensor.*plain tensors")
def a_model_with_a_distributed_buffer(lab: Lab) -> None:
    model, mesh = Net(), init_device_mesh("cpu", (lab.num_ranks,))
    model.register_buffer("offset", distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    lab.wrap(model)


@built(refused=r"parameter \S+ was replaced or removed after the engine was built|is freed")
def a_model_that_becomes_tensor_parallel_later(lab: Lab) -> None:
    t = lab.wrap(Net())
    mesh = init_device_mesh("cpu", (lab.num_ranks,))
    parallelize_module(t.model, mesh, TENSOR_PARALLEL["columns_and_rows"])
    lab.train(t)


DIFFERENT: dict[str, Callable[[int], Net]] = {
    "another_depth": lambda rank: Net(depth=3 + rank),
    "another_width": lambda rank: _with_head(rank),
    "another_name": lambda rank: _renamed(rank),
    "another_dtype": lambda rank: Net() if rank == 0 else Net().double(),
    "frozen_parts": lambda rank: _frozen(rank),
    "one_parameter_more": lambda rank: _with_extra(rank),
}


def _with_head(rank: int) -> Net:
    model = Net()
    model.head = nn.Linear(6, 3, bias=rank == 0)
    return model


def _renamed(rank: int) -> Net:
    model = Net()
    if rank:
        model.output = model.head
        del model.head
    return model


def _frozen(rank: int) -> Net:
    model = Net()
    model.layers[1].requires_grad_(rank == 0)
    return model


def _with_extra(rank: int) -> Net:
    model = Net()
    if rank:
        model.extra = nn.Parameter(torch.ones(2))
    return model


@variants([*DIFFERENT], EVERY_WAY, refused=r"rank", oracle=False)
def ranks_with_different_models(lab: Lab, kind: str) -> None:
    """Refused on every rank, in seconds."""
    lab.wrap(DIFFERENT[kind](lab.ranks[0]))


@variants(
    ["unit", "layout", "keep", "blocks", "norm", "groups", "dtypes", "bucket"],
    BY_STAGE,
    may_refuse=r"rank",
)
def ranks_with_different_settings(lab: Lab, kind: str) -> None:
    """A script that reads its settings from each machine's own file: rank 0's are meant, or it is refused."""
    from zeroexp.zero.options import Dtypes

    model, other = Net(), lab.ranks[0] != 0
    if kind == "blocks":
        t = lab.wrap(model, ["layers.0"] if other else ["layers.0", "layers.1"])
    elif kind == "norm":
        t = lab.wrap(model, max_grad_norm=0.01 if other else None)
    elif kind == "groups":
        parameters = list(model.parameters())
        t = lab.wrap(model, groups=[{"params": parameters[: 3 if other else None]}])
    elif kind == "dtypes":
        half, full = torch.bfloat16, torch.float32
        t = lab.wrap(model, dtypes=Dtypes(full, half if other else full, full))
    else:
        values: dict[str, tuple[Any, Any]] = {
            "unit": ("block", "module"),
            "layout": ("buffer", "tensor"),
            "keep": ("last", "none"),
            "bucket": (None, 0.0001),
        }
        key = {"bucket": "bucket_mb"}.get(kind, kind)
        t = lab.wrap(model, **{key: values[kind][other]})
    lab.train(t)


@scenario(EVERY_WAY)
def no_blocks_at_all(lab: Lab) -> None:
    lab.train(lab.wrap(Net(), []))


@scenario(EVERY_WAY)
def one_block_that_is_everything(lab: Lab) -> None:
    lab.train(lab.wrap(nn.Sequential(Net()), ["0"]))


@scenario(TWO, refused=r"parameter .*inference_mode", oracle=False)
def a_model_made_in_inference_mode(lab: Lab) -> None:
    with torch.inference_mode():
        model = Net()
    lab.wrap(model)


@scenario(may_refuse=r"parameter|param")
def a_model_without_parameters(lab: Lab) -> None:
    """Nothing to train: refused, or it runs."""
    t = lab.wrap(nn.Tanh(), [], groups=[], optimizer=lambda _g: sgd([torch.zeros(1)]))
    lab.note(t.model(torch.ones(2)))


@scenario(EVERY_WAY)
def an_unusual_tree(lab: Lab) -> None:
    """Blocks in a dictionary, with dots in nobody's way."""

    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.parts = nn.ModuleDict({"first block": Block(), "second-block": Block()})
            self.head = nn.Linear(6, 3)

        def forward(self, x: Any) -> Any:
            for part in self.parts.values():
                x = part(x)
            return self.head(x)

    lab.train(lab.wrap(Tree(), ["parts.first block", "parts.second-block"]))


@variants(["owners", "cuts"], refused="cut the parameters")
def a_rule_of_ones_own_that_differs_by_rank(lab: Lab, what: str) -> None:
    """Python salts `hash` of a text in each process, and so a rule that asks it gives each rank another answer."""
    salt = lab.ranks[0]

    def by_salt(specs: Any, world_size: int) -> dict[str, int]:
        return {spec.name: (len(spec.name) + salt) % world_size for spec in specs}

    def cut_by_salt(unit: Any, world_size: int) -> tuple[Chunk, ...]:
        return by_parameter(unit, world_size, by_salt(unit, world_size))

    OWNERS.add("salted", by_salt)
    LAYOUTS.add("salted", Layout(cut_by_salt))
    try:
        words: dict[str, Any] = {"layout": "salted"}
        if what == "owners":
            words = {"layout": "parameter", "owners": "salted"}
        lab.train(lab.wrap(Net(), **words))
    finally:
        OWNERS.remove("salted")
        LAYOUTS.remove("salted")
