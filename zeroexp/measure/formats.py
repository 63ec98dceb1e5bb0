"""The version of what run folders hold: `format` in summary.json, each line of records, timelines and hashes.

A name that is added does not change it, since readers leave out what they do not know. It grows when a name changes its
meaning or goes: then this version of zeroexp can not read the file, and says so. Older files have no format and are 1.
"""

from __future__ import annotations

from typing import Any

FORMAT = 1
KEY = "format"


class NewerFormat(ValueError):
    """A file of a later zeroexp."""


def refuse_newer_format(content: dict[str, Any], what: str) -> None:
    """Raise NewerFormat, with the remedy, for what a later version wrote."""
    number = content.get(KEY, FORMAT)
    if isinstance(number, int) and number > FORMAT:
        raise NewerFormat(
            f"{what} has format {number}, and this zeroexp reads {FORMAT}; use the version that wrote it"
        )
