"""`model.lora`: adapters of peft train under every engine as on one process; they alone are updated and exported."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.composing import compose_once
from tests.crossed import every_nth
from tests.model_folders import assert_same, of_line, refusal_of, saved
from tests.oracle import Recipe, configured
from tests.test_hf_models import GROUPED, RANKS, losses_of, model_config, run_steps
from tests.warm import Warm, start_servers_with
from zeroexp import __main__ as zeroexp
from zeroexp import export
from zeroexp.config.keys import LoraKeys, ModelConfig
from zeroexp.interface.values import fill_in
from zeroexp.measure.memory import bytes_by_kind
from zeroexp.models import lora
from zeroexp.models.flops import flops_per_sample
from zeroexp.models.module import build_deferred, build_model
from zeroexp.models.quantized import pack, unpack
from zeroexp.process.world import World

peft = pytest.importorskip("peft", reason="peft is not installed (pip install 'zeroexp[lora]')")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning"
)  # peft asks transformers by an old name
ADAPTERS = LoraKeys(
    r=3, lora_alpha=6.0, target_modules=["q_proj", "v_proj", "down_proj", "embed_tokens"]
)
PACKED = replace(ADAPTERS, quantize="int8", target_modules=["q_proj", "v_proj", "down_proj"])
ENGINES = [
    *(("zero3", "buffer"), ("zero2", "tensor"), ("zero1", "parameter")),
    *(("ddp", "torch"), ("zero1", "torch"), ("zero3", "torch")),
]


CAUSAL = model_config("causal", "llama", lora=ADAPTERS)
CLASSIFIER = model_config("classification", "llama", lora=LoraKeys(r=3))
IN_INT8 = model_config("causal", "llama", lora=PACKED)


def peft_itself(config: ModelConfig, seed: int) -> nn.Module:
    """What peft makes of the model without adapters: with the head of a classifier, which it trains too."""
    keys = {"r": 3} if config.num_labels else {"r": 3, "lora_alpha": 6.0}
    task = "SEQ_CLS" if config.num_labels else "CAUSAL_LM"
    targets = config.lora.target_modules
    module: Any = build_model(replace(config, lora=LoraKeys()), seed=seed).module
    torch.manual_seed(seed)
    settings = peft.LoraConfig(task_type=task, target_modules=targets, **keys)
    return peft.get_peft_model(module, settings)


def widened(config: ModelConfig, seed: int) -> nn.Module:
    """The model with adapters around plain layers, whose weights have the values that packed ones stand for."""
    module = build_model(
        replace(config, lora=replace(config.lora, quantize=None)), seed=seed
    ).module
    for name, layer in module.named_modules():
        if name.endswith("base_layer") and isinstance(layer, nn.Linear):
            layer.weight.data = unpack(*pack(layer.weight.data))
    return module


def train(world: World, stage: str, family: str) -> list[Any]:
    """By model: this rank's losses, and its bytes by kind."""
    told: list[Any] = []
    for config in (CAUSAL, CLASSIFIER, IN_INT8):
        strategy = configured(stage, family)(build_deferred(config, seed=1), Recipe(), world)
        losses = run_steps(world, strategy, config.task)
        told.append([losses, bytes_by_kind(strategy.model_states())])
    return told


@cache
def losses_of_one_process() -> list[list[float]]:
    """By model, as `train` has them: adapters of peft itself, and of ours around plain layers."""
    by_peft = [losses_of(peft_itself(each, 1), each.task) for each in (CAUSAL, CLASSIFIER)]
    return [*by_peft, losses_of(widened(IN_INT8, 1), "causal")]


@every_nth(3, "stage, family", ENGINES)
def test_every_engine_trains_them_as_peft_does_on_one_process(ranks, stage, family):
    """Of ZeRO-3 rests what the adapters need: two moments in fp32, half of them on each of two ranks."""
    answers = ranks(train, stage, family, world_size=RANKS)
    for losses, *shares in zip(losses_of_one_process(), *answers, strict=True):
        summed = [sum(step) for step in zip(*(each[0] for each in shares), strict=True)]
        torch.testing.assert_close(summed, losses, rtol=2e-5, atol=2e-5)
        assert losses[0] != losses[-1]
    if (stage, family) == ("zero3", "buffer"):
        held = sum(kinds["optimizer"] for (_, kinds), *_ in answers)
        counters = 4 * 2 * 14  # of steps, one for each tensor that a rank holds
        assert 2 * 4 * NUM_TRAINED <= held <= 2 * 4 * NUM_TRAINED + counters


# Of GROUPED: q is 16 to 16, v is 16 to 8 (one group of keys and values), down is 24 to 16; two layers, and 67 words.
OF_LAYERS = 2 * 3 * ((16 + 16) + (16 + 8) + (24 + 16))
NUM_TRAINED = OF_LAYERS + 3 * (67 + 16)


