"""The results as tables: for terminals of any width, pages and papers, and as other programs read them."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.composing import composed
from tests.report.made import change, edit, points, repeats, spread
from tests.run_folders import PARAMETER_BYTES, write_run
from tests.small_disks import files_of_at_most
from zeroexp.config.keys import Config, ConfigError, save
from zeroexp.measure.record import STEP_SECONDS
from zeroexp.report import exports
from zeroexp.report.columns import (
    LONGEST,
    all_columns,
    chosen_columns,
    column_name,
    exported_columns,
    point_columns,
    printed_columns,
    setting_text,
)
from zeroexp.report.conclusions import conclude
from zeroexp.report.markdown import BEGIN, END, replace_in
from zeroexp.report.markdown import render as as_markdown
from zeroexp.report.measured_points import MeasuredPoint
from zeroexp.report.results_table import print_lines, render
from zeroexp.report.tables import Table
from zeroexp.tracking import mlflow_labels
from zeroexp.tracking.files import write_engine

P = PARAMETER_BYTES / 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "a-ddp", "ddp", "torch")
    write_run(tmp_path / "b-zero3", "zero3", "buffer")
    reason = "rank 1: ValueError: x | y & z\nmore"
    write_run(tmp_path / "c-broken", "zero2", "tensor", status="failed", reason=reason)
    never = {"status": "skipped", "reason": "not here", "num_steps": 0}
    write_run(tmp_path / "d-never", "zero1", "torch", **never)
    return tmp_path


def rows(text: str) -> list[dict[str, str]]:
    """Each row by the names above it; columns of means, and the second step, are named by their order."""
    lines = text.splitlines()
    rules = [number for number, line in enumerate(lines) if set(line) == {"-"}]
    names, *_ = lines[rules[0] - 2 :]
    heads = [head for head in names.split("  ") if head.strip()]
    cells = [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in lines[rules[0] + 1 : rules[1]]
    ]
    named = [
        head.strip() + "'" * [h.strip() for h in heads[:n]].count(head.strip())
        for n, head in enumerate(heads)
    ]
    return [dict(zip(named, row, strict=True)) for row in cells]


def test_what_rises_with_the_steps_stands_below_but_for_a_time_that_others_spoilt(tmp_path):
    rises = {"step time": "rises by 1 % per 100 steps, rank 0", "live objects": "rise by 10 a step"}
    for name, cores in (("calm", 0.0), ("spoilt", 1.0)):
        run = write_run(tmp_path / name, "zero3" if cores else "ddp")
        change(run / "summary.json", {"drift": rises})
        change(run / "environment.json", {"other_cores": cores})
    made = points(tmp_path)
    for width in (None, 60):
        text = " ".join(render(made, width).split())
        assert "Drift of calm: step time rises by 1 % per 100 steps, rank 0." in text
        assert "Drift of spoilt: live objects rise by 10 a step." in text
        assert "Drift of spoilt: step time" not in text
    content = json.loads(
        exports.as_json(made, exported_columns(made, conclude(made)), conclude(made))
    )
    assert content["points"][1]["drift"] == "Drift of spoilt: live objects rise by 10 a step."
    assert mlflow_labels.run_tags(made[0].run, "done")["drift"] == (
        "step time rises by 1 % per 100 steps, rank 0; live objects rise by 10 a step"
    )


def test_one_row_per_point_with_its_numbers(folder: Path) -> None:
    text = render(points(folder))
    ddp, zero3, broken, never = rows(text)
    kinds = ("params", "grads", "optimizer", "total")
    # Two ranks: zero3 holds half of parameters, gradients and the two moments; DDP everything.
    assert [ddp[kind] for kind in kinds] == [f"{n * P:.1f}" for n in (1, 1, 2, 4)]
    assert [zero3[kind] for kind in kinds] == [f"{n * P:.1f}" for n in (0.5, 0.5, 1, 2)]
    assert zero3["step"] == "360.0"  # 0.4 / 2 + 0.15 + 0.01: the median of three step times
    assert zero3["MFU"] == "6.9"  # 2e11 operations in 0.36 s, of two ranks that reach 4e12 a second
    assert (ddp["strategy"], ddp["implementation"], ddp["ranks"]) == ("ddp", "torch", "2")
    assert {broken[name] for name in (*kinds, "step", "loss", "peak")} == {"–"}
    assert zero3["status"] == "done" and never["status"] == "skipped: not here"
    assert broken["status"] == "failed: rank 1: ValueError: x | y & z"
    assert "master" not in ddp and "buffers" not in ddp
    names, units, *lines = text.splitlines()
    assert units.split()[:6] == ["last", "step", "ms", "median", "ms", "p95"]
    end = names.index("params") + len("params")
    assert [line[end - 4 : end] for line in lines[1:3]] == ["96.0", "48.0"]
    assert not any(line.endswith(" ") for line in lines)
    foot = " ".join(text.split("---\n")[-1].split())
    assert "rank 0 over 20 steps after 3 of warm-up" in foot
    assert "zero1-torch is DDP and ZeroRedundancyOptimizer" in foot and "FSDP2" not in foot


def test_a_column_is_there_where_it_says_something(tmp_path: Path) -> None:
    summary = write_run(tmp_path / "a") / "summary.json"
    (plain,) = rows(render(points(tmp_path)))
    change(
        summary,
        {
            "validation_loss": 1.25,
            "rehearsed": {"peak": 7.0 * 2**20}
            | dict(zip(STEP_SECONDS, (0.0123, 0.4, 1.5), strict=True)),
            "not_rehearsed": "it is to be seen",
            "memory.build_peak": spread(3, 2),
            "memory.by_kind.optimizer": spread(3, 1),
            "memory.by_kind.master": spread(3, 1),
            "memory.peak": None,
            "wire_bytes_per_step": spread(1, 1),
        },
    )
    text = render(points(tmp_path))
    (row,) = rows(text)
    more = {
        "validation": "1.2500",
        "planned": "7.0",
        "predicted": "12.3–1,500",
        "build": "3.0",
        "master": "3.0",
    }
    assert not more.keys() & plain.keys()
    assert {**more, "optimizer": "3.0", "by TCP": "1.0", "peak": "–"}.items() <= row.items()
    names = text.splitlines()[0].split()
    assert [names[names.index(name) + 1] for name in ("optimizer", "master", "build")] == 3 * [
        "mean"
    ]
    foot = " ".join(text.split())
    assert "may read each other's memory" in foot and "build: the most allocated at once" in foot
    assert "range of its step" in foot and "No peak is planned of a: it is to be seen." in foot


def test_a_zero_is_shown_but_for_bytes_that_nobody_holds(tmp_path: Path) -> None:
    change(write_run(tmp_path / "a") / "summary.json", {"validation_accuracy": 0.0})
    (row,) = rows(render(points(tmp_path)))
    assert row["accuracy"] == "0.00" and "buffers" not in row


def test_utilisation_is_of_the_largest_peak_that_a_run_measured(folder: Path) -> None:
    """A busy machine measures a smaller peak, so that the largest of one name holds for all points."""
    change(folder / "a-ddp/summary.json", {"peak_flops_per_second": 1e12})
    text = render(points(folder))
    assert [row["MFU"] for row in rows(text)[:2]] == ["11.9", "6.9"]  # 2e11 / 0.21 s / 2 / 4e12
    assert "share of 4 TFLOP/s a rank (fastest product of matrices in float32)." in " ".join(
        text.split()
    )


def test_utilisation_is_of_the_processor_that_a_run_had(folder: Path) -> None:
    """The largest peak of a faster one is none of the others'."""
    change(folder / "a-ddp/summary.json", {"peak_flops_per_second": 1e12})
    change(folder / "a-ddp/environment.json", {"machine": {"processor": "Slow"}})
    text = render(points(folder))
    assert [row["MFU"] for row in rows(text)[:2]] == ["47.6", "6.9"]
    assert (
        "1 TFLOP/s a rank (fastest product of matrices in float32, Slow) or 4 TFLOP/s"
        in " ".join(text.split())
    )


