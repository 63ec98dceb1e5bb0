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

import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import MANIFEST, CheckpointError, to_json
from zeroexp.checkpoint.rng import random_states
from zeroexp.checkpoint.staging import RNG, Flat, Staging, flat_state
from zeroexp.checkpoint.storage import Written, join_pieces, manifest_of, write_pieces
from zeroexp.config.keys import Config
from zeroexp.interface.canonical import canonical_of_one_rank
from zeroexp.interface.strategy import Strategy
from zeroexp.process import world as worlds
from zeroexp.process.durable import write_durably
from zeroexp.process.world import World

# Ranks wait so long at least for the slowest one's file, on a disk that others use too.
SLOWEST_SECONDS = 1800.0


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
        self,
        run: Path,
        strategy: Strategy,
        config: Config,
        world: World,
        *,
        attempt: int = 0,
        tokens_hash: str = "",
    ) -> None:
        """Raises CheckpointError if the folder cannot be written, `attempt` is outdated or ranks can not connect.

        tokens_hash: see Manifest.
        """
        self._run, self._strategy, self._config, self._world = run, strategy, config, world
        self._attempt, self._tokens_hash = attempt, tokens_hash
        self._staging = Staging(world.device)
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[SaveRecord] | None = None
        self._last: SaveRecord | None = None
        self._blocked_seconds = 0.0
        if config.checkpoint.every is not None:
            self._prepare()  # fail now, not after the first steps

    def is_due(self, steps_done: int) -> bool:
        """Tell whether `checkpoint.every` asks for a save after this many steps; the end of training does not count."""
        every, train = self._config.checkpoint.every, self._config.train
        last = train.warmup_steps + train.steps
        return every is not None and steps_done % every == 0 and steps_done < last

    def async_save(self, steps_done: int) -> None:
        """Copy the state after `steps_done` steps; training may change the state once this returns."""
        began = time.perf_counter()
        self._settle()
        if self._last and self._last.step == steps_done and self._last.error is None:
            return
        if self._group is None:
            self._prepare()
        staged = self._staging.copy(self._flat_state())
        blocked = time.perf_counter() - began
        self._blocked_seconds += blocked
        saved = SaveRecord(steps_done, blocked_seconds=blocked)
        self._writing = _in_background(lambda: self._write(staged, saved))

    def save_now(self, steps_done: int) -> None:
        """Save and return when the checkpoint is complete on the disk. Raises CheckpointError if the save failed."""
        self.async_save(steps_done)
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
        problem = None
        if self._world.rank == 0:
            try:
                folders.clear_unfinished(self._run, self._attempt)
            except CheckpointError as error:
                problem = str(error)
        for failure in worlds.gather_objects(problem):
            if failure:
                raise CheckpointError(failure)
        try:
            self._group = worlds.background_group(max(self._world.timeout_seconds, SLOWEST_SECONDS))
        except RuntimeError as error:  # ranks on GPUs have met over NCCL alone
            problem = f"rank {self._world.rank} finds no others over gloo, which saves need"
            remedy = "set GLOO_SOCKET_IFNAME to the interface between nodes (docs/slurm.md)"
            raise CheckpointError(f"{problem}: {_first_line(error)}; {remedy}") from error

    def _flat_state(self) -> Flat:
        flat = flat_state(self._strategy)
        for kind, state in random_states(self._world).items():
            flat[f"{RNG}/{self._world.rank}/{kind}"] = canonical_of_one_rank(state)
        return flat

    def _settle(self) -> None:
        """Wait for the previous save."""
        if self._writing is not None:
            self._last, self._writing = self._writing.result(), None

    # -- in the thread ----------------------------------------------------------------------------

    def _write(self, staged: Flat, saved: SaveRecord) -> SaveRecord:
        """Write the copies without ever raising: `error` holds the failure, the same on every rank."""
        assert self._group is not None
        began, written, problem = time.perf_counter(), {}, None
        folder = folders.unfinished_folder(self._run, saved.step, self._attempt)
        try:
            written = write_pieces(folder, self._world.rank, staged.items())
        except Exception as error:
            problem = f"rank {self._world.rank}: {type(error).__name__}: {_first_line(error)}"
        try:
            problem, saved.num_bytes = worlds.decide_on_first_rank(
                (problem, written),
                lambda answers: self._complete(folder, saved, answers),
                self._group,
            )
        except Exception as error:  # a rank has died
            problem = f"{type(error).__name__}: {_first_line(error)}"
        if problem is not None:
            saved.error = f"checkpoint of step {saved.step} failed: {problem}"
        saved.write_seconds = time.perf_counter() - began
        if self._world.rank == 0:
            self._tell(saved)
        return saved

    def _complete(
        self, folder: Path, saved: SaveRecord, answers: Sequence[tuple[str | None, Written]]
    ) -> tuple[str | None, int]:
        """Write the manifest, rename the folder, remove older checkpoints; return (problem or None, bytes)."""
        for problem, _ in answers:
            if problem is not None:
                return problem, 0
        try:
            stored = join_pieces(written for _, written in answers)
            manifest = manifest_of(
                self._config, saved.step, self._world.size, *stored, tokens_hash=self._tokens_hash
            )
            if missing := folders.find_missing_file(folder, manifest):
                remedy = "set outputs to a folder that all nodes share"
                raise CheckpointError(f"{missing}, although its rank wrote it; {remedy}")
            write_durably(folder / MANIFEST, to_json(manifest))
            folders.commit(self._run, saved.step, self._attempt)
        except CheckpointError as error:
            return _first_line(error), 0
        except Exception as error:
            return f"rank 0: {type(error).__name__}: {_first_line(error)}", 0
        try:
            folders.keep_newest(self._run, self._config.checkpoint.keep)
        except Exception as error:  # this checkpoint is whole, whatever is wrong with older ones
            print(f"older checkpoints stay: {_first_line(error)}", file=sys.stderr)
        pieces = [(tensor, piece) for _, tensor in manifest.tensors() for piece in tensor.pieces]
        return None, sum(tensor.num_bytes(piece) for tensor, piece in pieces)

    def _tell(self, saved: SaveRecord) -> None:
        if saved.error is not None:
            with suppress(OSError):  # the log may be on the same full disk
                print(saved.error, file=sys.stderr, flush=True)
            unfinished = folders.unfinished_folder(self._run, saved.step, self._attempt)
            shutil.rmtree(unfinished, ignore_errors=True)
        folders.append_to_log(self._run, asdict(saved))


def _in_background(action: Callable[[], SaveRecord]) -> Future[SaveRecord]:
    future: Future[SaveRecord] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # else whoever waits for it would wait for ever
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
