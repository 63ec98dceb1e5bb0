"""`model.weights`: those of the configured model load bit for bit; any others are refused before a rank starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config

from tests.composing import compose_once, composed
from tests.warm import Warm, start_servers_with
from zeroexp import __main__ as zeroexp
from zeroexp.models.module import build_model

TINY = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
GPT2_TINY = {"vocab_size": 2048, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
MIXTRAL_TINY = {**TINY, "intermediate_size": 128, "num_local_experts": 4}
MIXTRAL_TINY["max_position_embeddings"] = 512
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


def saved(folder: Path, kind: str, config: Any, **how: Any) -> Path:
    torch.manual_seed(3)
    getattr(transformers, kind)(config).save_pretrained(folder, **how)
    return folder


def llama(folder: Path, **changes: Any) -> Path:
    return saved(folder, "LlamaForCausalLM", LlamaConfig(**{**TINY, **changes}))


def told_by(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a command that must be refused before a run folder is made."""
    monkeypatch.setattr(sys, "argv", ["zeroexp", *line.split()])
    capsys.readouterr()  # what transformers told of saving
    assert zeroexp.main() == zeroexp.REFUSED
    (told,) = capsys.readouterr().err.splitlines()
    assert not list(Path().glob("**/state.json")), "a run folder was made"
    return told


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose_once(monkeypatch)


# --- another model

OTHERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "qwen2": (
        lambda to: saved(to, "Qwen2ForCausalLM", Qwen2Config(**TINY)),
        "its config.json says model_type=qwen2, not llama; choose weights of model.family=llama",
    ),
    "mistral": (
        lambda to: saved(to, "MistralForCausalLM", MistralConfig(**TINY)),
        "its config.json says model_type=mistral, not llama; ",
    ),
    "norm eps": (
        lambda to: llama(to, rms_norm_eps=1e-5),
        "rms_norm_eps=1e-05 where model.name=tiny has 1e-06; use +model.hf_config.rms_norm_eps=1e-05",
    ),
    "theta": (
        lambda to: llama(to, rope_parameters={**DEFAULT, "rope_theta": 5e5}),
        "rope_parameters.rope_theta=500000.0 where model.name=tiny has 10000.0; "
        "use +model.hf_config.rope_parameters.rope_theta=500000.0",
    ),
    "rope scaling": (
        lambda to: llama(to, rope_parameters=LLAMA3),
        "rope_parameters.rope_type=llama3, rope_parameters.factor=8.0, ",
    ),
    "ties": (
        lambda to: llama(to, tie_word_embeddings=False),
        "tie_word_embeddings=false where model.name=tiny has true; "
        "use model.hf_config.tie_word_embeddings=false",
    ),
    "attention bias": (
        lambda to: llama(to, attention_bias=True),
        "attention_bias=true where model.name=tiny has false; "
        "use +model.hf_config.attention_bias=true",
    ),
    "activation": (
        lambda to: llama(to, hidden_act="gelu"),
        "hidden_act=gelu where model.name=tiny has silu",
    ),
    "head size": (
        lambda to: llama(to, head_dim=32),
        "head_dim=32 where model.name=tiny has 16; use +model.hf_config.head_dim=32",
    ),
    "depth and width": (
        lambda to: llama(to, num_hidden_layers=3, intermediate_size=100),
        "intermediate_size=100, num_hidden_layers=3 where model.name=tiny has 176, 2; use "
        "model.hf_config.intermediate_size=100 model.hf_config.num_hidden_layers=3, or",
    ),
    "head of another task": (
        lambda to: saved(to, "LlamaForSequenceClassification", LlamaConfig(**TINY)),
        "score.weight in it, not in model.name=tiny; choose weights without this head",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_weights_of_another_model_are_one_line_and_nothing_runs(other, monkeypatch, capsys):
    make, expected = OTHERS[other]
    make(Path("other"))
    told = told_by("model=tiny model.weights=other", monkeypatch, capsys)
    assert told.startswith("zeroexp: model.weights=other: ") and expected in told


def test_the_remedy_is_a_command_that_loads_them(monkeypatch, capsys):
    """What the line says to use is typed as it stands, until nothing is refused."""
    llama(Path("other"), rms_norm_eps=1e-5, num_hidden_layers=3, rope_parameters=LLAMA3)
    told = told_by("model=tiny model.weights=other", monkeypatch, capsys)
    use = told.partition("; use ")[2].partition(", or, if")[0].split()
    module = build_model(composed("model=tiny", "model.weights=other", *use).model, seed=0).module
    assert module.config.rope_parameters["factor"] == 8.0
    assert same(module, load_file("other/model.safetensors"))


def test_a_sliding_window_is_refused(monkeypatch, capsys):
    saved(Path("other"), "MixtralForCausalLM", MixtralConfig(**MIXTRAL_TINY, sliding_window=64))
    told = told_by("model=mixtral_tiny model.weights=other", monkeypatch, capsys)
    assert "sliding_window=64 where model.name=mixtral_tiny has null" in told


# --- damaged folders


def without_a_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def quantized(folder: Path) -> None:
    rewrite_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})