def test_utilisation_by_a_data_sheet_is_one_beside_all_processors(folder: Path) -> None:
    for run in folder.glob("*/summary.json"):
        sheet = {"peak_flops_name": "H200", "peak_flops_source": "datasheet"}
        change(run, sheet)
    change(folder / "a-ddp/environment.json", {"machine": {"processor": "another"}})
    assert "share of 4 TFLOP/s a rank (H200)." in " ".join(render(points(folder)).split())


def test_what_engines_settled_by_themselves_is_said_once(tmp_path: Path) -> None:
    settled = {"zero2": {"transport": "direct", "bucket_mb": 4.0, "prefetch": None}}
    settled["zero3"] = settled["zero2"]
    settled["ddp"] = {"engine": "DDP, everything replicated", "transport": "gloo"}
    for strategy, settings in settled.items():
        write_engine(write_run(tmp_path / strategy, strategy), settings)
    text = " ".join(render(points(tmp_path)).split())
    assert "zero2-buffer, zero3-buffer ran with transport direct, bucket_mb 4.0." in text
    assert "ddp-buffer ran with transport gloo." in text
    write_engine(write_run(tmp_path / "more", "zero3", world_size=3), {"transport": "direct"})
    text = " ".join(render(points(tmp_path)).split())
    assert "zero2-buffer, zero3 ran with" in text and "more ran with transport direct." in text


