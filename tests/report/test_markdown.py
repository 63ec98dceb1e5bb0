"""A sweep's results as Markdown, in a page that has a place for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.run_folders import write_run
from zeroexp.config.keys import ConfigError
from zeroexp.report.markdown import BEGIN, END, render, replace_in
from zeroexp.tracking.run import Run, read_run


def runs_of(folder: Path, **last: str) -> list[Run]:
    return [
        read_run(write_run(folder / "ddp", "ddp", "torch")),
        read_run(write_run(folder / "zero3", "zero3", "buffer", **last)),
    ]


def test_it_says_when_and_where_and_has_a_row_for_each_run(tmp_path: Path) -> None:
    sentence, table = render(runs_of(tmp_path)).split("\n\n")
    assert " ".join(sentence.split()) == (
        "Measured on 2026-09-21 with `zeroexp -m study=compare`; a processor, 2 cores; "
        "Python 3.11.7, torch 2.13.0. All points: model small, ranks 2. Bytes are MiB of the fullest rank."
    )
    assert max(map(len, sentence.splitlines())) <= 100
    header, rule, ddp, zero3 = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert header[:6] == [
        *("strategy", "implementation", "params"),
        *("grads", "optimizer", "total"),
    ]
    assert len(header) == len(rule) == len(ddp) == len(zero3)
    # Of 96 MiB of parameters DDP holds all and twice as much of moments, ZeRO-3 half of each.
    assert ddp[:6] == ["ddp", "torch", "96.0", "96.0", "192.0", "384.0"]
    assert zero3[:6] == ["zero3", "buffer", "48.0", "48.0", "96.0", "192.0"]
    assert zero3[header.index("step, ms median")] == "360.0"
    assert "status" not in header


def test_a_run_that_failed_is_told(tmp_path: Path) -> None:
    table = render(runs_of(tmp_path, status="failed", reason="boom"))
    assert table.splitlines()[-1].endswith("| failed: boom |")


def test_a_bar_in_a_reason_cuts_no_cell_and_an_unknown_machine_is_said(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, status="failed", reason="a | b")
    assert render(runs).splitlines()[-1].endswith(r"| failed: a \| b |")
    table = render([replace(run, environment={}) for run in runs])
    assert table.startswith("No run tells when, where and with which command it ran. All points:")


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    replace_in(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    page.write_text(f"{page.read_text()}<!-- other: begin -->\n<!-- other: end -->\n")
    replace_in(page, "newer", "other")
    assert page.read_text().endswith("after\n<!-- other: begin -->\nnewer\n<!-- other: end -->\n")


def test_a_page_without_a_place_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"{BEGIN}\nno end")
    with pytest.raises(ConfigError, match=r"README\.md: has no place for it; add the lines"):
        replace_in(page, "new")
    assert page.read_text() == f"{BEGIN}\nno end"
    with pytest.raises(ConfigError, match=r"--write .*absent\.md: No such file or directory; use"):
        replace_in(tmp_path / "absent.md", "new")
