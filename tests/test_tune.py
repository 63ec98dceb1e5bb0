"""examples/tune.py keeps what is equal and faster. Its commands run; only what they say of speed is replaced."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.warm import Warm

ROOT = Path(__file__).resolve().parent.parent
WORDS = ["model=tiny", "data.global_batch_size=2", "train.steps=4", "train.warmup_steps=0"]
SPACE = {
    "strategy.reduce_codec": ["null", "int4"],
    "optimizer.lr": ["1e-3", "2e-3"],
    "strategy.unit": ["module", "block"],
    "strategy": ["zero3", "ddp"],
    "strategy.overlap": ["false", "true"],
    "strategy.prefetch": ["null", "-1"],
}


@pytest.fixture
def tune() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune", ROOT / "examples/tune.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_what_is_unequal_or_does_not_fit_is_not_kept_however_fast(tune, tmp_path, monkeypatch):
    def all_are_faster(*words: str) -> tuple[Any, str]:
        command = [sys.executable, "-m", "zeroexp", *words]
        done = Warm(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
        output, errors = done.communicate()
        answer = json.loads(output or "null")
        for point in answer["points"] if isinstance(answer, dict) else ():
            point["verdict"] = "faster"
        return answer, errors.splitlines()[-1] if errors else ""

    monkeypatch.setattr(tune, "zeroexp", all_are_faster)
    limit = "cluster.device_memory_gib=0.0035"  # model states of ZeRO-3 are 2.7 MiB, of DDP 3.9
    table = tmp_path / "results.tsv"
    best = tune.search([*WORDS, limit], SPACE, table)
    start = {key: values[0] for key, values in SPACE.items()}
    assert best == start | {"strategy.unit": "block", "strategy.overlap": "true"}
    with table.open(encoding="utf-8") as file:
        why = {row["tried"]: row["why_not"] for row in csv.DictReader(file, delimiter="\t")}
    assert why.pop("strategy.reduce_codec=int4").startswith("unequal: loss off by ")
    assert why.pop("optimizer.lr=2e-3").startswith("unequal: loss off by ")
    assert why.pop("strategy=ddp") == "does not fit"
    assert why.pop("strategy.prefetch=-1").startswith("zeroexp: strategy.prefetch=-1: ")
    kept = ["strategy.unit=block", "strategy.overlap=true"]
    assert why == dict.fromkeys([*kept, " ".join(kept)], "")


def point(name: str, **values: Any) -> dict[str, Any]:
    return {"sweep": "s", "point": name, "status": "done", "reason": None, "verdict": None} | values


@pytest.mark.parametrize(
    ("changes", "agrees", "broken", "why"),
    [
        ({"verdict": "faster"}, True, [], ""),
        ({"verdict": "can't tell"}, True, [], "not faster: can't tell"),
        ({}, True, [], "not faster: None"),
        ({"verdict": "faster"}, False, [], "unequal: loss off by Infinity at step 3"),
        ({"verdict": "faster"}, None, [], "unequal: loss off by Infinity at step 3"),
        ({"verdict": "faster"}, "no curve", [], "unequal: loss off by ? at step ?"),
        ({"verdict": "faster"}, True, ["gather bytes differ"], "gather bytes differ"),
        ({"status": "failed", "reason": "no\nmemory"}, True, [], "failed: no memory"),
        ({"status": "cancelled"}, True, [], "cancelled: "),
    ],
)
def test_only_what_is_known_to_be_equal_and_faster_is_kept(tune, changes, agrees, broken, why):
    points = [point("one_process"), point("best"), point("new", **changes)]
    curves = [{"point": f"s/{name}", "agrees": True} for name in ("one_process", "best")]
    if agrees != "no curve":
        new = {"point": "s/new", "agrees": agrees, "difference": "Infinity", "step": 3}
        curves.append(new)
    assert tune.why_not(points, broken, curves) == why


def test_a_refused_command_is_none_and_its_reason(tune: ModuleType) -> None:
    answer, why = tune.zeroexp("plan", "strategy.prefetch=-1", "--json")
    assert answer is None and why.startswith("zeroexp: strategy.prefetch=-1: ")
