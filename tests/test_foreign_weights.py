"""`model.weights`: those of the configured model load bit for bit; any others are refused before a rank starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Qwen2Config,
)

from tests.composing import composed
from tests.model_folders import assert_same, of_line, refusal_of, rewrite, rewrite_config, saved
from zeroexp.config.keys import ModelConfig
from zeroexp.models.module import build_model

TINY = {
    **{"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
    "tie_word_embeddings": True,
}
GPT2_TINY = {"vocab_size": 2048, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
MIXTRAL_TINY = {**TINY, "intermediate_size": 128, "num_local_experts": 4}
MIXTRAL_TINY["max_position_embeddings"] = 512
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 512},
}
OTHER_ROPE = {"rope_type": "default", "rope_theta": 5e5}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def llama(**changes: Any) -> Path:
    return saved("mine", "LlamaForCausalLM", LlamaConfig(**{**TINY, **changes}))


def told_of(folder: Path, model: str = "tiny") -> str:
    told = refusal_of(f"model={model}", f"model.weights={folder}")
    return told.removeprefix(f"model.weights={folder}: ")


# --- another model


def causal(kind: str, config: Any) -> Any:
    return lambda: saved("mine", f"{kind}ForCausalLM", config)


OTHERS: dict[str, tuple[Any, str]] = {
    "qwen2": (
        causal("Qwen2", Qwen2Config(**TINY)),
        "its config.json says model_type=qwen2, not llama; choose weights of model.family=llama",
    ),
    "mistral": (causal("Mistral", MistralConfig(**TINY)), "model_type=mistral, not llama; "),
    "norm eps": (
        lambda: llama(rms_norm_eps=1e-5),
        "rms_norm_eps=1e-05 where model.name=tiny has 1e-06; use ++model.hf_config.rms_norm_eps=1e-05",
    ),
    "theta": (
        lambda: llama(rope_parameters=OTHER_ROPE),
        "rope_parameters.rope_theta=500000.0 where model.name=tiny has 10000.0; "
        "use ++model.hf_config.rope_parameters.rope_theta=500000.0",
    ),
    "ties": (
        lambda: llama(tie_word_embeddings=False),
        "=false where model.name=tiny has true; use ++model.hf_config.tie_word_embeddings=false",
    ),
    "attention bias": (lambda: llama(attention_bias=True), "attention_bias=true where"),
    "activation": (lambda: llama(hidden_act="gelu"), "hidden_act=gelu where model.name=tiny has"),
    "head size": (lambda: llama(head_dim=32), "head_dim=32 where model.name=tiny has 16; use +"),
    "depth and width": (
        lambda: llama(num_hidden_layers=3, intermediate_size=100),
        "intermediate_size=100, num_hidden_layers=3 where model.name=tiny has 176, 2; use "
        "++model.hf_config.intermediate_size=100 ++model.hf_config.num_hidden_layers=3, or",
    ),
    "head of another task": (
        lambda: saved("mine", "LlamaForSequenceClassification", LlamaConfig(**TINY)),
        "score.weight in it, not in model.name=tiny; choose weights without this head",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_weights_of_another_model_are_one_line(other):
    make, expected = OTHERS[other]
    assert expected in told_of(make())


def test_a_sliding_window_is_refused():
    windowed = MixtralConfig(**MIXTRAL_TINY, sliding_window=64)
    told = told_of(saved("mine", "MixtralForCausalLM", windowed), "mixtral_tiny")
    assert "sliding_window=64 where model.name=mixtral_tiny has null" in told


def test_a_config_inside_a_config_is_compared_by_its_own_keys():
    """Saved ones say a dtype, which those of a class do not."""
    tiny = {"d_model": 32, "n_heads": 2, "n_layers": 1, "vocab_size": 64, "max_seq_len": 32}
    folder = saved("mine", "MptForCausalLM", MptConfig(**tiny))
    assert build_model(of_line("model=hf", f"model.path={folder}"), seed=0).module
    other = ("model=hf", f"model.path={folder}", "++model.hf_config.attn_config.alibi=false")
    told = refusal_of(*other)
    assert "attn_config.alibi=true where" in told and len(told) < 400


def test_the_remedy_is_a_command_that_loads_them():
    """What the line says to use is typed as it stands, until nothing is refused."""
    folder = llama(rms_norm_eps=1e-5, num_hidden_layers=3, rope_parameters=LLAMA3)
    use = told_of(folder).partition("; use ")[2].partition(", or, if")[0].split()
    module = build_model(composed("model=tiny", "model.weights=mine", *use).model, seed=0).module
    assert module.config.rope_parameters["factor"] == 8.0
    assert_same(dict(module.named_parameters()), load_file("mine/model.safetensors"))


# --- damaged folders


def torn(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


BIAS = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
DAMAGED: dict[str, tuple[Any, str]] = {
    "no config": (lambda it: (it / "config.json").unlink(), "no config.json in it"),
    "an extra tensor": (
        lambda it: rewrite(it, BIAS),
        "model.layers.0.self_attn.q_proj.bias in it, not in model.name=tiny; ",
    ),
    "a missing tensor": (
        lambda it: rewrite(it, {}, drop="model.layers.1.mlp.up_proj.weight"),
        "model.layers.1.mlp.up_proj.weight of model.name=tiny, not in it; ",
    ),
    "another shape": (
        lambda it: rewrite(it, {"model.norm.weight": torch.ones(65)}),
        "model.norm.weight is 65 in it, 64 in model.name=tiny; ",
    ),
    "integers": (
        lambda it: rewrite(it, {"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
        "model.norm.weight is I8 in model.safetensors; use weights in one of F64, F32",
    ),
    "a second head": (
        lambda it: rewrite(it, {"lm_head.weight": torch.ones(2048, 64)}),
        "lm_head.weight differs from model.embed_tokens.weight in it",
    ),
    "torn": (torn, "its weights can not be read (model.safetensors: "),
    "a trainer's own file": (
        lambda it: pickled(it, state_dict={}),
        "(pytorch_model.bin: state_dict is a dict and no tensor; save model.state_dict() alone)",
    ),
    "renamed": (
        lambda it: (it / "model.safetensors").rename(it / "mine.safetensors"),
        "no model.safetensors or pytorch_model.bin",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_folder_is_one_line(damage):
    make, expected = DAMAGED[damage]
    make(folder := llama())
    assert expected in told_of(folder)


def test_a_missing_file_of_several_is_named():
    folder = saved("mine", "LlamaForCausalLM", LlamaConfig(**TINY), max_shard_size="200KB")
    files = sorted(folder.glob("*.safetensors"))
    files[1].unlink()
    assert len(files) > 2 and files[1].name in told_of(folder)


# --- the right one


def with_the_tied_head_twice() -> None:
    tensors = load_file(llama() / "model.safetensors")
    rewrite(Path("mine"), {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})


def with_other_names_and_words() -> None:
    ids = {"eos_token_id": 7, "bos_token_id": 8, "pad_token_id": 9}
    folder = llama(**ids, attention_dropout=0.1, initializer_range=0.5)
    more = {"torch_dtype": "bfloat16", "transformers_version": "4.40"}
    rewrite_config(folder, is_llama_config=True, **more)


def with_the_keys_of_old() -> None:
    """rope_theta and rope_scaling stood at the top, head_dim and the defaults were left out."""
    new = ("rope_parameters", "head_dim", "rms_norm_eps", "attention_bias", "mlp_bias")
    rewrite_config(llama(), drop=new, rope_theta=10000.0, rope_scaling=None)


def pickled(folder: Path | None = None, **more: Any) -> None:
    """As DeepSpeed's script writes them, whose safetensors tied weights do not fit into."""
    file = (folder or llama()) / "model.safetensors"
    torch.save({**load_file(file), **more}, file.with_name("pytorch_model.bin"))
    file.unlink()


