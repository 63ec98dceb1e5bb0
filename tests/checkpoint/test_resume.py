"""Which checkpoint `resume` means, and what the submitter refuses before a rank starts: one line each."""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.checkpoint.test_manifest import MADE
from tests.composing import composed
from zeroexp.check.sweep_points import points_of
from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    StoredTensor,
    to_json,
)
from zeroexp.checkpoint.resume import resolve_resume
from zeroexp.config.keys import Config, ConfigError, UndefinedCombination
from zeroexp.process.content_hash import hash_of

TINY = ("model=tiny", "train.steps=100")


def write(run: Path, step: int, config: Config, **changes: object) -> Path:
    folder = run / "checkpoint" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    state = {n: {k: _zeros(t) for k, t in entry.items()} for n, entry in MADE.state.items()}
    manifest = replace(MADE, config=asdict(config), step=step, state=state, **changes)
    assert isinstance(manifest, Manifest)
    (folder / MANIFEST).write_bytes(to_json(manifest))
    for file, num_bytes in manifest.file_bytes().items():
        (folder / file).write_bytes(bytes(num_bytes))
    return folder


def _zeros(tensor: StoredTensor) -> StoredTensor:
    pieces = [replace(p, hash=hash_of([bytes(tensor.num_bytes(p))])) for p in tensor.pieces]
    return replace(tensor, pieces=tuple(pieces))


def config_for(outputs: Path, *words: str) -> Config:
    return replace(composed(*TINY, *words), outputs=str(outputs))


def refused(config: Config, kind: type[ConfigError]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_resume(config)
    line = str(caught.value)
    assert isinstance(caught.value, kind), line
    assert "\n" not in line and "; " in line
    return line


def test_nothing_to_resume(tmp_path):
    assert resolve_resume(config_for(tmp_path)) is None


def test_a_run_means_its_newest_and_a_checkpoint_itself(tmp_path):
    run = tmp_path / "sweep" / "run"
    config = config_for(tmp_path)
    older, newer = (write(run, step, config) for step in (20, 40))
    assert resolve_resume(replace(config, resume=str(run))) == str(newer)
    assert resolve_resume(replace(config, resume=str(older))) == str(older)


def test_relative_to_where_the_command_is_given(tmp_path, monkeypatch):
    config = config_for(tmp_path)
    checkpoint = write(tmp_path / "sweep" / "run", 20, config)
    monkeypatch.chdir(tmp_path)
    assert resolve_resume(replace(config, resume="sweep/run")) == str(checkpoint)


def test_latest_is_the_newest_that_fits(tmp_path):
    config = config_for(tmp_path, "resume=latest")
    other = config_for(tmp_path, "model.hf_config.hidden_size=128")
    fits = write(tmp_path / "a" / "run", 20, config)
    write(tmp_path / "b" / "run", 40, other)
    write(tmp_path / "c" / "run", 60, config).joinpath(MANIFEST).write_text("{")
    assert resolve_resume(config) == str(fits)


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "no manifest"])
def test_what_is_not_whole_is_refused_by_name_and_passed_over_in_its_run(tmp_path, capsys, damage):
    config = config_for(tmp_path)
    run = tmp_path / "sweep" / "run"
    oldest, older, newer = (write(run, step, config, saved_at=9.0) for step in (10, 20, 40))
    write(tmp_path / "sweep" / "other", 30, config, saved_at=8.0)
    os.utime(newer / MANIFEST, (0, 0))  # as a copy may have it
    file = newer / next(iter(MADE.file_bytes()))
    size = file.stat().st_size
    if damage == "missing":
        file.unlink()
        told = "missing"
    elif damage == "truncated":
        file.write_bytes(bytes(1))
        told = f"truncated to 1 of {size} bytes"
    elif damage == "flipped":
        file.write_bytes(bytes([1, *bytes(size - 1)]))
        told = "damaged, a.b/weight at byte 0 has another hash"
    else:
        file = newer / MANIFEST
        file.write_text(file.read_text().replace('"step": 40', '"step": 41'))
        told = "damaged, its hash differs"
    line = refused(replace(config, resume=str(newer)), CheckpointError)
    assert line.startswith(f"{file}: {told}; ")
    assert line.endswith(f"; use resume={older}")
    for resume in (str(run), "latest"):
        for _ in range(2):  # two points of one sweep
            assert resolve_resume(replace(config, resume=resume)) == str(older)
        said = f"zeroexp: resume={resume}: {file}: {told}; goes on from {older}\n"
        assert capsys.readouterr().err == said
    for remedy, damaged in ((f"use resume={oldest}", older), ("give another checkpoint", oldest)):
        (damaged / next(iter(MADE.file_bytes()))).write_bytes(b"")
        line = refused(replace(config, resume=str(newer)), CheckpointError)
        assert line == f"{file}: {told}; {remedy}"


