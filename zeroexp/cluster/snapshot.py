"""Copy the code at submission, so that jobs run the submitted code even if the tree is edited while they wait."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def take_snapshot(sweep: Path) -> Path:
    """Copy the package below <sweep>/.code/ and return the folder for the path; the same code is copied only once."""
    target = sweep / ".code" / _fingerprint(PACKAGE)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=target.parent))
    shutil.copytree(PACKAGE, beside / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        os.rename(beside, target)
    except OSError:  # another submitter of this sweep made the same copy first
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
