"""Hashes of what a step computes, equal for equal values however an engine cuts and places them.

    parameters   as the module that holds them sees them in forward     on each rank, in the first microbatch
    forward      what each block and the model return                   on each rank and microbatch
    backward     each parameter's gradient before any reduction         on each rank and microbatch
    gradient     what the optimizer gets                                of each parameter, over all ranks
    weights      what the optimizer leaves                              of each parameter, over all ranks

Each row of hashes.<rank>.jsonl has two fingerprints of a tensor, and both add up over its pieces:

    exact    sum over elements of (bits + 1) x an odd number drawn from the position, modulo 2**64
    sketch   NUM_SIGNS sums of the elements, each with its own signs drawn from the position

Equal tensors have equal `exact`. The mean square of the difference of two sketches estimates the squared distance of
the tensors (Johnson-Lindenstrauss; Achlioptas 2003), which tells rounding from an error.

Gradients of embeddings are hashed only once they are reduced: engines may keep their rows apart until then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroexp.interface.strategy import Strategy
from zeroexp.measure.formats import FORMAT, KEY
from zeroexp.measure.memory import local_tensor

NUM_SIGNS = 8
NUMEL_AT_ONCE = 1 << 18  # elements that are hashed at once
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SUMMED = ("gradient", "weights")  # their rows hold this rank's pieces, to be added over ranks
MODULUS = 1 << 64
# Multipliers of splitmix64, as signed numbers.
GOLDEN, MIX = 0x9E3779B97F4A7C15 - MODULUS, 0xBF58476D1CE4E5B9 - MODULUS


@dataclass
class Hash:
    """One tensor, or this rank's pieces of one."""

    step: int
    kind: str  # of the table above
    tensor: str
    microbatch: int = 0
    numel: int = 0
    dtype: str = ""
    exact: int = 0
    square: float = 0.0  # sum of squares
    sketch: list[float] = field(default_factory=lambda: [0.0] * NUM_SIGNS)

    def add(self, values: Tensor, start: int = 0) -> None:
        """Add the flattened elements `values`, the first of which is number `start` of the tensor."""
        self.numel += values.numel()
        self.dtype = str(values.dtype).removeprefix("torch.")
        for offset in range(0, values.numel(), NUMEL_AT_ONCE):
            self._add_chunk(values[offset : offset + NUMEL_AT_ONCE], start + offset)

    def join(self, other: Hash) -> None:
        """Add the pieces of another rank."""
        self.numel += other.numel
        self.exact = (self.exact + other.exact) % MODULUS
        self.square += other.square
        self.sketch = [a + b for a, b in zip(self.sketch, other.sketch, strict=True)]

    def distance(self, other: Hash) -> float:
        """Estimate the distance of the two tensors relative to the longer one."""
        square = sum((a - b) ** 2 for a, b in zip(self.sketch, other.sketch, strict=True))
        longest = max(self.square, other.square)
        return (square / NUM_SIGNS / longest) ** 0.5 if longest else 0.0

    def _add_chunk(self, values: Tensor, start: int) -> None:
        positions = torch.arange(start, start + values.numel(), device=values.device)
        mixed = positions * GOLDEN
        mixed = (mixed ^ (mixed >> 29)) * MIX
        values = values + 0  # turns -0.0 into 0.0, which is equal to it
        bits = values.view(BITS[values.itemsize]).long()
        self.exact = (self.exact + int(((bits + 1) * (mixed | 1)).sum())) % MODULUS
        numbers = values.double()
        self.square += float(numbers.square().sum())
        for index in range(NUM_SIGNS):
            signs = ((mixed >> (32 + index)) & 1) * 2 - 1
            self.sketch[index] += float((numbers * signs).sum())