OLD_TABLE = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
RIGHT: dict[str, Any] = {
    "as it is": llama,
    "several files": lambda: saved(
        "mine", "LlamaForCausalLM", LlamaConfig(**TINY), max_shard_size="200KB"
    ),
    "the tied head twice": with_the_tied_head_twice,
    "no head": lambda: saved("mine", "LlamaModel", LlamaConfig(**TINY)),
    "tables of old": lambda: rewrite(llama(), OLD_TABLE),
    "other names and words": with_other_names_and_words,
    "keys of old": with_the_keys_of_old,
    "pickled": pickled,
}
OTHER_FAMILIES = {
    "gpt2_tiny": ("GPT2LMHeadModel", "GPT2Model", GPT2Config(**GPT2_TINY)),
    "mixtral_tiny": ("MixtralForCausalLM", "MixtralModel", MixtralConfig(**MIXTRAL_TINY)),
}


def assert_loads(model: str, kind: str) -> None:
    module = build_model(composed(f"model={model}", "model.weights=mine").model, seed=0).module
    expected = getattr(transformers, kind).from_pretrained("mine")
    assert_same(dict(module.named_parameters()), dict(expected.named_parameters()))


@pytest.mark.parametrize("form", RIGHT)
def test_the_right_folder_loads_bit_for_bit(form, capsys):
    RIGHT[form]()
    assert_loads("tiny", "LlamaForCausalLM")


