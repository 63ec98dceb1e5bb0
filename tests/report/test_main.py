"""`zeroexp report`: which sweep it shows, what it writes, and what it says where there is nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.made import edit, points, repeats
from tests.run_folders import write_run
from zeroexp.config.keys import ConfigError
from zeroexp.report.__main__ import BROKEN, REFUSED, main
from zeroexp.report.markdown import BEGIN, END
from zeroexp.report.page.html_tables import provenance_table
from zeroexp.report.writing import writing


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "outputs/older/a", "ddp", "torch")
    write_run(tmp_path / "outputs/newer/a", "zero3", "buffer")
    write_run(tmp_path / "outputs/newer/b", "zero2", "tensor")
    os.utime(tmp_path / "outputs/older/a/config.yaml", (1, 1))
    (tmp_path / "outputs/older/page.html").touch()  # its folder has changed since
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


@pytest.mark.parametrize(("num_runs", "needed"), [(1, []), (3, ["numpy", "scipy.special"])])
def test_a_page_imports_what_its_folders_need(tmp_path, num_runs, needed):
    repeats(tmp_path / "sweep", dict.fromkeys(("ddp", "zero3"), [0.2, 0.202, 0.203][:num_runs]))
    words = (str(tmp_path / "sweep"), "--html", str(tmp_path / "page.html"))
    command = [sys.executable, "-c", IMPORTED.format(libraries=LIBRARIES), *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stderr == f"{needed}\n"
    assert "zero3" in (tmp_path / "page.html").read_text()


@pytest.fixture
def report(monkeypatch, capsys):
    """Give words to the command; its exit code, what it printed, and its errors."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["zeroexp.report", *words])
        code = main()
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_it_shows_the_newest_sweep_or_those_that_are_named(outputs, report):
    code, text, _ = report()
    assert code == 0 and "outputs/newer" in text and "zero2" in text and "ddp" not in text
    _, text, _ = report("outputs/newer", "outputs/older")
    assert text.index("outputs/newer") < text.index("outputs/older")
    write_run(outputs / "newest/a", "zero3", "buffer")
    _, text, _ = report("outputs/newer", "outputs/newest")
    assert "0 of 1 points moved (after over before):" in text and "only before: newer/b" not in text
    assert "only before: b" in text


def test_it_writes_figures_pages_and_texts(outputs, report):
    page = Path("README.md")
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    words = ("--figure", "memory.svg", "--csv", "c.csv", "--html", "page.html", "--latex", "t.tex")
    code, text, _ = report("--write", str(page), *words, "--columns", "strategy,total_bytes")
    assert code == 0 and "outputs/newer" in text
    assert ">a<" in Path("memory.svg").read_text(encoding="utf-8")
    assert "\n| zero2 | 240.0 |\n" in page.read_text(encoding="utf-8"), "no name stands twice"
    assert "\nzero2 & 240.0 " in Path("t.tex").read_text(encoding="utf-8")
    means = "total_bytes_mean,peak_bytes_mean"
    _, text, _ = report("outputs/newer", "--markdown", "-", "--columns", means)
    assert "| total mean, MiB | peak mean, MiB |" in text
    _, text, _ = report("outputs/newer", "--markdown", "-", "--columns", "total_bytes")
    assert "\n| zero2 | tensor | 240.0 |\n" in text, "only numbers are chosen"
    assert Path("c.csv").read_text(encoding="utf-8").splitlines()[0] == "strategy,total_bytes"
    assert '<td class="left">b</td>' in Path("page.html").read_text(encoding="utf-8")
    _, text, _ = report("outputs/newer", "--json", "-")
    assert report("outputs/newer", "--json")[1] == text
    assert [point["point"] for point in json.loads(text)["points"]] == ["a", "b"], "nothing else"


@pytest.mark.parametrize("option", ["--json", "--csv", "--latex"])
def test_a_folder_behind_a_text_is_no_file_for_it(outputs, report, option):
    asked = report("outputs/older", option, "-")
    assert report(option, "outputs/older") == asked
    both = report("outputs/newer", "outputs/older", option, "-")
    assert report(option, "outputs/newer", "outputs/older") == both
    assert report("outputs/newer", option, "outputs/older") == both
    assert report(option, "table", "outputs/older")[0] == 0 and Path("table").exists()


