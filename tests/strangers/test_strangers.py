"""Every scenario under every setting is equal to plain PyTorch, or refused in one clear line."""

from __future__ import annotations

import pytest

from tests.ranks import RankError
from tests.strangers.known import KNOWN_TODAY, known
from tests.strangers.lab import (
    GATHERED,
    SCENARIOS,
    Refusal,
    Setting,
    difference,
    load_all,
    pattern_for,
    refusals_in,
    run_on_rank,
    wrong_refusal,
)

load_all()


def cases():
    for name, made in SCENARIOS.items():
        for setting in made.settings:
            key = f"{name}-{setting}"
            mark = made.mark_of(setting)
            marks = [pytest.mark.slow if mark == "slow" else pytest.mark.wide] if mark else []
            if reason := known(name, setting.stage, setting.unit):
                marks.append(pytest.mark.xfail(strict=True, reason=reason))
            yield pytest.param(name, setting, id=key, marks=marks)


def verdict(ranks, name: str, setting: Setting) -> str | None:
    """What is wrong; None where the outcome is one of those allowed."""
    made = SCENARIOS[name]
    refused = pattern_for(made.refused, setting.stage)
    allowed = refused or pattern_for(made.may_refuse, setting.stage)
    if (setting.stage, setting.unit) == ("zero3", "module"):
        # Scenarios are written for units that are blocks: the weights of a block's parts are freed while it runs.
        refused, allowed = None, f"{allowed}|{GATHERED}" if allowed else GATHERED
    try:
        answers = ranks(run_on_rank, name, setting, world_size=setting.world_size)
    except RankError as error:
        told = refusals_in(str(error))
        if allowed is not None and len(told) == setting.world_size:  # each in words of its own
            return next(filter(None, (wrong_refusal(*each, allowed) for each in told)), None)
        heard = "; ".join(f"{kind}: {message}" for kind, message in told)
        return f"ranks differ: {heard}" if told else str(error)
    if isinstance(answers[0], Refusal):
        kind, message = answers[0].kind, answers[0].message
        if allowed is None:
            return f"raised {kind}: {message}"
        return wrong_refusal(kind, message, allowed)
    if refused:
        return f"nothing was raised where {refused!r} was expected"
    return difference(answers, name, setting.world_size) if made.oracle else None


@pytest.mark.parametrize(("name", "setting"), list(cases()))
def test_a_stranger(ranks, name, setting):
    wrong = verdict(ranks, name, setting)
    assert wrong is None, wrong


def test_every_known_failure_is_a_scenario():
    assert set(KNOWN_TODAY) <= set(SCENARIOS)