def test_packed_weights_are_within_half_a_step_and_drawn_alike():
    whole = dict(build_model(IN_INT8, seed=3).module.named_parameters())
    later = build_deferred(IN_INT8, seed=3)
    assert later.values is not None
    fill_in(later.module, later.values)
    bits = [
        {name: p.detach().view(torch.int32) for name, p in each.items()}
        for each in (dict(later.module.named_parameters()), whole)
    ]
    assert_same(*bits)  # as floats some are NaN
    plain = build_model(replace(IN_INT8, lora=replace(PACKED, quantize=None)), seed=3).module
    for name, wide in plain.named_parameters():
        if name.endswith("base_layer.weight"):
            layer = name.removesuffix("weight")
            scale = whole[f"{layer}scale"]
            assert whole[f"{layer}packed"].nbytes * 4 == wide.nbytes
            off = (unpack(whole[f"{layer}packed"], scale) - wide).abs()
            assert (off <= 0.5001 * scale[:, None]).all() and off.any()
    # A byte for four of each weight around which adapters lie, and four for each of its rows; of two layers.
    saved = 2 * (3 * (16 * 16 + 16 * 8 + 24 * 16) - 4 * (16 + 8 + 16))
    assert (
        sum(p.nbytes for p in plain.parameters()) - sum(p.nbytes for p in whole.values()) == saved
    )
    assert flops_per_sample(later.module, IN_INT8, 8) == flops_per_sample(plain, IN_INT8, 8)


def test_they_are_drawn_alike_whatever_is_built(tmp_path):
    """Whole, on meta with values to come, and from files whose names are those of the model without adapters."""
    whole = dict(build_model(CAUSAL, seed=3).module.named_parameters())
    later = build_deferred(CAUSAL, seed=3)
    assert later.values is not None
    fill_in(later.module, later.values)
    assert_same(dict(later.module.named_parameters()), whole)
    own = build_model(replace(CAUSAL, lora=LoraKeys()), seed=3).module
    own.save_pretrained(tmp_path)  # type: ignore[operator]
    read = build_model(replace(CAUSAL, weights=str(tmp_path)), seed=3).module
    assert_same(dict(read.named_parameters()), whole)
    trained = {name for name, p in read.named_parameters() if p.requires_grad}
    assert trained == {name for name in whole if ".lora_" in name} and len(trained) == 2 * 3 * 2 + 2


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return saved("base", "LlamaForCausalLM", transformers.LlamaConfig(**GROUPED))