# ---- settings that tell points apart, and the width of a terminal


@cache
def config_with(option: str) -> Config:
    """Composing takes a third of a second, and several tests want the same."""
    return replace(composed(*option.split()), world_size=2)


def sweep_over(folder: Path, *options: str) -> list[MeasuredPoint]:
    """Points of zero3-buffer with what these options change."""
    for index, option in enumerate(options):
        save(config_with(option), write_run(folder / str(index)) / "config.yaml")
    return points(folder)


MODELS = ["model=tiny data.seq_len=64", "model=gpt2_tiny", "model=moe_tiny", "model=smollm2_360m"]


def test_settings_that_tell_points_apart_are_columns_and_a_model_stands_for_its_own(tmp_path):
    names, _, _, *lines = render(sweep_over(tmp_path / "a", *MODELS)).splitlines()
    assert names.split()[:6] == ["strategy", "implementation", "model", "seq_len", "ranks", "loss"]
    assert [line.split()[2:4] for line in lines[:4]] == [
        ["tiny", "64"],
        *(["gpt2_tiny", "128"], ["moe_tiny", "128"], ["smollm2_360m", "128"]),
    ]
    more = [*MODELS, "model=tiny model.hf_config.hidden_size=128", "precision=bf16_master"]
    header = render(sweep_over(tmp_path / "b", *more)).splitlines()[0].split()
    assert header[2:6] == ["model", "hidden_size", "seq_len", "precision"], "not what it implies"


@pytest.mark.parametrize("width", [400, 160, 120, 100, 80, 60])
def test_a_table_fits_its_terminal(tmp_path: Path, width: int) -> None:
    """What all points share moves into a caption, then only the columns are left that matter most."""
    text = render(sweep_over(tmp_path, *MODELS), width)
    caption, *_ = text.partition("\n")
    assert max(map(len, text.splitlines())) <= width
    (head,) = [line for line in text.splitlines() if line.startswith(("strategy ", "model  "))]
    assert (caption == "all points: strategy zero3, implementation buffer, ranks 2") == (
        width < 400
    )
    assert {"step", "status"} <= {*head.split()}
    assert ("grads" in head) == (width >= 160) == ("--csv" not in text)
    assert "total" in head


def test_a_table_shortens_a_setting_and_an_export_has_all_of_it(tmp_path: Path) -> None:
    texts = [f"[{letter}.and.a.list.longer.than.a.column]" for letter in "ab"]
    for letter, text in zip("ab", texts, strict=True):
        run = write_run(tmp_path / letter)
        edit(run / "config.yaml", "freeze: []", f"freeze: {text}")
    both = points(tmp_path)
    (column,) = [each for each in point_columns(both) if each.key == "model.freeze"]
    assert [json.loads(column.value(point)) for point in both] == [[each[1:-1]] for each in texts]
    assert {len(column.text(point)) for point in both} == {LONGEST} and column.differs(both)


def test_a_narrow_terminal_joins_strategy_and_implementation(folder: Path) -> None:
    first, *_ = rows(render(points(folder), 70))
    assert first["engine"] == "ddp-torch" and "step" in first


