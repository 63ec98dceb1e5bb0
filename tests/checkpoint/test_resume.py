"""Which checkpoint `resume` means, and what the submitter refuses before a rank starts: one line each."""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoint.test_manifest import MADE
from tests.composing import values_of
from tests.somebody_else import not_root, open_to_all
from zeroexp.check import try_data
from zeroexp.check.sweep_points import SweepPoint, point_of
from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    StoredTensor,
    read_manifest,
    to_json,
)
from zeroexp.checkpoint.resume import resolve_resume
from zeroexp.cluster.sweep import Sweep
from zeroexp.config.keys import Config, ConfigError, UndefinedCombination, from_mapping
from zeroexp.process.content_hash import hash_of

TINY = ("model=tiny", "train.steps=100")
HEAD, MATRIX = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"


def write(run: Path, step: int, config: Config, /, **changes: object) -> Path:
    folder = run / "checkpoint" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    state = {n: {k: _zeros(t) for k, t in entry.items()} for n, entry in MADE.state.items()}
    changes = {"config": asdict(config), "state": state, **changes}
    manifest = replace(MADE, step=step, **changes)
    assert isinstance(manifest, Manifest)
    (folder / MANIFEST).write_bytes(to_json(manifest))
    for file, num_bytes in manifest.file_bytes().items():
        (folder / file).write_bytes(bytes(num_bytes))
    return folder


def _zeros(tensor: StoredTensor) -> StoredTensor:
    pieces = [p._replace(hash=hash_of([bytes(tensor.num_bytes(p))])) for p in tensor.pieces]
    return replace(tensor, pieces=tuple(pieces))


def config_for(outputs: Path, *words: str) -> Config:
    return replace(from_mapping(Config, values_of(*TINY, *words)), outputs=str(outputs))


