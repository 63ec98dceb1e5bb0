"""What a rank does in the benchmark of checkpoints: save, or change its state and load what was saved.

A load counts only where it brought back every bit: each turn compares hashes of all pieces, outside of what is timed.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from benchmarks.ranks import Spec, Training
from benchmarks.savers import OURS, Way, way
from zeroexp.checkpoint.manifest import hash_of
from zeroexp.interface.strategy import Strategy
from zeroexp.measure.memory import AllocationMeter
from zeroexp.process import world as worlds

NUM_STEPS = 2  # before anything is saved, so that every moment is there


@dataclass(frozen=True)
class SaveSpec(Spec):
    folder: Path = Path()  # empty, and shared by the ranks of this engine
    ways: tuple[str, ...] = (OURS,)


@dataclass(frozen=True)
class Cost:
    """Of one save or load on one rank."""

    blocked_seconds: float  # until training may go on
    seconds: float  # until it is whole and synced
    # The most held at once: saving, beyond what training holds without it; loading, beyond what is there.
    extra_bytes: int | None
    state_bytes: int  # weights and moments that this rank contributes
    written_bytes: int = 0  # in the folder, of all ranks


class CheckpointRunner:
    def __init__(self, spec: Spec) -> None:
        assert isinstance(spec, SaveSpec)
        training = Training(spec)
        self._world = training.world
        self._strategy = cast(Strategy, training.strategy)
        for number in range(1, NUM_STEPS + 1):
            training.step(drain=number == NUM_STEPS)
        gc.collect()
        self._held_bytes = self._held()
        self._ways: dict[str, tuple[Way, Path]] = {}
        for number, name in enumerate(spec.ways):
            folder = spec.folder / str(number)
            folder.mkdir(exist_ok=True)
            self._ways[name] = way(name, self._strategy, folder, self._world), folder
        self._saved: dict[str, str] = {}

    def turn(self, order: tuple[str, str]) -> Cost:
        verb, name = order
        chosen, folder = self._ways[name]
        return self._save(chosen, folder) if verb == "save" else self._load(chosen, folder)

    def _save(self, chosen: Way, folder: Path) -> Cost:
        self._saved = self._hashes()
        with self._alone():
            memory, began = AllocationMeter(self._world.device), time.perf_counter()
            finish = chosen.save()
            blocked = time.perf_counter() - began
            finish()
            seconds = time.perf_counter() - began
        written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        extra = _extra(memory, self._held_bytes)
        return Cost(blocked, seconds, extra, self._state_bytes(), written)

    def _load(self, chosen: Way, folder: Path) -> Cost:
        self._change()
        assert self._hashes() != self._saved
        with self._alone():
            held = self._held()
            memory, began = AllocationMeter(self._world.device), time.perf_counter()
            chosen.load()
            seconds = time.perf_counter() - began
        if self._hashes() != self._saved:
            raise AssertionError(f"{folder}: what was loaded is not what was saved")
        if self._world.rank == 0:
            for path in (
                *folder.glob("checkpoint/step-*"),
                *folder.glob("*.pt"),
                folder / ".metadata",
            ):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return Cost(seconds, seconds, _extra(memory, held), self._state_bytes())

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        gc.collect()
        gc.disable()  # a collection in somebody's turn would be his bad luck
        worlds.barrier()
        yield
        worlds.barrier()
        gc.enable()

    def _held(self) -> int | None:
        return AllocationMeter(self._world.device).peak_bytes()

    def _change(self) -> None:
        for tensors in self._strategy.state_dict().values():
            for tensor in tensors.values():
                for piece in tensor.pieces:
                    piece.tensor.add_(1)

    def _hashes(self) -> dict[str, str]:
        return {
            f"{name} {key} {piece.start}": hash_of([piece.tensor.view(torch.uint8).numpy().data])
            for name, tensors in self._strategy.state_dict().items()
            for key, tensor in tensors.items()
            for piece in tensor.pieces
        }

    def _state_bytes(self) -> int:
        return sum(
            piece.tensor.nbytes
            for tensors in self._strategy.state_dict().values()
            for tensor in tensors.values()
            for piece in tensor.pieces
        )


def _extra(memory: AllocationMeter, held: int | None) -> int | None:
    peak = memory.peak_bytes()
    return None if peak is None or held is None else peak - held
