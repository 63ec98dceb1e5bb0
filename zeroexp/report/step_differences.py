"""The first step, verb and tensor in which two runs differ, from the hashes in their folders (measure/hashes.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zeroexp.config import keys as configs
from zeroexp.config.keys import Config, ConfigError
from zeroexp.measure.formats import KEY, NewerFormat, refuse_newer_format
from zeroexp.measure.hashes import SUMMED, Hash

TORCH = (
    "torch"  # its engines average, so that a rank's own gradients are larger until they are reduced
)

# Step, microbatch, kind, tensor, rank (None: over all ranks).
Key = tuple[int, int, str, str, int | None]


@dataclass(frozen=True)
class Difference:
    key: Key
    verb: str
    distance: float  # relative

    def __str__(self) -> str:
        step, microbatch, kind, tensor, rank = self.key
        where = "" if rank is None else f" on rank {rank}, microbatch {microbatch}"
        what = {"gradient": "the gradient of ", "backward": "the gradient of "}.get(kind, "")
        return f"step {step}, {self.verb}: {what}{tensor}{where}, relative distance {self.distance:.1e}"


@dataclass(frozen=True)
class Comparison:
    num_steps: int
    num_tensors: int
    exactly: Difference | None  # the first tensor whose bits differ
    beyond: Difference | None  # the first that lies further apart than the bound


def has_hashes(run: Path) -> bool:
    return (run / "hashes.0.jsonl").exists()


def compare_hashes(first: Path, second: Path, bound: float) -> Comparison:
    """Compare two run folders that have hashes. Raises ConfigError where there is nothing to compare."""
    mine, theirs = _hashes(first), _hashes(second)
    config, other = configs.load(second / "config.yaml"), configs.load(first / "config.yaml")
    averages = TORCH in (config.strategy.implementation, other.strategy.implementation)
    shared = [key for key in mine if key in theirs and not (averages and key[2] == "backward")]
    if not shared:
        raise ConfigError(
            f"{first} and {second}: no step was hashed in both; use the same train.hash_steps"
        )
    differing = [key for key in shared if mine[key].exact != theirs[key].exact]
    differences = [
        Difference(
            key, _verb(key, config, min(k[0] for k in shared)), mine[key].distance(theirs[key])
        )
        for key in differing
    ]
    return Comparison(
        num_steps=len({key[0] for key in shared}),
        num_tensors=len(shared),
        exactly=differences[0] if differences else None,
        beyond=next((each for each in differences if not each.distance <= bound), None),
    )


def _hashes(run: Path) -> dict[Key, Hash]:
    """Return the hashes in the order of the step; those of pieces are added over the ranks."""
    hashes: dict[Key, Hash] = {}
    order: dict[Key, tuple[int, int, int]] = {}
    for rank, index, row in _rows(run):
        local = None if row.kind in SUMMED else rank
        key = (row.step, row.microbatch, row.kind, row.tensor, local)
        if key in hashes and local is None:
            hashes[key].join(row)
        else:
            hashes[key] = row
            order[key] = (row.step, len(SUMMED) if row.kind in SUMMED else 0, index)
    return {key: hashes[key] for key in sorted(hashes, key=lambda key: order[key])}


def _rows(run: Path) -> Iterator[tuple[int, int, Hash]]:
    """Yield (rank, number of the row in its file, hash)."""
    for path in sorted(run.glob("hashes.*.jsonl")):
        rank = int(path.name.split(".")[1])
        for index, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            try:
                row = json.loads(line)
                refuse_newer_format(row, path.name)
                row.pop(KEY, None)
                yield rank, index, Hash(**row)
            except NewerFormat as error:
                raise ConfigError(f"{run}: {error}") from error
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    f"{path}: line {index + 1} is torn; run {run.name} again"
                ) from error


def _verb(key: Key, config: Config, first_step: int) -> str:
    """Return the verb that brought the tensor about, as the second run's strategy does it."""
    step, _, kind, _, _ = key
    rows = config.strategy
    if kind == "parameters":
        brought = "gather" if rows.parameters.placement == "shard" else "publish"
        return (
            f"{brought} (or the weights that the run began with)"
            if step == first_step == 0
            else brought
        )
    if kind == "gradient":
        return "hand_over" if rows.gradients.placement == "partial" else "reduce"
    return "optimizer" if kind == "weights" else kind