class StepHashes:
    """Hashes one step of one rank."""

    def __init__(self, step: int, module: nn.Module, blocks: Mapping[str, nn.Module]):
        self.rows: list[Hash] = []
        self._step, self._module, self._blocks = step, module, blocks
        self._microbatch = -1
        self._seen: set[str] = set()  # modules whose parameters were hashed
        self._pieces: list[tuple[str, int, Tensor]] = []

    @contextmanager
    def watching(self, strategy: Strategy) -> Generator[None]:
        self._pieces = [
            (name, piece.start, piece.tensor)
            for name, tensors in strategy.state_dict().items()
            if "weight" in tensors
            for piece in tensors["weight"].pieces
        ]
        embeddings = {m.weight for m in self._module.modules() if isinstance(m, nn.Embedding)}
        with ExitStack() as stack:

            def hook(register: Callable[[Any], Any], called: Callable[..., None]) -> None:
                stack.callback(register(called).remove)

            hook(self._module.register_forward_pre_hook, self._begin_microbatch)
            for name, block in self._blocks.items():
                hook(block.register_forward_hook, partial(self._output_of, name))
            whole: Any = self._module
            for name, module in whole.named_modules():
                if next(module.parameters(recurse=False), None) is not None:
                    hook(module.register_forward_pre_hook, partial(self._parameters_of, name))
            hook(self._module.register_forward_hook, partial(self._output_of, "the model"))
            for name, parameter in self._module.named_parameters():
                if parameter.requires_grad and parameter not in embeddings:
                    register: Any = parameter.register_hook  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
                    hook(register, partial(self._gradient_of, name))
            optimizer = strategy.optimizer
            hook(optimizer.register_step_pre_hook, partial(self._gradients, optimizer))
            hook(optimizer.register_step_post_hook, self._weights)
            yield

    def write(self, folder: Path, rank: int) -> None:
        """Append the rows to hashes.<rank>.jsonl in the run's folder."""
        with (folder / f"hashes.{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({KEY: FORMAT, **asdict(row)}) + "\n" for row in self.rows)

    def _begin_microbatch(self, _module: nn.Module, _inputs: Any) -> None:
        self._microbatch += 1

    def _parameters_of(self, prefix: str, module: nn.Module, _inputs: Any) -> None:
        if self._microbatch > 0 or prefix in self._seen:
            return
        self._seen.add(prefix)
        for name, parameter in module.named_parameters(prefix, recurse=False):
            self._add("parameters", name, parameter)

    def _output_of(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for index, tensor in enumerate(tensors):
            self._add("forward", f"output {index} of {name}", tensor)

    def _gradient_of(self, name: str, gradient: Tensor) -> None:
        self._add("backward", name, gradient)

    def _gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        masters = [p for group in optimizer.param_groups for p in group["params"]]
        # Our engine shows these gradients to no other hook.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            trained = [p for p in masters if p.grad is not None]
            pairs = [(local_tensor(p).detach(), local_tensor(p.grad).detach()) for p in trained]
        for name, start, piece in self._pieces:
            for master, gradient in pairs:
                offset = _offset_in(master, piece)
                if offset is not None:
                    values = gradient.flatten()[offset : offset + piece.numel()]
                    self._row("gradient", name).add(values, start)

    def _weights(self, *_: Any) -> None:
        for name, start, piece in self._pieces:
            self._row("weights", name).add(piece.detach(), start)

    def _add(self, kind: str, tensor: str, values: Tensor) -> None:
        if hasattr(values, "to_local"):  # FSDP2 shows its shards where it gathers later
            return
        row = Hash(self._step, kind, tensor, self._microbatch)
        with torch.no_grad():
            row.add(values.detach().flatten())
        self.rows.append(row)

    def _row(self, kind: str, tensor: str) -> Hash:
        """Return the row of a tensor whose pieces are added one by one."""
        last = self.rows[-1] if self.rows else None
        if last is None or (last.kind, last.tensor) != (kind, tensor):
            self.rows.append(Hash(self._step, kind, tensor))
        return self.rows[-1]


def _offset_in(master: Tensor, piece: Tensor) -> int | None:
    """Return at which element of `master` the memory of `piece` begins; None where it is elsewhere."""
    distance = piece.data_ptr() - master.data_ptr()
    return distance // master.itemsize if piece.numel() and 0 <= distance < master.nbytes else None
