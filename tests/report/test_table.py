"""The table at the end of a sweep, from folders as a sweep leaves them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.composing import composed
from tests.run_folders import PARAMETER_BYTES, records, summaries, write_config, write_run
from zeroexp.config.keys import Config, load, save
from zeroexp.measure.summary import spread, summarise
from zeroexp.report.results_table import print_lines, render
from zeroexp.report.settings import LONGEST, column_name, setting_text
from zeroexp.tracking.files import write_engine, write_json, write_summary
from zeroexp.tracking.run import Run, read_run

MIB = 2**20


@pytest.fixture
def sweep(tmp_path: Path) -> list[Run]:
    folders = [
        write_run(tmp_path / "ddp", "ddp", "torch"),
        write_run(tmp_path / "zero3", "zero3", "buffer"),
        write_run(
            tmp_path / "broken",
            "zero2",
            "tensor",
            status="failed",
            reason="rank 1: ValueError: x\nmore",
        ),
        write_run(
            tmp_path / "never", "zero1", "torch", status="skipped", reason="not here", num_steps=0
        ),
    ]
    return [read_run(folder) for folder in folders]


def cells(text: str) -> list[list[str]]:
    """Rows between the two rules, split where two blanks are."""
    body = text.split("\n---")[1].split("\n")[1:]
    return [[cell for cell in line.split("  ") if cell.strip()] for line in body]


def test_a_validation_loss_is_a_column_beside_the_loss(sweep: list[Run]) -> None:
    assert "validation" not in render(sweep)
    ddp, *others = sweep
    assert ddp.summary is not None
    validated = replace(ddp, summary=replace(ddp.summary, validation_loss=1.25))
    header, units, _, row, *rest = render([validated, *others]).splitlines()
    column = header.index("validation")
    assert units[column:].startswith("      loss") and row[column:].startswith("    1.2500")
    assert header.index("loss") < column < header.index("step")
    assert rest[0][column:].startswith("         –")


def test_one_row_per_run_with_its_numbers(sweep: list[Run]) -> None:
    ddp, zero3, broken, never = ([c.strip() for c in row] for row in cells(render(sweep)))
    mib = PARAMETER_BYTES / MIB
    assert ddp[:3] == ["ddp", "torch", "2"]
    # Two ranks: zero3 holds half of parameters, gradients and the two moments; DDP everything.
    assert ddp[8:12] == [f"{n * mib:.1f}" for n in (1, 1, 2, 4)]
    assert zero3[8:12] == [f"{n * mib:.1f}" for n in (0.5, 0.5, 1, 2)]
    assert zero3[4] == "360.0"  # 0.4 / 2 + 0.15 + 0.01: the median of three step times
    # 2e11 operations in 0.36 s, of two ranks that reach 4e12 a second.
    assert zero3[7] == "6.9"
    assert zero3[-1] == "done"
    assert broken[3:-1] == ["–"] * (len(zero3) - 4)
    assert broken[-1] == "failed: rank 1: ValueError: x"
    assert never[-1] == "skipped: not here"


def test_utilisation_is_of_the_largest_peak_that_a_run_measured(sweep: list[Run]) -> None:
    ddp, zero3, *_ = sweep
    assert ddp.summary is not None
    disturbed = replace(ddp, summary=replace(ddp.summary, peak_flops_per_second=1e12))
    text = render([disturbed, zero3])
    assert [row[7].strip() for row in cells(text)] == ["11.9", "6.9"]  # 2e11 / 0.21 s / 2 / 4e12
    foot = " ".join(text.split())
    assert "share of 4 TFLOP/s a rank (768 x 768 product in float32)." in foot


def test_units_stand_in_the_header_and_meanings_at_the_foot(sweep: list[Run]) -> None:
    text = render(sweep)
    names, units, *_ = text.splitlines()
    for word in ("strategy", "implementation", "ranks", "loss", "tokens/s", "params", "grads"):
        assert word in names
    assert units.split()[:6] == ["last", "step", "ms", "median", "ms", "p95"]
    assert units.count("MiB") == 7  # params, grads, optimizer, total and its mean, peak, sent
    foot = " ".join(text.split("---\n")[-1].split())
    assert "rank 0 over 20 steps after 3 of warm-up" in foot
    assert "after backward" in foot
    assert "zero1/torch is DDP + ZeroRedundancyOptimizer" in foot
    assert "FSDP2" not in foot  # no zero2/torch in this sweep


def test_numbers_are_aligned_under_their_headers(sweep: list[Run]) -> None:
    lines = render(sweep).splitlines()
    end = lines[0].index("params") + len("params")
    assert [line[end - 4 : end] for line in (lines[3], lines[4])] == ["96.0", "48.0"]
    assert not any(line.endswith(" ") for line in lines)


def test_a_narrow_terminal_gets_two_tables_with_every_number_once(sweep: list[Run]) -> None:
    wide, narrow = render(sweep), render(sweep, width=110)
    assert render(sweep, width=400) == wide
    caption, _, narrow = narrow.partition("\n\n")
    assert caption == "all points: ranks 2"
    table, foot = narrow.split("\nstep, tokens/s:")
    assert wide.endswith(foot)
    first, second = (part.splitlines() for part in table.split("\n\n"))
    # But for reasons, which are last in their row.
    assert max(map(len, [*first[:5], *second])) <= 110
    assert "tokens/s" in first[0] and "sent/step" in first[0] and first[0].endswith("status")
    assert second[0].split()[2:] == ["params", "grads", "optimizer", "total", "mean", "peak"]
    numbers = set(wide.splitlines()[3].split()) - {"2"}
    assert numbers == set(first[3].split()) | set(second[3].split())


def _uneven(folder: Path) -> Run:
    """Parameter-level owners: rank 0 holds 3 MiB of optimizer and master, rank 1 holds 1."""
    write_config(folder, "zero1", "parameter", 2)
    write_json(folder / "state.json", {"status": "done"})
    ranks = [records("zero1", 2, rank, 6) for rank in range(2)]
    first, second = summaries(ranks)
    first.memory_bytes |= {"optimizer": 3 * MIB, "master": 3 * MIB}
    second.memory_bytes |= {"optimizer": MIB, "master": MIB}
    write_summary(folder, summarise(ranks[0], [first, second]))
    return read_run(folder)


def test_mean_and_rare_kinds_appear_where_they_say_something(tmp_path: Path) -> None:
    names, _, _, row, *_ = render([_uneven(tmp_path / "uneven")]).splitlines()
    headers = names.split()
    assert headers[8:13] == ["grads", "optimizer", "mean", "master", "mean"]
    assert row.split()[8:13] == ["96.0", "3.0", "2.0", "3.0", "2.0"]
    assert "buffers" not in headers


def test_what_left_through_the_network_is_told_apart_where_ranks_share_memory(
    tmp_path: Path,
) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert "by TCP" not in render([run])
    assert run.summary is not None
    run.summary.wire_bytes_per_step = spread([MIB, MIB])
    text = render([run])
    assert "by TCP" in text.splitlines()[0]
    assert [cell.strip() for cell in cells(text)[0]][-3:] == ["96.0", "1.0", "done"]
    assert "may read each other's memory" in " ".join(text.split())


def test_a_peak_that_one_rank_cannot_know_is_absent(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert run.summary is not None
    run.summary.memory.peak = None
    row = cells(render([run]))[0]
    assert "–" in [cell.strip() for cell in row]


def test_the_peak_of_building_is_a_column_where_it_is_known(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert run.summary is not None
    assert "build" not in render([run])
    run.summary.memory.build_peak = spread([3 * MIB, 2 * MIB])
    text = render([run])
    names = text.splitlines()[0].split()
    assert names[names.index("build") :][:2] == ["build", "mean"]
    assert {"3.0", "2.5"} <= {cell.strip() for cell in cells(text)[0]}
    assert "build: the most allocated at once before the first step." in " ".join(text.split())


def test_what_engines_settled_by_themselves_is_said_once(tmp_path: Path) -> None:
    settled = {"zero2": {"transport": "direct", "bucket_mb": 4.0, "prefetch": None}}
    settled["zero3"] = settled["zero2"]
    settled["ddp"] = {"engine": "DDP, everything replicated", "transport": "gloo"}
    folders = [write_run(tmp_path / strategy, strategy) for strategy in settled]
    for folder, settings in zip(folders, settled.values(), strict=True):
        write_engine(folder, settings)
    text = " ".join(render([read_run(folder) for folder in folders]).split())
    assert "zero2/buffer, zero3/buffer ran with transport direct, bucket_mb 4.0." in text
    assert "ddp/buffer ran with transport gloo." in text


def test_settings_that_tell_two_points_apart_become_columns(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(seq_len)) for seq_len in (128, 256)]
    config = load(folders[1] / "config.yaml")
    config.data.seq_len = 256
    save(config, folders[1] / "config.yaml")
    other = write_run(tmp_path / "ddp", "ddp", "torch")
    text = render([read_run(folder) for folder in (*folders, other)])
    assert "seq_len" in text.splitlines()[0]
    assert [row[2].strip() for row in cells(text)] == ["128", "256", "128"]
    assert "seq_len" not in render([read_run(folders[0]), read_run(other)])


@cache
def config_with(option: str) -> Config:
    """Composing takes a third of a second, and several tests want the same."""
    return replace(composed(*option.split()), world_size=2)


def _sweep_over(folder: Path, *options: str) -> list[Run]:
    """Runs of zero3/buffer with what these options change."""
    runs = []
    for index, option in enumerate(options):
        path = write_run(folder / str(index))
        save(config_with(option), path / "config.yaml")
        runs.append(read_run(path))
    return runs


MODELS = ["model=tiny data.seq_len=64", "model=gpt2_tiny", "model=moe_tiny", "model=smollm2_360m"]


def test_a_model_stands_for_all_that_follows_from_it(tmp_path: Path) -> None:
    names, _, _, *rows = render(_sweep_over(tmp_path, *MODELS)).splitlines()
    assert names.split()[:6] == ["strategy", "implementation", "model", "seq_len", "ranks", "loss"]
    assert [row.split()[2:4] for row in rows[:4]] == [
        ["tiny", "64"],
        *(["gpt2_tiny", "128"], ["moe_tiny", "128"], ["smollm2_360m", "128"]),
    ]
    more = [*MODELS, "model=tiny model.hf_config.hidden_size=128", "precision=bf16_master"]
    header = render(_sweep_over(tmp_path / "more", *more)).splitlines()[0].split()
    assert header[2:6] == ["model", "hidden_size", "seq_len", "precision"], "not what it implies"


@pytest.mark.parametrize("width", [100, 120, 140, 160])
def test_a_sweep_over_models_is_shown_whole_where_two_tables_fit(
    tmp_path: Path, width: int
) -> None:
    runs = _sweep_over(tmp_path, *MODELS)
    text = render(runs, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(render(runs).split("\nstep, tokens/s:")[0].split()).split()
    for word in {*words} - {"-" * len(word) for word in words}:
        assert word in text
    assert lines[0] == "all points: strategy zero3, implementation buffer, ranks 2"
    tables = text.split("\nstep, tokens/s:")[0].split("\n\n")[1:]
    assert len(tables) == (1 if width >= 130 else 2)
    assert all(table.startswith("model ") for table in tables)


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_gets_the_columns_that_matter_most(tmp_path: Path, width: int) -> None:
    runs = [*_sweep_over(tmp_path, *MODELS), _uneven(tmp_path / "uneven")]
    lines = render(runs, width).splitlines()
    assert max(map(len, lines)) <= width
    heads = [line for line in lines if line.startswith("engine ")]
    assert len(heads) == 1, "one table"
    assert heads[0].split()[-1] == "status" and "step" in heads[0]
    assert ("peak" in heads[0]) == (width == 80)
    assert [line.split()[0] for line in lines[5:10]] == [*["zero3/buffer"] * 4, "zero1/parameter"]
    assert "--csv" in " ".join(lines[10:])


def test_values_are_shortened_and_names_told_apart() -> None:
    assert setting_text("0.007096987080382738") == "0.00709699"
    assert setting_text("128") == "128" and setting_text("true") == "true"
    path = setting_text("/a/very/long/folder/of/reviews.csv")
    assert len(path) == LONGEST and path.startswith("…") and path.endswith("/of/reviews.csv")
    keys = ["data.task", "model.task", "model.name"]
    assert [column_name(key, keys) for key in keys] == ["data.task", "model.task", "model"]


@pytest.mark.parametrize("columns", [None, 80])
def test_long_lines_are_wrapped_on_a_terminal_alone(monkeypatch, capsys, columns):
    lines = ["head:", f"  zero3  0.90: {'word ' * 30}end", "short"]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: columns is not None)
    print_lines(lines)
    printed = capsys.readouterr().out.splitlines()
    if columns is None:
        assert printed == lines
    else:
        assert max(map(len, printed)) <= 80 and len(printed) > len(lines)
        assert (printed[0], printed[-1]) == ("head:", "short")
        assert printed[2].startswith("    word"), "what goes on is told from the next line"
        assert " ".join(" ".join(printed).split()) == " ".join(" ".join(lines).split())