def with_code(folder: Path) -> None:
    rewrite_config(folder, auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})


def with_an_extra_tensor(folder: Path) -> None:
    rewrite(folder, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})


def without_a_tensor(folder: Path) -> None:
    rewrite(folder, {}, drop="model.layers.1.mlp.up_proj.weight")


def with_another_shape(folder: Path) -> None:
    rewrite(folder, {"model.norm.weight": torch.ones(65)})


def with_integers(folder: Path) -> None:
    rewrite(folder, {"model.norm.weight": torch.ones(64, dtype=torch.int8)})


def with_a_second_head(folder: Path) -> None:
    rewrite(folder, {"lm_head.weight": torch.ones(2048, 64)})


def torn(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def renamed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "mine.safetensors")


def rewrite_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(folder: Path, changes: dict[str, Tensor], drop: str = "") -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    tensors.pop(drop, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGED = {
    without_a_config: "no config.json in it",
    quantized: "its config.json has quantization_config",
    with_code: "its config.json has auto_map",
    with_an_extra_tensor: "model.layers.0.self_attn.q_proj.bias in it, not in model.name=tiny; ",
    without_a_tensor: "model.layers.1.mlp.up_proj.weight of model.name=tiny, not in it; ",
    with_another_shape: "model.norm.weight is 65 in it, 64 in model.name=tiny; ",
    with_integers: "model.norm.weight is I8 in model.safetensors; use weights in one of F64, F32",
    with_a_second_head: "lm_head.weight differs from model.embed_tokens.weight in it",
    torn: "its weights can not be read (model.safetensors: ",
    renamed: "no model.safetensors or pytorch_model.bin",
}


@pytest.mark.parametrize("damage", DAMAGED, ids=lambda damage: damage.__name__)
def test_a_damaged_folder_is_one_line_and_nothing_runs(damage, monkeypatch, capsys):
    damage(llama(Path("mine")))
    told = told_by("model=tiny model.weights=mine", monkeypatch, capsys)
    assert told.startswith("zeroexp: model.weights=mine: ") and DAMAGED[damage] in told


def test_a_missing_file_of_several_is_named(monkeypatch, capsys):
    config = LlamaConfig(**TINY)
    saved(Path("mine"), "LlamaForCausalLM", config, max_shard_size="200KB")
    files = sorted(Path("mine").glob("*.safetensors"))
    files[1].unlink()
    told = told_by("model=tiny model.weights=mine", monkeypatch, capsys)
    assert len(files) > 2 and files[1].name in told


# --- the right one


def same(module: torch.nn.Module, tensors: dict[str, Tensor]) -> bool:
    named = dict(module.named_parameters())
    return named.keys() == tensors.keys() and all(
        torch.equal(parameter, tensors[name]) for name, parameter in named.items()
    )


def of_several_files(to: Path) -> Path:
    return saved(to, "LlamaForCausalLM", LlamaConfig(**TINY), max_shard_size="200KB")


def with_the_tied_head_twice(to: Path) -> Path:
    tensors = load_file(llama(to) / "model.safetensors")
    rewrite(to, {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    return to


def without_a_head(to: Path) -> Path:
    return saved(to, "LlamaModel", LlamaConfig(**TINY))


def with_tables_of_old(to: Path) -> Path:
    llama(to)
    rewrite(to, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    return to


def with_other_names_and_words(to: Path) -> Path:
    harmless = {"eos_token_id": 7, "bos_token_id": 8, "pad_token_id": 9, "attention_dropout": 0.1}
    llama(to, **harmless, initializer_range=0.5)
    rewrite_config(to, is_llama_config=True, torch_dtype="bfloat16", transformers_version="4.40")
    return to


def with_the_keys_of_old(to: Path) -> Path:
    """rope_theta and rope_scaling stood at the top, head_dim and the defaults were left out."""
    llama(to)
    path = to / "config.json"
    written = json.loads(path.read_text())
    for key in ("rope_parameters", "head_dim", "rms_norm_eps", "attention_bias", "mlp_bias"):
        del written[key]
    path.write_text(json.dumps({**written, "rope_theta": 10000.0, "rope_scaling": None}))
    return to


def pickled(to: Path) -> Path:
    llama(to)
    torch.save(load_file(to / "model.safetensors"), to / "pytorch_model.bin")
    (to / "model.safetensors").unlink()
    return to


RIGHT = [
    llama,
    of_several_files,
    with_the_tied_head_twice,
    without_a_head,
    with_tables_of_old,
    with_other_names_and_words,
    with_the_keys_of_old,
    pickled,
]


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_the_right_folder_loads_bit_for_bit(make, tmp_path):
    torch.manual_seed(3)
    expected = dict(transformers.LlamaForCausalLM(LlamaConfig(**TINY)).named_parameters())
    if make in (without_a_head, with_other_names_and_words):  # drawn in another way
        expected = dict(
            transformers.LlamaForCausalLM.from_pretrained(
                make(tmp_path / "right")
            ).named_parameters()
        )
    else:
        make(tmp_path / "right")
    config = composed("model=tiny", f"model.weights={tmp_path / 'right'}").model
    assert same(build_model(config, seed=0).module, expected)


@pytest.mark.parametrize("name", ["gpt2_tiny", "mixtral_tiny"])
@pytest.mark.parametrize("head", [True, False])
def test_other_families_load_too(name, head, tmp_path):
    kinds = {
        "gpt2_tiny": ("GPT2LMHeadModel", "GPT2Model", GPT2Config(**GPT2_TINY)),
        "mixtral_tiny": ("MixtralForCausalLM", "MixtralModel", MixtralConfig(**MIXTRAL_TINY)),
    }
    with_head, without, config = kinds[name]
    folder = saved(tmp_path / "right", with_head if head else without, config)
    expected = getattr(transformers, with_head).from_pretrained(folder)
    module = build_model(composed(f"model={name}", f"model.weights={folder}").model, seed=0).module
    assert same(module, dict(expected.named_parameters()))


def test_a_run_starts_from_the_right_folder(tmp_path, monkeypatch):
    """Through the command line: the check lets it through, and the ranks load it."""
    llama(Path("mine"))
    words = "model=tiny model.weights=mine data=synthetic data.seq_len=8 data.global_batch_size=2"
    more = "world_size=1 train.steps=1 train.warmup_steps=1 tracking=files"
    start_servers_with(monkeypatch, Warm)
    monkeypatch.setattr(sys, "argv", ["zeroexp", *words.split(), *more.split()])
    assert zeroexp.main() == 0
