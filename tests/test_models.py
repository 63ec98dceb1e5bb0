"""Models: the published sizes to the parameter, the same weights everywhere, nothing random in forward."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn

from tests.composing import composed, options
from tests.models_for_tests import allow_experts
from zeroexp.check.try_model import check_model
from zeroexp.cluster import forkserver
from zeroexp.config.keys import ConfigError, ModelConfig
from zeroexp.models import find_weights
from zeroexp.models.blocks import chosen_blocks, find_blocks
from zeroexp.models.loss import IGNORED, loss_sum
from zeroexp.models.module import build_model
from zeroexp.models.moe import Experts

TINY = ["gpt2_tiny", "mixtral_tiny", "mlp_tiny", "moe_tiny", "tiny"]


def model_config(name: str, **changes) -> ModelConfig:
    company = ["data=yelp"] if name.endswith("yelp") else []
    return replace(copy.deepcopy(composed(f"model={name}", *company).model), **changes)


def built(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> nn.Module:
    return build_model(model_config(name, **changes), seed=seed, dtype=dtype).module


def batch(name: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    if name == "mlp_tiny":
        return {"vectors": torch.randn(2, 8, 64, generator=random)}
    return {"input_ids": torch.randint(0, 2048, (2, 8), generator=random)}


def values(output) -> torch.Tensor:
    return getattr(output, "logits", output)


# Sums of the published shapes: embedding + layers x (attention + feed-forward + norms) + last norm + head.
SIZES = {
    "tiny": (2048 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 176 + 2 * 64) + 64, 20),
    "small": (24_650_240, 74),
    "smollm2_135m": (134_515_008, 272),
    "smollm2_360m": (361_821_120, 290),
    "smollm2_360m_yelp": (361_825_920, 291),
    "llama_7b": (6_738_415_616, 291),
    "llama_13b": (13_015_864_320, 363),
    "llama_70b": (68_976_648_192, 723),
    "llama3_8b": (8_030_261_248, 291),
    "qwen3_8b": (8_190_735_360, 399),
    "mlp_1b": (10 * (2 * 4096 * 4 * 4096 + 5 * 4096), 40),
    "mlp_tiny": (2 * (2 * 64 * 4 * 64 + 5 * 64), 8),
    "gpt2_tiny": (263_936, 28),
    "gpt3_175b": (174_604_259_328, 1156),
    "mixtral_tiny": (353_088, 20),
    "mixtral_8x7b": (46_702_792_704, 291),
    "moe_tiny": (330_368, 50),
}


def test_sizes_are_known_for_every_model():
    assert set(SIZES) == set(options("model")) - {"hf"}  # which is whatever its path says
    assert SIZES["mlp_1b"][0] == 1_342_382_080
    assert SIZES["tiny"][0] == 223_552


@pytest.mark.parametrize("name", SIZES)
def test_size_is_exact(name):
    module = build_model(model_config(name), seed=0, dtype=torch.bfloat16, device="meta").module
    parameters = list(module.parameters())
    assert (sum(p.numel() for p in parameters), len(parameters)) == SIZES[name]
    assert {(p.device.type, p.dtype) for p in parameters} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("name", TINY)
def test_blocks_are_named_in_forward_order(name):
    model = build_model(model_config(name), seed=0)
    order: list[str] = []
    for block in model.blocks:
        module = model.module.get_submodule(block)
        module.register_forward_pre_hook(lambda *_, block=block: order.append(block))
    model.module(**batch(name))
    assert len(model.blocks) == 2
    assert order == model.blocks


@pytest.mark.parametrize("name", TINY)
def test_bf16_weights_are_the_rounded_fp32_weights_and_buffers_stay(name):
    exact, rounded = built(name), built(name, dtype=torch.bfloat16)
    for a, b in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)
    for a, b in zip(exact.buffers(), rounded.buffers(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert values(rounded(**batch(name))).dtype == torch.bfloat16


@pytest.mark.parametrize("name", TINY)
def test_training_forward_is_deterministic_and_keeps_no_cache(name):
    module = built(name)
    assert module.training
    first, second = module(**batch(name)), module(**batch(name))
    assert torch.equal(values(first), values(second))
    assert getattr(first, "past_key_values", None) is None
    if hasattr(module, "config"):
        assert module.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["tiny", "gpt2_tiny", "moe_tiny", "mixtral_tiny"])
def test_no_position_sees_a_later_token(name):
    module, inputs = built(name), batch(name)
    before = values(module(**inputs))
    inputs["input_ids"][:, -1] = (inputs["input_ids"][:, -1] + 1) % 2048
    after = values(module(**inputs))
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_a_block_that_stands_in_several_places_is_one():
    block = nn.Linear(2, 2)
    module = nn.Module()
    module.blocks = nn.ModuleList([block, nn.Linear(2, 2), block])
    assert find_blocks(module) == ["blocks.0", "blocks.1"]
    assert chosen_blocks(module, ["blocks.1", "blocks", "blocks.1"]) == ["blocks.1", "blocks.0"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden, inner", [(64, 72), (64, 68), (64, 69), (68, 64), (66, 64)])
def test_experts_are_refused_where_torch_can_not_multiply(hidden, inner, dtype):
    config = copy.deepcopy(composed("model=mixtral_tiny"))
    config.precision.compute = dtype
    keys = {"hidden_size": hidden, "intermediate_size": inner, "head_dim": 16}
    config.model.hf_config.update(keys)
    module = build_model(config.model, seed=0, dtype=getattr(torch, dtype)).module
    problem = ""
    try:
        module(**batch("mixtral_tiny")).logits.float().square().mean().backward()
    except RuntimeError as error:
        problem = str(error)
    if problem:
        assert "multiple of 16 bytes" in problem
        with pytest.raises(ConfigError, match=rf"_size={inner if hidden == 64 else hidden}: torch"):
            check_model(config)
    else:
        check_model(config)


def test_mlp_is_the_published_one():
    module, x = built("mlp_tiny"), batch("mlp_tiny")["vectors"]
    expected = x
    for up, down in zip(
        *[iter(m for m in module.modules() if isinstance(m, nn.Linear))] * 2, strict=True
    ):
        expected = expected + down(torch.nn.functional.gelu(up(expected)))
    assert torch.equal(module(x), expected)


# --- what a user gets wrong


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        (
            "tiny",
            {"hf_config": {"hiden_size": 8}},
            "model.hf_config.hiden_size: .* did you mean hidden_size",
        ),
        ("tiny", {"hf_config": {"hidden_size": 100, "num_attention_heads": 7}}, "not a multiple"),
        ("tiny", {"family": "lama"}, "model.family=lama: unknown word; did you mean llama"),
        ("mlp_tiny", {"mlp": {"width": 8}}, "model.mlp.depth is missing"),
        (
            "mlp_tiny",
            {"mlp": {"width": 8, "depht": 2}},
            r"model.mlp.depht: .* did you mean depth\?",
        ),
        ("moe_tiny", {"moe": {}}, "model.moe.vocab_size is missing"),
    ],
)
def test_wrong_shape_is_one_line(name, changes, line):
    with pytest.raises(ConfigError, match=line) as caught:
        built(name, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "group"), [("tiny", "hf_config"), ("moe_tiny", "moe")])
def test_a_vocabulary_smaller_than_the_data_is_refused(name, group):
    with pytest.raises(
        ConfigError, match=rf"model.{group}.vocab_size=2048: .* set it to 5000 or more"
    ):
        build_model(model_config(name), seed=0, vocab_size=5000)


def test_a_model_without_a_vocabulary_takes_the_data():
    config = model_config("tiny")
    del config.hf_config["vocab_size"]
    assert build_model(config, seed=0, vocab_size=300).module.config.vocab_size == 300  # type: ignore


# --- real weights


def test_weights_do_not_matter_on_meta():
    config = model_config("tiny", weights="nobody/nothing")
    module = build_model(config, seed=0, device="meta").module
    assert sum(p.numel() for p in module.parameters()) == SIZES["tiny"][0]


def test_weights_that_can_not_be_had_fail_before_a_download_is_tried(monkeypatch, tmp_path):
    """It would try again and again, for half a minute."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(find_weights, "is_online", lambda: False)
    asked: list[dict[str, object]] = []
    look_up = find_weights.snapshot_download

    def noting(name: str, **options: object) -> str:
        asked.append(options)
        return look_up(name, **options)

    monkeypatch.setattr(find_weights, "snapshot_download", noting)
    with pytest.raises(ConfigError, match=r"model.weights=zeroexp-tests/no-such-model: ") as caught:
        built("tiny", weights="zeroexp-tests/no-such-model")
    assert "\n" not in str(caught.value)
    assert asked and all(options["local_files_only"] for options in asked)


