"""`model=hf`: architectures of transformers under ZeRO-3, against one process that does the obvious thing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

from tests.composing import compose_once, composed
from tests.model_folders import assert_same, of_line, refusal_of, rewrite, rewrite_config, saved
from tests.oracle import Recipe, assembled, configured, pieces_of
from tests.warm import Warm, start_servers_with
from zeroexp import __main__ as zeroexp
from zeroexp import export
from zeroexp.checkpoint.load import load
from zeroexp.checkpoint.save import Saver
from zeroexp.config.families import shape_of
from zeroexp.config.keys import Config, ConfigError, ModelConfig
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.data.batches import build_data
from zeroexp.interface.canonical import BUFFER
from zeroexp.interface.module_buffers import persistent_buffers
from zeroexp.interface.strategy import Strategy
from zeroexp.models import huggingface_folder
from zeroexp.models.loss import loss_sum
from zeroexp.models.module import build_deferred, build_model
from zeroexp.models.published_config import adopt_published_config
from zeroexp.process.world import World

WORDS, SEQ_LEN, RANKS, STEPS = 67, 8, 2, 3
NARROW = {
    **{"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 16},
}
GROUPED = {**NARROW, "num_key_value_heads": 1}
GPT = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
without_inner = {key: value for key, value in NARROW.items() if key != "intermediate_size"}
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "mistral": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "gemma": {**GROUPED, "head_dim": 8},
    "gemma2": {**GROUPED, "head_dim": 8},
    "phi": NARROW,
    "phi3": {**NARROW, "pad_token_id": 0},
    "olmo2": NARROW,
    "gpt_neox": NARROW,
    "starcoder2": GROUPED,
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "opt": {**without_inner, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "bloom": {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "falcon": without_inner,
    "gpt_oss": {**GROUPED, "num_local_experts": 4, "head_dim": 8},
    "qwen2_moe": {
        **{**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        "shared_expert_intermediate_size": 8,
    },
    "mamba": {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "bert": NARROW,
    "roberta": {**NARROW, "max_position_embeddings": 20, "pad_token_id": 1},
    "distilbert": {
        **{"vocab_size": WORDS, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2},
        "max_position_embeddings": 16,
    },
    "modernbert": {**NARROW, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    "llama": GROUPED,
    "gpt2": GPT,
}
EVERY = [*(("causal", kind) for kind in CAUSAL), *(("classification", k) for k in CLASSIFIERS)]
QUICK = [("causal", "qwen3"), ("causal", "bloom"), ("classification", "bert")]
ROUNDING = 2e-5  # of losses summed over ranks, and of weights after one step


def model_config(task: str, kind: str, **more: Any) -> ModelConfig:
    shape = (CAUSAL if task == "causal" else CLASSIFIERS)[kind]
    labels = 3 if task == "classification" else None
    keys = {"model_type": kind, **shape}
    return ModelConfig(name=kind, family="hf", task=task, num_labels=labels, hf_config=keys, **more)


def microbatch(task: str, step: int, rank: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(3, WORDS, (2, SEQ_LEN + 1), generator=random)
    if task == "causal":
        return tokens[:, :-1], tokens[:, 1:]
    tokens = tokens[:, :-1].clone()
    tokens[0, -2:] = 0  # padding, where 0 is
    return tokens, torch.randint(3, (2,), generator=random)


def share(model: Any, task: str, step: int, rank: int) -> Tensor:
    tokens, labels = microbatch(task, step, rank)
    return loss_sum(model(input_ids=tokens), labels, task) / (labels.numel() * RANKS)


def losses_of_one_process(config: ModelConfig) -> list[float]:
    return losses_of(build_model(config, seed=1).module, config.task)


def losses_of(module: Any, task: str) -> list[float]:
    recipe = Recipe().optimizer_config()
    optimizer = optimizer_factory(recipe)(parameter_groups(module, recipe, []))
    losses: list[float] = []
    for step in range(STEPS):
        shares = [share(module, task, step, rank) for rank in range(RANKS)]
        for each in shares:
            each.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(each.item() for each in shares))
    return losses


def train(
    world: World, configs: list[ModelConfig], stage: str = "zero3", engine: str = "buffer"
) -> list[list[float]]:
    """This rank's share of the loss of each step, by model."""
    made = configured(stage, engine)
    return [
        run_steps(world, made(build_deferred(c, seed=1), Recipe(), world), c.task) for c in configs
    ]


