"""docs/scaling.md: its rows are what the plan says of the same points, and it tells what is assumed."""

from __future__ import annotations

import csv
import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaling_page import (
    MODELS,
    SHARED,
    SIZES,
    Scaled,
    assumptions,
    on_networks,
    page,
    planned_points,
    section,
)
from tests.test_docs import prose
from zeroexp.config.gpus import NETWORKS
from zeroexp.plan import __main__ as plan
from zeroexp.report.markdown import LINE

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
ONE_BLOCK = ("model=tiny", "model.hf_config.num_hidden_layers=1")
TINY = [
    Scaled("tiny", (*ONE_BLOCK, "data.seq_len=16"), (16,), ("zero1", "zero3")),
    Scaled("experts", ("model=mixtral_tiny", "data.seq_len=16"), (16,), ("zero3",)),
]


def rows_of(text: str) -> list[list[str]]:
    lines = [line.split(" | ") for line in text.splitlines() if " | " in line]
    return [cells for cells in lines if cells[0] != "strategy"]


@pytest.mark.slow
def test_a_row_is_what_the_plan_rehearses(monkeypatch, capsys):
    """Of two nodes; the plan's own network is the first one."""
    text = page(TINY)
    shown = rows_of(text)
    capsys.readouterr()
    planned: list[dict[str, str]] = []
    for model in TINY:
        words = [*model.words, *SHARED, f"strategy={','.join(model.strategies)}", "world_size=16"]
        monkeypatch.setattr(sys, "argv", ["zeroexp.plan", *words, "--rehearse", "--csv"])
        assert plan.main() == 0
        planned += csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert len(shown) == len(planned) == 3
    for cells, row in zip(shown, planned, strict=True):
        assert cells[0] == row["strategy"]
        assert cells[1] == f"{int(row['rehearsed_peak_bytes']) / 2**30:,.1f}"
        assert cells[2] == f"{1e3 * float(row['step_seconds']):,.0f}"
    assert [line for _, line in prose(text) if len(line) > LINE] == []


@pytest.mark.slow
def test_a_slower_network_costs_what_its_links_take_longer():
    """zero3 gathers and reduces: with links of no width the step is all waiting, and the host launches meanwhile."""
    (planned,) = planned_points(TINY[1])
    network = NETWORKS["nvlink-infiniband"]
    slower = replace(network, name="slow", node_bytes_per_second=1e6)
    fast, slow = on_networks(planned, [network, slower])
    assert 0 < slow.compute_seconds < fast.compute_seconds, "a small model waits for its host"
    assert planned.outcome is not None
    sent = planned.outcome.sent.fullest / 1e6
    assert slow.step_seconds[1] - slow.compute_seconds == pytest.approx(sent, rel=0.05)
    assert slow.ranks == fast.ranks


def test_the_page_shows_every_model_strategy_and_size_with_its_assumptions():
    text = PAGE.read_text()
    assert [row[0] for row in rows_of(text)] == [name for m in MODELS for name in m.strategies]
    heads = [line.split(" | ") for line in text.splitlines() if line.startswith("strategy | ")]
    for head, model in zip(heads, MODELS, strict=True):
        assert head[1 : 1 + len(SIZES)] == ["peak, 8", "64", "1,024"] and model.sizes == SIZES
    assert {len(cells) for cells in [*heads, *rows_of(text)]} == {1 + 3 * len(SIZES)}
    flat = " ".join(text.split())
    assert all(text in flat for text in assumptions())


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.words[0])
def test_the_page_has_the_rows_that_its_command_prints(model):
    """Of the fewest ranks; all rows take minutes."""
    few = replace(model, sizes=model.sizes[:1], strategies=("zero3",))
    (row,) = rows_of(section(few))
    shown = rows_of(PAGE.read_text().partition(f"## {model.title}")[2])
    whole = next(cells for cells in shown if cells[0] == "zero3")
    assert row[1:] == whole[1 :: len(model.sizes)]
