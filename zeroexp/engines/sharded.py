"""Our engine for every stage and layout, with the observer that refuses what would train another model in silence."""

from __future__ import annotations

from zeroexp.zero.engine import Engine
from zeroexp.zero_safety.refusals import Refusals


class Sharded(Engine):
    """`Engine`, observed by `Refusals`."""

    observed_by = Refusals