def run_steps(world: World, strategy: Strategy, task: str) -> list[float]:
    losses: list[float] = []
    for step in range(STEPS):
        with strategy.microbatch(last=True):
            loss = share(strategy.model, task, step, world.rank)
            strategy.backward(loss)
        strategy.step(drain=True)
        strategy.zero_grad()
        losses.append(loss.item())
    return losses


def assert_parity(ranks: Any, configs: list[ModelConfig], **how: str) -> None:
    answers = ranks(train, configs, *how.values(), world_size=RANKS)
    for config, *shares in zip(configs, *answers, strict=True):
        losses = [sum(step) for step in zip(*shares, strict=True)]
        expected = losses_of_one_process(config)
        torch.testing.assert_close(
            losses, expected, rtol=ROUNDING, atol=ROUNDING, msg=lambda m, c=config: f"{c.name}: {m}"
        )
        assert losses[0] != losses[-1], config.name


ALBERT = {**NARROW, "embedding_size": 8, "pad_token_id": 0, "model_type": "albert"}
ITS_ONE_LAYER = "albert.encoder.albert_layer_groups"


def frozen() -> ModelConfig:
    return model_config("causal", "llama", freeze=["model.embed_tokens.*", "*.layers.0.*"])


def test_architectures_train_as_on_one_process(ranks):
    """Three, one with frozen parameters, and one that runs its one layer many times."""
    task = {"task": "classification", "num_labels": 3, "blocks": [ITS_ONE_LAYER]}
    albert = ModelConfig(name="albert", family="hf", hf_config=ALBERT, **task)
    assert build_model(albert, seed=0, device="meta").blocks == [f"{ITS_ONE_LAYER}.0"]
    assert_parity(ranks, [*(model_config(*one) for one in QUICK), frozen(), albert])


def test_frozen_parameters_stay_under_fsdp2_too(ranks):
    assert_parity(ranks, [frozen()], stage="zero3", engine="torch")
    module = build_model(frozen(), seed=0).module
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained and not any("embed" in name or ".layers.0." in name for name in trained)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["buffer", "parameter"])
def test_every_architecture_trains_as_on_one_process(ranks, engine):
    assert_parity(ranks, [model_config(*one) for one in EVERY], stage="zero3", engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero3"])
def test_torchs_engines_train_them_too(ranks, stage):
    assert_parity(ranks, [model_config(*one) for one in QUICK], stage=stage, engine="torch")


@pytest.mark.parametrize(("task", "kind"), EVERY)
def test_the_blocks_are_found(task, kind):
    built = build_model(model_config(task, kind), seed=0, device="meta")
    assert len(built.blocks) == 2
    order: list[str] = []
    whole = build_model(model_config(task, kind), seed=0).module
    for name in built.blocks:
        block = whole.get_submodule(name)
        block.register_forward_pre_hook(lambda *_, name=name: order.append(name))
    whole(input_ids=microbatch(task, 0, 0)[0])
    assert order == built.blocks


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_padding_does_not_change_what_a_classifier_says(kind):
    """BERT looks ahead, and would read padding as words; a llama's head reads the last token that is none."""
    module = build_model(model_config("classification", kind), seed=0).module.eval()
    words = torch.tensor([[5, 6, 7, 8]])
    padded = torch.tensor([[5, 6, 7, 8, 0, 0, 0]])
    torch.testing.assert_close(module(input_ids=words).logits, module(input_ids=padded).logits)


@pytest.mark.parametrize("published", [{}, {"is_causal": False}])
def test_a_decoder_that_looks_ahead_is_no_language_model(published):
    """As an embedder made of a llama is published; the oracle is whether first logits change with the last word."""
    config = model_config("causal", "llama", published=published)
    module = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**shape_of(config)), dtype=torch.float64
    )
    first, second = (module(input_ids=torch.tensor([[1, 2, last]])).logits for last in (3, 4))
    if torch.equal(first[:, :2], second[:, :2]):
        assert build_model(config, seed=0)
    else:
        with pytest.raises(ConfigError, match=r"model.task=causal: llama looks ahead"):
            build_model(config, seed=0)
    assert torch.equal(first[:, :2], second[:, :2]) != bool(published)


