"""The plain process's stand-in for other ranks answers as gloo where all ranks give the same, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed import nn as with_gradients
from torch.utils._pytree import tree_map_only

from zeroexp.process.on_ranks import on_ranks
from zeroexp.verify.equal_ranks import REFUSED, EqualRanks, stand_for_ranks


def in_place(collective: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def result(own: Tensor) -> Tensor:
        collective(own)
        return own

    return result


def filled(collective: Callable[[list[Tensor], Tensor], Any]) -> Callable[[Tensor], Any]:
    """Of a collective that writes into a tensor for each rank."""

    def result(own: Tensor) -> list[Tensor]:
        copies = [torch.full_like(own, -1), torch.full_like(own, -1)]
        collective(copies, own)
        return copies

    return result


def objects(collective: Callable[[list[Any]], Any]) -> Callable[[Tensor], Any]:
    def result(own: Tensor) -> list[Any]:
        found: list[Any] = [own.tolist(), None]
        collective(found)
        return found

    return result


def world() -> Any:
    return dist.group.WORLD


def as_one(own: Tensor) -> Tensor:
    return torch.full((2 * len(own),), -1.0)


def wait_for_all_reduce(own: Tensor) -> None:
    work: Any = dist.all_reduce(own, async_op=True)
    work.wait()


def gathered_as_one(own: Tensor) -> Tensor:
    copies = as_one(own)
    dist.all_gather_into_tensor(copies, own)
    return copies


TAKEN: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": in_place(dist.all_reduce),
    "all_reduce AVG": in_place(lambda own: dist.all_reduce(own, ReduceOp.AVG)),
    "all_reduce MAX": in_place(lambda own: dist.all_reduce(own, ReduceOp.MAX)),
    "all_reduce MIN": in_place(lambda own: dist.all_reduce(own, ReduceOp.MIN)),
    "all_reduce later": in_place(wait_for_all_reduce),
    "all_reduce of integers": in_place(lambda own: dist.all_reduce(own.int())),
    "functional all_reduce": lambda own: functional.all_reduce(own, "sum", world()) + 0,
    "all_reduce with gradients": lambda own: with_gradients.functional.all_reduce(own),
    "all_gather": filled(dist.all_gather),
    "all_gather_into_tensor": gathered_as_one,
    "all_gather_object": objects(lambda found: dist.all_gather_object(found, found[0])),
    "broadcast": in_place(lambda own: dist.broadcast(own, 0)),
    "broadcast_object_list": objects(lambda found: dist.broadcast_object_list(found, 0)),
    "barrier": in_place(lambda _: dist.barrier()),
    "monitored_barrier": in_place(lambda _: dist.monitored_barrier()),
}
LEFT: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce PRODUCT": in_place(lambda own: dist.all_reduce(own, ReduceOp.PRODUCT)),
    "all_reduce BXOR": in_place(lambda own: dist.all_reduce(own.int(), ReduceOp.BXOR)),
    "all_reduce_coalesced": in_place(lambda own: dist.all_reduce_coalesced([own])),
    "functional all_gather": lambda own: functional.all_gather_tensor(own, 0, world()) + 0,
    "broadcast of rank 1": in_place(lambda own: dist.broadcast(own, 1)),
    "reduce": in_place(lambda own: dist.reduce(own, 0)),
    "gather": filled(lambda copies, own: dist.gather(own, copies)),
    "scatter": filled(lambda copies, own: dist.scatter(own, copies)),
    "scatter of rank 1": in_place(lambda own: dist.scatter(own, src=1)),
    "reduce_scatter": filled(lambda copies, own: dist.reduce_scatter(own, copies)),
    "reduce_scatter_tensor": in_place(lambda own: dist.reduce_scatter_tensor(own, as_one(own))),
    "all_to_all": filled(lambda copies, own: dist.all_to_all(copies, [own, own])),
    "all_to_all_single": in_place(lambda own: dist.all_to_all_single(own, own.clone())),
    "send": in_place(lambda own: dist.send(own, 1)),
    "recv": in_place(lambda own: dist.recv(own, 1)),
    "recv of any": in_place(dist.recv),
}


def results(_: Any, collectives: dict[str, Callable[[Tensor], Any]]) -> dict[str, Any]:
    found = {name: each(torch.tensor([3.0, 5.0])) for name, each in collectives.items()}
    return tree_map_only(Tensor, Tensor.tolist, found)


@pytest.mark.filterwarnings("ignore")  # old names of collectives, which loops of users have
def test_what_it_answers_is_what_two_real_ranks_of_gloo_hold() -> None:
    def on_one(world: Any) -> tuple[dict[str, Any], int]:
        stand_for_ranks(2)
        return results(world, TAKEN), len(EqualRanks.given)

    first, second = on_ranks(lambda world: results(world, TAKEN), 2)
    ((alone, num_given),) = on_ranks(on_one, 1)
    assert alone == first == second
    assert num_given >= len(TAKEN) - 2  # but for the barriers


@pytest.mark.filterwarnings("ignore")
def test_it_refuses_every_other_collective() -> None:
    def why_refused(world: Any) -> dict[str, str]:
        stand_for_ranks(2)
        return {name: why(world, {name: each}) for name, each in LEFT.items()}

    def why(world: Any, collective: dict[str, Any]) -> str:
        with pytest.raises(RuntimeError) as refused:
            results(world, collective)
        return str(refused.value)

    (said,) = on_ranks(why_refused, 1)
    assert {name for name, each in said.items() if REFUSED not in each} == set()
