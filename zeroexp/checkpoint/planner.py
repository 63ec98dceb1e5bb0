"""Tell torch.distributed.checkpoint what each rank writes.

DCP's own planner knows tensors and boxes of them. A piece of a flat buffer is not a box of its parameter, so every
tensor is described as one-dimensional, with its pieces as chunks, and its real shape is passed separately.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.futures import Future

from zeroexp.checkpoint.staging import Flat

# Maps name -> (shape, dtype). Every rank that knows the tensor reports this, even without a piece of it.
Shapes = dict[str, tuple[tuple[int, ...], str]]


class PiecePlanner(SavePlanner):
    """Every rank writes what it holds; nothing moves between ranks, so the global plan is the list of local plans."""

    def set_up_planner(
        self,
        state_dict: Any,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._tensors = cast(Flat, state_dict)

    def create_local_plan(self) -> SavePlan:
        shapes = {n: (tuple(t.shape), dtype_name(t.dtype)) for n, t in self._tensors.items()}
        return SavePlan(self._items(), planner_data=shapes)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        shapes: Shapes = {}
        for plan in all_plans:
            for name, shape in plan.planner_data.items():
                first = shapes.setdefault(name, shape)
                assert first == shape, f"ranks disagree about {name}: {first} and {shape}"
        # The plans are sent back to the ranks, which do not need the shapes.
        plans = [replace(plan, planner_data=None) for plan in all_plans]
        return plans, Metadata(state_dict_metadata={}, planner_data=shapes)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        index = write_item.index
        assert index.index is not None
        return self._tensors[index.fqn].pieces[index.index].tensor

    def _items(self) -> list[WriteItem]:
        items: list[WriteItem] = []
        for name, tensor in self._tensors.items():
            size = torch.Size([torch.Size(tensor.shape).numel()])
            properties = TensorProperties(tensor.dtype)
            for number, piece in enumerate(tensor.pieces):
                start = torch.Size([piece.start])
                chunk = ChunkStorageMetadata(start, torch.Size([piece.tensor.numel()]))
                index = MetadataIndex(name, start, number)
                data = TensorWriteData(chunk, properties, size)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def finished_future(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