def test_forward_is_without_chance_whatever_was_published():
    published = {
        "gpt2": {"embd_pdrop": 0.5, "summary_first_dropout": 0.5, "_attn_implementation": "eager"},
        "bert": {"hidden_dropout_prob": 0.5, "classifier_dropout": 0.5, "use_cache": True},
    }
    for task, kind in (("causal", "falcon"), ("classification", "bert"), ("causal", "gpt2")):
        config = model_config(task, kind, published=published.get(kind, {}))
        module = build_model(config, seed=0).module
        tokens, _ = microbatch(task, 0, 0)
        first, second = module(input_ids=tokens).logits, module(input_ids=tokens).logits
        assert module.training and torch.equal(first, second), kind
        assert module.config._attn_implementation == "sdpa"


# --- from a folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def qwen(**more: Any) -> Path:
    return saved("qwen", "Qwen2ForCausalLM", transformers.Qwen2Config(**GROUPED, **more))


def of_folder(folder: str | Path, task: str = "causal") -> Any:
    kinds = {"causal": "CausalLM", "classification": "SequenceClassification"}
    return getattr(transformers, f"AutoModelFor{kinds[task]}").from_pretrained(folder).train()


def test_a_folder_gives_config_and_weights(here):
    folder = qwen(rope_theta=5e5, rms_norm_eps=1e-5, attention_dropout=0.1)
    config = of_line("model=hf", f"model.path={folder}")
    assert (config.name, config.weights) == ("qwen", "qwen")
    module, expected = build_model(config, seed=0).module, of_folder(folder)
    assert_same(module.state_dict(), expected.state_dict())
    tokens = microbatch("causal", 0, 0)[0]
    torch.testing.assert_close(
        module(input_ids=tokens).logits, expected.eval()(input_ids=tokens).logits
    )


def test_random_weights_of_a_folders_shape(here):
    (qwen() / "model.safetensors").unlink()
    deeper = "+model.hf_config.num_hidden_layers=3"
    config = of_line("model=hf", "model.path=qwen", "model.init=random", deeper)
    assert config.weights is None and len(build_model(config, seed=0).blocks) == 3


