"""Save checkpoints: copy the state at the boundary between two steps, then write it in a thread.

    step k ── boundary: wait for the previous save ─▶ copy pieces ── step k+1, k+2, ...
                                                          └─▶ thread: write, hash, sync ─▶ rank 0: manifest, rename

All ranks call the same methods at the same boundaries. The thread's messages (plans and hashes, no tensor) use their
own gloo group, so that they never mix with those of training.

[Note: failed saves] A save that fails is reported at once, in one line of the log and of checkpoints.jsonl; it frees
its space on the disk and leaves the older checkpoints unchanged. Training goes on, since its state in memory is now
worth more than ever, and the next save tries again. A run whose last save failed ends as failed.
"""

from __future__ import annotations

import platform
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from zeroexp import __version__
from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import CheckpointError, Manifest, Stored
from zeroexp.checkpoint.planner import PiecePlanner
from zeroexp.checkpoint.rng import random_states
from zeroexp.checkpoint.staging import RNG, Flat, Staging, flat_state
from zeroexp.checkpoint.storage import PieceWriter, Target
from zeroexp.config.keys import Config
from zeroexp.interface.strategy import CanonicalTensor, Piece, Strategy
from zeroexp.process import world as worlds
from zeroexp.process.world import World


@dataclass
class SaveRecord:
    """A line of checkpoints.jsonl: one save as rank 0 saw it."""

    step: int
    num_bytes: int = 0  # sum over all ranks
    blocked_seconds: float = 0.0  # training waited: for the previous save, and for the copy
    write_seconds: float = 0.0  # in the thread, while training goes on
    error: str | None = None  # None: the checkpoint is complete


class Saver:
    """Saves one run. Its thread is a daemon, so a rank that fails does not wait for it."""

    def __init__(
        self, run: Path, strategy: Strategy, config: Config, world: World, *, attempt: int = 0
    ) -> None:
        """Raises CheckpointError, on all ranks, if the folder cannot be written or `attempt` is outdated."""
        self._run, self._strategy, self._config, self._world = run, strategy, config, world
        self._attempt = attempt
        self._staging = Staging(world.device)
        self._group: dist.ProcessGroup | None = None  # created at the first save
        self._writing: Future[SaveRecord] | None = None
        self._last: SaveRecord | None = None
        self._blocked_seconds = 0.0
        self._prepared = False
        if config.checkpoint.every is not None:
            self._prepare()  # fail now, not after the first steps

    def is_due(self, steps_done: int) -> bool:
        """Tell whether `checkpoint.every` asks for a save after this many steps; the end of training does not count."""
        every, train = self._config.checkpoint.every, self._config.train
        last = train.warmup_steps + train.steps
        return every is not None and steps_done % every == 0 and steps_done < last

    def save(self, steps_done: int) -> None:
        """Copy the state after `steps_done` steps; training may change the state once this returns."""
        began = time.perf_counter()
        self._settle()
        if self._last and self._last.step == steps_done and self._last.error is None:
            return
        if not self._prepared:
            self._prepare()
        if self._group is None:
            self._group = worlds.background_group()
        staged = self._staging.copy(self._flat_state())
        blocked = time.perf_counter() - began
        self._blocked_seconds += blocked
        saved = SaveRecord(steps_done, blocked_seconds=blocked)
        self._writing = _in_background(lambda: self._write(staged, saved))

    def save_now(self, steps_done: int) -> None:
        """Save and return when the checkpoint is complete on the disk. Raises CheckpointError if the save failed."""
        self.save(steps_done)
        self.finish()

    def finish(self) -> None:
        """Wait for the save in progress. Raises CheckpointError if the last save failed."""
        self._settle()
        if self._last is not None and self._last.error is not None:
            newest = folders.newest_checkpoint(self._run)
            stands = f"the newest whole one is {newest}" if newest else "there is no other"
            raise CheckpointError(f"{self._last.error}; {stands}")

    def close(self) -> None:
        """Destroy the process group; all ranks call this together, with no save in progress."""
        assert self._writing is None, "finish first"
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def take_blocked_seconds(self) -> float:
        """Return how long training has stood still since the last call."""
        seconds, self._blocked_seconds = self._blocked_seconds, 0.0
        return seconds

    # -- how --------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        problem, self._prepared = None, True
        if self._world.rank == 0:
            try:
                folders.register_attempt(self._run, self._attempt)
            except CheckpointError as error:
                problem = str(error)
        for failure in worlds.gather_objects(problem):
            if failure:
                raise CheckpointError(failure)

    def _flat_state(self) -> Flat:
        flat = flat_state(self._strategy)
        for kind, state in random_states(self._world).items():
            whole = CanonicalTensor(tuple(state.shape), state.dtype, [Piece(0, state)])
            flat[f"{RNG}/{self._world.rank}/{kind}"] = whole
        return flat

    def _settle(self) -> None:
        """Wait for the previous save."""
        if self._writing is not None:
            self._last, self._writing = self._writing.result(), None

    # -- in the thread ----------------------------------------------------------------------------

    def _write(self, staged: Flat, saved: SaveRecord) -> SaveRecord:
        """Write the copies without ever raising: `error` holds the failure, the same on every rank."""
        began = time.perf_counter()
        target = Target(self._run, saved.step, self._attempt, self._config.checkpoint.keep)
        writer = PieceWriter(target, lambda state, rng: self._manifest(saved.step, state, rng))
        state: dict[str, Any] = dict(staged)
        try:
            dcp.save(
                state, storage_writer=writer, planner=PiecePlanner(), process_group=self._group
            )
        except BaseException as error:  # DCP's own error is not an Exception
            saved.error = f"checkpoint of step {saved.step} failed: {_first(error)}"
        saved.num_bytes, saved.write_seconds = writer.num_bytes, time.perf_counter() - began
        if self._world.rank == 0:
            self._tell(saved)
        return saved

    def _tell(self, saved: SaveRecord) -> None:
        if saved.error is not None:
            print(saved.error, file=sys.stderr)
            folders.discard(self._run, saved.step, self._attempt)
        folders.append_to_log(self._run, asdict(saved))

    def _manifest(self, steps_done: int, state: Stored, rng: Stored) -> Manifest:
        versions = {"zeroexp": __version__, "torch": torch.__version__}
        return Manifest(
            versions={**versions, "python": platform.python_version()},
            saved_at=time.time(),
            config=asdict(self._config),
            step=steps_done,
            samples_seen=steps_done * self._config.data.global_batch_size,
            world_size=self._world.size,
            state=state,
            rng=rng,
        )


def _in_background(action: Callable[[], SaveRecord]) -> Future[SaveRecord]:
    future: Future[SaveRecord] = Future()
    threading.Thread(target=lambda: future.set_result(action()), daemon=True).start()
    return future


def _first(error: BaseException) -> str:
    """Return the first cause in one line, with its rank."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    reason = str(cause).partition("\n")[0]
    return (
        reason
        if isinstance(cause, CheckpointError)
        else f"rank {rank}: {type(cause).__name__}: {reason}"
    )
