"""A headless Chromium for tests that look at a page as a reader does."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")


@dataclass(frozen=True)
class Seen:
    dom: str  # the document after its scripts have run
    # What the page wrote to the browser's console, errors and refused requests included.
    console: list[str]


def browse(url: str, folder: Path, *more: str, milliseconds: int = 90_000) -> Seen:
    """Open a page and let its scripts run; `milliseconds` is the time the page believes to have."""
    assert BROWSER is not None
    flags = [*FLAGS, f"--virtual-time-budget={milliseconds}", "--enable-logging=stderr", *more]
    command = [BROWSER, *flags, "--dump-dom", f"--user-data-dir={folder}", url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    console = [line for line in ended.stderr.splitlines() if ":CONSOLE" in line]
    return Seen(ended.stdout, console)
