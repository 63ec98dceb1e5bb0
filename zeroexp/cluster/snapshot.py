"""The code that runs is the code that was submitted, however the tree is edited while jobs wait in a queue."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def take_snapshot(sweep: Path) -> Path:
    """A copy of the package below <sweep>/.code/, to be put on the path; the same code is copied once."""
    target = sweep / ".code" / _fingerprint(PACKAGE)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=target.parent))
    shutil.copytree(PACKAGE, beside / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        os.rename(beside, target)
    except OSError:  # another submitter of this sweep was faster with the same copy
        if not target.exists():
            raise
        shutil.rmtree(beside)
    return target


def _fingerprint(package: Path) -> str:
    content = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return content.hexdigest()[:12]