def refused(config: Config, kind: type[ConfigError]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_resume(config)
    line = str(caught.value)
    assert isinstance(caught.value, kind), line
    assert "\n" not in line and "; " in line
    return line


def test_what_a_sweep_goes_on_from_stays_while_its_points_are_tried(tmp_path, monkeypatch):
    """Its run goes on, saves and removes older checkpoints."""
    run = tmp_path / "sweep" / "run"
    words = [*TINY, "tracking=files", f"outputs={tmp_path}", f"resume={run}"]
    chosen = write(run, 20, config_for(tmp_path))

    def try_while_the_run_saves(_: Sweep, points: list[SweepPoint]) -> list[SweepPoint]:
        write(run, 40, config_for(tmp_path))
        folders.keep_newest(run, 1)
        return points

    monkeypatch.setattr(Sweep, "_tried", try_while_the_run_saves)
    monkeypatch.setattr(Sweep, "_execute", lambda *_: None)
    with Sweep([]) as sweep:
        sweep.run([(words, values_of(*words), {})])
        folders.keep_newest(run, 1)
        assert chosen.exists()


def test_a_run_means_its_newest_and_a_checkpoint_itself(tmp_path, monkeypatch):
    """Relative to where the command is given."""
    run = tmp_path / "sweep" / "run"
    config = config_for(tmp_path)
    older, newer = (write(run, step, config) for step in (20, 40))
    monkeypatch.chdir(tmp_path)
    for resume, expected in ((run, newer), ("sweep/run", newer), (older, older)):
        assert resolve_resume(replace(config, resume=str(resume))) == str(expected)
    assert resolve_resume(config) is None


def test_latest_is_the_newest_that_fits(tmp_path):
    config = config_for(tmp_path, "resume=latest")
    other = config_for(tmp_path, "model.hf_config.hidden_size=128")
    fits = write(tmp_path / "a" / "run", 20, config)
    write(tmp_path / "b" / "run", 40, other)
    write(tmp_path / "c" / "run", 60, config).joinpath(MANIFEST).write_text("{")
    assert resolve_resume(config) == str(fits)


def test_latest_may_be_what_was_imported_and_is_nothing_half_written(tmp_path):
    """An import goes to outputs/NAME, as a whole, from a hidden folder beside it."""
    config = config_for(tmp_path, "resume=latest")
    imported = write(tmp_path / "theirs", 20, config)
    write(tmp_path / ".zeroexp-half" / "others", 40, config)
    assert resolve_resume(config) == str(imported)


@pytest.mark.parametrize("closed", ["checkpoint", "checkpoint/step-000040", "."])
def test_latest_passes_over_a_run_of_somebody_else_that_can_not_be_read(closed):
    with open_to_all() as outputs:
        config = config_for(outputs, "resume=latest")
        run = outputs / "b" / "run"
        write(run, 40, config)
        (run / closed).chmod(0)
        with not_root():
            line = refused(
                config, UndefinedCombination
            )  # a folder that can not be listed holds none
            assert closed != "checkpoint/step-000040" or f"{run}: Permission denied; " in line
        fits = write(outputs / "a" / "run", 20, config)
        with not_root():
            assert resolve_resume(config) == str(fits)


def damage(checkpoint: Path, how: str) -> str:
    """Do it; returns what the line says: the file and its damage."""
    file = checkpoint / next(iter(MADE.file_bytes()))
    size = file.stat().st_size
    if how == "missing":
        file.unlink()
        return f"{file}: No such file or directory"
    if how == "truncated":
        file.write_bytes(bytes(1))
        return f"{file}: truncated to 1 of {size} bytes"
    if how == "flipped":
        file.write_bytes(bytes([1, *bytes(size - 1)]))
        return f"{file}: damaged, a.b/weight at byte 0 has another hash"
    file = checkpoint / MANIFEST
    file.write_text(file.read_text().replace('"step": 40', '"step": 41'))
    return f"{file}: damaged, its hash differs"


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped", "other manifest"])
def test_a_damaged_one_is_refused_by_name_and_passed_over_in_its_run(tmp_path, capsys, how):
    config = config_for(tmp_path)
    run = tmp_path / "sweep" / "run"
    oldest, older, newer = (write(run, step, config, saved_at=9.0) for step in (10, 20, 40))
    write(tmp_path / "sweep" / "other", 30, config, saved_at=8.0)
    os.utime(newer / MANIFEST, (0, 0))  # as a copy may have it
    problem = damage(newer, how)
    by_name = replace(config, resume=str(newer))
    assert refused(by_name, CheckpointError) == f"{problem}; use resume={older}"
    for resume in (str(run), "latest"):
        for _ in range(2):  # two points of one sweep
            assert resolve_resume(replace(config, resume=resume)) == str(older)
        line = f"zeroexp: resume={resume}: {problem}; goes on from {older}\n"
        assert capsys.readouterr().err == line
    for remedy, damaged in ((f"use resume={oldest}", older), ("give another checkpoint", oldest)):
        damage(damaged, "truncated")
        assert refused(by_name, CheckpointError) == f"{problem}; {remedy}"


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


def test_latest_where_none_fits_says_why(tmp_path):
    """It does not go back in a run that is over."""
    config = config_for(tmp_path, "resume=latest", "train.warmup_steps=0", "train.steps=40")
    assert "there is none; use resume=null" in refused(config, UndefinedCombination)
    for step in (20, 40):
        write(tmp_path / "sweep" / "run", step, config)
    assert "40 steps are done, of 40 here" in refused(config, UndefinedCombination)


def test_a_checkpoint_between_outer_steps_is_refused(tmp_path):
    """All that needs one model comes after multiples of the interval, counted from the first step."""
    words = ("strategy=zero2", "world_size=4", "strategy.replicas=2", "strategy.outer.every=4")
    run = tmp_path / "sweep" / "run"
    write(run, 6, config_for(tmp_path))
    config = config_for(tmp_path, *words, f"resume={run}")
    told = "step 6 is between outer steps of strategy.outer.every=4; use an interval that divides 6"
    assert told in refused(config, UndefinedCombination)
    write(run, 8, config_for(tmp_path))
    assert resolve_resume(config) == str(run / "checkpoint/step-000008")


def test_latest_where_all_are_damaged_says_which(tmp_path):
    config = config_for(tmp_path, "resume=latest")
    run = tmp_path / "b" / "run"
    for step in (20, 30, 40):
        write(run, step, config)
    (run / "checkpoint/step-000020" / MANIFEST).write_text("{")
    for step in (30, 40):
        (run / f"checkpoint/step-0000{step}/rank0.bin").unlink()
    newest = f"{run}/checkpoint/step-000040/rank0.bin: No such file or directory"
    told = f"{run}/checkpoint: none of 3 checkpoints can be used (the newest: {newest})"
    told += "; restore one, or use resume=null to begin anew"
    line = refused(config, UndefinedCombination)
    assert line == f"resume=latest: no checkpoint under {tmp_path} fits: {told}"
    line = refused(replace(config, resume=str(run)), CheckpointError)
    assert line == f"resume={run}: {told}"


def test_no_checkpoint_in_there(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("nowhere", "empty", "file"):
        resume = f"resume={tmp_path / name}"
        line = refused(config_for(tmp_path, resume), CheckpointError)
        assert line.startswith(f"{resume}: no whole checkpoint in there")


@pytest.mark.parametrize(
    ("word", "difference"),
    [
        ("model.hf_config.vocab_size=4096", "model.hf_config.vocab_size is 4096 in it, 2048 here"),
        ("data.seq_len=64", "data.seq_len is 64 in it, 128 here"),
        ("data.global_batch_size=24", "data.global_batch_size is 24 in it, 12 here"),
        ("train.seed=3", "train.seed is 3 in it, 0 here"),
        ("optimizer=sgd", f"optimizer.name of {HEAD} is sgd in it, adamw here"),
        (
            "+optimizer.kinds.matrices={name: sgd, lr: 0.01}",
            f"optimizer.name of {MATRIX} is sgd in it, adamw here",
        ),
        # The checkpoint alone has this key.
        ("+model.hf_config.window=16", "model.hf_config.window is 16 in it, None here"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, word, difference):
    run = tmp_path / "sweep" / "run"
    write(run, 20, config_for(tmp_path, word))
    resume = f"resume={run}"
    line = refused(config_for(tmp_path, resume), UndefinedCombination)
    remedy = "use the same, or another checkpoint"
    assert line == f"{resume}: {difference}; {remedy}, or use resume=null to begin anew"
    line = refused(config_for(tmp_path, "resume=latest"), UndefinedCombination)
    assert f": {difference}; " in line


SGD = "{name: sgd, momentum: 0.9, lr: 0.01}"
MUON = "{name: muon, momentum: 0.9}"
LAYER, MLP = "*.layers.0.*", "*.mlp.*"
GATE, NORM = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.input_layernorm.weight"


def kinds(**rows: str) -> str:
    return f"+optimizer.kinds={{{', '.join(f'{row}: {own}' for row, own in rows.items())}}}"


def saved_with(moments: dict[str, str]) -> dict[str, dict[str, StoredTensor]]:
    """What a checkpoint holds of these weights, each with its moment."""
    entry = next(iter(MADE.state.values()))
    weight = _zeros(entry["weight"])
    return {name: {"weight": weight, moment: weight} for name, moment in moments.items()}


BY_MUON = f"optimizer.kinds.{MLP}.name of {GATE} is sgd in it, muon here"
FORGETS = "the state holds momentum_buffer, and the optimizer keeps none of it"


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        (
            ["optimizer=muon", kinds(**{LAYER: SGD})],
            ["optimizer=muon", kinds(**{MLP: "{lr: 1e-4}", LAYER: SGD})],
            BY_MUON,
        ),
        (
            ["optimizer=muon", kinds(**{LAYER: SGD, MLP: "{lr: 1e-4}"})],
            ["optimizer=muon", kinds(**{MLP: "{lr: 1e-4}", LAYER: SGD})],
            BY_MUON,
        ),
        (
            [kinds(matrices=MUON)],
            [kinds(matrices=MUON, **{LAYER: "{lr: 1e-4}"})],
            f"optimizer.kinds.{LAYER}.name of {MATRIX} is muon in it, adamw here",
        ),
        (
            ["optimizer=sgd"],
            ["optimizer=sgd", "optimizer.momentum=0"],
            f"optimizer.momentum of {HEAD} is 0.9 in it, 0.0 here: {FORGETS}",
        ),
        (
            ["optimizer=sgd"],
            ["optimizer=sgd", kinds(vectors="{momentum: 0}")],
            f"optimizer.kinds.vectors.momentum of {NORM} is 0.9 in it, 0 here: {FORGETS}",
        ),
    ],
    ids=["a further row", "rows in another order", "a row before a kind", "none", "none of a row"],
)
def test_a_weight_is_stepped_by_the_optimizer_that_it_had(tmp_path, before, now, difference):
    """SGD's moment and Muon's have one name, so that ranks would not tell them apart."""
    names = [MATRIX, GATE]
    if "optimizer=sgd" in before:  # else AdamW steps what is no matrix of a block
        names += [HEAD, NORM]
    state = saved_with(dict.fromkeys(names, "momentum_buffer"))
    run = tmp_path / "run"
    write(run, 20, config_for(tmp_path, *before), state=state)
    line = refused(config_for(tmp_path, *now, f"resume={run}"), UndefinedCombination)
    remedy = "use the same, or another checkpoint, or use resume=null to begin anew"
    assert line == f"resume={run}: {difference}; {remedy}"


def test_what_a_new_run_may_choose(tmp_path):
    words = ["strategy=ddp", "strategy.implementation=torch", "world_size=3", "precision=bf16"]
    words += ["optimizer.lr=1", "optimizer.schedule=cosine", "data.micro_batch_size=2"]
    words += ["+optimizer.kinds.matrices={name: adamw, lr: 0.5}"]
    path = write(tmp_path / "run", 20, config_for(tmp_path, *words))
    assert resolve_resume(config_for(tmp_path, f"resume={tmp_path / 'run'}")) == str(path)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (["optimizer=sgd"], [kinds(**{"*": "{name: sgd, momentum: 0.9}"})]),
        ([kinds(matrices=SGD)], [kinds(matrices=SGD.replace("0.01", "0.5"))]),
        (["optimizer=sgd", "optimizer.momentum=0"], ["optimizer=sgd"]),
    ],
    ids=["in a row", "another rate", "a momentum that is new"],
)
def test_optimizers_may_be_named_otherwise(tmp_path, before, now):
    path = write(tmp_path / "run", 20, config_for(tmp_path, *before))
    assert resolve_resume(config_for(tmp_path, *now, f"resume={path}")) == str(path)


