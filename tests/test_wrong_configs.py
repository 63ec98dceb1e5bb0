"""Every mistake is answered in one line with key, value and remedy, before a rank starts, and never as a traceback."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from tests.composing import compose_once, composed, values_of
from tests.somebody_else import not_root, open_to_all, read_only
from zeroexp import __main__ as zeroexp
from zeroexp.check import rules_machine, rules_of_one_key
from zeroexp.check.try_data import require_readable
from zeroexp.check.try_points import try_points
from zeroexp.cluster.sweep import Sweep
from zeroexp.commandline.mistakes import explain
from zeroexp.config.keys import KEYS, ConfigError
from zeroexp.models import find_weights
from zeroexp.process.writable import require_writable

ROOT = Path(__file__).resolve().parent.parent


def wrong_lines() -> dict[str, dict[str, tuple[str, str]]]:
    """Section of wrong_lines.txt -> command line -> how its answer begins, and a part of it."""
    sections: dict[str, dict[str, tuple[str, str]]] = {}
    for row in (ROOT / "tests" / "wrong_lines.txt").read_text(encoding="utf-8").splitlines():
        if row.startswith("["):
            section = sections.setdefault(row.strip("[]"), {})
        elif row and not row.startswith("#"):
            line, _, answer = row.partition(" -> ")
            begin, _, part = answer.rpartition(" ... ")
            section[line] = begin or line.split()[-1].lstrip("+") + ":", part
    return sections


WRONG, WRONG_VALUES = wrong_lines().values()
LONG = "x" * 300
WRONG[f"resume={LONG}"] = "resume=xxxx", "File name too long"
WRONG_VALUES[f"study.name={LONG}"] = "study.name=xxxx", "at most 100"
WRONG_VALUES[f'study.name="{"実" * 100}"'] = "study.name=実", "over 200 bytes, and a folder"


@pytest.fixture(autouse=True)
def sooner(monkeypatch):
    """No rank starts, and nothing is done twice. In the last test, a whole process, Hydra does all that it does;
    one of tests/cluster/test_local.py tries points where ranks are forked.
    """
    compose_once(monkeypatch)
    monkeypatch.setattr(Sweep, "_execute", lambda *_: pytest.fail("it would run"))


@pytest.fixture
def offline(monkeypatch, tmp_path) -> Iterator[None]:
    """No network, and none of this machine's caches of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path / "cache"))
    find_weights.is_online.cache_clear()
    yield
    find_weights.is_online.cache_clear()


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Where the command is given: a folder with what no run can read or write."""
    for name in ("empty", "rows"):
        (tmp_path / name).mkdir()
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "rows.csv").write_text("body,stars\nfine,3\n")
    for name in ("dev.csv", "test.csv"):
        (tmp_path / "rows" / name).write_text("text\nfine\n")
    (tmp_path / "link").symlink_to("/no/such/disk")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.fixture
def refused(monkeypatch, capsys) -> Callable[..., str]:
    """Give a command line; returns the one line that refuses it, without its beginning."""

    def refused(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["zeroexp", *words])
        assert zeroexp.main() == zeroexp.REFUSED
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert printed.out == "" and line.startswith("zeroexp: ")
        return line.removeprefix("zeroexp: ")

    return refused


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_is_one_line_and_nothing_runs(line, here, refused):
    answer = refused(*line.split())
    begin, part = WRONG[line]
    assert answer.startswith(begin) and part in answer
    assert not list(here.glob("**/state.json")), "a run folder was made"


@pytest.mark.parametrize("outputs", ["'~/runs'", "$SCRATCH/runs"])
def test_a_wrong_name_of_a_folder_makes_none(outputs, here, refused):
    """Whoever tidies up a folder ~ types rm -r ~."""
    before = sorted(here.iterdir())
    assert refused(f"outputs={outputs}").startswith("outputs=")
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("line", WRONG_VALUES)
def test_a_wrong_value_is_one_line_and_nothing_runs(line, here, offline):
    words = line.split()
    with Sweep([]) as sweep, pytest.raises(zeroexp.MISTAKES) as caught:
        sweep.run([(words, values_of(*words), {})])
    answer, (begin, part) = explain(caught.value), WRONG_VALUES[line]
    assert "\n" not in answer and answer.startswith(begin) and part in answer
    assert not list(here.glob("**/state.json")), "a run folder was made"


def refused_with(key: str, value: object) -> list[tuple[str, ...]]:
    """The refusals of a config in which this key has this value."""
    config = deepcopy(composed())
    *groups, name = key.split(".")
    setattr(functools.reduce(getattr, groups, config), name, value)
    return [*rules_of_one_key.check_values(config)]


def test_no_number_may_be_beyond_its_bounds():
    phrases = {"least": ("at least", -1), "above": ("more than", 0), "most": ("at most", 1)}
    for key, (bound, (phrase, step)) in itertools.product(KEYS, phrases.items()):
        if (limit := KEYS[key].metadata.get(bound)) is not None:
            ((named, _, remedy),) = refused_with(key, limit + step)
            assert (named, remedy) == (key, f"use {phrase} {limit}")


def test_no_word_may_be_another_than_those_of_its_key():
    for key, words in rules_of_one_key.choices_of_keys().items():
        remedy = f"did you mean {words[0]}? use one of {', '.join(words)}"
        assert refused_with(key, f"{words[0]}x") == [(key, "unknown word", remedy)]


def test_null_is_taken_where_the_type_of_a_key_says_so():
    """Of a number too: optimizer.max_grad_norm=null turns clipping off, and is not its default."""
    for key in (key for key, item in KEYS.items() if "None" in str(item.type)):
        assert refused_with(key, None) == []


@pytest.mark.parametrize("shown", ["job", "all"])
def test_no_password_is_printed(shown, tmp_path, monkeypatch, capsys):
    """One in a word is refused; a file of the user and the environment may hold one too."""
    (tmp_path / "tracking").mkdir()
    text = "mlflow: true\nuri: postgresql://me:hunter2@host/db\nname: ${oc.env:SECRET_STORE}\n"
    (tmp_path / "tracking" / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET_STORE", "http://host?token=hunter2")
    line = ["--config-dir", str(tmp_path), "tracking=mine", "--cfg", shown, "--resolve"]
    monkeypatch.setattr(sys, "argv", ["zeroexp", *line])
    assert zeroexp.main() == 0
    printed = capsys.readouterr()
    assert "uri: postgresql://me@host/db" in printed.out
    assert "hunter2" not in printed.out + printed.err


@pytest.mark.parametrize("shut", ["folder", "folder/text.txt"])
def test_what_others_alone_may_read_is_refused(shut):
    with open_to_all() as home:
        folder = home / "folder"
        folder.mkdir()
        (folder / "text.txt").write_text("text")
        (home / shut).chmod(0)
        data = composed(f"data.path={folder}").data
        with not_root(), pytest.raises(ConfigError) as told:
            require_readable(data)
        (home / shut).chmod(0o755)
        require_readable(data)
    assert str(told.value).startswith(f"data.path={folder}: can not be read (Permission denied: ")
    assert str(told.value).endswith("; make it readable, or choose another")


@pytest.fixture
def theirs() -> Iterator[Path]:
    with open_to_all() as home:
        folder = home / "theirs"
        folder.mkdir()
        with read_only(folder):
            yield folder


def test_a_folder_of_somebody_else_takes_no_results(theirs):
    """Asked for in the middle, since who is not root may not enter the folder this repository lies in."""
    with not_root(), pytest.raises(ConfigError) as caught:
        require_writable(f"outputs={theirs}", theirs, "choose another")
    told = f"outputs={theirs}: no folder that can be written (Permission denied"
    assert str(caught.value).startswith(told) and str(caught.value).endswith("; choose another")


def test_a_sweep_of_somebody_else_can_not_be_run_again_in_place(theirs, refused):
    with not_root():
        answer = refused("--rerun", str(theirs))
    assert answer.startswith(f"--rerun {theirs}: no folder that can be written (Permission")


@pytest.mark.parametrize("line", ["data.path=/on/the/nodes", "model.weights=me/model"])
def test_what_only_the_nodes_of_slurm_may_see_is_not_judged_here(line, offline):
    config = composed("cluster=slurm", line)
    try_points([config])
    with pytest.raises(ConfigError):
        try_points([replace(config, cluster=composed().cluster)])


def test_cuda_on_a_machine_without(here, monkeypatch, refused):
    monkeypatch.setattr(rules_machine, "num_gpus", lambda: 1)
    answer = refused("cluster.device=cuda")
    problem = "1 GPUs here for world_size=2"
    assert answer == f"cluster.device=cuda: {problem}; use cluster.device=auto or cpu"


def test_mistake_in_a_file_of_the_user(here, refused):
    (here / "study").mkdir()
    (here / "study" / "mine.yaml").write_text("# @package _global_\ntrain: {stepz: 3}\n")
    answer = refused("--config-dir", str(here), "study=mine")
    assert answer.startswith("study/mine.yaml: train.stepz: unknown key; did you mean train.steps")


@pytest.mark.parametrize(
    ("text", "key"),
    [("train: {steps: 3}", "train"), ("defaults: [{override /model: tiny}]", "model")],
)
def test_a_study_of_the_user_that_is_not_of_the_whole_config(text, key, here, refused):
    (here / "study").mkdir()
    (here / "study" / "mine.yaml").write_text(f"{text}\n")
    answer = refused("--config-dir", str(here), "study=mine")
    remedy = "begin it with # @package _global_"
    assert answer == f"study/mine.yaml: {key} is no key of a study; {remedy}"


def test_from_the_outside_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "zeroexp", "strategy=zero3", "-m", "world_size=1,0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("zeroexp: world_size=0: ") and done.stderr.count("\n") == 1