def test_steps_have_the_names_of_torchtitan_on_request(outputs, report):
    # Measured on a busy machine: of equal processors the largest counts, as in the table.
    edit(
        outputs / "newer/a/summary.json", '"peak_flops_per_second": 4', '"peak_flops_per_second": 1'
    )
    _, text, _ = report("outputs/newer", "--torchtitan", "-")
    steps = [json.loads(line) for line in text.splitlines()]
    assert [(each["run"], each["step"]) for each in steps] == [
        (name, step) for name in ("a", "b") for step in range(1, 24)
    ]
    # Step 1 of zero3 on two ranks: 12 samples of 128 tokens, 0.4 / 2 + 3 * 0.05 s, see run_folders.py.
    assert steps[0] == {
        **{"run": "a", "step": 1, "loss_metrics/global_avg_loss": 7.0, "grad_norm": 2.0},
        **{"throughput(tps)": pytest.approx(12 * 128 / 0.35 / 2)},
        **{"time_metrics/end_to_end(s)": pytest.approx(0.35)},
        **{"time_metrics/data_loading(s)": 0.0, "time_metrics/data_loading(%)": 0.0},
        **{"tflops": pytest.approx(0.2 / 0.7), "mfu(%)": pytest.approx(100 * 0.2 / 0.7 / 4)},
        "memory/max_active(GiB)": pytest.approx((48 + 48 + 96 + 10) / 1024),
    }


def test_a_torn_run_is_one_line_and_a_broken_claim_an_exit_code(outputs, report):
    (outputs / "newer/a/summary.json").write_text("{")
    code, _, errors = report("outputs/newer")
    assert code == 0 and "outputs/newer/a: left out" in errors
    for name in ("c", "d"):
        write_run(outputs / "newer" / name, "zero1")
    edit(outputs / "newer/d/records.jsonl", '"loss": 7.0,', '"loss": 7.5,')
    code, _, errors = report("outputs/newer")
    assert code == BROKEN and "losses part at step 0: 7.0 and 7.5 (c, d)" in errors


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["elsewhere"], "elsewhere: no run in there; give outputs/<sweep>"),
        (["--json=-", "--csv=-"], "--csv and --json: - takes one of them; name files for the rest"),
        (["--html=-"], "--html -: a page is a file; name one, as --html report.html"),
        (["--figure=m.svg", "outputs/older"], "--figure: it shows one sweep, not 2; name one"),
        (["--write=R.md", "outputs/older"], "--write: it shows one sweep, not 2; name one"),
        (["outputs/older", "--markdown"], "--markdown: it shows one sweep, not 2; name one"),
        (["--csv", "outputs/oldr"], "--csv outputs/oldr: no such sweep; for a file give it a"),
        (["--html=nowhere/x.html"], "--html nowhere/x.html: No such file or directory; use a file"),
        (["--write=absent.md"], "--write absent.md: No such file or directory; use a page"),
        (["--reference=c"], "--reference c: no such point with a time; use one of a, b"),
        (["--figure=m.png"], "--figure m.png: use a name that ends in .svg or .pdf"),
        (["--figure=no/a.svg"], "--figure no/a.svg: No such file or directory; use a file"),
        (["--figure=a.svg", "--chart=causes"], "--figure a.svg: nothing to draw; No run tells its"),
        (["--figure=m.svg", "--chart=x"], "--chart x: no such chart; use one of memory, causes, "),
        (["--columns=point"], "--columns: chooses those of a text; name one, as --csv -"),
        (["--columns=x", "--csv=c"], "--columns x: no such column; use some of point, strategy, "),
        (
            ["--latex=nowhere/x.tex"],
            "--latex nowhere/x.tex: No such file or directory; use a file in a folder that you may write to, or -",
        ),
    ],
)
def test_a_mistake_is_one_line(outputs, report, words, error):
    folders = [] if words == ["elsewhere"] else ["outputs/newer"]
    code, _, errors = report(*words, *folders)
    assert code == REFUSED and errors.startswith(f"zeroexp: {error}") and errors.count("\n") == 1
    assert not Path("-").exists() and not (outputs / "oldr").exists()


def test_where_nothing_is_it_says_what_to_do(tmp_path, monkeypatch, report):
    monkeypatch.chdir(tmp_path)
    assert report() == (REFUSED, "", "zeroexp: outputs/ holds no sweep; run one first: zeroexp\n")


@pytest.mark.parametrize(("outputs", "named"), [("out/a b", "out/a b"), ("elsewhere", "a b")])
def test_a_page_names_its_sweep_as_the_command_did(tmp_path, outputs, named):
    """Else by the last of its names: it may have been moved since."""
    folder = write_run(tmp_path / "out/a b/sweep/run")
    edit(folder / "config.yaml", "outputs: outputs", f"outputs: {outputs}")
    page = provenance_table(points(folder.parent))
    assert f"zeroexp report &#x27;{named}/sweep&#x27; --html report.html" in page


def test_a_page_of_a_run_at_the_root_names_the_root(tmp_path):
    """As where a container sees one run's folder."""
    (point,) = points(write_run(tmp_path / "run"))
    at_root = replace(point, runs=(replace(point.run, folder=Path("/run")),))
    assert "zeroexp report / --html report.html" in provenance_table([at_root])


def test_a_full_disk_is_asked_for_room():
    full = Path("/dev/full")
    told = (
        "--csv /dev/full: No space left on device; make room there, or use a file on another disk"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"), writing("csv", full):
        full.write_text("x", encoding="utf-8")
