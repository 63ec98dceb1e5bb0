"""docs/extending.md step by step: its files in an empty folder, its commands given there, its losses compared."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.warm import Warm

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/extending.md").read_text()
FILES = dict(re.findall(r"^```(?:python)\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^    (zeroexp .*)$", re.sub(r"\\\n +", "", PAGE), re.MULTILINE)
RUNS = [command for command in COMMANDS if not command.startswith("zeroexp plan ")]
SMALL = [
    *("train.steps=4", "train.warmup_steps=1", "cluster.device=cpu", "tracking=files"),
    "cluster.rehearse_s=0",
    *("data.seq_len=32", "data.global_batch_size=8", "data.micro_batch_size=2"),
]
# Sums are taken in another order where gradients meet in another order; Lion's signs turn with the last bit.
CLOSE, CLOSE_IN_SIGN = 1e-5, 2e-3


def in_an_empty_folder(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def give(folder: Path, command: str, *more: str) -> str:
    module, *words = [*shlex.split(command), *more]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": paths}
    done = Warm([sys.executable, "-m", module, *words], cwd=folder, env=environment)
    output, errors = done.communicate()
    assert done.returncode == 0, f"{command}: {errors}\n{output}"
    return output


def losses(folder: Path) -> dict[str, float]:
    """Final loss of each run of the only sweep, by the name of its folder."""
    return {
        path.parent.name: json.loads(path.read_text())["final_loss"]
        for path in folder.glob("outputs/*/*/summary.json")
    }


def test_the_page_adds_one_of_each():
    assert len(FILES) == len(RUNS) == 7
    for name, text in FILES.items():
        if name.endswith(".py"):
            compile(text, name, "exec")
            assert len(re.findall(r"^[A-Z]+\.add\(", text, re.MULTILINE)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS, ids=lambda command: shlex.split(command)[1])
def test_what_the_page_adds_trains_like_one_process(command, tmp_path):
    words = SMALL if "data=" in command else [*SMALL, "data=synthetic"]
    words = words if "model=" in command else [*words, "model=tiny"]
    given = shlex.split(command)
    words = [
        word for word in words if not any(w.startswith(word.split("=")[0] + "=") for w in given)
    ]
    give(in_an_empty_folder(tmp_path), command, *words)
    found = losses(tmp_path)
    alone = {name: loss for name, loss in found.items() if "-n1" in name}
    assert len(alone) == len(found) / 2 >= 1
    tolerance = CLOSE_IN_SIGN if "lion" in command else CLOSE
    assert list(found.values()) == pytest.approx([*alone.values()][:1] * len(found), rel=tolerance)


@pytest.mark.slow
def test_what_the_page_adds_can_be_planned(tmp_path):
    plans = [command for command in COMMANDS if command not in RUNS]
    assert plans
    in_an_empty_folder(tmp_path)
    for command in plans:
        told = give(tmp_path, command, "data=synthetic")
        assert "Planned, not measured" in told
        assert ("Rehearsed on tensors" in told) == ("--rehearse" in command)
    (helped,) = re.findall(r"`(zeroexp --help [^`]*)`", PAGE)
    assert "lion                 added by a plugin" in give(tmp_path, helped)


@pytest.mark.slow
def test_what_others_add_is_held_as_planned(tmp_path):
    """A model, an optimizer and a layout of others, in one run: every kind on every rank, to the byte."""
    (command,) = (command for command in COMMANDS if "--rehearse" in command)
    words = command.removeprefix("zeroexp plan --rehearse ")
    in_an_empty_folder(tmp_path)
    give(tmp_path, f"zeroexp {words}", "data=synthetic", *SMALL)
    (summary,) = tmp_path.glob("outputs/*/*/summary.json")
    held = json.loads(summary.read_text())["memory"]["by_kind"]
    (planned,) = json.loads(
        give(tmp_path, f"zeroexp plan --json {words}", "data=synthetic", *SMALL)
    )
    assert planned["by_kind"] == held
    light, full = held["optimizer"]["per_rank"]
    assert full == pytest.approx(2 * light, rel=1e-3)


def test_an_export_finds_a_plugin_where_its_run_was_started_or_where_one_stands(tmp_path):
    """Of a model whose vocabulary is the data's: nobody but the checkpoint names its size."""
    started, here = tmp_path / "started", tmp_path / "here"
    started.mkdir(), here.mkdir()
    file = in_an_empty_folder(started) / "convolutions.py"
    file.write_text(file.read_text().replace(', "vocab_size": 2048', ""))
    words = "plugins=convolutions model=convolutions data=offline checkpoint.every=4"
    give(started, f"zeroexp {words} world_size=1", *SMALL)
    (run,) = started.glob("outputs/*/*/")
    give(here, f"zeroexp.export {run} --format dcp --to first")
    file.rename(here / file.name)
    give(here, f"zeroexp.export {run} --format dcp --to second")
    assert (here / "second/.metadata").is_file()
    with pytest.raises(AssertionError, match=f"plugins=.convolutions.: no module .* {tmp_path}; "):
        give(tmp_path, f"zeroexp.export {run} --format dcp --to third")


@pytest.mark.parametrize("engine", ["zero3 strategy.implementation=torch", "zero3"])
def test_a_model_that_keeps_a_view_of_a_weight_is_refused_before_a_rank_starts(tmp_path, engine):
    """Its parameters are on meta then; FSDP2 would train with a view that stays there."""
    file = in_an_empty_folder(tmp_path) / "convolutions.py"
    made = "        self.embed = nn.Embedding(words, width)\n"
    file.write_text(
        file.read_text().replace(made, f"{made}        self.t = self.embed.weight.t()\n")
    )
    words = f"plugins=convolutions model=convolutions data=synthetic strategy={engine}"
    problem = r"model.name=convolutions: .*embed.weight and attribute t lie in the same memory"
    with pytest.raises(AssertionError, match=problem):
        give(tmp_path, f"zeroexp {words} world_size=2", *SMALL)
    assert not [*tmp_path.glob("outputs/*/*/config.yaml")]


def test_a_model_that_exits_as_it_is_built_is_named(tmp_path):
    """It would end the process that starts ranks, too, which imports what they will need."""
    file = in_an_empty_folder(tmp_path) / "convolutions.py"
    file.write_text(
        file.read_text().replace("    shape = {key", "    raise SystemExit(0)\n    shape = {key")
    )
    words = "plugins=convolutions model=convolutions data=synthetic world_size=1"
    with pytest.raises(
        AssertionError, match=r"convolutions: raised SystemExit: 0 at line .*; repair"
    ):
        give(tmp_path, f"zeroexp {words}", *SMALL)
