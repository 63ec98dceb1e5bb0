"""Storages that live while a program runs on fake tensors: how many bytes there are, of which kind, and at which time.

Every operation goes through `Storages`, a dispatch mode above FakeTensorMode. A storage that an operation returns for
the first time is born; it dies when no tensor has it any more. `UntypedStorage.resize_` is no operation, so it is
watched by itself: engines free gathered parameters with `resize_(0)` while tensors still point at them. Views and
aliases count once, since storages are counted and not tensors.

[Note: kinds] What a storage is becomes known later: an engine names its model states at some moments, and a storage
that outlives the forward in which it was born is an activation. So births, sizes and deaths are written down, and
`peaks` goes through them again once the phase is over.

[Note: guarded parameters] While an engine guards a parameter (zero_safety/parameter_guards.py), it has another class,
by which FakeTensorMode does not know it as fake. Giving it a gradient asks for its device, which is answered here.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from zeroexp.measure.communication_overlap import meter
from zeroexp.measure.memory import on_host
from zeroexp.plan.caching_allocator import Change

ACTIVATIONS, LOGITS, TEMPORARIES = "activations", "logits", "temporaries"
DEVICE = torch.ops.prim.device.default
MESSAGES = "messages"  # born while the engine issues a move


class LocalOperations(TorchDispatchMode):
    """The base of the modes of a rehearsal: `run` is called for each operation on the tensors of one rank."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes back with the local tensors
        if func is DEVICE and isinstance(args[0], FakeTensor):  # two of three calls, in a backward
            return args[0].fake_device
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation, or what is to be run instead, and return its result."""
        return func(*args, **kwargs)


@dataclass
class Storage:
    """One storage, alive or dead."""

    born_in: str  # the phase
    made_by: str  # the operation that returned it first
    is_logits: bool = False  # a number for each word, at each position
    num_bytes: int = 0  # now
    kind: str | None = None  # as the engine names it
    counts: bool = True
    outlives_forward: bool = False


@dataclass(frozen=True)
class PhasePeak:
    """The most bytes that lived at once in a phase."""

    num_bytes: int
    by_kind: dict[str, int]
    # The largest storages at that time: (bytes, kind, operation that made it), largest first.
    largest: list[tuple[int, str, str]] = field(compare=False)


class Storages(LocalOperations):
    """Follows all storages of fake tensors of `mode`; enter it inside of that mode."""

    def __init__(
        self, mode: FakeTensorMode, device: torch.device, num_logits: int | None = None
    ) -> None:
        """Follow nothing yet.

        device: of the model's parameters. num_logits: the size of the model's output, by which logits are known from
        other activations.
        """
        super().__init__()
        of_device = torch.get_device_module(device)
        self._current_stream: Callable[[], Hashable] = of_device.current_stream
        self._num_uncounted = 0  # how many ask just now that nothing counts
        self._mode = mode
        self._device = device
        self._num_logits = num_logits
        self._all: list[Storage] = []  # by serial number
        # Address of the C++ storage -> serial number, of those alive.
        self._serials: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._changes: list[Change] = []  # keys are serial numbers
        # The phases so far, and how many changes there were when each began.
        self._phases: list[tuple[str, int]] = [("build", 0)]
        self._first_kept = 1  # of the phases after the build, see `forget_phases`

    def __enter__(self) -> Storages:
        self._resize = torch.UntypedStorage.resize_
        resize, seen = self._resize, self._record_resize

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            seen(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_tell  # pyright: ignore[reportAttributeAccessIssue]
        self._propagate = propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def propagate_uncounted(propagator: ShardingPropagator, schema: Any) -> Any:
            with self.not_counting():  # it asks for the shape of a result with whole tensors
                return propagate(propagator, schema)

        ShardingPropagator._propagate_tensor_meta_non_cached = propagate_uncounted  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        ShardingPropagator._propagate_tensor_meta_non_cached = self._propagate
        super().__exit__(*error)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is DEVICE:
            return self._device  # [Note: guarded parameters]
        result = func(*args, **kwargs)
        for tensor in tree_iter(result):
            if isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode:
                self._record(tensor, func)
        return result

    # -- what the caller tells and asks ------------------------------------------------------------

    @contextmanager
    def not_counting(self) -> Generator[None]:
        """Count no storage that is born inside: it is of another rank, or has a shape or an address alone."""
        self._num_uncounted += 1
        yield
        self._num_uncounted -= 1

    def begin_phase(self, phase: str) -> None:
        """Begin a phase; all changes belong to it until the next one."""
        if self._phase == "forward":
            for serial in self._serials.values():
                self._all[serial].outlives_forward |= self._all[serial].born_in == "forward"
        self._phases.append((phase, len(self._changes)))

    def forget_phases(self) -> None:
        """Leave the phases since the build out of `peaks`; storages that live stay known."""
        self._first_kept = len(self._phases)

    def changes(self) -> tuple[list[Change], list[Change]]:
        """Return what lives after the build and what changed until `forget_phases`; and what changed since."""
        build_end, start = self._phases[1][1], self._phases[self._first_kept][1]
        built = {change[0]: change for change in self._changes[:build_end]}.values()
        before = [*(each for each in built if each[1]), *self._changes[build_end:start]]
        return before, self._changes[start:]

    def assign_kind(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Say what the storages behind these tensors are. The first name stays, but for messages that rest later."""
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            serial = self._serials.get(local.untyped_storage()._cdata)
            if serial is not None and self._all[serial].kind in (None, MESSAGES):
                self._all[serial].kind = kind

    def peaks(self) -> dict[str, PhasePeak]:
        """Return the peak of each phase; one that came several times counts where it was highest."""
        found: dict[str, PhasePeak] = {}
        alive: dict[int, int] = {}  # serial number -> bytes when the phase began
        ends = [*(start for _, start in self._phases[1:]), len(self._changes)]
        for number, ((phase, start), end) in enumerate(zip(self._phases, ends, strict=True)):
            changes = [(serial, size) for serial, size, _ in self._changes[start:end]]
            if number == 0 or number >= self._first_kept:
                peak = self._peak_of(alive, changes)
                if phase not in found or peak.num_bytes > found[phase].num_bytes:
                    found[phase] = peak
            alive |= changes
        return found

    # -- how ---------------------------------------------------------------------------------------

    @property
    def _phase(self) -> str:
        return self._phases[-1][0]

    def _record(self, tensor: FakeTensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        serial = self._serials.get(address)
        if serial is None:
            serial = len(self._all)
            is_logits = tensor.dim() > 1 and tensor.shape[-1] == self._num_logits
            kind = MESSAGES if meter.is_issuing else None
            counts = not self._num_uncounted and not on_host.is_entered
            self._all.append(Storage(self._phase, str(func), is_logits, kind=kind, counts=counts))
            self._serials[address] = serial
            self._references[serial] = weakref.ref(
                storage, lambda _: self._record_death(address, serial)
            )
        self._record_size(serial, storage.nbytes())

    def _record_resize(self, storage: torch.UntypedStorage) -> None:
        serial = self._serials.get(storage._cdata)
        if serial is not None:
            self._record_size(serial, storage.nbytes())

    def _record_death(self, address: int, serial: int) -> None:
        if self._serials.get(address) == serial:
            del self._serials[address]
        del self._references[serial]
        self._record_size(serial, 0)

    def _record_size(self, serial: int, num_bytes: int) -> None:
        if self._all[serial].counts and self._all[serial].num_bytes != num_bytes:
            self._all[serial].num_bytes = num_bytes
            self._changes.append((serial, num_bytes, self._current_stream()))

    def _peak_of(self, alive: dict[int, int], changes: list[tuple[int, int]]) -> PhasePeak:
        now, when = dict(alive), 0  # after how many changes there were most
        num_bytes = total = sum(now.values())
        for index, (serial, size) in enumerate(changes, start=1):
            total += size - now.get(serial, 0)
            now[serial] = size
            if total > num_bytes:
                num_bytes, when = total, index
        held = {**alive, **dict(changes[:when])}
        by_kind: Counter[str] = Counter()
        for serial, size in held.items():
            by_kind[self._kind_of(serial)] += size
        largest = sorted(held.items(), key=lambda each: -each[1])[:10]
        told = [(size, self._kind_of(s), self._all[s].made_by) for s, size in largest if size]
        return PhasePeak(num_bytes, {kind: size for kind, size in by_kind.items() if size}, told)

    def _kind_of(self, serial: int) -> str:
        storage = self._all[serial]
        if storage.kind is not None:
            return storage.kind
        if storage.is_logits:
            return LOGITS
        return ACTIVATIONS if storage.outlives_forward else TEMPORARIES
