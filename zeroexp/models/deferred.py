"""Run a model's constructor without the memory of its parameters, and draw their values later, one after the other.

    torch.empty(4096, 4096)         a tensor on meta, which has a shape and no elements
    weight.normal_(0, 0.02)         noted on a tape, and not run
    self.scale = nn.Parameter(ones) the ones are kept, and noted as what the parameter, now on meta, begins with
    torch.arange(0, 64, 2)          runs: buffers such as rotary frequencies are right at once

    replay                          every noted operation in its order, on real memory and with one generator;
                                    the memory of a parameter exists from its last overwriting to its last operation

The generator sees the same draws in the same order as if the constructor had run plainly, so the values are the same
bits. Libraries initialize twice (torch when a layer is made, transformers when the model is complete). The first draws
are thrown away at once, but they must be drawn, since the generator advances with them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from zeroexp.interface.values import Read, swap_in

Thing = TypeVar("Thing")

aten = torch.ops.aten
EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default}
# These operations write every element of their first argument and read none of it.
OVERWRITING = {
    *(aten.normal_.default, aten.uniform_.default, aten.random_.default, aten.exponential_.default),
    *(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default),
}
LARGEST_SCRATCH = 1 << 24  # bytes
PAGE, WORD = 4096, 8  # bytes that are summed up, and those of one term
# On meta these do nothing, without a word.
BY_ELEMENT = (Tensor.apply_, Tensor.map_, Tensor.map2_)  # pyright: ignore[reportAttributeAccessIssue]


class CannotDefer(RuntimeError):
    """The error of a constructor that reads the values of a parameter, so that it must run plainly."""


@dataclass(frozen=True, eq=False)
class _Operation:
    """Tensors on meta are views of memories that exist only in the replay; held here, none gets another's address."""

    function: Callable[..., Any]
    arguments: tuple[Any, dict[str, Any]]
    made: list[Tensor | None]  # each tensor that it returns; None for a view of what was there
    overwrites: int | None  # the memory whose elements all become new

    def given(self) -> dict[int, int]:
        """Return the memories that it reads or writes and does not make, each with its bytes."""
        leaves = filter(_is_meta, tree_flatten(self.arguments)[0])
        return {_memory_of(leaf): leaf.untyped_storage().nbytes() for leaf in leaves}

    def memories(self) -> set[int]:
        return {*self.given(), *(_memory_of(tensor) for tensor in self.made if tensor is not None)}


