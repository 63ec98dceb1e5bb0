"""What the command line says without running anything, and what it leaves in a run's folder."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

from tests.composing import CONF, compose_once, composed, values_of
from zeroexp import __main__ as zeroexp
from zeroexp.check.sweep_points import LONGEST_NAME_BYTES, Composed, point_of, with_suited_batch
from zeroexp.cluster.sweep import Sweep
from zeroexp.commandline import help
from zeroexp.commandline.check_arguments import refuse_arguments
from zeroexp.commandline.commands import VERBS
from zeroexp.config.keys import ENGINE_SETTINGS, KEYS, ConfigError

HERE = {**os.environ, "PYTHONPATH": str(CONF.parent)}
TINY = ["model=tiny", "data=synthetic", "tracking=files", "cluster.rehearse_s=0", "world_size=1"]


def say(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["zeroexp", *words])
    return zeroexp.main()


def test_help_takes_its_key_behind_an_equals_sign(monkeypatch, capsys):
    assert say(monkeypatch, "--help=train.steps") == 0
    assert "train.steps" in capsys.readouterr().out
    assert say(monkeypatch, "model=tiny", "--help=train.steps") == 0
    assert "train.steps" in capsys.readouterr().out


def test_help_is_one_screen(monkeypatch, capsys):
    assert say(monkeypatch, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 42 and max(map(len, lines)) <= 110
    for word in (*VERBS, *(path.name for path in CONF.iterdir() if path.is_dir())):
        assert any(word in line.split() for line in lines), word
    for key in help.IMPORTANT:
        assert any(line.split()[:1] == [key] and len(line.split()) > 1 for line in lines), key


def test_every_key_and_group_has_help(monkeypatch, capsys):
    for key, item in KEYS.items():
        assert help.about(key, CONF).startswith(f"{key}: {item.type}")
    for key, item in ENGINE_SETTINGS.items():
        meant = item["stands_for"]
        told = (
            f"null stands for {str(meant).lower()}\n" in help.about(f"strategy.{key}", CONF) + "\n"
        )
        assert told == (meant is not None), key
    assert "null stands for last\n" in help.about("strategy.keep", CONF)
    assert say(monkeypatch, "--help", "strategy.prefetch", "precision") == 0
    told = capsys.readouterr().out
    assert "units gathered ahead (zero3)" in told and "at most 1024" in told
    assert "bf16_master" in told and "precision.autocast" in told
    assert "read by adamw, muon\n" in help.about("optimizer.eps", CONF) + "\n"
    assert "read by" not in help.about("strategy.outer.momentum", CONF)
    assert say(monkeypatch, "--help", "strategy.outer", "cluster.slurm") == 0
    told = capsys.readouterr().out
    for group in ("strategy.outer", "cluster.slurm"):
        assert all(f"  {key} " in told for key in KEYS if key.startswith(f"{group}."))
    assert say(monkeypatch, "--help", "train.stepz") == zeroexp.REFUSED
    assert "did you mean train.steps" in capsys.readouterr().err


def test_ctrl_c_while_it_imports_is_silent(tmp_path):
    """Python tells each import that is done; ours of Hydra are then under way."""
    command = [sys.executable, "-X", "importtime", "-m", "zeroexp", *TINY]
    told: list[str] = []
    with subprocess.Popen(
        command, cwd=tmp_path, env=HERE, stderr=subprocess.PIPE, text=True
    ) as run:
        for line in run.stderr or ():
            told.append(line)
            if line.split("|")[-1].strip() == "omegaconf.errors":
                run.send_signal(signal.SIGINT)
    assert run.returncode in (-signal.SIGINT, zeroexp.INTERRUPTED)
    assert len(told) > 50 and all(line.startswith("import time:") for line in told), told[-1]


def test_an_ascii_locale_shows_what_it_can(tmp_path):
    """A character that it lacks is escaped, and a word in other bytes is refused in one line."""
    env = {**HERE, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "zeroexp", *TINY, "data.path=ü"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, encoding="ascii")
    (told,) = done.stderr.splitlines()
    assert done.returncode == zeroexp.REFUSED and "data.path=\\udcc3\\udcbc: not in the enc" in told


def test_version_is_ours(monkeypatch, capsys):
    assert say(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("zeroexp 0.")


@pytest.mark.parametrize("verb", ["run", *VERBS])
def test_every_verb_has_help(verb, monkeypatch, capsys):
    try:
        code = say(monkeypatch, verb, "--help")
    except SystemExit as ended:  # argparse's
        code = ended.code
    told = capsys.readouterr().out
    assert code == 0 and "zeroexp" in told and len(told.splitlines()) > 3


@pytest.mark.parametrize(
    "words, batch",
    [
        (["world_size=3"], 12),  # the default suits them
        (["world_size=8"], 8),
        (["world_size=5"], 10),
        (["world_size=2 data.micro_batch_size=8"], 16),
        (["world_size=2", "world_size=8"], 8),  # alike in all points, or they could not be compared
        (["world_size=8 data.global_batch_size=12"], 12),  # chosen, and refused later
        (["world_size=8 study=compare"], 2),
        (["world_size=0", "world_size=8"], 8),
    ],
)
def test_a_batch_that_nobody_chose_suits_all_ranks(words, batch, capsys):
    points = [(each.split(), values_of(*each.split()), {}) for each in words]
    suited = with_suited_batch(points, [])
    assert {values["data"]["global_batch_size"] for _, values, _ in suited} == {batch}
    told = capsys.readouterr().err
    assert told.startswith(f"zeroexp: data.global_batch_size={batch} ") == (suited is not points)


def test_a_run_keeps_what_users_of_hydra_look_for(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    compose_once(monkeypatch)
    monkeypatch.setattr(Sweep, "_execute", lambda *_: None)  # no rank starts
    monkeypatch.setattr(Sweep, "conclude", lambda _: 0)
    assert say(monkeypatch, *TINY, "-m", "optimizer.lr=0.1,0.2") == 0
    found = {}
    for folder in tmp_path.glob("outputs/*/*/.hydra"):
        overrides = OmegaConf.load(folder / "overrides.yaml")
        found[overrides[-1]] = folder
        config = OmegaConf.load(folder / "config.yaml")
        assert f"optimizer.lr={config.optimizer.lr}" == overrides[-1]
        assert list(overrides[:-1]) == TINY
        assert "hydra" not in config
        hydra = OmegaConf.load(folder / "hydra.yaml").hydra
        assert list(hydra.overrides.task) == list(overrides)
    assert set(found) == {"optimizer.lr=0.1", "optimizer.lr=0.2"}


class Taker:
    """Keeps the points that a line composes."""

    has_failures = False

    def run(self, batch: Sequence[Composed]) -> list[None]:
        self.batch = batch
        return [None for _ in batch]


def points_of_line(*words: str) -> Sequence[Composed]:
    taker = Taker()
    zeroexp.compose(taker, list(words), writes=False)
    return taker.batch


def test_a_key_that_is_fixed_and_then_swept_tells_its_points():
    words = [words for words, *_ in points_of_line("train.steps=1", "train.steps=2,3")]
    assert words == [["train.steps=2"], ["train.steps=3"]]


@pytest.mark.parametrize(
    ("error", "passes", "told"),
    [
        (ConfigError("data.path: gone"), False, "zeroexp: data.path: gone"),
        (IndexError("a mistake of ours"), True, ""),
    ],
)
def test_after_a_failed_point_a_refusal_is_told_and_a_mistake_of_ours_raised(
    error, passes, told, capsys
):
    """What points have done is concluded in either case but a mistake of ours, which no line may hide."""

    class Failing(Taker):
        has_failures = True

        def run(self, batch: Sequence[Composed]) -> list[None]:
            raise error

    with pytest.raises(type(error)) if passes else nullcontext():
        zeroexp.compose(Failing(), [*TINY], writes=False)
    assert capsys.readouterr().err.strip() == told


def test_each_point_of_a_line_is_composed_once(monkeypatch):
    """Hydra's sweepers compose each to see whether it can, before our launcher is asked for them."""
    load, composed_by_hydra = ConfigLoaderImpl.load_sweep_config, list[str]()

    def counted(self, master_config, sweep_overrides):
        composed_by_hydra.append(sweep_overrides[-1])
        return load(self, master_config, sweep_overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", counted)
    seeds = ["train.seed=1", "train.seed=2"]
    points = points_of_line("train.seed=1,2")
    assert composed_by_hydra == [words[-1] for words, _, _ in points] == seeds


def test_a_key_that_is_text_gets_the_text_that_was_typed():
    """Hydra reads numbers with underscores, and truths; other keys keep what it reads."""
    (alone,) = points_of_line(*TINY, "study.name=2026_11_23", "data.subset=1.10", "resume=null")
    _, values, _ = alone
    assert (values["study"]["name"], values["data"]["subset"]) == ("2026_11_23", "1.10")
    assert values["resume"] is None and values["world_size"] == 1
    swept = points_of_line(*TINY, "data.subset=1.10,1.20,true,x", "optimizer.lr=1e-2")
    assert [values["data"]["subset"] for _, values, _ in swept] == ["1.10", "1.20", "true", "x"]
    assert {values["optimizer"]["lr"] for _, values, _ in swept} == {0.01}
    overrides, values, _ = swept[0]
    point = point_of(overrides, values)
    assert point is not None and point.name == "zero3-buffer-n1-subset1.10"


def test_a_group_that_a_file_leaves_open_is_asked_for(monkeypatch, tmp_path, capsys):
    (tmp_path / "study").mkdir()
    text = "# @package _global_\ndefaults: [{override /model: '???'}]\nstudy: {name: mine}\n"
    (tmp_path / "study" / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert say(monkeypatch, "--config-dir", str(tmp_path), "study=mine") == zeroexp.REFUSED
    assert "You must specify 'model'" in capsys.readouterr().err


def test_a_long_value_makes_no_long_name():
    values = asdict(composed("world_size=1"))
    points = [point_of([f"data.path={'ü/' * 200}{end}"], values) for end in "ab"]
    long = [point.name for point in points if point]
    assert len(set(long)) == 2
    assert all(len(name.encode()) <= LONGEST_NAME_BYTES for name in long)
    assert all(name.startswith("zero3-buffer-n1-path") for name in long)
    assert Path(long[0]).name == long[0]


def test_options_may_be_swept_by_a_function_of_hydras():
    """What is in its brackets is no list of options of one point."""
    line = "strategy=glob([zero2*,zero3*])"
    refuse_arguments([line])
    swept = [point["strategy"]["name"] for _, point, _ in points_of_line(*TINY, line)]
    assert swept == ["zero2", "zero3"]


def test_flags_may_stand_between_settings(monkeypatch, capsys):
    line = ["model=tiny", "--cfg", "job", "train.steps=3", "--resolve", "strategy=zero1"]
    assert say(monkeypatch, *line) == 0
    shown = capsys.readouterr().out
    assert "steps: 3" in shown and "name: zero1" in shown


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), zeroexp.INTERRUPTED),
        (OSError(errno.ENOSPC, "No space left on device"), zeroexp.FAILED),
        (ConfigError("world_size=9: no"), zeroexp.REFUSED),
    ],
    ids=["interrupted", "full disk", "a later batch is refused"],
)
def test_json_of_a_sweep_that_ends_early_holds_what_has_ended(error, code, monkeypatch):
    def interrupted(*_: object) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["zeroexp"])
    monkeypatch.setattr(zeroexp, "_run", interrupted)
    monkeypatch.setattr(Sweep, "as_json", lambda _: "[1]")
    told: list[str] = []
    assert (zeroexp._sweep_or_explain(told), told) == (code, ["[1]"])
