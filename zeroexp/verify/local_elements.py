"""Which elements of which weight a rank's tensors are, whoever cut them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zeroexp.measure.memory import local_tensor
from zeroexp.verify.loop_to_verify import NoLoop

# What wrappers put into the names of parameters.
WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module")
# A weight, which of its elements, and where these lie in a flat tensor.
Place = tuple[str, Tensor, slice]


@dataclass
class LocalElements:
    """Some elements of one weight, or of its gradient."""

    name: str
    where: Tensor  # the number of each in the flattened weight
    values: Tensor  # flat, in the dtype in which they were found


class Places:
    """Tells what tensors of this rank are, of a sharded model and of its optimizers."""

    def __init__(self, holder: Any, initial: Mapping[str, Tensor]) -> None:
        """holder: the sharded model, or an engine of `zeroexp.interface`. initial: the plain model's weights."""
        self._holder, self._initial = holder, initial
        self._known: dict[int, tuple[Tensor, list[Place]]] = {}  # of optimizers, by their id

    def weights(self) -> list[LocalElements]:
        """Copies of all weights on this rank, as modules show them and as optimizers hold them besides."""
        pieces = [
            LocalElements(name, where, values.clone()) for name, where, values in self._shown()
        ]
        add(pieces, self.held())
        return pieces

    def held(self) -> list[LocalElements]:
        """Copies of what optimizers hold: masters, flat shards, or the parameters themselves."""
        return [each for tensor, at in self._known.values() for each in _copies(tensor, at)]

    def gradients(self, tensors: Iterable[Tensor]) -> list[LocalElements]:
        """Copies of the gradients of these tensors, of a module or of an optimizer."""
        pieces: list[LocalElements] = []
        # Our engine shows its gradients to no plain code.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            found = [each for each in tensors if each.grad is not None]
            self._learn(found)
            for tensor in found:
                pieces += _copies(tensor.grad, self._known[id(tensor)][1])
        return pieces

    def names(self, tensor: Tensor) -> list[str]:
        """The weights that an optimizer's tensor is, or holds elements of, once it had a gradient."""
        return [name for name, _, _ in self._known.get(id(tensor), (tensor, []))[1]]

    @property
    def _is_engine(self) -> bool:
        return hasattr(self._holder, "model_states")

    @property
    def has_strangers(self) -> bool:
        """Whether an optimizer has gradients of tensors that are no weights, as far as can be told."""
        return any(not places for _, places in self._known.values())

    def _learn(self, tensors: list[Tensor]) -> None:
        """Find what these tensors, as of one optimizer, are, by where they lie, else by their values."""
        new = [each for each in tensors if id(each) not in self._known]
        self._known |= {id(each): (each, self._by_memory(each)) for each in new}
        copies = [each for each in new if not self._known[id(each)][1]]
        for tensor, at in zip(copies, self._by_value(copies), strict=True):
            self._known[id(tensor)] = tensor, at

    def _shown(self) -> Iterable[tuple[str, Tensor, Tensor]]:
        """(name, which elements, their values) of what the sharded model shows."""
        if self._is_engine:
            for name, entries in self._holder.state_dict().items():
                for piece in entries["weight"].pieces if "weight" in entries else ():
                    where = torch.arange(piece.start, piece.start + piece.tensor.numel())
                    yield name, where, piece.tensor.detach()
            return
        for name, parameter in self._parameters():
            if not _is_freed(parameter):
                yield name, _elements(parameter), _flat(parameter)

    def _parameters(self) -> Iterable[tuple[str, Tensor]]:
        """(name, parameter) of a module, or of an engine's, that has a weight's shape."""
        module = self._holder.model if self._is_engine else self._holder
        for name, parameter in module.named_parameters():
            name = self._plain_name(name)
            if name in self._initial and parameter.shape == self._initial[name].shape:
                yield name, parameter

    def _by_memory(self, tensor: Tensor) -> list[Place]:
        """Find weights that lie in the tensor's memory: it is one, or a slice of a flat buffer of them."""
        found: list[Place] = []
        mine = _flat(tensor)
        for name, parameter in self._parameters():
            if parameter is tensor:  # of which an engine's state may give no part on this rank
                return [(name, _elements(parameter), slice(0, len(mine)))]
        for name, where, values in self._shown():
            begin = (values.data_ptr() - mine.data_ptr()) // mine.itemsize
            low, high = max(begin, 0), min(begin + len(values), len(mine))
            if low < high and values.dtype == mine.dtype:
                found.append((name, where[low - begin : high - begin], slice(low, high)))
        return found

    def _plain_name(self, name: str) -> str:
        """Leave out what wrappers put before or between a name's words; a model may have a child `module` itself."""
        tried = [name]
        while tried:
            if found := next((each for each in tried if each in self._initial), None):
                return found
            split = [each.split(".") for each in tried]  # one word of a wrapper less, whichever
            less = (w[:i] + w[i + 1 :] for w in split for i in range(len(w)) if w[i] in WRAPPED)
            tried = [*dict.fromkeys(map(".".join, less))]
        return name

    def _by_value(self, copies: list[Tensor]) -> list[list[Place]]:
        """Find what these tensors are, as built: each one weight, else elements of some."""
        if not copies:
            return []
        dtype = copies[0].dtype
        initial = {name: each.flatten().to(dtype).float() for name, each in self._initial.items()}
        whole, begins = torch.cat([*initial.values()]), {*accumulate(map(len, initial.values()))}
        numbers, counts = whole.unique(return_counts=True)
        order = whole.argsort()
        found: list[list[Place]] = []
        for mine in (_flat(each).float() for each in copies):
            named = [name for name, values in initial.items() if torch.equal(values, mine)]
            if len(named) == 1:
                found.append([(named[0], torch.arange(len(mine)), slice(0, len(mine)))])
                continue
            ranked = torch.searchsorted(whole[order], mine).clamp(max=len(order) - 1)
            at = torch.where(torch.isin(mine, numbers[counts == 1]), order[ranked], -1)
            found.append(self._runs(_filled(at.tolist(), mine, whole, begins)))
        return found

    def _runs(self, numbers: list[int]) -> list[Place]:
        """Return the weights of elements, given by their numbers among those of all weights; -1 of none."""
        found: list[Place] = []
        at, begin = torch.tensor(numbers), 0
        for name, value in self._initial.items():
            inside = ((at >= begin) & (at < begin + value.numel())).nonzero().flatten().tolist()
            if inside and inside[-1] - inside[0] + 1 == len(inside):
                here = slice(inside[0], inside[-1] + 1)
                found.append((name, at[here] - begin, here))
            begin += value.numel()
        return found


