"""`zeroexp report`: which sweep it shows, and what it says where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.run_folders import write_run
from zeroexp.report.__main__ import BROKEN, REFUSED, main
from zeroexp.report.markdown import BEGIN, END


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "outputs/older/a", "ddp", "torch")
    write_run(tmp_path / "outputs/newer/a", "zero3", "buffer")
    write_run(tmp_path / "outputs/newer/b", "zero2", "tensor")
    os.utime(tmp_path / "outputs/older", (1, 1))
    return tmp_path / "outputs"


# Reports and prints which of these libraries that took.
IMPORTED = """
import sys
from zeroexp.report.__main__ import main
code = main()
print([name for name in {libraries} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
LIBRARIES = ("torch", "numpy", "pandas", "matplotlib", "mlflow", "scipy.special", "scipy.stats")


@pytest.mark.parametrize(
    ("num_runs", "needed"),
    [(1, []), (3, ["numpy", "scipy.special"])],
    ids=["one run of each point", "three repeats"],
)
def test_a_page_imports_what_its_folders_need(
    tmp_path: Path, num_runs: int, needed: list[str]
) -> None:
    for strategy, number in product(("ddp", "zero3"), range(num_runs)):
        folder = write_run(tmp_path / f"sweep/{strategy}-{number}", strategy)
        summary = json.loads((folder / "summary.json").read_text())
        summary["step_seconds_median"] *= 1 + 0.01 * number
        (folder / "summary.json").write_text(json.dumps(summary))
    ended = subprocess.run(
        [
            *(sys.executable, "-c", IMPORTED.format(libraries=LIBRARIES)),
            *(str(tmp_path / "sweep"), "--html", str(tmp_path / "page.html")),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == f"{needed}\n"
    assert "zero3 · buffer" in (tmp_path / "page.html").read_text()


def report(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["zeroexp.report", *words])
    return main()


def test_without_a_folder_the_newest_sweep_is_shown(outputs, monkeypatch, capsys):
    assert report(monkeypatch) == 0
    text = capsys.readouterr().out
    assert "outputs/newer" in text
    assert "zero3" in text
    assert "zero2" in text
    assert "ddp" not in text


def test_named_sweeps_are_shown_in_turn(outputs, monkeypatch, capsys):
    assert report(monkeypatch, "outputs/newer", "outputs/older") == 0
    text = capsys.readouterr().out
    assert text.index("outputs/newer") < text.index("outputs/older")


def test_where_nothing_is_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert report(monkeypatch) == REFUSED
    assert report(monkeypatch, "elsewhere") == REFUSED
    said = capsys.readouterr().err
    assert "zeroexp" in said
    assert "elsewhere: no run in there" in said


def test_the_newest_sweep_goes_into_a_picture_and_a_page(outputs, monkeypatch, capsys):
    page = Path("README.md")
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    assert report(monkeypatch, "--figure", "memory.svg", "--write", str(page)) == 0
    assert "zero2 · tensor" in Path("memory.svg").read_text(encoding="utf-8")
    assert "| zero2 | tensor |" in page.read_text(encoding="utf-8")
    assert "outputs/newer" in capsys.readouterr().out


def test_of_two_sweeps_it_says_which_points_moved(outputs, monkeypatch, capsys):
    write_run(outputs / "newest/a", "zero3", "buffer")
    assert report(monkeypatch, "outputs/newer", "outputs/newest") == 0
    text = capsys.readouterr().out
    assert "0 of 1 points moved (after over before):" in text
    assert "only before: zero2 · tensor" in text


def test_texts_for_other_programs_stand_alone_on_standard_output(outputs, monkeypatch, capsys):
    assert report(monkeypatch, "outputs/newer", "--json", "-") == 0
    told = json.loads(capsys.readouterr().out)
    assert [point["point"] for point in told["points"]] == ["zero3 · buffer", "zero2 · tensor"]
    assert report(monkeypatch, "outputs/newer", "--csv", "c.csv", "--html", "page.html") == 0
    assert Path("c.csv").read_text(encoding="utf-8").startswith("point,sweep,")
    assert "zero2 · tensor" in Path("page.html").read_text(encoding="utf-8")
    assert report(monkeypatch, "outputs/newer", "--latex", "nowhere/x.tex") == REFUSED
    assert "--latex nowhere/x.tex: No such file" in capsys.readouterr().err


def test_a_torn_run_is_one_line_and_a_broken_claim_an_exit_code(outputs, monkeypatch, capsys):
    (outputs / "newer/a/summary.json").write_text("{")
    assert report(monkeypatch, "outputs/newer") == 0
    assert "outputs/newer/a: left out" in capsys.readouterr().err
    for name in ("c", "d"):
        write_run(outputs / "newer" / name, "zero1")
    records = outputs / "newer/d/records.jsonl"
    records.write_text(records.read_text().replace('"loss": 7.0,', '"loss": 7.5,'))
    assert report(monkeypatch, "outputs/newer") == BROKEN
    assert "losses of c and d part at step 0: 7.0 and 7.5" in capsys.readouterr().err


def test_standard_output_takes_one_text_and_no_page(outputs, monkeypatch, capsys):
    assert report(monkeypatch, "outputs/newer", "--json", "-", "--csv", "-") == REFUSED
    assert capsys.readouterr().err == (
        "zeroexp: --csv and --json: - takes one of them; name files for the rest\n"
    )
    assert report(monkeypatch, "outputs/newer", "--html", "-") == REFUSED
    assert "a page is a file" in capsys.readouterr().err and not Path("-").exists()


@pytest.mark.parametrize("option", ["--figure=memory.svg", "--write=README.md"])
def test_a_picture_or_a_page_of_two_sweeps_is_refused(outputs, monkeypatch, capsys, option):
    assert report(monkeypatch, "outputs/newer", "outputs/older", option) == REFUSED
    assert capsys.readouterr().err == (
        f"zeroexp: {option.partition('=')[0]}: it shows one sweep, not 2; name one\n"
    )


def test_a_wrong_name_of_a_picture_is_one_line(outputs, monkeypatch, capsys):
    assert report(monkeypatch, "--figure", "memory.png") == REFUSED
    assert capsys.readouterr().err.startswith("zeroexp: --figure memory.png: ")