@pytest.fixture
def half(monkeypatch, tmp_path) -> Iterator[Path]:
    """The folder of zeroexp-tests/half in the hub's cache, which holds the tokenizer alone; there is no network."""
    folder = tmp_path / "models--zeroexp-tests--half"
    (folder / "snapshots" / "c0ffee").mkdir(parents=True)
    (folder / "snapshots" / "c0ffee" / "tokenizer.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c0ffee")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    find_weights.is_online.cache_clear()
    yield folder
    find_weights.is_online.cache_clear()


def test_a_cache_that_holds_the_tokenizer_alone_is_no_weights(half):
    """As another program leaves it; the hub's own look-up would call that snapshot found."""
    with pytest.raises(
        ConfigError, match=r"model.weights=zeroexp-tests/half: .* can not be reached"
    ):
        built("tiny", weights="zeroexp-tests/half")
    (half / "snapshots" / "c0ffee" / "model.safetensors").write_text("")
    assert find_weights.model_folder("zeroexp-tests/half").name == "c0ffee"


def test_what_was_fetched_is_found_where_there_is_no_network(half):
    """A README, which nobody fetched, is in the list of files that a download leaves behind."""
    (half / "snapshots" / "c0ffee" / "model.safetensors").write_text("")
    names = ("README.md", "model.safetensors", "tokenizer.json")
    files = {name: {"size": 2, "blob_id": "b" * 40} for name in names}
    (half / "trees").mkdir()
    (half / "trees" / "c0ffee.json").write_text(json.dumps({"format_version": 1, "files": files}))
    assert find_weights.model_folder("zeroexp-tests/half").name == "c0ffee"


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, of which it knows one revision."""

    files: ClassVar[dict[str, bytes]] = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "model.safetensors.index.json": b'{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}',
        "1.safetensors": b"one",
        "2.safetensors": b"two",
        "consolidated.safetensors": b"both",
    }
    fetched: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        body = self.files.get(name, b"")
        if self.path.startswith("/api/models/zeroexp-tests/half/tree/"):
            listed = [
                {"type": "file", "path": n, "size": len(b), "oid": n} for n, b in self.files.items()
            ]
            body = json.dumps(listed).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("ETag", f'"{name}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            self.fetched.append(name)

    def log_message(self, *_: object) -> None:
        pass


REVISION = "c0ffee" + "0" * 34


@pytest.mark.parametrize("there", [["1.safetensors"], ["1.safetensors", "2.safetensors"]])
def test_a_cached_model_that_is_not_whole_is_completed(half, monkeypatch, there):
    """After an end in its download, or where somebody wanted the weights alone."""
    folder = (half / "snapshots" / "c0ffee").rename(half / "snapshots" / REVISION)
    (half / "refs" / "main").write_text(REVISION)
    (folder / "tokenizer.json").unlink()
    for name in ("config.json", "model.safetensors.index.json", *there):
        (folder / name).write_bytes(Hub.files[name])
    assert find_weights.model_folder("zeroexp-tests/half") == folder, "there is no network"
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        url = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url)
        find_weights.is_online.cache_clear()
        assert find_weights.model_folder("zeroexp-tests/half") == folder
        Hub.fetched.clear()
        assert find_weights.model_folder("zeroexp-tests/half") == folder
        server.shutdown()
    assert not Hub.fetched, "what is whole is not asked for"
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert found == {n: b for n, b in Hub.files.items() if n != "consolidated.safetensors"}


def test_a_switch_whose_name_tells_of_dropout_is_no_number():
    shape = {"model_type": "esm", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "intermediate_size": 16, "pad_token_id": 0}
    shape |= {"token_dropout": False}
    config = model_config("hf", task="classification", num_labels=2, hf_config=shape)
    module: Any = build_model(config, seed=0, device="meta").module
    assert module.config.token_dropout is False and module.config.hidden_dropout_prob == 0


def test_an_error_that_can_not_be_made_anew_is_told_by_another():
    """It goes from one process to another; as it was read there, it ended the server without a word."""
    error = StrictDataclassFieldValidationError(field="size", cause=TypeError("no number"))
    told = pickle.loads(pickle.dumps(forkserver._portable(error)))
    assert isinstance(told, RuntimeError) and "field 'size'" in str(told)
    assert isinstance(forkserver._portable(OSError("no room")), OSError)


# --- the mixture of experts


def experts_without_gradient(module: nn.Module) -> set[tuple[int, int]]:
    """(block, expert) of all experts whose parameters have none."""
    layers = [m for m in module.modules() if isinstance(m, Experts)]
    return {
        (layer, index)
        for layer, mixture in enumerate(layers)
        for index, expert in enumerate(mixture.experts)
        if all(p.grad is None for p in expert.parameters())
    }


@pytest.mark.parametrize("allowed", [[0], [1, 3], [], None])
def test_experts_that_are_not_allowed_do_not_run(allowed):
    module = built("moe_tiny")
    allow_experts(module, allowed)
    inputs = {"input_ids": torch.arange(256).view(2, 128)}  # enough tokens for every expert
    loss_sum(module(**inputs), inputs["input_ids"], "causal").backward()
    skipped = set(range(4)) - set(range(4) if allowed is None else allowed)
    assert experts_without_gradient(module) == {(b, e) for b in range(2) for e in skipped}
    routers = [m.router.weight.grad for m in module.modules() if isinstance(m, Experts)]
    assert all((grad is None) == (allowed == []) for grad in routers)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_mixture_equals_running_every_expert_on_every_token(top_k):
    """The oracle computes all experts for all tokens and weighs those not chosen with zero."""
    shape = dict(model_config("moe_tiny").moe, top_k=top_k)
    mixture = next(m for m in built("moe_tiny", moe=shape).modules() if isinstance(m, Experts))
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(2))
    tokens = mixture.norm(x)
    scores = mixture.router(tokens)
    kept = scores >= scores.topk(top_k, dim=-1).values[..., -1:]
    weights = scores.masked_fill(~kept, float("-inf")).softmax(-1)
    every = torch.stack([expert(tokens) for expert in mixture.experts], dim=-1)
    torch.testing.assert_close(mixture(x), x + (every * weights[..., None, :]).sum(-1))


# --- the loss


def test_causal_loss_counts_valid_labels_alone():
    logits = torch.randn(2, 3, 7, dtype=torch.float64)
    labels = torch.tensor([[1, IGNORED, 6], [IGNORED, 0, 2]])
    expected = -sum(
        logits.log_softmax(-1)[row, place, labels[row, place]]
        for row, place in (labels != IGNORED).nonzero().tolist()
    )
    torch.testing.assert_close(loss_sum(logits, labels, "causal"), expected)
    parts = [loss_sum(logits[row : row + 1], labels[row : row + 1], "causal") for row in (0, 1)]
    torch.testing.assert_close(parts[0] + parts[1], expected)


def test_loss_of_the_other_tasks():
    logits, stars = torch.randn(3, 5), torch.tensor([0, 4, 2])
    expected = -logits.log_softmax(-1)[torch.arange(3), stars].sum()
    torch.testing.assert_close(loss_sum(logits, stars, "classification"), expected)
    a, b = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    torch.testing.assert_close(loss_sum(a, b, "regression"), ((a - b) ** 2).sum())


def test_loss_of_half_precision_is_float32():
    logits, labels = torch.randn(1, 4, 9).bfloat16(), torch.tensor([[1, 2, 3, 4]])
    loss = loss_sum(logits, labels, "causal")
    assert loss.dtype == torch.float32
    assert torch.equal(loss, loss_sum(logits.float(), labels, "causal"))
