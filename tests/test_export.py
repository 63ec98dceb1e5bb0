"""A checkpoint in Hugging Face's format: transformers has the same bits, and so has a run that starts from it."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.composing import composed
from tests.model_folders import assert_same
from tests.small_disks import files_of_at_most
from zeroexp import export
from zeroexp.checkpoint.manifest import MANIFEST, read_manifest
from zeroexp.checkpoint.save import Saver
from zeroexp.config import keys as configs
from zeroexp.config.keys import Config
from zeroexp.data.source_files import CORPUS
from zeroexp.engines.build import build_strategy
from zeroexp.measure.memory import AllocationMeter, count_cpu_allocations
from zeroexp.models.module import build_model
from zeroexp.process.world import World

WORDS = ("tracking=files", "train.warmup_steps=0", "checkpoint.every=2", "checkpoint.keep=9")
YELP = ("data=yelp", "model.task=classification", "model.num_labels=5")
MAMBA = (
    "+model.hf_config.model_type=mamba",
    "+model.hf_config.hidden_size=16",
    "+model.hf_config.num_hidden_layers=2",
    "+model.hf_config.vocab_size=2048",
)
LOADERS = {"causal": AutoModelForCausalLM, "classification": AutoModelForSequenceClassification}


def config_of(*words: str) -> Config:
    return configs.resolve(copy.deepcopy(composed(*WORDS, *words)))


def save(world: World, config: Config, run: Path) -> None:
    """The weights as they are drawn from the seed."""
    model = build_model(config.model, seed=config.train.seed, vocab_size=2048)
    saver = Saver(run, build_strategy(config, model, world), config, world)
    saver.save_now(2)
    saver.close()


def exported(ranks, tmp_path: Path, *words: str, **options: str) -> tuple[Path, Config]:
    config = config_of(*words)
    ranks(save, config, tmp_path)
    export.export(export.choose_checkpoint(tmp_path), tmp_path / "to", **options)
    return tmp_path / "to", config


def load(folder: Path, task: str):
    model, report = LOADERS[task].from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def require_bits(folder: Path, config: Config, dtype: torch.dtype = torch.float32):
    """What transformers loads, against the weights that were saved."""
    model = load(folder, config.model.task)
    drawn = build_model(config.model, seed=config.train.seed, vocab_size=2048).module
    named = dict(drawn.named_parameters())
    assert list(named) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, named[name].to(dtype)), name
    return model, drawn


def words_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (("model=tiny",), "100KB"),
        (("model=tiny", "model.hf_config.tie_word_embeddings=false"), "5GB"),
        (("model=tiny", "~model.hf_config.vocab_size"), "100KB"),
        (("model=tiny", *YELP), "5GB"),
        (("model=gpt2_tiny", "strategy.implementation=tensor"), "100KB"),
        (("model=mixtral_tiny", "strategy=zero2"), "100KB"),
        (("model=hf", "model.path=null", *MAMBA), "5GB"),
    ],
    ids=["tied", "untied", "words_of_the_data", "labels", "gpt2", "mixtral", "no_positions"],
)
def test_transformers_loads_the_same_bits(ranks, tmp_path, words, size):
    folder, config = exported(ranks, tmp_path, *words, max_shard_size=size)
    model, drawn = require_bits(folder, config)
    again = build_model(replace(config.model, weights=str(folder)), seed=9, vocab_size=2048)
    assert_same(dict(again.module.named_parameters()), dict(drawn.named_parameters()))
    assert len(list(folder.glob("*.safetensors"))) == (1 if size == "5GB" else len(files(folder)))
    if "model=mixtral_tiny" in words:
        names = words_of(folder)
        assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in names
        assert "lm_head.weight" not in names  # tied
        embedding = 2048 * 64 * 4  # the largest, a file of its own
        assert all((folder / file).stat().st_size < 1.01 * embedding for file in files(folder))
    tokens = torch.arange(1, 17).view(2, 8)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, drawn.eval()(input_ids=tokens).logits)


def files(folder: Path) -> set[str]:
    found = set(words_of(folder).values())
    assert len(found) > 2
    return found


def test_bfloat16_is_rounded_once_to_the_nearest(ranks, tmp_path):
    folder, config = exported(ranks, tmp_path, "model=tiny", dtype="bfloat16")
    require_bits(folder, config, torch.bfloat16)


def test_a_bf16_run_in_float32_is_exact(ranks, tmp_path):
    config = config_of("model=tiny", "precision=bf16")
    ranks(save, config, tmp_path)
    export.export(export.choose_checkpoint(tmp_path), tmp_path / "to")
    drawn = build_model(config.model, seed=0, dtype=torch.bfloat16).module
    model = load(tmp_path / "to", "causal")
    for mine, theirs in zip(model.parameters(), drawn.parameters(), strict=True):
        assert mine.dtype == torch.float32 and torch.equal(mine, theirs.float())


def test_its_tokenizer_and_generation(ranks, tmp_path):
    folder, _ = exported(ranks, tmp_path, "model=tiny")
    shipped, text = CORPUS / "tokenizer.json", "The  with statement,\n    naïvely: 1_000"
    assert (folder / "tokenizer.json").read_bytes() == shipped.read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(text).input_ids == Tokenizer.from_file(str(shipped)).encode(text).ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    model = load(folder, "causal")
    assert model.generation_config.eos_token_id == 0 and model.config.use_cache
    tokens = torch.tensor([tokenizer(text).input_ids])
    assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape[1] > tokens.shape[1]


def test_numbers_have_no_tokenizer(ranks, tmp_path):
    folder, config = exported(ranks, tmp_path, "model=tiny", "data=synthetic")
    require_bits(folder, config)
    assert not list(folder.glob("tokenizer*"))


@pytest.mark.slow
def test_one_file_is_in_memory_at_a_time(ranks, tmp_path):
    ranks(save, config_of("model=tiny", "model.hf_config.num_hidden_layers=24"), tmp_path)
    assert count_cpu_allocations() is None
    before = AllocationMeter(torch.device("cpu")).peak_bytes()
    meter = AllocationMeter(torch.device("cpu"))
    export.export(export.choose_checkpoint(tmp_path), tmp_path / "to", max_shard_size="600KB")
    peak = meter.peak_bytes()
    assert before is not None and peak is not None
    whole = sum(file.stat().st_size for file in (tmp_path / "to").glob("*.safetensors"))
    assert whole > 4_500_000 and 500_000 < peak - before < 700_000


# -- what is refused --------------------------------------------------------------------------------


def refused(capsys, monkeypatch, *arguments: object) -> str:
    monkeypatch.setattr("sys.argv", ["export", *map(str, arguments)])
    assert export.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zeroexp: ") and "; " in line
    return line


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    ranks(save, config_of("model=tiny"), folder)
    return folder


def test_the_command_writes_beside_the_checkpoints(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["export", str(run / "checkpoint" / "step-000002")])
    assert export.main() == 0
    target = run / "exported" / "step-000002"
    assert f"model.weights={target}" in capsys.readouterr().out
    load(target, "causal")
    capsys.readouterr()  # transformers tells how far it is
    assert f"--to={target}: exists already" in refused(capsys, monkeypatch, run)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--step", 7], "--step=7: no such checkpoint in {run}; use 2"),
        (["--max-shard-size", "big"], "big: no size; use a number and its unit, for example 5GB"),
    ],
)
def test_what_is_no_step_and_no_size(run, tmp_path, capsys, monkeypatch, words, problem):
    line = refused(capsys, monkeypatch, run, "--to", tmp_path / "to", *words)
    assert problem.format(run=run) in line
    assert "no whole checkpoint in there" in refused(capsys, monkeypatch, tmp_path)


@pytest.mark.parametrize("family", ["mlp", "moe"])
def test_families_that_transformers_does_not_have(ranks, tmp_path, capsys, monkeypatch, family):
    words = ("data=vectors",) if family == "mlp" else ()
    ranks(save, config_of(f"model={family}_tiny", *words), tmp_path)
    line = refused(capsys, monkeypatch, tmp_path, "--to", tmp_path / "to")
    problem = f"model.family={family}: transformers has no such model"
    assert f"{problem}; export a run of llama, gpt2, mixtral, hf" in line
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "checkpoints.jsonl"}


def test_damage_leaves_nothing_behind(ranks, tmp_path, capsys, monkeypatch):
    (tmp_path / "run").mkdir()
    ranks(save, config_of("model=tiny"), tmp_path / "run")
    checkpoint = export.choose_checkpoint(tmp_path / "run")
    weights = [entry["weight"] for entry in read_manifest(checkpoint).state.values()]
    weight, piece = random.Random(0).choice([(w, p) for w in weights for p in w.pieces])
    path = checkpoint / piece.file
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[piece.offset + weight.num_bytes(piece) - 1] ^= 1
    for content, said in ((bytes(flipped), "damaged"), (whole[: piece.offset + 1], "truncated")):
        path.write_bytes(content)
        assert said in refused(capsys, monkeypatch, checkpoint, "--to", tmp_path / "to" / "here")
        assert list((tmp_path / "to").iterdir()) == []
    path.unlink()
    line = refused(capsys, monkeypatch, checkpoint, "--to", tmp_path / "to" / "here")
    assert "No such file" in line
    (checkpoint / MANIFEST).write_text("{")
    line = refused(capsys, monkeypatch, checkpoint, "--to", tmp_path / "to" / "here")
    assert f"{checkpoint / MANIFEST}: damaged" in line
    assert {path.name for path in tmp_path.iterdir()} == {"run", "to"}


def test_a_full_disk_leaves_nothing_behind(run, tmp_path, capsys, monkeypatch):
    with files_of_at_most(100_000):
        line = refused(capsys, monkeypatch, run, "--to", tmp_path / "to")
    assert "File too large" in line and "make room there" in line
    assert list(tmp_path.iterdir()) == []


def test_classes_keep_their_names(ranks, tmp_path):
    words = ("model=tiny", "data=yelp", "model.task=classification", "model.num_labels=3")
    target, _ = exported(ranks, tmp_path, *words, "data.labels=[bad,fine,good]")
    config = json.loads((target / "config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "fine", "2": "good"}
    assert config["label2id"] == {"bad": 0, "fine": 1, "good": 2}