@pytest.mark.slow
def test_a_run_is_planned_and_its_adapters_are_exported(here, monkeypatch, capsys):
    """Through the command line; peft puts what was exported around the model that the run began with."""
    compose_once(monkeypatch)
    start_servers_with(monkeypatch, Warm)
    model = "model=hf model.path=base model.lora.r=3 model.lora.target_modules=[q_proj,v_proj,down_proj]"
    data = (
        "data=synthetic data.seq_len=8 data.global_batch_size=2 train.steps=2 train.warmup_steps=1"
    )
    line = [*model.split(), *data.split(), "tracking=files", "checkpoint.every=3", "world_size=2"]
    monkeypatch.setattr(sys, "argv", ["zeroexp", *line, "model.lora.quantize=int8"])
    assert zeroexp.main() == 0
    (run,) = [path.parent for path in Path("outputs").glob("*/*/summary.json")]
    monkeypatch.setattr(sys, "argv", ["export", str(run), "--format", "dcp", "--to", "theirs"])
    assert export.main() == 2 and not Path("theirs").exists()
    said = (
        "--format=dcp: model.lora.quantize=int8 packs weights as no other trainer reads them; leave"
    )
    assert said in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["export", str(run), "--to", "adapters"])
    assert export.main() == 0
    told = capsys.readouterr().out
    assert (
        "put them around the model with peft.PeftModel.from_pretrained(model, 'adapters')" in told
    )
    summary = json.loads((run / "summary.json").read_text())
    for kind in ("parameters", "gradients", "optimizer"):
        assert summary["plan"][kind] == summary["memory"]["by_kind"][kind]["fullest"], kind
    base = transformers.AutoModelForCausalLM.from_pretrained("base")
    theirs = peft.PeftModel.from_pretrained(base, "adapters")
    written = load_file("adapters/adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in written.values()) == OF_LAYERS
    assert all(written[name].any() for name in written), "B is zeros before it is trained"
    for name, tensor in load_file("base/model.safetensors").items():
        assert any(torch.equal(tensor, p) for p in theirs.parameters()), name
    assert theirs.peft_config["default"].base_model_name_or_path == str(Path("base").resolve())


WRONG = {
    "model=mixtral_tiny model.lora.r=2 model.lora.target_modules=[all-linear]": (
        "=['all-linear']: model.layers.0.mlp.gate is no layer that multiplies by its weight alone; set model.lora."
    ),
    "model.lora.lora_alpha=3": "model.lora.lora_alpha=3.0: no effect, model.lora.r=null; set model.lora.r",
    "model.lora.r=0": "model.lora.r=0: ",
    "model.lora.r=3 model.lora.target_modules=[q]": (
        "model.lora.r=3: Target modules {'q'} not found in the base model. Please check the target modules and try "
        "again.; set model.lora.target_modules to some of down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj"
    ),
    "model.lora.r=3 model.lora.quantize=int8 precision=bf16_master": "precision=bf16_master: casts weights",
    "model.lora.r=3 model.lora.quantize=int8 strategy.gather_codec=int8": "gather_codec=int8: rounds weights",
    "model.lora.r=3 model.lora.quantize=int4": "model.lora.quantize=int4: ",
    "model.lora.quantize=int8": "no effect, model.lora.r=null; set model.lora.r",
    "model.lora.r=3 model.lora.target_modules=[q_proj,lm_head] model.lora.quantize=int8": (
        "=int8: the weight of lm_head is tied to another module's; leave it out of model.lora.target_modules"
    ),
    "model=gpt2_tiny model.lora.r=3 model.lora.quantize=int8": "lie around no linear layer here",
    "model.lora.r=3 model.lora.layers_to_transform=[7]": "You specified 'layers_to_transform': [7]",
    "model.lora.r=3 model.lora.target_modules=[all-linear] model.lora.layers_to_transform=[0]": (
        "model.lora.r=3: `layers_to_transform` cannot be used when `target_modules` is a str; leave one of the keys out"
    ),
    "model.lora.r=3 model.lora.modules_to_save=[q]": "modules_to_save=q: no such module; name modules",
    "model.lora.r=3 model.lora.modules_to_save=[lm_head]": "=lm_head: it has no weight of its own; name the module",
    **dict.fromkeys(
        (
            "model.lora.r=3 model.lora.modules_to_save=[self_attn]",
            "model.lora.r=3 model.lora.modules_to_save=[layers.0.self_attn.q_proj]",
        ),
        "adapters lie around model.layers.0.self_attn.q_proj, of the head ",
    ),
    "model.lora.r=3 model.freeze=['*lora_*']": "model.freeze=*lora_*: nothing is left to train",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_keys_are_one_line(words):
    assert WRONG[words] in refusal_of(
        *([] if "model=" in words else ["model=tiny"]), *words.split()
    )


def test_without_peft_one_line_says_how_it_is_installed(monkeypatch):
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    line = (
        "model.lora.r=3: needs peft, which is not installed; pip install 'zeroexp[lora]', or leave"
    )
    assert line in refusal_of("model=tiny", "model.lora.r=3")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("names", [["norm"], ["embed_tokens"], ["model.norm", "self_attn.o_proj"]])
def test_modules_that_are_trained_as_they_are_are_those_of_peft_and_return(tmp_path, names, tied):
    saved(
        tmp_path,
        "LlamaForCausalLM",
        transformers.LlamaConfig(**GROUPED | {"tie_word_embeddings": tied}),
    )
    words = [
        "model=hf",
        f"model.path={tmp_path}",
        f"model.lora.modules_to_save=[{','.join(names)}]",
    ]
    config = of_line(*words, "model.lora.r=3")
    module = build_model(config, seed=3).module
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter)
    tensors = dict(module.named_parameters())
    to = tmp_path / "to"
    to.mkdir()
    lora.write_adapters(to, config, module, lambda name: tensors[name].detach(), torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(base, to, is_trainable=True)
    tokens = torch.tensor([[5, 6, 7]])
    assert torch.equal(theirs(tokens).logits, module.eval()(input_ids=tokens).logits)
    count = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert count == sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_a_classifier_trains_and_exports_its_head_too(here):
    words = ["model=hf", "model.path=base", "model.task=classification", "model.num_labels=3"]
    config = of_line(*words, "data=yelp", "model.lora.r=3")
    module = build_model(config, seed=3).module
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert "score.weight" in trained and all(n == "score.weight" or "lora" in n for n in trained)
    tensors = dict(module.named_parameters())
    Path("to").mkdir()
    lora.write_adapters(
        Path("to"), config, module, lambda name: tensors[name].detach(), torch.float32
    )
    kind = transformers.AutoModelForSequenceClassification
    theirs = peft.PeftModel.from_pretrained(kind.from_pretrained("base", num_labels=3), "to")
    tokens = torch.tensor([[5, 6, 7]])
    theirs.eval().base_model.model.config.pad_token_id = 0
    assert torch.equal(theirs(tokens).logits, module.eval()(input_ids=tokens).logits)