def test_an_optimizer_that_is_none_of_this_run_is_passed_over(tmp_path):
    """Its plugin is not loaded."""
    config = config_for(tmp_path, "resume=latest")
    fits = write(tmp_path / "a" / "run", 20, config)
    theirs = replace(config, optimizer=replace(config.optimizer, name="theirs"))
    run = tmp_path / "b" / "run"
    write(run, 40, theirs)
    line = refused(replace(config, resume=str(run)), UndefinedCombination)
    assert "its optimizer is none of this run: optimizer.name=theirs: unknown word" in line
    assert resolve_resume(config) == str(fits)


def test_classes_that_the_data_names_are_no_difference(tmp_path):
    """A run keeps those that it found, so that an export can name them; the same words name none."""
    found = config_for(tmp_path, "data.labels=[bad,good]")
    path = write(tmp_path / "sweep" / "run", 4, found)
    assert resolve_resume(config_for(tmp_path, "resume=latest")) == str(path)
    stars = write(tmp_path / "stars" / "run", 4, config_for(tmp_path, "data.labels=['2','1']"))
    asked = config_for(tmp_path, f"resume={tmp_path / 'stars' / 'run'}", "data.labels=[2,1]")
    assert resolve_resume(asked) == str(stars), "a column of words, whose classes are asked for"
    other = config_for(tmp_path, f"resume={path}", "data.labels=[good,bad]")
    assert "data.labels is ['bad', 'good'] in it, ['good', 'bad'] here" in refused(
        other, UndefinedCombination
    )


