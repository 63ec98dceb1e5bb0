"""Hash of what lies on a disk, of checkpoints and packed data.

[Note: hashes] XXH3 with 128 bits finds any damage of a disk or a copy. It runs at the speed of memory (20 GB/s on one
core, with Python's lock released), so checking never becomes the slow part; blake2b, at 1 GB/s, would. It is not a
signature: whoever can write the files can write their hashes. Reading is safe all the same, because nothing in a
checkpoint is executed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash


def hash_of(parts: Iterable[bytes | memoryview]) -> str:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def hash_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hash_of(iter(lambda: file.read(4 << 20), b""))