@pytest.mark.parametrize("model", OTHER_FAMILIES)
def test_other_families_load_too_with_and_without_their_head(model):
    with_head, without, config = OTHER_FAMILIES[model]
    for kind in (with_head, without):
        saved("mine", kind, config)
        assert_loads(model, with_head)


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
NAMED_OTHERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": (
        "causal",
        {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    ),
    "llama4_text": ("causal", {"intermediate_size_mlp": 48, "num_local_experts": 2}),
    "esm": ("classification", {"pad_token_id": 1}),
    "inkling_text": ("causal", {"num_hidden_layers": 4}),
    "bigbird_pegasus": ("causal", {"d_model": 32, "decoder_layers": 1, "encoder_layers": 1}),
}


FORMS = [*((kind, "published") for kind in NAMED_OTHERWISE), ("esm", "spelt apart")]


@pytest.mark.parametrize(("kind", "form"), [*FORMS, ("esm", "without its head")])
def test_models_whose_names_or_ties_differ_from_their_class(kind, form):
    """transformers publishes them under other names, or its class does not tie what its config says is tied."""
    task, more = NAMED_OTHERWISE[kind]
    plain = transformers.AutoConfig.for_model(kind)
    keys = {k: v for k, v in SMALL.items() if k in plain.to_dict() or k in plain.attribute_map}
    shape = {"model_type": kind, **keys, **more}
    config = ModelConfig(name="hf", family="hf", task=task, hf_config=shape)
    auto = transformers.AutoModelForCausalLM
    if task == "classification":
        config.num_labels, auto = 2, transformers.AutoModelForSequenceClassification
    build_model(config, seed=0)  # it is one of ours
    theirs = auto.from_config(transformers.AutoConfig.for_model(**{**shape, "num_labels": 2}))
    (theirs.base_model if form == "without its head" else theirs).save_pretrained("mine")
    if form == "spelt apart":
        tensors = load_file("mine/model.safetensors")
        respelt = {n.replace("LayerNorm.gamma", "LayerNorm.weight"): t for n, t in tensors.items()}
        respelt = {n.replace("LayerNorm.beta", "LayerNorm.bias"): t for n, t in respelt.items()}
        save_file(respelt, "mine/model.safetensors", metadata={"format": "pt"})
    ours = build_model(replace(config, weights="mine"), seed=1).module
    heads = ("classifier.", "lm_head.") if form == "without its head" else ()
    for name, parameter in theirs.named_parameters():
        if not name.startswith(heads or "-"):
            assert torch.equal(ours.get_parameter(name), parameter), name
