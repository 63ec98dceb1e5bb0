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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from zeroexp.interface.values import Read, exchange

Thing = TypeVar("Thing")

aten = torch.ops.aten
EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default}
# These operations write every element of their first argument and read none of it.
OVERWRITING = {
    *(aten.normal_.default, aten.uniform_.default, aten.random_.default, aten.exponential_.default),
    *(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default),
}


class CannotDefer(RuntimeError):
    """The error of a constructor that reads the values of a parameter, so that it must run plainly."""


@dataclass(frozen=True)
class _View:
    """A tensor of the constructor, as a view of a memory that exists only in the replay."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class _Operation:
    function: Callable[..., Any]
    arguments: tuple[Any, dict[str, Any]]  # with views in the place of tensors on meta
    made: list[_View | None]  # each tensor that it returns; None for a view of what was there
    overwrites: int | None  # the memory whose elements all become new

    def given(self) -> set[int]:
        """Return the memories that it reads or writes and does not make."""
        leaves = tree_flatten(self.arguments)[0]
        return {leaf.memory for leaf in leaves if isinstance(leaf, _View)}

    def memories(self) -> set[int]:
        return self.given() | {view.memory for view in self.made if view is not None}


class Tape(TorchDispatchMode):
    """The tape notes what happens to tensors without elements while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[_Operation] = []
        self._bytes: dict[int, int] = {}  # of each memory
        # Storages are kept alive, so that none gets the address of another.
        self._alive: dict[int, torch.UntypedStorage] = {}

    def __enter__(self) -> Tape:
        self._hook = register_module_parameter_registration_hook(self._take)
        self._pretence = _AsOnCpu()
        self._pretence.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._pretence.__exit__(*error)
        self._hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run_or_note(func, args, kwargs or {})

    def _run_or_note(self, func: Any, args: Any, kwargs: Any) -> Any:
        deferred = any(_is_meta(leaf) for leaf in tree_flatten((args, kwargs))[0])
        if not (deferred or func in EMPTY or torch.Tag.nondeterministic_seeded in func.tags):
            return func(*args, **kwargs)
        if func._schema.is_mutable and not _is_meta(args[0]):
            raise CannotDefer(f"{func} draws into a tensor that is no parameter")
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

    def parameters(self, module: nn.Module) -> dict[str, _View]:
        """Return the parameters of `module` by name. Raises CannotDefer for one that this tape does not know."""
        views = {name: self._noted(p.detach()) for name, p in module.named_parameters()}
        for name, view in views.items():
            if not isinstance(view, _View):
                raise CannotDefer(f"{name} has values already")
        return views

    def replay(self, wanted: dict[str, _View], seed: int) -> Iterator[tuple[str, Tensor]]:
        """Run all operations; yield each parameter once it has its values. It is freed when the next one is asked for.

        The caller's random state stays as it is.
        """
        random = _Random(seed)
        storages: dict[int, torch.UntypedStorage] = {}
        named: dict[int, list[str]] = {}
        for name, view in wanted.items():
            named.setdefault(view.memory, []).append(name)
        ends, last = self._ends()
        for index, operation in enumerate(self._operations):
            for memory in operation.given():
                if memory not in storages:
                    storages[memory] = _allocated(self._bytes[memory])
            with random, torch.no_grad():
                _run(operation, storages)
            for memory in ends[index]:
                for name in named.get(memory, ()) if index == last[memory] else ():
                    yield name, wanted[name].of(storages[memory])
                del storages[memory]

    def only(self, wanted: dict[str, _View]) -> Tape:
        """Return a tape of what gives these parameters their values, and of no other draw."""
        needed = {view.memory for view in wanted.values()}
        kept: list[_Operation] = []
        for index in reversed(range(len(self._operations))):
            operation = self._operations[index]
            if needed & operation.memories():
                kept.append(operation)
                needed |= operation.memories()
                if operation.overwrites is not None:
                    needed.discard(operation.overwrites)
        tape = Tape()
        tape._operations, tape._bytes = kept[::-1], self._bytes
        return tape

    # -- how --------------------------------------------------------------------------------------

    def _take(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Put a parameter that is registered with values on meta, and note the values."""
        with torch._C.DisableTorchFunction():
            if parameter is None or parameter.is_meta:
                return
            values = parameter.detach()
            exchange(parameter, torch.empty_like(values, device="meta"))
            view = self._noted(parameter)
        self._operations.append(
            _Operation(aten.copy_.default, ((view, values), {}), [None], view.memory)
        )

    def _noted(self, tensor: Tensor) -> Any:
        if not tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        memory = id(storage)
        self._alive[memory] = storage
        self._bytes[memory] = max(storage.nbytes(), self._bytes.get(memory, 0))
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return _View(memory, tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def _note(self, func: Any, arguments: Any, result: Any) -> None:
        before = {leaf.memory for leaf in tree_flatten(arguments)[0] if isinstance(leaf, _View)}
        results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        views = [self._noted(tensor) for tensor in results]
        made = [view if view.memory not in before else None for view in views]
        if not any(made) and not func._schema.is_mutable:
            return  # a view, which has no memory of its own
        overwrites = None
        first = arguments[0][0] if arguments[0] else None
        if func in OVERWRITING and isinstance(first, _View) and self._covers_whole_storage(first):
            overwrites = first.memory
        self._operations.append(_Operation(func, arguments, made, overwrites))

    def _covers_whole_storage(self, view: _View) -> bool:
        numel = torch.Size(view.shape).numel()
        dense = torch.empty(view.shape, device="meta").stride() == view.stride
        return dense and numel * view.dtype.itemsize == self._bytes[view.memory]

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


class _AsOnCpu(TorchFunctionMode):
    """Code sees tensors without elements as on the CPU: initializers do nothing to what they know to be on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return False
        if func == torch.Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return torch.device("cpu")
        return func(*args, **(kwargs or {}))


class _Random:
    """A generator of our own, which takes the place of torch's while it is entered."""

    def __init__(self, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._state = torch.get_rng_state()

    def __enter__(self) -> None:
        self._callers = torch.get_rng_state()
        torch.set_rng_state(self._state)

    def __exit__(self, *_: object) -> None:
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._callers)


def _is_meta(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def _allocated(num_bytes: int) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()


def _run(operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
    """Run one operation on real memory; what it makes anew takes the place of the memory that was allocated for it."""
    args, kwargs = tree_map_only(
        _View, lambda view: view.of(storages[view.memory]), operation.arguments
    )
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = operation.function(*args, **kwargs)
    results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
    for view, tensor in zip(operation.made, results, strict=True):
        if view is not None:
            storages[view.memory] = tensor.untyped_storage()


class Drawn:
    """The values that a seed gives the parameters of a module whose constructor ran inside of `tape`."""

    def __init__(self, tape: Tape, parameters: dict[str, _View], seed: int) -> None:
        self._tape, self._parameters, self._seed = tape, parameters, seed

    def __iter__(self) -> Iterator[tuple[str, Read]]:
        for name, tensor in self._tape.replay(self._parameters, self._seed):
            held = [tensor]
            del tensor
            yield name, ranges_of(held)
            held.clear()  # a caller may still hold `read` while the next parameter is drawn

    def only(self, names: set[str]) -> Drawn:
        """Return the values of these parameters, drawn as if there were no others."""
        few = {name: view for name, view in self._parameters.items() if name in names}
        return Drawn(self._tape.only(few), few, self._seed)

    def fingerprint(self) -> int:
        return zlib.crc32(repr((self._seed, sorted(self._parameters))).encode())


def defer(
    construct: Callable[[], Thing], seed: int, module_of: Callable[[Thing], nn.Module]
) -> tuple[Thing, Drawn]:
    """Run `construct` and return what it made, its module's parameters on meta, with the values they are to hold.

    Raises CannotDefer if the constructor needs values that are still to be drawn.
    """
    tape = Tape()
    with tape:
        made = construct()
    module = module_of(made)
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise CannotDefer(f"buffer {name} depends on what is drawn")
    return made, Drawn(tape, tape.parameters(module), seed)


def ranges_of(held: list[Tensor]) -> Read:
    """Return a reader of the one tensor in `held`, which its owner may take away."""
    return lambda start, stop: held[0].reshape(-1)[start:stop]
