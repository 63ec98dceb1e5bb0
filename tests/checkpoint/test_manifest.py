"""The manifest as plain data: written and read again, and every way in which it can be no manifest."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zeroexp.checkpoint.manifest import (
    ITEM_BYTES,
    MANIFEST,
    CheckpointError,
    Manifest,
    StoredPiece,
    StoredTensor,
    read_manifest,
    require_whole,
    to_json,
)
from zeroexp.config.keys import Config
from zeroexp.process.content_hash import hash_of

PIECES = (StoredPiece("rank0.bin", 0, 0, 4, "ab"), StoredPiece("rank1.bin", 64, 4, 2, "cd"))
WEIGHT = StoredTensor((2, 3), "bfloat16", PIECES)
STEP = StoredTensor((), "float32", (StoredPiece("rank0.bin", 128, 0, 1, "ef"),))
MADE = Manifest(
    versions={"torch": "2.13"},
    saved_at=1.5,
    config=asdict(Config()),
    step=20,
    samples_seen=240,
    world_size=2,
    state={"a.b": {"weight": WEIGHT, "step": STEP}, "empty": {}},
    rng={},
)


def test_what_is_written_is_read(tmp_path):
    (tmp_path / MANIFEST).write_bytes(to_json(MADE))
    assert read_manifest(tmp_path) == MADE
    assert MADE.file_bytes() == {"rank0.bin": 132, "rank1.bin": 68}


def refused(folder: Path, content: bytes | dict[str, Any]) -> str:
    """One line that names the file and says what to do."""
    if isinstance(content, dict):
        rest = {key: value for key, value in content.items() if key != "hash"}
        canonical = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
        content = json.dumps({**rest, "hash": hash_of([canonical])}).encode()
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(folder)
    line = str(caught.value)
    assert line.startswith(str(folder / MANIFEST)) and "\n" not in line and "; " in line
    return line


def changed(**values: Any) -> dict[str, Any]:
    return {**json.loads(to_json(MADE)), **values}


def test_a_buffer_may_be_of_any_dtype_of_whole_bytes():
    dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    # Quantized, parts of bytes, or without numbers.
    others = re.compile(r"torch\.(q|bits|u?int[1-7]$|float4)")
    sizes = {str(each)[6:]: each.itemsize for each in dtypes if not others.match(str(each))}
    assert {name: ITEM_BYTES.get(name) for name in sizes} == sizes


def test_missing_or_of_a_newer_format(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_manifest(tmp_path)
    line = refused(tmp_path, changed(format=3))
    assert "format 3, this zeroexp reads up to 2; update zeroexp" in line


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b'{"a": 1}', b'{"format": "x"}']
)
def test_no_manifest_at_all(tmp_path, content):
    assert re.search("damaged|no manifest", refused(tmp_path, content))


@settings(deadline=None)
@example(to_json(MADE).index(b" "), ord(" ") ^ ord("\t"))
@given(st.integers(0, len(to_json(MADE)) - 1), st.integers(1, 255))
def test_no_changed_byte_changes_what_is_read(tmp_path_factory, position, change):
    """It is found; but where it only stands between two words, as a space that became a tab."""
    content = bytearray(to_json(MADE))
    content[position] ^= change
    folder = tmp_path_factory.getbasetemp()
    if content[position] in b"\t\n\r" and change ^ content[position] == ord(" "):
        (folder / MANIFEST).write_bytes(content)
        with contextlib.suppress(CheckpointError):  # inside a word it is found
            assert read_manifest(folder) == MADE
        return
    refused(folder, bytes(content))


@pytest.mark.parametrize(
    ("shape", "dtype", "pieces"),
    [
        # Files outside of the folder are never opened.
        *(
            ([6], "float32", [[file, 0, 0, 6, ""]])
            for file in ("../../etc/passwd", "/etc/passwd", "rank0.bin/x", "other.bin")
        ),
        ([6], "float31", [["rank0.bin", 0, 0, 6, ""]]),
        ([6], "float32", [["rank0.bin", 2, 0, 6, ""]]),  # not where a number can begin
        ([6], "float32", [["rank0.bin", -4, 0, 6, ""]]),
        ([6], "float32", [["rank0.bin", 0, 0, 6]]),
        ([6], "float32", [["rank0.bin", 0, 0, 4, ""]]),  # the last two are nowhere
        ([6], "float32", None),
        (None, "float32", []),
    ],
)
def test_nonsense_with_a_right_hash(tmp_path, shape, dtype, pieces):
    state = {"a": {"weight": {"shape": shape, "dtype": dtype, "pieces": pieces}}}
    refused(tmp_path, changed(state=state))


@given(st.lists(st.integers(1, 5), max_size=6), st.data())
def test_pieces_are_every_element_once_or_refused(sizes, data):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pieces = tuple(
        StoredPiece("rank0.bin", 0, start, size, "")
        for start, size in zip(starts, sizes, strict=True)
    )
    require_whole("a", StoredTensor((sum(sizes),), "uint8", pieces))
    if pieces:
        index = data.draw(st.integers(0, len(pieces) - 1))
        missing = pieces[:index] + pieces[index + 1 :]
        twice = (*pieces[:index], pieces[index], *pieces[index:])
        for wrong in (missing, twice):
            with pytest.raises(ValueError, match="elements"):
                require_whole("a", StoredTensor((sum(sizes),), "uint8", wrong))
