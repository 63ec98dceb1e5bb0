"""Copy the code at submission, so that jobs run the submitted code even if the tree is edited while they wait.

The code is our package and the run's plugins, but for those that are installed: jobs find these where we do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from zeroexp.process.content_hash import hash_of
from zeroexp.process.durable import appearing

PACKAGE = Path(__file__).resolve().parents[1]


def snapshot_code(sweep: Path, plugins: Sequence[str] = ()) -> Path:
    """Copy the code below <sweep>/.code/ and return the folder for the path; the same code is copied only once.

    plugins: names of modules, which this process can import.
    """
    sources = [PACKAGE, *_sources(plugins)]
    target = sweep / ".code" / hash_of(_contents(sources))[:12]
    if target.exists():
        return target
    try:
        with appearing(target) as folder:
            for source in sources:
                _copy(source, folder)
    except OSError:  # another submitter of this sweep made the same copy first
        if not target.exists():
            raise
    return target


def _copy(source: Path, folder: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / source.name, ignore=ignored)
    else:
        shutil.copy2(source, folder)


def _sources(plugins: Sequence[str]) -> list[Path]:
    """Return the file or folder of each top-level module that is not installed."""
    sources: list[Path] = []
    for name in dict.fromkeys(plugin.partition(".")[0] for plugin in plugins):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        path = Path(spec.origin)
        path = path.parent if path.name == "__init__.py" else path
        if not {"site-packages", "dist-packages"} & set(path.parts):
            sources.append(path)
    return sources


def _contents(sources: Sequence[Path]) -> Iterator[bytes]:
    for source in sources:
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{path.relative_to(source.parent)}\0".encode() + path.read_bytes()
