"""Samples in a folder of .npy files that every rank maps into memory; the first process that needs them writes them.

    <cache>/<key>/tokens.npy    causal: [samples, seq_len + 1]; classification: [samples, seq_len], padded
    <cache>/<key>/counts.npy    [samples, seq_len], prompts with completions only: which labels count
    <cache>/<key>/labels.npy    [samples], classification only
    <cache>/<key>/lengths.npy   [samples], classification only: number of tokens without padding
    <cache>/<key>/digests.json  hashes of the others, which are compared before they are read
    <cache>/<key>/about.json    vocab_size, num_used (the largest token and one), source (one line for the record),
                                classes (labels' values), names

The folder's name is a hash of everything that decides its content, so a cache is never stale. It is written under
another name and renamed when complete: a rank, or another run, sees all of it or nothing.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zeroexp.config.cache_folder import cache_root
from zeroexp.data import Microbatch
from zeroexp.models.loss import IGNORED
from zeroexp.process import progress
from zeroexp.process.content_hash import hash_of, hash_of_file
from zeroexp.process.durable import appearing
from zeroexp.process.locks import NoLocks, take
from zeroexp.process.writable import require_writable

DIGESTS = "digests.json"
POLL_SECONDS = 0.05


def cached(decisive: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """Return the complete folder for `decisive`; `write` fills it if it is missing or damaged.

    One process at a time writes; the others on this file system wait for it and then read.
    """
    folder = cache_root() / hash_of([json.dumps(decisive, sort_keys=True).encode()])
    if _is_whole(folder):
        return folder
    remedy = "set ZEROEXP_CACHE to a folder that is yours"
    require_writable(f"ZEROEXP_CACHE={folder.parent}", folder.parent, remedy)
    with _only_writer(folder.with_suffix(".lock")):
        if not _is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one
            _fill(folder, write)
    return folder


@contextmanager
def _only_writer(lock: Path) -> Iterator[None]:
    """Hold the lock, where there is one to be had. Who waits for it is no rank that hangs: another process works."""
    held = None
    with suppress(NoLocks, PermissionError):
        while not (held := take(lock)):
            progress.count_move()
            time.sleep(POLL_SECONDS)
    with held or nullcontext():
        yield


def _fill(folder: Path, write: Callable[[Path], None]) -> None:
    try:
        with appearing(folder) as unfinished:
            write(unfinished)
            digests = json.dumps(_digests(unfinished))
            (unfinished / DIGESTS).write_text(digests, encoding="utf-8")
    except OSError:
        if not _is_whole(folder):  # a host whose locks are not seen here was faster
            raise


def _is_whole(folder: Path) -> bool:
    """Whether the folder is as it was written: a power cut or a disk may leave zeros, which would be trained on."""
    try:
        return json.loads((folder / DIGESTS).read_text(encoding="utf-8")) == _digests(folder)
    except (OSError, ValueError):  # missing or torn
        return False


def _digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.iterdir() if path.is_file() and path.name != DIGESTS)
    return {path.name: hash_of_file(path) for path in files}


def open_packed(folder: Path) -> PackedTokens | PaddedTexts:
    return PaddedTexts(folder) if (folder / "labels.npy").exists() else PackedTokens(folder)


class _Folder:
    def __init__(self, folder: Path) -> None:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        self.vocab_size: int | None = about["vocab_size"]
        self.num_used: int = about["num_used"]
        self.source: str = about["source"]
        self.classes: list[Any] | None = about["classes"]
        self.names: list[Any] | None = about["names"]
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        digests = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        # Labels, and which tokens count, decide as much of what a run trains on.
        decisive = ("tokens.npy", "labels.npy", "counts.npy")
        self.tokens_hash = " ".join(digests[name] for name in decisive if name in digests)

    def __len__(self) -> int:
        return len(self.tokens)


class PackedTokens(_Folder):
    """Rows full of text: there is no padding, and every position has a label, unless its token is one of a prompt."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        counts = folder / "counts.npy"
        self.counts = np.load(counts, mmap_mode="r") if counts.exists() else None

    def read(self, indices: np.ndarray) -> Microbatch:
        rows = torch.from_numpy(self.tokens[indices].astype(np.int64))
        # A slice of a single row is contiguous: `contiguous()` would be a view of it, and labels are written below.
        labels = rows[:, 1:].clone()
        if self.counts is not None:
            labels[torch.from_numpy(~self.counts[indices])] = IGNORED
        return Microbatch({"input_ids": rows[:, :-1].contiguous()}, labels)

    def count_labels_and_tokens(self, indices: np.ndarray) -> tuple[int, int]:
        num_tokens = len(indices) * (self.tokens.shape[1] - 1)
        if self.counts is not None:
            return int(self.counts[indices].sum()), num_tokens
        return num_tokens, num_tokens


class PaddedTexts(_Folder):
    """One text and its label per row, padded on the right.

    There is no attention mask: attention is causal and the head reads the last token that is not padding. So no token
    attends to padding on the right, and attention keeps its fast path.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.labels = np.load(folder / "labels.npy", mmap_mode="r")
        self.lengths = np.load(folder / "lengths.npy", mmap_mode="r")

    def read(self, indices: np.ndarray) -> Microbatch:
        rows = torch.from_numpy(self.tokens[indices].astype(np.int64))
        return Microbatch({"input_ids": rows}, torch.from_numpy(self.labels[indices]))

    def count_labels_and_tokens(self, indices: np.ndarray) -> tuple[int, int]:
        return len(indices), int(self.lengths[indices].sum())
