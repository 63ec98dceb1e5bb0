"""`zeroexp verify KEY=VALUE ...` judges the engine of a run's words, also one that somebody added."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.verify.test_verify import HERE, answers
from zeroexp.process.world import fake_world
from zeroexp.verify.__main__ import source_of
from zeroexp.verify.loop_to_verify import NoLoop, as_dtype, batch_of, make_loop, plain_model

TINY = (
    "model=tiny model.hf_config.vocab_size=64 model.hf_config.num_hidden_layers=1 data=synthetic data.seq_len=16 "
    "optimizer.max_grad_norm=0.1"
)
ENGINES = [
    ("strategy=zero2 optimizer=muon strategy.replicas=2 world_size=4", 4),
    ("strategy=zero3 strategy.implementation=tensor", 2),
    ("strategy=zero2 strategy.implementation=parameter model=mixtral_tiny", 2),
    ("strategy=zero1 strategy.implementation=torch", 2),
    ("strategy=zero3 strategy.implementation=torch", 3),
    ("strategy=ddp strategy.implementation=torch precision=autocast", 2),
    ("strategy=zero3 model.lora.r=4 precision=bf16_master", 2),
    ("strategy=zero3 model.lora.r=4 precision=bf16_master strategy.implementation=torch", 2),
    ("strategy=ddp precision=bf16_master train.activation_checkpointing=true", 2),
]
HALVED = """
from zeroexp.config.engines import ENGINES, Engine
from zeroexp.engines.build import build_torch_strategy


def build(config, model, world, common):
    strategy = build_torch_strategy(config, model, world, common | {"max_grad_norm": None})
    backward = strategy.backward
    strategy.backward = lambda loss: backward(loss / 2)
    return strategy


ENGINES.add("halved", Engine(build=build, stages=("ddp",)))
"""
OFF = "optimizer.max_grad_norm=null strategy=ddp strategy.implementation=halved plugins=halved"


HALVED_OURS = """
from zeroexp.zero.engine import Engine

backward = Engine.backward
Engine.backward = lambda engine, loss: backward(engine, loss / 2)
"""


def test_a_factor_that_clipping_takes_out_again_is_seen_in_the_norm(tmp_path: Path):
    (tmp_path / "ours.py").write_text(HALVED_OURS, encoding="utf-8")
    (found,) = answers(HERE / "loops.py", [(f"{TINY} plugins=ours", 2)], further=tmp_path)
    assert found[0] == "scale"
    assert "the norm of all gradients is x 0.5" in found[1]


@pytest.mark.slow
def test_an_engine_is_equal_and_faults_are_named(tmp_path: Path):
    (tmp_path / "halved.py").write_text(HALVED, encoding="utf-8")
    rounded = "strategy=zero3 strategy.gather_codec=int8"
    # Masters are bfloat16, but for those of a row.
    halves = "strategy=zero2 precision=bf16 +optimizer.kinds.vectors.master=float32"
    asked = [(f"{TINY} {words}", 2) for words in (halves, OFF, rounded)]
    right, halved, rounded = answers(HERE / "loops.py", asked, further=tmp_path)
    assert right is None
    assert halved[0] == "scale"
    assert "0.5" in halved[1]
    assert rounded[0] == "dtype"


def test_the_plain_model_of_fused_experts_computes_in_float64():
    """Torch's grouped product, by which transformers multiplies them, takes none."""
    words = "model=mixtral_tiny data=synthetic data.seq_len=16 world_size=2"
    loop = make_loop(source_of(words.split()))
    batch = batch_of(loop, 0, 0, 0)
    losses = []
    for dtype in (torch.float32, torch.float64):
        result = loop.loss(plain_model(loop, dtype), as_dtype(batch, dtype))
        losses.append(result[0] if isinstance(result, tuple) else result)
    assert losses[1].dtype is torch.float64
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=1e-6, atol=0)


def test_blocks_are_compiled_as_a_run_does(monkeypatch: pytest.MonkeyPatch):
    compiled: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda forward: compiled.append("a block") or forward)
    loop = make_loop(source_of(f"{TINY} world_size=1 strategy=zero3 train.compile=true".split()))
    with fake_world(0, 1):
        assert loop.train is not None
        loop.train(plain_model(loop, torch.float32))
    assert len(compiled) == 1


def test_a_file_whose_path_has_an_equals_sign_is_a_file(tmp_path: Path):
    (tmp_path / "lr=1").mkdir()
    (tmp_path / "lr=1/loop.py").touch()
    assert source_of([f"{tmp_path}/lr=1/loop.py:ddp"]).name == "loop.py:ddp"


def test_numbers_of_ranks_that_a_run_would_refuse_are_left_out():
    source = source_of([*TINY.split(), "strategy=zero2", "strategy.replicas=2", "world_size=4"])
    left_out = {size: source.why_not_on(size) for size in (1, 2, 3, 4, 6)}
    assert [size for size, why in left_out.items() if why is None] == [4, 6]
    assert "1 ranks form no 2 equal groups" in str(left_out[1])


@pytest.mark.slow
def test_engines_of_ours_and_of_torch_are_equal():
    found = answers(HERE / "loops.py", [(f"{TINY} {words}", size) for words, size in ENGINES])
    assert found == [None] * len(ENGINES)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("strategy=zero1,zero2", "2 points"),
        ("strategy=zer", "did you mean zero3"),
        ("model=tiny model.lora.r=2 model.lora.quantize=int8", "computes with no codes"),
        ("strategy=zero3 world_size=2 optimizer.learning=3", "unknown key"),
        ("model=tiny model.hf_config.num_attention_heads=5", "is not a multiple of"),
    ],
)
def test_words_that_no_run_takes_are_refused_in_a_line(words: str, why: str):
    with pytest.raises(NoLoop, match=why) as refused:
        source_of(words.split())
    assert "\n" not in str(refused.value)
