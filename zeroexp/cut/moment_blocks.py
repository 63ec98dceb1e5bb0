"""Moments of 8 bits rest in blocks of elements that share a scale: arithmetic, for layout, optimizer and plan.

Both what is in blocks and where they begin follow from the whole parameter, never from what a rank holds of it:

    element of the parameter   0 ... 255 | 256 ... 511 | 512 ...     a layout cuts at the borders of blocks alone
    at rest, one row a block   256 codes of a byte, then the scale, a float32

Parameters of fewer than LEAST_NUMEL elements keep their moments as they are, as in torchao and bitsandbytes. The
others are a kind of their own (chunk.py), whose last word is INT8.
"""

from __future__ import annotations

INT8 = "int8"
BLOCK = 256  # elements; as in torchao and bitsandbytes
ROW_BYTES = BLOCK + 4
LEAST_NUMEL = 4096
CODES_PER_OCTAVE = 8  # neighbouring codes differ by 2 ** (1 / 8)

# Dtypes of moments -> the decay from which on rounding takes back what a moment falls in a step: half of what parts
# two neighbouring numbers.
MOST_DECAY = {"bfloat16": 1 - 2**-8, INT8: (1 + 2 ** (-1 / CODES_PER_OCTAVE)) / 2}


def num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def bytes_of_elements(start: int, stop: int) -> tuple[int, int]:
    """Return where the rows of the blocks that hold these elements begin and end, in a parameter's rows."""
    return start // BLOCK * ROW_BYTES, num_blocks(stop) * ROW_BYTES


def kind_in_blocks(kind: str) -> str:
    return f"{kind} {INT8}".strip()


def kind_in_full(kind: str) -> str:
    """Return the kind of what is stepped alike and is not in blocks."""
    return "" if kind == INT8 else kind.removesuffix(f" {INT8}")


def is_blockwise(kind: str) -> bool:
    return kind != kind_in_full(kind)