def add(pieces: list[LocalElements], further: list[LocalElements]) -> list[LocalElements]:
    """Add what is not there in this dtype, as masters beside copies; return what is left out, as the first wins."""
    there: dict[Any, list[Tensor]] = {}
    for piece in pieces:
        there.setdefault((piece.name, piece.values.dtype), []).append(piece.where)
    left_out: list[LocalElements] = []
    for piece in further:
        known = there.get((piece.name, piece.values.dtype), [])
        is_there = any(_share_elements(piece.where, each) for each in known)
        (left_out if is_there else pieces).append(piece)
    return left_out


def _share_elements(one: Tensor, other: Tensor) -> bool:
    if not (len(one) and len(other)):
        return False
    # `isin` sorts both, and nearly always they are alike.
    return torch.equal(one, other) or bool(torch.isin(one, other).any())


def whole(pieces: Iterable[LocalElements], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return whole flat tensors in float64; nan where no piece is. The first with most bits wins."""
    result = {
        name: torch.full((size.numel(),), torch.nan).double() for name, size in shapes.items()
    }
    for piece in sorted(pieces, key=lambda each: -each.values.itemsize):
        empty = result[piece.name][piece.where].isnan()
        result[piece.name][piece.where[empty]] = piece.values[empty].double()
    return result


def _filled(at: list[int], mine: Tensor, whole: Tensor, begins: set[int]) -> list[int]:
    """Find what stands more than once beside what is found; zeros behind a weight or before one may be padding."""
    at, values = at.copy(), mine.tolist()
    for indices, step in ((range(1, len(at)), 1), (range(len(at) - 2, -1, -1), -1)):
        for i in indices:
            beside = at[i - step] + step
            is_next = at[i] < 0 <= at[i - step] and 0 <= beside < len(whole)
            is_padding = values[i] == 0 and max(beside, at[i - step]) in begins
            if is_next and whole[beside] == values[i] and not is_padding:
                at[i] = beside
    return at


def _is_freed(tensor: Any) -> bool:
    """Whether a tensor keeps its shape and has no memory, as under FSDP. Raises NoLoop where it may not be asked."""
    try:
        local = local_tensor(tensor).detach()
    except RuntimeError as error:  # of an engine of ours, which guards what is freed
        raise NoLoop("weights are shown by the strategy alone; return (strategy, step)") from error
    return local.numel() > 0 and local.untyped_storage().nbytes() == 0


def _copies(tensor: Any, places: list[Place]) -> list[LocalElements]:
    if _is_freed(tensor):
        return []
    flat = _flat(tensor)
    return [LocalElements(name, where, flat[at].clone()) for name, where, at in places]


def _flat(tensor: Any) -> Tensor:
    return local_tensor(tensor).detach().reshape(-1)


def _elements(parameter: Tensor) -> Tensor:
    numbers = torch.arange(parameter.numel())
    if not isinstance(parameter, DTensor):
        return numbers
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    box = tuple(slice(low, low + size) for low, size in zip(offset, shape, strict=True))
    return numbers.view(parameter.shape)[box].reshape(-1)