def test_a_renamed_one_is_passed_over(tmp_path):
    """Its steps would be done a second time, and its batches taken once more."""
    config = config_for(tmp_path, "resume=latest")
    older, newer = (write(tmp_path / "a" / "run", step, config) for step in (2, 3))
    renamed = newer.rename(newer.with_name("step-000004"))
    assert resolve_resume(config) == str(older)
    line = refused(replace(config, resume=str(renamed)), CheckpointError)
    assert "its folder was renamed, and is of step-000003; use resume=" in line
    with pytest.raises(CheckpointError, match=r"is of step-000003; rename it to step-000003$"):
        read_manifest(renamed)


OF_A_HUB = {"model_type": "llama", "rope_theta": 1e4, "pad_token_id": 0}
OF_ITS_UPDATE = {"transformers_version": "9.9.9", "use_cache": False, "torch_dtype": "bfloat16"}
OF_ITS_UPDATE |= {"id2label": {"0": "bad"}, "eos_token_id": [2, 3], "attention_dropout": 0.1}
# What transformers' class does not know, and what it has by default.
OF_ITS_UPDATE |= {"tokenizer_class": "LlamaTokenizer", "max_length": 9, "a_site": {"rope_theta": 1}}
OF_ITS_UPDATE |= {"attention_bias": False, "rms_norm_eps": 1e-6, "num_key_value_heads": 32}
OF_ITS_UPDATE |= {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4}}