def test_values_are_shortened_and_names_told_apart() -> None:
    assert setting_text("0.007096987080382738") == "0.00709699"
    assert setting_text("128") == "128" and setting_text("true") == "true"
    path = setting_text("/a/very/long/folder/of/reviews.csv")
    assert len(path) == LONGEST and path.startswith("…") and path.endswith("/of/reviews.csv")
    keys = ["data.task", "model.task", "model.name"]
    assert [column_name(key, keys) for key in keys] == ["data.task", "model.task", "model"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_long_lines_are_wrapped_on_a_terminal_alone(monkeypatch, capsys, is_terminal):
    lines = ["head:", f"  zero3  0.90: {'word ' * 30}end", "short"]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    print_lines(lines)
    printed = capsys.readouterr().out.splitlines()
    if not is_terminal:
        assert printed == lines
        return
    assert max(map(len, printed)) <= 80 and (printed[0], printed[-1]) == ("head:", "short")
    assert printed[2].startswith("    word"), "what goes on is told from the next line"
    assert " ".join(" ".join(printed).split()) == " ".join(" ".join(lines).split())


# ---- for pages, papers and programs


@pytest.fixture
def paper(tmp_path: Path) -> list[MeasuredPoint]:
    """Three runs of each: zero3 takes half of ddp's time."""
    return points(repeats(tmp_path, {"ddp": [1.0, 1.01, 1.02], "zero3": [0.5, 0.505, 0.511]}))


def test_a_page_says_when_and_where_and_what_differs(folder: Path) -> None:
    made = points(folder)[:2]
    sentence, table = as_markdown(made, printed_columns(made, conclude(made))).split("\n\n")
    assert " ".join(sentence.split()) == (
        "Measured on 2026-09-21 with `zeroexp -m study=compare`; a processor, 2 cores; "
        "Python 3.11.7, torch 2.13.0. All points: model small, ranks 2. MiB are of the fullest rank."
    )
    assert max(map(len, sentence.splitlines())) <= 100
    header, rule, ddp, zero3 = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert len(header) == len(rule) == len(ddp) == len(zero3) and "status" not in header
    row = dict(zip(header, zero3, strict=True))
    expected = {"strategy": "zero3", "params, MiB": "48.0", "step, ms median": "360.0"}
    assert expected.items() <= row.items()
    machine = {"machine": {"processor": "another", "num_cpus": 8}}
    change(folder / "b-zero3/environment.json", machine)
    chosen = chosen_columns(all_columns(made, conclude(made)), ["planned_bytes", "mfu"])
    sentence, table = as_markdown(points(folder)[:2], chosen).split("\n\n")
    assert "; a processor, 2 cores and another, 8 cores; Python" in sentence.replace("\n", " ")
    assert "MiB" not in sentence, "it is of other columns"
    assert table.startswith("| strategy | implementation | planned_bytes | MFU, % |")
    failed = as_markdown(points(folder), [])
    assert "| failed: rank 1: ValueError: x \\| y & z |" in failed, "a bar cuts no cell"
    (folder / "a-ddp/environment.json").unlink()
    (folder / "b-zero3/environment.json").unlink()
    unknown = as_markdown(points(folder)[:2], [])
    assert unknown.startswith("No run tells when, where and with which command it ran. All points:")


def test_a_papers_table_has_ratio_interval_and_verdict(paper: list[MeasuredPoint]) -> None:
    conclusions = conclude(paper)
    columns = printed_columns(paper, conclusions)
    *_, ddp, zero3 = as_markdown(paper, columns).splitlines()
    assert "| – | – | – |" in ddp and "| 0.50 | [0.50, 0.50] | faster |" in zero3
    chosen = chosen_columns(
        all_columns(paper, conclusions), ["point", "ratio", "interval", "verdict"]
    )
    lines = Table.of(paper, chosen).as_latex().splitlines()
    assert lines[0] == r"\begin{tabular}{lrll}"
    assert lines[2] == r"point & ratio & 95 \% & verdict \\"
    assert lines[5] == r"zero3 & 0.50 & [0.50, 0.50] & faster \\"
    assert Table.of_words(["a_b & 5 %"], [["~ · ±"]]).as_latex().splitlines()[2:5:2] == [
        r"a\_b \& 5 \% \\",
        r"\textasciitilde{} $\cdot$ $\pm$ \\",
    ]


def test_programs_read_bytes_seconds_and_verdicts(paper, tmp_path):
    write_run(tmp_path / "zz", "zero1", status="failed", reason="a & b_c", num_steps=0)
    made = points(tmp_path)
    conclusions = conclude(made)
    columns = all_columns(made, conclusions)
    told = json.loads(exports.as_json(made, columns, conclusions, problems=[]))
    ddp, zero3, failed = told["points"]
    assert (told["format"], told["problems"], told["reference"]) == (exports.FORMAT, [], "ddp")
    assert zero3["total_bytes"] == 2 * PARAMETER_BYTES
    assert zero3["step_seconds"] == pytest.approx(0.505)
    assert zero3["step_phase_seconds"] == pytest.approx(0.2 * 0.36)
    assert (zero3["ratio"], zero3["verdict"]) == (pytest.approx(0.5, rel=1e-3), "faster")
    assert zero3["ratio_low"] < zero3["ratio"] < zero3["ratio_high"] and ddp["ratio"] is None
    assert (failed["status"], failed["reason"], failed["step_seconds"]) == (
        "failed",
        "a & b_c",
        None,
    )
    *_, second, last = csv.DictReader(io.StringIO(exports.as_csv(made, columns)))
    assert (float(second["total_bytes"]), second["verdict"]) == (2 * PARAMETER_BYTES, "faster")
    assert (last["reason"], last["total_bytes"]) == ("a & b_c", "")


def test_programs_read_which_losses_agree_with_the_first(tmp_path: Path) -> None:
    for name in ("a", "near", "off", "no_number", "apart"):
        write_run(tmp_path / name)
        edit(tmp_path / name / "config.yaml", "loss_agreement: null", "loss_agreement: 1.0e-05")
        edit(tmp_path / name / "config.yaml", "lr: 0.001", f"lr: 0.001{len(name)}")
    write_run(tmp_path / "b", "ddp", status="failed", num_steps=0)
    edit(tmp_path / "apart/config.yaml", "every: null", "every: 4")
    for name, loss in [("near", "7.00006"), ("off", "7.7"), ("no_number", '"NaN"')]:
        edit(tmp_path / name / "records.jsonl", '"loss": 7.0,', f'"loss": {loss},')

    def told() -> dict[str, Any]:
        return json.loads(exports.runs_as_json([p.run for p in points(tmp_path)]))["losses"]

    losses = told()
    assert (losses["reference"], losses["bound"]) == ("a", 1e-5)
    agrees = {curve["point"]: curve["agrees"] for curve in losses["curves"]}
    assert agrees == {"a": True, "near": True, "off": False, "no_number": False, "apart": False}
    off = next(curve for curve in losses["curves"] if curve["point"] == "off")
    assert (off["difference"], off["step"], off["falls"]) == (pytest.approx(0.1), 0, True)
    edit(tmp_path / "a/config.yaml", "loss_agreement: 1.0e-05", "loss_agreement: null")
    assert {curve["agrees"] for curve in told()["curves"]} == {None}


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(
        f"before\n{BEGIN}\nold\n{END}\nafter\n<!-- other: begin -->\n<!-- other: end -->\n"
    )
    replace_in(page, "new")
    replace_in(page, "newer", "other")
    assert page.read_text() == (
        f"before\n{BEGIN}\nnew\n{END}\nafter\n<!-- other: begin -->\nnewer\n<!-- other: end -->\n"
    )
    page.write_text(f"{BEGIN}\nno end")
    with pytest.raises(ConfigError, match=r"README\.md: has no place for it; add the lines"):
        replace_in(page, "new")
    assert page.read_text() == f"{BEGIN}\nno end"


def test_the_rest_of_a_page_stays_as_it_is_to_the_byte(tmp_path: Path) -> None:
    """Ends of lines as on Windows, an encoding of its own, and whatever happens where the disk is full."""
    page, link = tmp_path / "page.md", tmp_path / "link.md"
    page.write_bytes(f"caf\xe9\r\n{BEGIN}\r\nold\r\n{END}\r\n".encode("latin-1"))
    page.chmod(0o640)
    link.symlink_to(page)
    replace_in(link, "one\ntwo")
    whole = f"caf\xe9\r\n{BEGIN}\r\none\r\ntwo\r\n{END}\r\n".encode("latin-1")
    assert (page.read_bytes(), page.stat().st_mode & 0o777) == (whole, 0o640)
    assert link.is_symlink()
    with files_of_at_most(1000), pytest.raises(ConfigError, match=r"--write .*: File too large; "):
        replace_in(page, "x" * 2000)
    assert page.read_bytes() == whole and {*tmp_path.iterdir()} == {page, link}
