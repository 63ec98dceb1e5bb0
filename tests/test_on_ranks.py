"""Ranks as forks of a process."""

from __future__ import annotations

import tempfile

import pytest

from zeroexp.process.on_ranks import on_ranks


@pytest.mark.parametrize("name", ["a#b", "a?b"])
def test_ranks_meet_below_a_folder_of_any_name(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    assert on_ranks(lambda world: world.size, 2, seconds=60) == [2, 2]
    assert [*tmp_path.iterdir()] == [tmp_path / name]