def test_a_run_that_thins_its_checkpoints_is_looked_up_all_the_while(tmp_path):
    config = config_for(tmp_path, "train.steps=1000000")
    run = tmp_path / "sweep" / "run"
    over = threading.Event()

    def save_and_thin() -> None:
        for step in itertools.count(3):
            saved = write(tmp_path / "beside", step, config)
            saved.rename(run / "checkpoint" / saved.name)
            folders.keep_newest(run, 1)
            if over.is_set():
                return

    write(run, 1, config)
    thread = threading.Thread(target=save_and_thin)
    thread.start()
    try:
        for resume in ["latest", str(run)] * 50:
            found = resolve_resume(replace(config, resume=resume))
            assert found is not None and folders.step_of(Path(found))
    finally:
        over.set()
        thread.join()


def test_latest_does_not_go_back_in_a_run_that_is_over(tmp_path):
    config = config_for(tmp_path, "resume=latest", "train.warmup_steps=0", "train.steps=40")
    for step in (20, 40):
        write(tmp_path / "sweep" / "run", step, config)
    assert "40 steps are done, of 40 here" in refused(config, UndefinedCombination)


def test_latest_without_any(tmp_path):
    line = refused(config_for(tmp_path, "resume=latest"), UndefinedCombination)
    assert "there is none; use resume=null" in line


def test_latest_where_all_are_damaged_says_which(tmp_path):
    config = config_for(tmp_path, "resume=latest")
    run = tmp_path / "b" / "run"
    for step in (20, 30, 40):
        write(run, step, config)
    (run / "checkpoint/step-000020" / MANIFEST).write_text("{")
    for step in (30, 40):
        (run / f"checkpoint/step-0000{step}/rank0.bin").unlink()
    newest = f"{run}/checkpoint/step-000040/rank0.bin: missing"
    told = f"{run}/checkpoint: none of 3 checkpoints can be used (the newest: {newest})"
    told += "; restore one, or use resume=null to begin anew"
    line = refused(config, UndefinedCombination)
    assert line == f"resume=latest: no checkpoint under {tmp_path} fits: {told}"
    line = refused(replace(config, resume=str(run)), CheckpointError)
    assert line == f"resume={run}: {told}"


def test_latest_without_one_that_fits(tmp_path):
    write(tmp_path / "b" / "run", 40, config_for(tmp_path, "train.seed=1"))
    line = refused(config_for(tmp_path, "resume=latest"), UndefinedCombination)
    assert "train.seed is 1 in it, 0 here" in line


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_no_checkpoint_in_there(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    line = refused(config_for(tmp_path, f"resume={tmp_path / name}"), CheckpointError)
    assert line.startswith(f"resume={tmp_path / name}: no whole checkpoint in there")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.hf_config.vocab_size=4096", "model.hf_config.vocab_size is 4096 in it, 2048 here"),
        ("model.hf_config.hidden_size=128", "model.hf_config.hidden_size is 128 in it, 64 here"),
        ("data.seq_len=64", "data.seq_len is 64 in it, 128 here"),
        ("data.global_batch_size=24", "data.global_batch_size is 24 in it, 12 here"),
        ("train.seed=3", "train.seed is 3 in it, 0 here"),
        ("optimizer=sgd", "optimizer.name is sgd in it, adamw here"),
        # What the checkpoint alone has: whoever compares our keys finds nothing.
        (
            "+model.hf_config.sliding_window=16",
            "model.hf_config.sliding_window is 16 in it, None here",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, word, said):
    write(tmp_path / "run", 20, config_for(tmp_path, word))
    line = refused(config_for(tmp_path, f"resume={tmp_path / 'run'}"), UndefinedCombination)
    assert f"resume={tmp_path / 'run'}: {said}; use the same, or another checkpoint" == line


def test_what_a_new_run_may_choose(tmp_path):
    words = ["strategy=ddp", "strategy.implementation=torch", "world_size=3", "precision=bf16"]
    words += ["optimizer.lr=1", "optimizer.schedule=cosine", "data.micro_batch_size=2"]
    path = write(tmp_path / "run", 20, config_for(tmp_path, *words))
    assert resolve_resume(config_for(tmp_path, f"resume={tmp_path / 'run'}")) == str(path)


def test_nothing_left_to_train(tmp_path):
    write(tmp_path / "run", 103, config_for(tmp_path))
    line = refused(config_for(tmp_path, f"resume={tmp_path / 'run'}"), UndefinedCombination)
    assert "103 steps are done, of 103 here; raise train.steps" in line


def test_a_point_that_does_not_fit_is_skipped_with_the_reason(tmp_path):
    path = write(tmp_path / "run", 20, config_for(tmp_path))
    resume = f"resume={tmp_path / 'run'}"
    (fits,) = points_of([resume], asdict(config_for(tmp_path, resume)))
    assert fits.refusal is None and fits.config.resume == str(path)
    assert fits.name == "zero3-buffer-n2"
    (other,) = points_of([resume], asdict(config_for(tmp_path, resume, "train.seed=3")))
    assert other.refusal is not None and "train.seed is 0 in it, 3 here" in other.refusal