class Tape(TorchDispatchMode):
    """The tape notes what happens to tensors without elements while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        # Generators of the constructor's own: the state from which noted draws begin, and the one that they have left.
        self.generators: dict[torch.Generator, tuple[Tensor, Tensor]] = {}
        # Large tensors, with what `_state_of` told of them when they were noted.
        self._uncopied: list[tuple[Tensor, tuple[int, int]]] = []

    def __enter__(self) -> Tape:
        self._hook = register_module_parameter_registration_hook(self._take)
        self._random_state = self._state_of_draws = torch.get_rng_state()
        self._pretence = _AsOnCpu()
        self._pretence.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._pretence.__exit__(*error)
        self._hook.remove()
        try:
            self._require_own_draws()
            if any(_state_of(tensor) != noted for tensor, noted in self._uncopied):
                raise CannotDefer("a large tensor was changed after values were copied from it")
        finally:
            torch.set_rng_state(self._random_state)
            for generator, (first, _) in self.generators.items():
                generator.set_state(first)

    def _require_own_draws(self) -> None:
        """Raise CannotDefer if torch's generator is not where the draws so far have left it: it was seeded since."""
        if not torch.equal(torch.get_rng_state(), self._state_of_draws):
            raise CannotDefer("the random generator is seeded, or its state set, on the way")

    def _noted(self, tensor: Tensor) -> Tensor:
        """Return a tensor as it is now: one on meta may change its shape in place, a scratch one its values.

        A large one is read from somewhere, a mapped file perhaps, and is not copied: it must stay as it is.
        """
        if not tensor.is_meta and tensor.nbytes <= LARGEST_SCRATCH:
            return tensor.detach().clone()
        if not tensor.is_meta:
            self._uncopied.append((tensor, _state_of(tensor)))
        return tensor.detach()

    def _draw_in_place_of(self, func: Any, kwargs: Any) -> None:
        """Move the generator of a draw that is noted, so that code which sets it back is seen."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        if (own := kwargs.get("generator")) is not None:
            first, left = self.generators.get(own, (own.get_state(), own.get_state()))
            if not torch.equal(own.get_state(), left):
                raise CannotDefer("a random generator of its own is seeded or used on the way")
            torch.rand((), generator=own)
            self.generators[own] = first, own.get_state()
            return
        self._require_own_draws()
        torch.rand(())
        self._state_of_draws = torch.get_rng_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run_or_note(func, args, kwargs or {})

    def _run_or_note(self, func: Any, args: Any, kwargs: Any) -> Any:
        deferred = any(_is_meta(leaf) for leaf in tree_flatten((args, kwargs))[0])
        if not (deferred or func in EMPTY or torch.Tag.nondeterministic_seeded in func.tags):
            result = func(*args, **kwargs)
            # Torch brings a number or a list of indices to the device of the tensor that it writes into.
            if any(_is_meta(leaf) for leaf in tree_flatten(result)[0]):
                self._note(func, tree_map_only(Tensor, self._noted, (args, kwargs)), result)
            return result
        if func._schema.is_mutable and not _is_meta(args[0]):
            raise CannotDefer(f"{func} draws into a tensor that is no parameter")
        self._draw_in_place_of(func, kwargs)
        arguments = tree_map_only(Tensor, self._noted, (args, kwargs))
        on_meta = dict(kwargs)
        if "device" in on_meta or not deferred:
            on_meta["device"] = torch.device("meta")
        try:
            result = func(*args, **on_meta)
        except (RuntimeError, NotImplementedError) as error:
            raise CannotDefer(f"{func}: {error}") from error
        self._note(func, arguments, result)
        return result

    def _take(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Put a parameter that is registered with values on meta, and note the values."""
        with torch._C.DisableTorchFunction():
            if parameter is None or parameter.is_meta:
                return
            values = parameter.detach()
            swap_in(parameter, torch.empty_like(values, device="meta"))
            self._note(aten.copy_.default, ((parameter.detach(), values), {}), parameter)

    def _note(self, func: Any, arguments: Any, result: Any) -> None:
        before = {_memory_of(leaf) for leaf in tree_flatten(arguments)[0] if _is_meta(leaf)}
        results = [
            self._noted(leaf) for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)
        ]
        made = [tensor if _memory_of(tensor) not in before else None for tensor in results]
        if all(each is None for each in made) and not func._schema.is_mutable:
            return  # a view, which has no memory of its own
        first: Any = arguments[0][0] if arguments[0] else None
        overwrites = None
        if func in OVERWRITING and _is_meta(first) and _is_all_of_its_memory(first):
            read = filter(_is_meta, tree_flatten((arguments[0][1:], arguments[1]))[0])
            if _memory_of(first) not in map(_memory_of, read):  # as in w.fill_(w[0])
                overwrites = _memory_of(first)
        self.operations.append(_Operation(func, arguments, made, overwrites))