def test_keys_of_a_published_config_that_decide_nothing_may_differ(tmp_path):
    config = config_for(tmp_path, "resume=latest")
    path = write(tmp_path / "a" / "run", 4, published(config, OF_A_HUB))
    updated = published(config, {**OF_A_HUB, **OF_ITS_UPDATE})
    assert resolve_resume(updated) == str(path)
    for keys, told in (
        ({"rope_theta": 5e5}, "rope_parameters.rope_theta is 10000.0 in it, 500000.0 here"),
        ({"pad_token_id": 1}, "pad_token_id is 0 in it, 1 here"),
        ({"model_type": "granite"}, "model_type is llama in it, granite here"),
        ({"attention_bias": True}, "attention_bias is False in it, True here"),
    ):
        other = published(config, {**OF_A_HUB, **keys})
        assert f"model.published.{told}" in refused(other, UndefinedCombination)


@pytest.mark.parametrize("kind", ["of_tomorrow", "dots3_note_text"])
def test_a_published_config_that_transformers_does_not_take_is_compared_as_it_is(tmp_path, kind):
    """Nor one whose layers have sizes of their own: its class raises where one of all is asked for."""
    config, keys = config_for(tmp_path, "resume=latest"), {"model_type": kind}
    path = write(tmp_path / "a" / "run", 4, published(config, keys))
    assert resolve_resume(published(config, keys)) == str(path)
    other = published(config, {**keys, "model_type": "of_today"})
    assert f"model_type is {kind} in it, of_today" in refused(other, UndefinedCombination)


def published(config: Config, keys: dict[str, object]) -> Config:
    return replace(config, model=replace(config.model, published=keys))


def test_a_checkpoint_from_before_a_key_has_its_default(tmp_path):
    config = config_for(tmp_path, "resume=latest")
    older = asdict(config)
    del older["model"]["lora"], older["data"]["labels"]
    path = write(tmp_path / "a" / "run", 4, config, config=older)
    assert resolve_resume(config) == str(path)
    adapted = replace(config, model=replace(config.model, lora=replace(config.model.lora, r=4)))
    assert "model.lora.r is None in it, 4 here" in refused(adapted, UndefinedCombination)


def test_a_point_that_does_not_fit_is_skipped_with_the_reason(tmp_path):
    path = write(tmp_path / "run", 20, config_for(tmp_path))
    resume = f"resume={tmp_path / 'run'}"
    fits = point_of([resume], asdict(config_for(tmp_path, resume)))
    assert fits is not None and fits.refusal is None and fits.config.resume == str(path)
    assert fits.name == "zero3-buffer-n2"
    other = point_of([resume], asdict(config_for(tmp_path, resume, "train.seed=3")))
    assert (
        other is not None
        and other.refusal is not None
        and "train.seed is 0 in it, 3 here" in other.refusal
    )


def test_another_text_than_that_of_the_checkpoint_is_refused_before_ranks_start(
    tmp_path, monkeypatch
):
    config = config_for(tmp_path)
    saved = str(write(tmp_path / "sweep" / "run", 1, config, tokens_hash="theirs labels"))
    ours = SimpleNamespace(tokens_hash="theirs labels", vocab_size=None)
    monkeypatch.setattr(try_data, "build_data", lambda *_: ours)
    try_data.check_data(replace(config, resume=saved))
    of_none = str(write(tmp_path / "sweep" / "of_none", 1, config))  # brought in from elsewhere
    try_data.check_data(replace(config, resume=of_none))
    for ours.tokens_hash in ("ours labels", "theirs others"):
        with pytest.raises(ConfigError, match=r"held another text when its run began.*; bring"):
            try_data.check_data(replace(config, resume=saved))
