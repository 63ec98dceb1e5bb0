"""What else differs beside the thing that is compared: precision, batch, versions, machine, load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zeroexp.report.measured_points import OUTSIDE, MeasuredPoint, distinguishing_keys
from zeroexp.tracking.run import Run

# The choice of a strategy is what is compared, with all that follows from its name.
COMPARED = (
    *("strategy.name", "strategy.implementation", "world_size"),
    *(f"strategy.{row}.placement" for row in ("parameters", "gradients", "optimizer")),
)
MACHINE = ("host", "device", "machine.")
BUSY = 0.25  # cores: less use by others counts as none
ABSENT, DEFAULT = "not set", "its own default"
# Values that only tell which of the compared engines ran, or are other files' business.
QUIET = ("engine.engine", "engine.page_bytes", "cluster.name")


def differences(points: Sequence[MeasuredPoint]) -> dict[str, dict[str, list[str]]]:
    """Return key -> value -> names of the points that have it, for each fact that is not what is compared.

    Left out is also what belongs to a group whose choice is compared, as model.hf_config.n_layer to model.name.
    """
    swept = {*distinguishing_keys([point.run for point in points])}
    return {
        key: values
        for key, values in _differing_facts(points).items()
        if key not in {*COMPARED, *swept}
        and f"{key.partition('.')[0]}.name" not in swept - {*COMPARED}
    }


def lines_of_broken_must_equal(
    points: Sequence[MeasuredPoint], must_equal: Iterable[str]
) -> list[str]:
    """Return one line for each fact that a study wants equal and that differs, also where it was swept."""
    wanted = tuple("engine.transport" if word == "transport" else word for word in must_equal)
    return [
        f"{key} differs: {describe_values(values)}"
        for key, values in _differing_facts(points).items()
        if any(key == word or key.startswith(f"{word}.") for word in wanted)
    ]


def describe_values(values: Mapping[str, Sequence[str]]) -> str:
    """Say which points have which value; the value of most points comes first and names nobody."""
    most, *rest = sorted(values.items(), key=lambda item: -len(item[1]))
    others = "; ".join(f"{value} in {', '.join(names)}" for value, names in rest)
    return f"{most[0]}, but {others}" if others else most[0]


def _differing_facts(points: Sequence[MeasuredPoint]) -> dict[str, dict[str, list[str]]]:
    facts = [(point.name, _facts_of_run(run)) for point in points for run in point.finished_runs]
    by_key: dict[str, dict[str, list[str]]] = {}
    for key in dict.fromkeys(key for _, one in facts for key in one if key not in QUIET):
        # A dictionary in place of a set, which keeps the order of the points.
        names: dict[str, dict[str, None]] = {}
        for name, one in facts:
            names.setdefault(one.get(key, ABSENT), {})[name] = None
        if len(names) > 1:
            by_key[key] = {value: list(who) for value, who in names.items()}
    return by_key


def _facts_of_run(run: Run) -> dict[str, str]:
    """Return everything that may make a run's numbers differ from another's, by dotted key."""
    facts = {
        key: DEFAULT if value == "null" else value
        for key, value in run.config.items()
        if not key.startswith(OUTSIDE)
    }
    facts |= {f"engine.{key}": value for key, value in run.engine.items() if value != "null"}
    for key, value in run.environment.items():
        if key.startswith(MACHINE):
            facts[key if key.startswith("machine.") else f"machine.{key}"] = value
    facts |= {k: v for k, v in run.environment.items() if k.startswith(("versions.", "git."))}
    if run.other_cores is not None:
        busy = run.other_cores >= BUSY
        facts["load"] = f"{run.other_cores:.1f} cores used by others" if busy else "none by others"
    return facts