class _AsOnCpu(TorchFunctionMode):
    """Code sees tensors without elements as on the CPU: initializers do nothing to what they know to be on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return False
        if func == torch.Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return torch.device("cpu")
        if func in BY_ELEMENT:
            raise CannotDefer(f"{func.__name__} calls Python for each element")
        return func(*args, **(kwargs or {}))


def _is_meta(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def _state_of(tensor: Tensor) -> tuple[int, int]:
    """Return how often torch has written a tensor, and a checksum of the memory that it spans: NumPy counts no writes.

    Sums of its pages are taken some twenty times as fast as a crc32 of all bytes.
    """
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    stop = start + (1 + reach) * tensor.itemsize
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    spanned = memory[start // WORD * WORD : stop]
    pages, rest = spanned.split([len(spanned) // PAGE * PAGE, len(spanned) % PAGE])
    words = numpy.from_dlpack(pages.view(torch.int64).view(-1, PAGE // WORD))
    return tensor._version, zlib.crc32(words.sum(axis=1).data, zlib.crc32(rest.numpy().data))


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_all_of_its_memory(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _allocated(num_bytes: int) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()


def _run(operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
    """Run one operation on real memory; what it makes anew takes the place of the memory that was allocated for it."""
    args, kwargs = tree_map_only(
        Tensor, lambda each: _real(each, storages) if each.is_meta else each, operation.arguments
    )
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = operation.function(*args, **kwargs)
    results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
    for made, tensor in zip(operation.made, results, strict=True):
        if made is not None:
            storages[_memory_of(made)] = tensor.untyped_storage()


def _real(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """Return what a tensor on meta stands for."""
    view = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return torch.empty(0, dtype=tensor.dtype).set_(storages[_memory_of(tensor)], *view)


class Drawn:
    """The values that a seed gives the parameters of a module, of which a tape noted these operations."""

    def __init__(
        self,
        operations: list[_Operation],
        parameters: dict[str, Tensor],
        seed: int,
        generators: dict[torch.Generator, tuple[Tensor, Tensor]],
    ) -> None:
        """generators: see Tape."""
        self._operations, self._parameters, self._seed = operations, parameters, seed
        self._generators = generators

    def __iter__(self) -> Iterator[tuple[str, Read]]:
        """Run all operations; yield each parameter once it has its values. It is freed when the next one is asked for.

        The caller's random state stays as it is.
        """
        random_state = torch.Generator().manual_seed(self._seed).get_state()
        for generator, (first, _) in self._generators.items():
            generator.set_state(first)
        storages: dict[int, torch.UntypedStorage] = {}
        named: dict[int, list[str]] = {}
        for name, tensor in self._parameters.items():
            named.setdefault(_memory_of(tensor), []).append(name)
        ends, last = self._ends()
        for index, operation in enumerate(self._operations):
            for memory, num_bytes in operation.given().items():
                if memory not in storages:
                    storages[memory] = _allocated(num_bytes)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.set_rng_state(random_state)
                _run(operation, storages)
                random_state = torch.get_rng_state()
            for memory in ends[index]:
                for name in named.get(memory, ()) if index == last[memory] else ():
                    held = [_real(self._parameters[name], storages)]
                    yield name, ranges_of(held)
                    held.clear()  # a caller may still hold `read` while the next parameter is drawn
                del storages[memory]

    def _ends(self) -> tuple[list[list[int]], dict[int, int]]:
        """Return, for each operation, the memories that nobody needs after it; and each memory's last operation."""
        ends: list[list[int]] = [[] for _ in self._operations]
        last: dict[int, int] = {}
        for index, operation in enumerate(self._operations):
            if operation.overwrites in last:
                assert operation.overwrites is not None
                ends[last[operation.overwrites]].append(operation.overwrites)
            for memory in operation.memories():
                last[memory] = index
        for memory, index in last.items():
            ends[index].append(memory)
        return ends, last

    def only(self, names: set[str]) -> Drawn:
        """Return the values of these parameters, drawn as if there were no others."""
        few = {name: each for name, each in self._parameters.items() if name in names}
        needed = {_memory_of(tensor) for tensor in few.values()}
        kept: list[_Operation] = []
        for operation in reversed(self._operations):
            if needed & operation.memories():
                kept.append(operation)
                needed |= operation.memories()
                needed.discard(operation.overwrites or 0)
        return Drawn(kept[::-1], few, self._seed, self._generators)

    def fingerprint(self) -> int:
        return zlib.crc32(repr((self._seed, sorted(self._parameters))).encode())


def defer(
    construct: Callable[[], Thing], seed: int, module_of: Callable[[Thing], nn.Module]
) -> tuple[Thing, Drawn]:
    """Run `construct` and return what it made, its module's parameters on meta, with the values they are to hold.

    Raises CannotDefer if the constructor needs values that are still to be drawn.
    """
    tape = Tape()
    try:
        with tape:
            made = construct()
    except (RuntimeError, TypeError) as error:  # of torch: a tensor on meta has no values to read
        reason = str(error).partition("\n")[0]
        raise CannotDefer(reason) from error
    module = module_of(made)
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise CannotDefer(f"buffer {name} depends on what is drawn")
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    for name, parameter in parameters.items():
        if not parameter.is_meta:
            raise CannotDefer(f"{name} has values already")
    _require_known(tape.operations)
    return made, Drawn(tape.operations, parameters, seed, tape.generators)


def _require_known(operations: Sequence[_Operation]) -> None:
    """Raise CannotDefer if memory is read that no operation has made or overwritten: nobody knows its values."""
    known: set[int] = set()
    for operation in operations:
        if operation.given().keys() - known - {operation.overwrites}:
            raise CannotDefer(f"{operation.function} reads what nothing on the tape has made")
        known |= operation.memories()


def ranges_of(held: list[Tensor]) -> Read:
    """Return a reader of the one tensor in `held`, which its owner may take away."""
    return lambda start, stop: held[0].reshape(-1)[start:stop]
