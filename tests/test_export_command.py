"""The export as a user runs it: a process with an exit code, killed at any moment; and the tokenizer it takes along."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.test_export import config_of, exported, load, require_bits, save
from tests.warm import Warm
from zeroexp import export
from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import MANIFEST, read_manifest, to_json
from zeroexp.checkpoint.weights import Weights
from zeroexp.tracking.json_files import write_json

MANY_FILES = ("model=tiny", "model.hf_config.num_hidden_layers=24")


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    ranks(save, config_of(*MANY_FILES), folder)
    return folder


def command(*arguments: object) -> Warm:
    words = [sys.executable, "-m", "zeroexp.export", *map(str, arguments)]
    return Warm(words, env=dict(os.environ))


@contextlib.contextmanager
def changed_config(checkpoint: Path) -> Iterator[dict[str, Any]]:
    manifest = read_manifest(checkpoint)
    yield manifest.config
    (checkpoint / MANIFEST).write_bytes(to_json(manifest))


def kill_when(sign: Callable[[], object], process: Warm) -> None:
    while not sign():
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_killed_it_leaves_nothing_under_its_name_or_all_of_it(run, tmp_path):
    target, size = tmp_path / "to", ("--max-shard-size", "100KB")
    process = command(run, "--to", target, *size)
    kill_when(lambda: list(tmp_path.glob(".*/to/*.safetensors")), process)
    assert process.returncode == -signal.SIGKILL and not target.exists()
    left = {*tmp_path.glob(".*")}
    assert len(left) == 2  # a folder, and the lock beside it
    process = command(run, "--to", target, *size)
    kill_when(target.exists, process)
    require_bits(target, config_of(*MANY_FILES))
    assert not any(each.exists() for each in left)


def test_after_ctrl_c_nothing_is_left(run, tmp_path):
    target, before = tmp_path / "to", {*(run / "checkpoint").iterdir()}
    process = command(run, "--to", target, "--max-shard-size", "100KB")
    while not list(tmp_path.glob(".*/to/*.safetensors")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130 and [*tmp_path.iterdir()] == []
    assert {*(run / "checkpoint").iterdir()} == before  # with pins of those that were killed


def test_the_run_that_goes_on_leaves_what_is_exported(run, tmp_path, monkeypatch):
    """It saves, and removes older checkpoints, while their weights are read."""
    goes_on, read = tmp_path / "run", Weights.read
    shutil.copytree(run, goes_on)
    shutil.copytree(goes_on / "checkpoint/step-000002", goes_on / "checkpoint/step-000004")

    def save_and_read(weights: Weights, name: str) -> Any:
        folders.keep_newest(goes_on, 1)
        return read(weights, name)

    monkeypatch.setattr(Weights, "read", save_and_read)
    words = [str(goes_on), "--step", "2", "--to", str(tmp_path / "to")]
    monkeypatch.setattr(sys, "argv", ["export", *words])
    assert export.main() == 0
    require_bits(tmp_path / "to", config_of(*MANY_FILES))
    folders.keep_newest(goes_on, 1)
    assert [path.name for path in (goes_on / "checkpoint").iterdir()] == ["step-000004"]


# -- the tokenizer of model.weights -----------------------------------------------------------------


@pytest.fixture
def weights(ranks, tmp_path) -> Path:
    """Of somebody else: another end of text, and files about words that nothing here reads."""
    folder, _ = exported(ranks, tmp_path, "model=tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "bos_token_id": 3, "eos_token_id": 5})
    )
    words = json.loads((folder / "tokenizer_config.json").read_text())
    words = {**words, "model_max_length": 77, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


def test_it_goes_along_byte_for_byte_or_is_said_to_be_gone(ranks, tmp_path, weights, capsys):
    (tmp_path / "run").mkdir()
    ranks(save, config_of("model=tiny", f"model.weights={weights}"), tmp_path / "run")
    export.export(export.choose_checkpoint(tmp_path / "run"), tmp_path / "with")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "with" / name).read_bytes() == (weights / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "with")
    assert (tokenizer.model_max_length, tokenizer.chat_template) == (77, "{{ messages }}")
    model = load(tmp_path / "with", "causal")
    assert (model.config.bos_token_id, model.config.eos_token_id) == (3, 5)
    assert model.generation_config.eos_token_id == 5

    shutil.rmtree(weights)
    capsys.readouterr()  # transformers tells how far it is
    export.export(export.choose_checkpoint(tmp_path / "run"), tmp_path / "without")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zeroexp: exported without a tokenizer: ") and str(weights) in line
    assert not list((tmp_path / "without").glob("*token*"))
    load(tmp_path / "without", "causal")


def test_the_tokenizer_of_a_relative_path_is_that_of_the_run(ranks, tmp_path, weights, monkeypatch):
    """Whoever exports may stand elsewhere, where no folder has this name, or one with another tokenizer."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    ranks(save, config_of("model=tiny", f"model.weights={weights}"), run)
    checkpoint = export.choose_checkpoint(run)
    with changed_config(checkpoint) as config:
        config["model"]["weights"] = weights.name
    write_json(run / "environment.json", {"folder": str(weights.parent)})
    monkeypatch.chdir(elsewhere)
    export.export(checkpoint, tmp_path / "first")
    shutil.copytree(weights, weights.name)
    Path(weights.name, "tokenizer.json").write_bytes(b"another")
    export.export(checkpoint, tmp_path / "second")
    for name in ("first", "second"):
        words = (tmp_path / name / "tokenizer.json").read_bytes()
        assert words == (weights / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("form", ["huggingface", "dcp"])
def test_a_plugin_that_is_gone_and_of_which_nothing_is_needed_is_not_missed(run, tmp_path, form):
    shutil.copytree(run, tmp_path / "run")
    with changed_config(export.choose_checkpoint(tmp_path / "run")) as config:
        config["plugins"] = ["plugin_that_is_gone"]
    process = command(tmp_path / "run", "--to", tmp_path / "to", "--format", form, "--json")
    told, errors = process.communicate()
    assert process.returncode == 0, errors
    # Another trainer's format keeps the dtypes that are saved.
    assert json.loads(told).get("dtype") == {"huggingface": "float32"}.get(form)
    assert (tmp_path / "to" / "tokenizer.json").exists() == (form == "huggingface")
