"""The plan beside the measurement: what the closed forms say of a run that has just been measured."""

from __future__ import annotations

from typing import Any

from zeroexp.config.keys import Config
from zeroexp.measure.record import KINDS
from zeroexp.plan.closed_forms import ShardedForm
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.outcome import planned_ranks


def plan_beside(
    config: Config, settings: dict[str, Any], vocab_size: int | None
) -> dict[str, float]:
    """Return planned bytes of the fullest rank: by kind, `total`, `after_backward`, and `sent` where the engine counts.

    settings: what the engine settled, see Strategy.settings. vocab_size: the data's number of words.
    """
    form = form_of(config, build_on_meta(config, vocab_size), settings["transport"])
    ranks = planned_ranks(form)
    planned = {kind: float(max(rank.by_kind[kind] for rank in ranks)) for kind in KINDS}
    planned["total"] = max(rank.total_bytes for rank in ranks)
    planned["after_backward"] = max(rank.bytes_at["after_backward"] for rank in ranks)
    if isinstance(form, ShardedForm):
        planned["sent"] = max(sum(rank.sent.values()) for rank in ranks)
    return planned