def test_a_key_inside_of_a_published_one_leaves_the_others(here):
    qwen(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    theta = "+model.hf_config.rope_parameters.rope_theta=1e6"
    config = of_line("model=hf", "model.path=qwen", "model.init=random", theta)
    found: Any = build_model(config, seed=0, device="meta").module.config
    assert found.rope_parameters == {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_another_method_of_rotary_positions_leaves_the_published_ones_settings(here, spelling):
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    qwen(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, **llama3})
    method = f"+model.hf_config.rope_parameters={{{spelling}: dynamic, factor: 2.0}}"
    config = of_line("model=hf", "model.path=qwen", "model.init=random", method)
    module: Any = build_model(config, seed=0, device="meta").module
    found = module.config.rope_parameters
    assert module.model.rotary_emb.rope_type == "dynamic"
    assert found["rope_theta"] == 1e4 and "low_freq_factor" not in found


def test_two_methods_of_rotary_positions_are_refused_by_type_of_layer():
    """As beside a YAML, in which Hydra lays one over the other: tests/wrong_lines.txt."""
    both = "{full_attention: {rope_type: linear, factor: 2.0, type: dynamic}}"
    line = f"+model.hf_config.rope_parameters={both}"
    shape = {**NARROW, "model_type": "gemma3_text"}
    keys = [f"+model.hf_config.{key}={value}" for key, value in shape.items()]
    config = of_line("model=hf", "model.path=null", *keys, line)
    with pytest.raises(
        ConfigError, match=r"full_attention\.type=dynamic: no effect beside rope_type"
    ):
        build_model(config, seed=0, device="meta")


NOMIC = {**NARROW, "num_labels": 3, "pad_token_id": 0}
LAYOUTS = {
    "parameters joined in one tensor": ("hrm_text", "causal", NARROW),
    "those of a classifier": ("nomic_bert", "classification", NOMIC),
    "a constructor that reads its values": (
        *("modernbert", "classification"),
        {**CLASSIFIERS["modernbert"], "num_labels": 3},
    ),
    "infinity in a config": (
        *("mamba2", "causal"),
        {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4, **CAUSAL["mamba"]},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_transformers_wrote_is_read_and_written_again(here, layout):
    """Also where a tensor of a file holds several parameters, which are then exported into one file."""
    kind, task, shape = LAYOUTS[layout]
    config = transformers.AutoConfig.for_model(kind, **shape)
    classes = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
    torch.manual_seed(3)
    classes[task == "classification"].from_config(config).save_pretrained("theirs")
    head = ["model.task=classification", "model.num_labels=3"] if "num_labels" in shape else []
    model = of_line("model=hf", "model.path=theirs", *head)
    module, expected = build_model(model, seed=0).module, of_folder("theirs", task)
    assert_same(module.state_dict(), expected.state_dict())
    tensors = {**dict(module.named_parameters()), **persistent_buffers(module)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    Path("ours").mkdir()
    huggingface_folder.write(
        *(Path("ours"), model, shapes, lambda name: tensors[name].detach()),
        **{"dtype": torch.float32, "max_shard_size": "2KB", "tokenizer": None},
    )
    assert len(list(Path("ours").glob("*.safetensors"))) > 2
    assert_same(of_folder("ours", task).state_dict(), expected.state_dict())


ENCODERS = {
    **{"BertForMaskedLM": "bert", "BertForPreTraining": "bert", "BertModel": "bert"},
    **{"RobertaForMaskedLM": "roberta", "DistilBertForMaskedLM": "distilbert"},
    "ModernBertForMaskedLM": "modernbert",
}


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_pretrained_encoder_gets_a_new_head(here, kind):
    """And BERT a pooler, where it has none; its norms are named as in the hub's."""
    config = transformers.AutoConfig.for_model(ENCODERS[kind], **CLASSIFIERS[ENCODERS[kind]])
    file = saved("theirs", kind, config) / "model.safetensors"
    theirs = {of_tensorflow(n): t for n, t in load_file(file).items()}
    save_file(theirs, file, metadata={"format": "pt"})
    task = ("model.task=classification", "model.num_labels=3")
    module: Any = build_model(of_line("model=hf", "model.path=theirs", *task), seed=0).module
    expected = of_folder("theirs", "classification").base_model.state_dict()
    known = {name: t for name, t in expected.items() if not name.startswith("pooler.")}
    found = module.base_model.state_dict()
    assert_same({name: found[name] for name in known}, known)


def of_tensorflow(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    )


# --- saved buffers


class NormedConfig(transformers.LlamaConfig):
    model_type = "normed"


class NormedForCausalLM(transformers.LlamaForCausalLM):
    """A LLaMA with running statistics, of which one buffer holds a whole number."""

    config_class = NormedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.statistics = torch.nn.BatchNorm1d(config.vocab_size)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = self.statistics(output.logits.transpose(1, 2)).transpose(1, 2)
        return output


transformers.AutoConfig.register("normed", NormedConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(NormedConfig, NormedForCausalLM, exist_ok=True)
setattr(transformers, NormedForCausalLM.__name__, NormedForCausalLM)

ROUTED = {
    **{"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1},
}
LATENT = {
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 1}
BUFFERED = {
    "DeepseekV3ForCausalLM": transformers.DeepseekV3Config(**NARROW, **ROUTED, **LATENT),
    "Glm4MoeForCausalLM": transformers.Glm4MoeConfig(**GROUPED, **ROUTED),
    "Ernie4_5_MoeForCausalLM": transformers.Ernie4_5_MoeConfig(**GROUPED, **ERNIE),
    "NormedForCausalLM": NormedConfig(**GROUPED),
}


def train_and_go_on(world: World, configs: list[Config], runs: Path) -> list[Any]:
    """By model: the losses from its folder, its state as saved, and as an engine of other weights loads it."""
    told: list[Any] = []
    for config in configs:
        model, run = config.model, runs / config.model.name
        strategy = configured("zero3", "buffer")(build_deferred(model, seed=1), Recipe(), world)
        losses = run_steps(world, strategy, model.task)
        if world.rank == 0:
            run.mkdir()
        saver = Saver(run, strategy, config, world)
        saver.save_now(STEPS)
        saver.close()
        random = build_deferred(replace(model, weights=None), seed=5)
        other = configured("zero3", "buffer")(random, Recipe(), world)
        load(run / "checkpoint" / f"step-{STEPS:06d}", other, world)
        told.append((losses, pieces_of(strategy), pieces_of(other)))
    return told


@pytest.mark.slow
def test_saved_buffers_are_loaded_trained_with_saved_and_exported(here, ranks):
    """The bias by which DeepSeek-V3, GLM-4.5 and Ernie choose experts, and running statistics."""
    configs = [from_folder_with_buffers(kind) for kind in BUFFERED]
    (runs := Path.cwd() / "runs").mkdir()
    for config in configs:  # ranks began in another folder
        config.model.weights = str(Path(config.model.weights or "").resolve())
    answers = ranks(train_and_go_on, configs, runs, world_size=RANKS)
    for kind, *told in zip(BUFFERED, *answers, strict=True):
        plain = of_folder(kind)
        before = {name: plain.state_dict()[name].clone() for name in persistent_buffers(plain)}
        saved, loaded = (assembled([each[place] for each in told]) for place in (1, 2))
        assert loaded.keys() == saved.keys() and before.keys() <= saved.keys()
        for name, entry in saved.items():
            assert all(torch.equal(loaded[name][key], entry[key]) for key in entry), name
        export.export(export.choose_checkpoint(runs / kind), Path("to") / kind)
        exported = of_folder(Path("to") / kind).state_dict()
        assert_same(
            {name: exported[name] for name in before},
            {name: saved[name][BUFFER] for name in before},
        )
        if kind == "NormedForCausalLM":  # each rank has statistics of its own samples
            assert exported["statistics.num_batches_tracked"] == BATCHES_BEFORE + STEPS
            continue
        assert_same({name: exported[name] for name in before}, before)
        losses = [sum(step) for step in zip(*(each[0] for each in told), strict=True)]
        expected = losses_of(plain, "causal")
        torch.testing.assert_close(losses, expected, rtol=ROUNDING, atol=ROUNDING)


BATCHES_BEFORE = 7


def from_folder_with_buffers(kind: str) -> Config:
    """Saved by transformers, with a bias of routers and statistics that are not those of a new model."""
    torch.manual_seed(3)
    module = getattr(transformers, kind)(BUFFERED[kind])
    for name, tensor in module.state_dict().items():
        if name.endswith(("correction_bias", "running_mean")):
            tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) * 0.01)
        if name.endswith("num_batches_tracked"):
            tensor.fill_(BATCHES_BEFORE)
    module.save_pretrained(kind)
    config = adopt_published_config(composed("model=hf", f"model.path={kind}"))
    built = build_model(config.model, seed=0).module.state_dict()
    assert_same(built, of_folder(kind).state_dict())
    return config


def test_layers_that_transformers_leaves_out_are_left_out(here):
    """DeepSeek-V3's folder has a layer 61, which predicts a second token, beside its 61 layers."""
    config = from_folder_with_buffers("DeepseekV3ForCausalLM").model
    rewrite(folder := Path(config.name), {"model.layers.61.eh_proj.weight": torch.ones(16, 32)})
    assert_same(build_model(config, seed=0).module.state_dict(), of_folder(folder).state_dict())
    rewrite(folder, {"model.layers.7.mlp.b": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"model\.layers\.7\.mlp\.b in it, not in model\.name="):
        build_model(config, seed=0)


SPELT = {"!": 0, "good": 1, "bad": 2, "</s>": 3}


def classifier_of_words(**more: Any) -> Config:
    """A GPT-2 with a tokenizer of four words, of which the first is a word of texts, and texts that end in it."""
    shape = transformers.GPT2Config(**GPT, num_labels=3, **more)
    folder = saved(Path("gpt2"), "GPT2ForSequenceClassification", shape)
    tokenizer = Tokenizer(WordLevel(SPELT, unk_token="</s>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    Path("a.csv").write_text(
        "text,label\n" + "".join(f"{t},{n}\n" for n, t in enumerate(TEXTS)), encoding="utf-8"
    )
    words = ["model=hf", "model.path=gpt2", "model.task=classification", "model.num_labels=3"]
    data = ["data=hf", "data.path=a.csv", "data.seq_len=5", "data.global_batch_size=3"]
    return adopt_published_config(
        composed(*words, *data, "data.micro_batch_size=3", "world_size=1")
    )


TEXTS = ("good bad !", "bad", "good ! !")


def test_a_word_with_the_id_0_is_no_padding(here):
    """GPT-2's token 0 is `!`: taken for padding, it would hide the end of a text from the head."""
    config = classifier_of_words(eos_token_id=3, bos_token_id=3)
    batch = build_data(config.data, config.model, 0).step_batch(0, rank=0, world_size=1)
    ((inputs, labels),) = [(each.inputs, each.labels) for each in batch.microbatches]
    ours = loss_sum(build_model(config.model, seed=0).module(**inputs), labels, "classification")
    rows = [[SPELT[word] for word in TEXTS[label].split()] for label in labels.tolist()]
    padded = torch.tensor([row + [3] * (5 - len(row)) for row in rows])
    shown = torch.tensor([[1] * len(row) + [0] * (5 - len(row)) for row in rows])
    kind = transformers.AutoModelForSequenceClassification
    expected = kind.from_pretrained("gpt2", pad_token_id=3)(padded, attention_mask=shown).logits
    expected = torch.nn.functional.cross_entropy(expected, labels, reduction="sum")
    assert ours.item() == pytest.approx(expected.item(), rel=1e-6)
    export = build_model(replace(config.model, weights=None), seed=0, device="meta").module
    assert export.config.pad_token_id == 3


def test_random_weights_pad_as_the_shipped_tokenizer_does(here):
    """Its word 1 is `!`, which a published config may name."""
    saved("gpt2", "GPT2ForSequenceClassification", transformers.GPT2Config(**GPT, pad_token_id=1))
    words = ["model=hf", "model.path=gpt2", "model.task=classification", "model.num_labels=3"]
    assert shape_of(of_line(*words, "model.init=random"))["pad_token_id"] == 0
    assert shape_of(of_line(*words))["pad_token_id"] == 1
    assert shape_of(of_line(*words, "data.vocab_size=2048"))["pad_token_id"] == 0


def test_without_any_token_that_pads_nothing_runs(here):
    config = classifier_of_words(eos_token_id=None, bos_token_id=None)
    with pytest.raises(ConfigError, match=r"pad_token_id=null: token 0, which would pad, is a w"):
        build_data(config.data, config.model, 0)


def clip() -> None:
    saved("clip", "CLIPTextModel", transformers.CLIPTextConfig(**NARROW))


def albert() -> None:
    saved(
        "albert", "AlbertForMaskedLM", transformers.AlbertConfig(**{**ALBERT, "vocab_size": 2048})
    )


def changed(**keys: Any) -> Any:
    return lambda: rewrite_config(qwen(), **keys)


# What a folder is, what is typed behind `model=hf`, and what the line says.
REFUSED: dict[str, tuple[Any, str, str]] = {
    "no path": (None, "", "model.path=null: model=hf needs a model; set it to a folder with"),
    "no folder": (None, "model.path=./nothing", "model.path=./nothing: no such folder; use one"),
    "other family": (None, "model=tiny model.path=qwen", "=qwen: no effect, model=tiny"),
    "a wrong init": (qwen, "model.init=zero", "model.init=zero: unknown word; use one of weights"),
    "weights too": (qwen, "model.weights=qwen", "model.weights=qwen: model.path names them;"),
    "code of its own": (
        *(changed(auto_map={"AutoConfig": "mine.Mine"}), ""),
        "has auto_map, which means code of its own; remove it there to train what transformers has",
    ),
    "quantized": (
        *(changed(quantization_config={"bits": 4}), ""),
        "which means weights that are no plain numbers; save it dequantized (model.dequantize()",
    ),
    "two inputs": (changed(is_encoder_decoder=True), "", "an encoder and a decoder take"),
    "no type": (changed(model_type=None), "", "its config.json has no model_type"),
    "unknown type": (changed(model_type="qwen22"), "", "model_type=qwen22: transformers has no"),
    "a misspelt key": (qwen, "+model.hf_config.hiden_size=3", "did you mean hidden_size?"),
    "positions as of old": (
        *(qwen, "+model.hf_config.rope_theta=1e6"),
        "model.hf_config.rope_theta=1000000.0: no effect beside rope_parameters; set it in model.hf_",
    ),
    "positions as of now": (
        changed(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        "+model.hf_config.rope_parameters.rope_theta=1e6",
        "no effect beside rope_scaling; set model.hf_config.rope_theta or rope_scaling",
    ),
    "a wish for dropout": (
        *(lambda: qwen(attention_dropout=0.1), "+model.hf_config.attention_dropout=0.2"),
        "model.hf_config.attention_dropout=0.2: forward passes have no randomness here",
    ),
    "no such task": (
        *(clip, "model.path=clip"),
        "model.task=causal: transformers builds no causal model of clip_text_model",
    ),
    "other blocks": (qwen, "model.blocks=[layers]", "no such module; its lists: model.layers"),
    "no block": (
        albert,
        "model.path=albert model.init=random data=yelp data.path=a.csv model.task=classification "
        "model.num_labels=3",
        f"the model has no block; name some: model.blocks=[{ITS_ONE_LAYER}",
    ),
    "nothing to freeze": (qwen, "model.freeze=[embed]", "use names as model.embed_tokens.weight"),
    "all frozen": (qwen, "model.freeze=['*']", "model.freeze=*: nothing is left to train"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_trained_is_one_line(case, here):
    make, typed, expected = REFUSED[case]
    words = typed.split()
    if make is not None:
        make()
        words += [] if "model.path" in typed else ["model.path=qwen"]
    words += [] if "model=tiny" in words else ["model=hf"]
    words += ["data.seq_len=8", *([] if "data=yelp" in words else ["data=synthetic"])]
    assert expected in refusal_of(*words)


@pytest.mark.slow
def test_a_run_from_a_folder(here, monkeypatch, capsys):
    """Through the command line, with a frozen embedding; what was trained is exported and read again as that says.

    What is another function than the weights are of is refused before a run folder is made.
    """
    qwen()
    compose_once(monkeypatch)
    start_servers_with(monkeypatch, Warm)
    words = (
        "model=hf model.path=qwen model.freeze=[model.embed_tokens.*] world_size=2 train.steps=1"
    )
    more = (
        "checkpoint.every=2 data=synthetic data.seq_len=8 data.global_batch_size=2 tracking=files"
    )
    line = [*words.split(), *more.split(), "train.warmup_steps=1"]
    monkeypatch.setattr(sys, "argv", ["zeroexp", *line, "+model.hf_config.rms_norm_eps=1e-3"])
    assert zeroexp.main() == zeroexp.REFUSED
    assert "zeroexp: model.weights=qwen: its config.json has rms_no" in capsys.readouterr().err
    assert not list(Path().glob("**/state.json"))
    monkeypatch.setattr(sys, "argv", ["zeroexp", *line])
    assert zeroexp.main() == 0
    (run,) = Path("outputs").glob("*/*/summary.json")
    assert "model_type: qwen2" in (run.parent / "config.yaml").read_text()
    monkeypatch.setattr(sys, "argv", ["export", str(run.parent), "--to", "trained"])
    assert export.main() == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("trained:")]
    use = line.rpartition("; ")[2].removeprefix("start from it with ").split()
    after = of_folder("trained").state_dict()
    assert use[0] == "model=hf"
    assert_same(build_model(of_line(*use), seed=0).module.state_dict(), after)
    before = load_file("qwen/model.safetensors")
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    moved = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[moved], after[moved])


def test_a_tied_weight_is_frozen_by_either_name():
    shape = {**CAUSAL["llama"], "model_type": "llama", "tie_word_embeddings": True}
    config = ModelConfig(name="tied", family="hf", hf_config=shape, freeze=["lm_head.*"])
    module = build_model(config, seed=0).module
    assert not module.get_parameter("model.embed_tokens.weight").requires_grad


def test_named_blocks_replace_those_that_are_found():
    config = model_config("causal", "llama", blocks=["model.layers.1", "lm_head"])
    assert build_model(config, seed=0, device="meta").blocks == ["model.layers.1", "lm_head"]
    listed = model_config("causal", "llama", blocks=["model.layers"])
    assert build_model(listed, seed=0, device="meta").blocks == ["model.layers.0", "model.layers.1"]
