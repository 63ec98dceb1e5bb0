"""A step reads no value of a tensor: on a GPU each reading stops the host, which can not run ahead then.

The device is played on the CPU: readings raise between the beginning of a microbatch and the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.process.world import World
from zeroexp.zero.assemble import bit_checksum
from zeroexp.zero.options import Dtypes, Options

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class NothingIsRead(TorchDispatchMode):
    num_allowed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_allowed -= func in READS
        assert self.num_allowed >= 0, f"{func} reads a value"
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_is_read() -> Iterator[None]:
    def read(tensor: Tensor) -> None:
        raise AssertionError("tolist reads values")

    with NothingIsRead(), patch.object(Tensor, "tolist", read):
        yield


def train(world: World, stage: str, layout: str, compute: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    strategy = Sharded(
        model,
        blocks=["0", "2"],
        stage=STAGES[stage],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.1),
        world=world,
        dtypes=Dtypes(compute, torch.float32, torch.float32),
        max_grad_norm=0.1,
        options=Options(layout=layout, transport="native"),
    )
    strategy._reads_late = True
    norms: list[Tensor] = []
    for step in range(4):
        inputs = torch.randn(
            2, 5, generator=torch.manual_seed(2 * step + world.rank), dtype=compute
        )
        # The first microbatch compares the ranks, and the refusals look at values in the first steps.
        with nothing_is_read() if step > 2 else torch.enable_grad():
            for last in (False, True):
                with strategy.microbatch(last=last):
                    strategy.backward(model(inputs).square().sum())
            norms.append(strategy.step())
            strategy.zero_grad()
    return [norm.item() for norm in norms]


# Each stage with each layout in turns, and each layout under the one that gathers.
PAIRS = [
    *zip(STAGES, ["parameter", "tensor", "buffer"] * 2, strict=False),
    *(("zero3", layout) for layout in ("parameter", "buffer")),
]
CASES = [(*pair, (torch.float32, torch.bfloat16)[index % 2]) for index, pair in enumerate(PAIRS)]


@pytest.mark.parametrize(("stage", "layout", "compute"), CASES)
def test_a_step_reads_no_value(ranks, stage, layout, compute):
    first, second = ranks(train, stage, layout, compute)
    assert first == second and all(norm > 0.1 for norm in first), "and it clips"


def test_a_checksum_reads_one_value_of_a_tensor_of_many_parts():
    """And parts in another order have another sum."""
    values, sums = torch.randn(1 << 18), []
    for each in (values, values.clone(), values.roll(1 << 16)):
        with NothingIsRead() as reads:
            reads.num_allowed = 1
            sums.append(bit_checksum(each))
    assert sums[0] == sums[1] != sums[2]
