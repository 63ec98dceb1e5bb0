"""How many bytes codes take of the elements that they stand for (comm/codec.py): arithmetic, for engine and plan."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from zeroexp.cut.chunk import Chunk, Member

CODE_BITS = {"int8": 8, "float8": 8, "int4": 4}  # of one element, by codec
CODES_IN_BLOCK = 128  # elements that share a factor
FACTOR_BYTES = 4


def encoded_bytes(codec: str, numel: int) -> int:
    """Return the bytes of the codes and factors of so many elements."""
    num_blocks = -(-numel // CODES_IN_BLOCK)
    return num_blocks * (CODES_IN_BLOCK * CODE_BITS[codec] // 8 + FACTOR_BYTES)


@lru_cache(maxsize=4096)
def encoded_chunk(codec: str, chunks: tuple[Chunk, ...]) -> Chunk:
    """Return what an all-gather of these chunks moves: one chunk of bytes, the codes of every rank's sections."""
    ranks = range(len(chunks[0].cuts) - 1)
    sections = [sum(chunk.section_numel(rank) for chunk in chunks) for rank in ranks]
    cuts = tuple(accumulate((encoded_bytes(codec, numel) for numel in sections), initial=0))
    return Chunk((Member("codes", 0, cuts[-1]),), cuts)
