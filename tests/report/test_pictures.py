"""Pictures of a page for documents: two PNG files, or one line where they cannot be taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report_pictures import PICTURES, REFUSED, main, take_pictures
from tests.browser import needs_browser
from zeroexp.config.keys import ConfigError


def size_of(picture: Path) -> tuple[int, int]:
    """Read width and height from the head of a PNG."""
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


@pytest.mark.slow
@pytest.mark.browser
@needs_browser
def test_each_picture_has_its_size(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><p>a page")
    for path in take_pictures(page, tmp_path):
        assert size_of(path) == PICTURES[path.name][0]


@needs_browser
def test_a_page_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pictures", str(tmp_path / "none.html"), str(tmp_path)])
    assert main() == REFUSED
    assert "none.html: no such page; make it with " in capsys.readouterr().err


def test_without_a_browser_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install one of chromium"):
        take_pictures(tmp_path / "page.html", tmp_path)
