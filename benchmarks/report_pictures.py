"""`python -m benchmarks.report_pictures PAGE.html FOLDER`: pictures of a page for documents, by headless Chromium.

report.png shows the page as it begins, report-dark.png the same in dark mode on a narrow screen, report-whole.png all
of it, and timeline.png one traced step of the first point.
Exit codes: 0 fine; 2 refused in one line.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from zeroexp.config.keys import ConfigError
from zeroexp.process import locks

REFUSED = 2
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--virtual-time-budget=10000",  # milliseconds of the page's own clock
)
DARK = "--blink-settings=preferredColorScheme=0"
# Name of the picture -> (width and height in pixels, further flags, the only section shown).
PICTURES = {
    "report.png": ((1280, 1750), (), ""),
    "report-dark.png": ((560, 1750), (DARK,), ""),
    "report-whole.png": ((1100, 8050), (), ""),
    "timeline.png": ((1100, 900), (), "s-timeline"),
}
SECONDS = 120


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, metavar="PAGE.html")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        for path in take_pictures(arguments.page, arguments.folder):
            print(path)
    except ConfigError as error:
        print(f"zeroexp: {error}", file=sys.stderr)
        return REFUSED
    return 0


def take_pictures(page: Path, folder: Path) -> list[Path]:
    """Write the pictures and return their paths. Raises ConfigError without a browser, page or folder."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise ConfigError(f"no browser takes the pictures; install one of {', '.join(BROWSERS)}")
    if not page.is_file():
        raise ConfigError(f"{page}: no such page; make it with zeroexp report --html {page}")
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; name one that is there")
    return [_take_picture(browser, page, folder / name) for name in PICTURES]


def _take_picture(browser: str, page: Path, path: Path) -> Path:
    (width, height), more, section = PICTURES[path.name]
    with locks.temporary_folder() as profile:
        shown = _only(section, page, Path(profile)) if section else page
        where = [f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        words = [browser, *FLAGS, *more, *where, f"--screenshot={path.resolve()}"]
        try:
            command = [*words, shown.resolve().as_uri()]
            subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            raise ConfigError(
                f"{path}: {browser} took no picture ({type(error).__name__})"
            ) from None
    return path


def _only(section: str, page: Path, folder: Path) -> Path:
    """Write a copy of the page that shows one of its sections."""
    style = f"<style>body > :not(#{section}, svg) {{ display: none }}</style></head>"
    copy = folder / "page.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</head>", style, 1), encoding="utf-8")
    return copy


if __name__ == "__main__":
    sys.exit(main())
