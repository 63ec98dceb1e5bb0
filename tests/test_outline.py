"""A model's outline: what a plan reads of it is what the model itself has, and it is read without transformers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.composing import CONF, composed, values_of
from zeroexp.check.try_model import check_model
from zeroexp.config.families import MODELS
from zeroexp.config.keys import Config, ConfigError, from_mapping
from zeroexp.config.optimizer import parameter_groups
from zeroexp.models.module import BuiltModel, build_model
from zeroexp.models.outline import longest_sequence, outline_of
from zeroexp.plan.__main__ import main as plan
from zeroexp.zero.grouping import group_parameters, specs_of

LIBRARIES = {
    "transformers",
    "huggingface_hub",
    "torch._dynamo",
    "torch.distributed.tensor",
    "sympy",
}
PLANNED = ["model=tiny", "strategy=zero1,zero3", "strategy.implementation=buffer,torch"]
MODELS_READ = [
    *("model=tiny", "model=gpt2_tiny", "model=mixtral_tiny", "model=mlp_tiny", "model=qwen3_8b"),
    "model=tiny model.freeze=[model.embed_tokens*]",
    "model=gpt2_tiny model.task=classification model.num_labels=5",
]


def read_of(model: BuiltModel) -> tuple[object, ...]:
    """Return all that plans and engines' forms read of a model."""
    muon = composed("optimizer=muon").optimizer
    named = model.module.named_parameters(remove_duplicate=False)
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    units = ("model", "block", "layer", "module")
    return (
        [(name, p.shape, p.dtype, p.requires_grad, names[p]) for name, p in named],
        [
            (unit, group.name, specs_of(group))
            for unit in units
            for group in group_parameters(model.module, model.blocks, unit)
        ],
        [
            [names[p] for p in g["params"]]
            for g in parameter_groups(model.module, muon, model.blocks)
        ],
        [
            (name, len(list(m.parameters(recurse=False))))
            for name, m in model.module.named_modules()
        ],
        model.blocks,
        longest_sequence(model),
    )


@pytest.mark.parametrize("words", MODELS_READ)
def test_an_outline_has_what_a_plan_reads_of_the_model(words, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path))
    config = from_mapping(Config, values_of(*words.split())).model
    whole = build_model(config, seed=0, device="meta", vocab_size=2048)
    for _ in range(
        2
    ):  # the first call builds the model and keeps its outline, the second reads that
        outline = outline_of(config, 2048)
        assert read_of(outline) == read_of(whole)
    is_kept = type(outline.module) is not type(whole.module)
    has_fused_experts = any(hasattr(each, "is_concatenated") for each in whole.module.modules())
    assert is_kept == (MODELS[config.family].of_transformers and not has_fused_experts)


def test_what_is_refused_or_torn_is_never_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path))
    config = from_mapping(Config, values_of("model=tiny", "model.hf_config.hidden_size=65"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="hidden size"):
            check_model(config)
    assert not list(tmp_path.rglob("*.json"))
    tiny = composed("model=tiny").model
    whole = outline_of(tiny, None)
    (kept,) = tmp_path.rglob("*.json")
    for torn in (
        "",
        "[]",
        "{}",
        kept.read_text()[:999],
        kept.read_text().replace("weight", "wait"),
    ):
        kept.write_text(torn)
        assert read_of(outline_of(tiny, None)) == read_of(whole), torn[:20]


@pytest.mark.slow
def test_a_second_plan_imports_neither_transformers_nor_a_compiler(tmp_path, monkeypatch, capsys):
    """They take longer than all else of it. The first one, here, keeps the outline of the model."""
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["zeroexp plan", *PLANNED])
    assert plan() == 0
    assert set(sys.modules) > LIBRARIES, "what it imports has other names"
    code = f"""
import sys
from zeroexp.plan.__main__ import main
sys.argv[1:] = {PLANNED}
assert main() == 0
print(*sorted({LIBRARIES!r} & set(sys.modules)), file=sys.stderr)
"""
    second = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(CONF.parent)},
        capture_output=True,
        text=True,
    )
    assert (second.returncode, second.stderr.strip()) == (0, "")
    assert second.stdout == capsys.readouterr().out
