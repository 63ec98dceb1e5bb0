"""Small JSON files that are complete at any moment.

JSON cannot express numbers that are not finite: they are written as strings, "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from zeroexp.config.keys import DamagedFile
from zeroexp.process.durable import replace_durably
from zeroexp.tracking.disk_full import write_with_reserve

NOT_FINITE = ("NaN", "Infinity", "-Infinity")
# What `write_json` and its like write into before they rename it: .state.json.<pid>, .failure.json.<host>.<pid>, ...
UNFINISHED = re.compile(r"\.\w+\.(json|jsonl|yaml)(\..+)?\.\d+")


def dumps(content: Any, *, indent: int | None = None) -> str:
    """Serialize to JSON that every reader of JSON accepts."""
    try:
        return json.dumps(content, indent=indent, allow_nan=False)
    except ValueError:
        # json writes numbers that are not finite as words that are no JSON, and reads them as strings here.
        in_words = json.loads(json.dumps(content), parse_constant=str)
        return json.dumps(in_words, indent=indent)


def loads(text: str) -> Any:
    """Return the content that `dumps` serialized."""
    content = json.loads(text)
    return _as_numbers(content) if any(f'"{word}"' in text for word in NOT_FINITE) else content


def _as_numbers(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _as_numbers(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_as_numbers(value) for value in content]
    return float(content) if content in NOT_FINITE else content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file that appears whole."""
    text = f"{dumps(content, indent=2)}\n"
    write_with_reserve(path.parent, lambda: replace_durably(path, text.encode()))


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes were writing. Nobody else may write into the folder meanwhile."""
    for path in folder.glob(".*"):
        if UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no such file. Raises DamagedFile."""
    try:
        text = path.read_text(encoding="utf-8")
        content = loads(text)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedFile(path, "no JSON") from error
    if not isinstance(content, dict):
        raise DamagedFile(path, "no JSON object")
    return content
