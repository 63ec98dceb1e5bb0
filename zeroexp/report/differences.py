"""This file lists what differs between the points of a report beside the thing that it compares. Pure.

A comparison is of strategies only where nothing else differs: precision, clipping, batch, versions, machine, load. All
of that is in the run folders, so it is listed, and what a study declares in `study.must_equal` is made a claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zeroexp.report.measured_points import OUTSIDE, Point
from zeroexp.report.settings import distinguishing_keys
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
QUIET = ("engine.engine", "engine.page_bytes", "cluster.name", "cluster.world_sizes")


def facts_of_run(run: Run) -> dict[str, str]:
    """Return everything that may make a run's numbers differ from another's, by dotted key."""
    config = {
        k: DEFAULT if v == "null" else v for k, v in run.config.items() if not k.startswith(OUTSIDE)
    }
    known = run.environment
    machine = {
        key if key.startswith("machine.") else f"machine.{key}": value
        for key, value in known.items()
        if key.startswith(MACHINE)
    }
    others = {k: v for k, v in known.items() if k.startswith(("versions.", "git."))}
    engine = {f"engine.{key}": value for key, value in run.engine.items() if value != "null"}
    return {**config, **engine, **machine, **others, **_load(run)}


def differences(points: Sequence[Point]) -> dict[str, dict[str, list[str]]]:
    """Return key -> value -> names of the points that have it, for each fact that is not what is compared."""
    compared = {*COMPARED, *distinguishing_keys([point.run for point in points])}
    return {
        key: values
        for key, values in _differing(points).items()
        if key not in compared and not _follows(key, compared)
    }


def lines_of_unequal_facts(points: Sequence[Point], must_equal: Iterable[str]) -> list[str]:
    """Return one line for each fact that a study wants equal and that differs, also where it was swept."""
    wanted = tuple(must_equal)
    return [
        f"{key} differs: {describe_values(values)}"
        for key, values in _differing(points).items()
        if any(_belongs(key, word) for word in wanted)
    ]


def _differing(points: Sequence[Point]) -> dict[str, dict[str, list[str]]]:
    told = [(point.name, facts_of_run(run)) for point in points for run in point.finished_runs]
    keys = dict.fromkeys(key for _, known in told for key in known if key not in QUIET)
    found = {key: _by_value(key, told) for key in keys}
    return {key: values for key, values in found.items() if len(values) > 1}


def describe_values(values: Mapping[str, Sequence[str]]) -> str:
    """Say which points have which value; the value of most points comes first and names nobody."""
    most, *rest = sorted(values.items(), key=lambda item: -len(item[1]))
    said = [f"{value} in {', '.join(names)}" for value, names in rest]
    return f"{most[0]}, but {'; '.join(said)}"


def _belongs(key: str, word: str) -> bool:
    if word == "transport":
        return key == "engine.transport"
    return key == word or key.startswith(f"{word}.")


def _by_value(key: str, told: Sequence[tuple[str, Mapping[str, str]]]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for name, known in told:
        names = values.setdefault(known.get(key, ABSENT), [])
        if name not in names:
            names.append(name)
    return values


def _follows(key: str, compared: set[str]) -> bool:
    """Tell whether the key belongs to a group whose choice is compared, as model.hf_config.n_layer to model.name."""
    return f"{key.partition('.')[0]}.name" in compared - set(COMPARED)


def _load(run: Run) -> dict[str, str]:
    if run.other_cores is None:
        return {}
    busy = run.other_cores >= BUSY
    return {"load": f"{run.other_cores:.1f} cores used by others" if busy else "none by others"}
