"""Moments as they rest, in fewer bytes than the weights: rounded to bfloat16, or to 8 bits in blocks.

A code of 8 bits counts steps of 2 ** (1 / 8) below its block's largest element, so that whatever is coded is right
within 4.4 %, and the largest is exact. Encoding what was decoded changes nothing: it lies on these steps.

    a block with negative elements    sign and 127 steps; what is smaller than all of them is 0
    without (squares)                 255 steps; what is smaller, and not 0, is the last of them, since it divides

Each number follows from its block alone by comparisons, products of two and quotients, which every kernel rounds alike.
No operation mixes dtypes: torch would cast inside, where no plan counts the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeroexp.cut.moment_blocks import BLOCK, CODES_PER_OCTAVE, ROW_BYTES, num_blocks

NUM_STEPS = 255
SIGNED = 128  # the steps, of 255, that a signed block can not tell from 0
BLOCKS_AT_ONCE = 1024  # what is beside a moment for them alone takes 6 MiB
KEPT_ON = (
    "cuda",
)  # devices to which tables are brought once: on a CPU making them anew waits for nothing
BLOCKS_AT_ONCE_ON_GPU = 8 * BLOCKS_AT_ONCE  # of fewer it waits for the host


def at_rest(moment: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a moment of elements as it rests: of `dtype`; int8 is rows of blocks [num_blocks, ROW_BYTES]."""
    return encode(moment) if dtype is torch.int8 else moment.to(dtype or moment.dtype)


def to_step(moment: Tensor, parameter: Tensor) -> Tensor:
    """Return a moment that rests as an optimizer steps it: with the shape and dtype of its parameter."""
    if lies_in_blocks(moment.dtype, moment.shape, parameter.shape):
        moment = decode(moment)[: parameter.numel()].view(parameter.shape)
    return moment.to(parameter.dtype)


def shape_in_blocks(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the rows of a parameter of this shape."""
    return num_blocks(prod(shape)), ROW_BYTES


def lies_in_blocks(dtype: torch.dtype, shape: Sequence[int], of: Sequence[int]) -> bool:
    """Tell whether a moment is rows of blocks, by its dtype and shape and the shape `of` its parameter or piece."""
    return dtype is torch.int8 and tuple(shape) == shape_in_blocks(of)


def encode(moment: Tensor) -> Tensor:
    """Return rows of int8 [num_blocks, ROW_BYTES] of a moment, whose first element is the first of a block."""
    flat = moment.detach().reshape(-1)
    packed = torch.empty(shape_in_blocks(flat.shape), dtype=torch.int8, device=flat.device)
    _, borders = _tables_beside(packed)
    at_once = _blocks_at_once(packed)
    for part, rows in zip(flat.split(at_once * BLOCK), packed.split(at_once), strict=True):
        values = pad(part.float(), (0, len(rows) * BLOCK - len(part))).view(-1, BLOCK)
        sizes = values.abs()
        scale = sizes.amax(1, keepdim=True)
        is_signed = values.amin(1, keepdim=True) < 0
        steps = torch.bucketize(sizes / scale, borders, out_int32=True).add_(1)
        signs = values.sign().int()
        signed = (steps - SIGNED).clamp_(min=0).mul_(signs)
        plain = steps.mul_(signs.abs_()).sub_(SIGNED)
        rows[:, :BLOCK] = torch.where(is_signed, signed, plain)
        rows[:, BLOCK:] = torch.where(is_signed, scale, -scale).view(torch.int8)
    return packed


def decode(packed: Tensor) -> Tensor:
    """Return the elements of rows of blocks, as float32 [num_blocks * BLOCK]."""
    flat = torch.empty(len(packed) * BLOCK, device=packed.device)
    all_sizes, _ = _tables_beside(packed)
    at_once = _blocks_at_once(packed)
    parts = flat.view(-1, BLOCK).split(at_once)
    for values, rows in zip(parts, packed.split(at_once), strict=True):
        codes, scale = rows[:, :BLOCK].int(), rows[:, BLOCK:].view(torch.float32)
        is_signed = scale > 0
        signed = codes.abs().add_(codes.sign().abs_(), alpha=SIGNED)
        steps = torch.where(is_signed, signed, codes + SIGNED)
        sizes = all_sizes.index_select(0, steps.view(-1)).view(values.shape)
        torch.mul(sizes, scale.abs(), out=values)
        values.mul_(torch.where(is_signed & (codes < 0), -1.0, 1.0))
    return flat


def _blocks_at_once(packed: Tensor) -> int:
    return BLOCKS_AT_ONCE if packed.device.type == "cpu" else BLOCKS_AT_ONCE_ON_GPU


def _tables_beside(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tables on the device of a tensor; those beside a fake one are fake, and end with its mode."""
    is_kept = type(packed) is Tensor and packed.device.type in KEPT_ON
    return (_tables if is_kept else _tables.__wrapped__)(packed.device)


@cache  # to bring them to a GPU stops the host
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what a code of so many steps stands for, in parts of the largest: 0, ..., 2 ** (-1 / 8), 1.

    And what lies half-way between two steps.
    """
    steps = (2 ** ((step - NUM_STEPS) / CODES_PER_OCTAVE) for step in range(1, NUM_STEPS + 1))
    sizes = torch.tensor([0.0, *steps], device=device)
    return sizes, (sizes[2:] + sizes[1:-1]) / 2
