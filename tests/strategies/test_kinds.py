"""Kinds of parameters with settings of their own: one process that steps each by torch, every cut, and every plan."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.composing import composed
from tests.crossed import every_nth
from tests.engines import FLOAT32_ROUNDING
from tests.models_for_tests import MODELS
from tests.oracle import (
    Recipe,
    Rules,
    assert_same,
    configured,
    outcome_of,
    train_on_ranks,
    train_oracle,
    train_third_step,
    train_two_steps,
)
from tests.plan.real_steps import assert_as_planned
from tests.strategies.engine import Ours
from tests.strategies.pairwise import Row, pairwise
from tests.strategies.test_muon import AXES as OF_MUON
from tests.strategies.test_muon import make, make_of, momenta
from tests.strategies.test_parity import check_rows
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import describe_groups, parameter_groups
from zeroexp.config.parameter_kinds import kinds_of_parameters
from zeroexp.cut.chunk import Chunk
from zeroexp.interface.canonical import merge
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.zero.options import Options

ELEMENTWISE = {
    "embeddings": {"name": "sgd", "momentum": 0.9, "lr": 0.01},
    "vectors": {"lr": 0.005, "weight_decay": 0.2},
    "*.down.weight": {"moments": "bfloat16", "betas": [0.8, 0.9]},
}
WITH_MUON = {
    **ELEMENTWISE,
    "*.down.weight": {"name": "muon", "momentum": 0.8, "moments": "bfloat16"},
    "matrices": {"name": "muon", "momentum": 0.9, "settings": {"ns_steps": 3}},
}
WITH_LAYOUTS = {
    **WITH_MUON,
    "embeddings": {**ELEMENTWISE["embeddings"], "layout": "tensor"},
    "vectors": {**ELEMENTWISE["vectors"], "layout": "parameter"},
    "matrices": {**WITH_MUON["matrices"], "layout": "parameter"},
    "*.down.weight": {**WITH_MUON["*.down.weight"], "layout": "buffer"},
}
WITH_MASTERS = {
    "embeddings": {**ELEMENTWISE["embeddings"], "master": "bfloat16"},
    "vectors": {**ELEMENTWISE["vectors"], "master": "bfloat16", "layout": "parameter"},
    "*.down.weight": ELEMENTWISE["*.down.weight"],
}
# Kernels of bfloat16 round once more in the elements that fill no vector, and cuts end elsewhere than tensors.
BF16_ROUNDING = {"rtol": 2**-5, "atol": 2**-8}
RECIPE = Recipe(kinds=json.dumps(WITH_MUON))


def test_each_parameter_is_stepped_by_the_optimizer_of_its_row() -> None:
    """Its pattern first, then its kind, else the line's own: four optimizers of torch beside ours."""
    ours, theirs = MODELS["toy"].build(), MODELS["toy"].build()
    config = replace(RECIPE, optimizer="adamw").optimizer_config()
    one = optimizer_factory(config)(parameter_groups(ours.module, config, ours.blocks))
    named = {n: p for n, p in theirs.module.named_parameters() if p.requires_grad}
    down, up = ([p for n, p in named.items() if n.endswith(f"{w}.weight")] for w in ("down", "up"))
    vectors = [p for p in named.values() if p.ndim < 2]
    muon = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}
    others = [
        torch.optim.SGD([named["embedding.weight"]], 0.01, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(vectors, 0.005, betas=(0.9, 0.95), weight_decay=0.2),
        torch.optim.Muon(up, momentum=0.9, ns_steps=3, **muon),
        torch.optim.Muon(down, momentum=0.8, **muon),
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        pairs = zip(ours.module.parameters(), theirs.module.parameters(), strict=True)
        for parameter, other in ((p, o) for p, o in pairs if p.requires_grad):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            other.grad = parameter.grad.clone()
        one.step()
        for each in others:
            each.step()
        for own in others[3].state.values():
            own["momentum_buffer"] = own["momentum_buffer"].bfloat16().float()
    for parameter, other in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            "toy",
            {
                "embedding.weight": "embeddings",  # the head is tied to it
                "blocks.0.up.weight": "matrices",
                "blocks.0.up.bias": "vectors",
                "blocks.0.gain": "vectors",
                "norm.weight": "vectors",
            },
        ),
        (
            "moe_one_rank",
            {
                "blocks.0.experts.router.weight": "routers",
                "blocks.0.experts.norm.weight": "vectors",
                "blocks.0.experts.experts.0.up.weight": "experts",
            },
        ),
        (
            "mixtral",
            {
                "model.embed_tokens.weight": "embeddings",
                "model.layers.0.self_attn.q_proj.weight": "matrices",
                "model.layers.0.mlp.gate.weight": "routers",
                "model.layers.0.mlp.experts.gate_up_proj": "experts",
            },
        ),
    ],
)
def test_what_is_of_which_kind(model, expected) -> None:
    built = MODELS[model].build()
    kinds = kinds_of_parameters(built.module, built.blocks)
    named = {name: kinds.get(p) for name, p in built.module.named_parameters()}
    assert {name: named[name] for name in expected} == expected


NO_AXES = ("moments", "model", "optimizer_over")  # of a kind, or others in groups
AXES: dict[str, Any] = {
    **{name: values for name, values in OF_MUON.items() if name not in NO_AXES},
    "replicas": [1],
    "kinds": [
        json.dumps(WITH_MASTERS),
        json.dumps(WITH_LAYOUTS),
        json.dumps(WITH_MUON),
        json.dumps(ELEMENTWISE),
    ],
}


def is_legal(row: Row) -> bool:
    return row.get("precision") != "fp32" or row.get("kinds") != json.dumps(WITH_MASTERS)


ROWS = pairwise(AXES, every=("stage", "layout"), legal=is_legal)


def recipe_of(row: Row) -> Recipe:
    words = ("world_size", "precision", "kinds")
    return replace(RECIPE, steps=2, **{word: row[word] for word in words})


@every_nth(2, "world_size", AXES["world_size"])
def test_any_cut_trains_what_one_process_trains(ranks, world_size) -> None:
    def is_that_of_one_process(_: Row, recipe: Recipe, answers: Any) -> None:
        bounds = BF16_ROUNDING if recipe.kinds == json.dumps(WITH_MASTERS) else {}
        assert_same(outcome_of(answers), train_oracle(recipe), **bounds)

    rows = [row for row in ROWS if row["world_size"] == world_size]
    runs = [(recipe_of(row), make_of(row)) for row in rows]
    check_rows(ranks, rows, runs, is_that_of_one_process)


def test_rows_that_are_stepped_on_the_host(ranks) -> None:
    recipe = replace(RECIPE, kinds=json.dumps(ELEMENTWISE))
    answers = ranks(train_on_ranks, recipe, Ours("zero2", Options(offload="optimizer")))
    assert_same(outcome_of(answers), train_oracle(recipe))


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero3"])
def test_engines_of_torch(ranks, stage) -> None:
    """FSDP2 counts a parameter without a gradient on any rank as zero."""
    kinds = ELEMENTWISE if stage == "zero3" else WITH_MUON
    recipe = replace(RECIPE, kinds=json.dumps(kinds), model="llama" if stage == "zero3" else "toy")
    if stage == "zero3":
        kinds = {row.replace("down", "down_proj"): own for row, own in kinds.items()}
        recipe = replace(recipe, kinds=json.dumps(kinds))
    answers = ranks(train_on_ranks, recipe, configured(stage, "torch"))
    rules = Rules("microbatch", added_in_master=True) if stage == "zero3" else Rules()
    assert_same(outcome_of(answers), train_oracle(recipe, rules))


def test_a_fused_row_of_sgd_under_fsdp2_is_stepped_by_the_plain_one(ranks) -> None:
    """torch has none for its shards, and `optimizer.fused` is true unless somebody says otherwise."""
    kinds = json.dumps({"embeddings": ELEMENTWISE["embeddings"]})
    recipe = replace(RECIPE, kinds=kinds, model="llama", fused=True)
    answers = ranks(train_on_ranks, recipe, configured("zero3", "torch"))
    oracle = train_oracle(recipe, Rules("microbatch", added_in_master=True))
    assert_same(outcome_of(answers), oracle, atol=FLOAT32_ROUNDING)


ENGINES = [("ddp", "torch"), ("zero1", "torch"), ("zero3", "torch"), ("zero3", "buffer")]


@pytest.mark.parametrize(("stage", "implementation"), ENGINES)
def test_sgd_in_bfloat16_trains_by_torchs_loop(ranks, stage, implementation) -> None:
    """Its fused kernel is wrong there on CPUs, and `optimizer.fused` is true unless somebody says otherwise."""
    recipe = Recipe(optimizer="sgd", precision="bf16", steps=3)
    answers = ranks(train_on_ranks, replace(recipe, fused=True), configured(stage, implementation))
    assert_same(outcome_of(answers), train_oracle(recipe), **BF16_ROUNDING)


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (("zero3", "buffer"), ("zero1", "torch")),
        (("zero1", "torch"), ("zero2", "tensor")),
        (("ddp", "torch"), ("zero3", "parameter")),
    ],
)
def test_an_engine_goes_on_from_the_state_of_another(ranks, first, last) -> None:
    saved = merge(ranks(train_two_steps, RECIPE, make(*first)))
    dtypes = {moment.dtype for moment in momenta(saved)}
    assert dtypes == {torch.float32, torch.bfloat16}
    outcome = outcome_of(ranks(train_third_step, RECIPE, make(*last), saved))
    expected = train_oracle(RECIPE)
    assert_same(outcome, replace(expected, losses=expected.losses[2:], norms=expected.norms[2:]))


def test_masters_of_several_dtypes_go_on_under_another_cut(ranks) -> None:
    recipe = replace(RECIPE, precision="bf16_master", kinds=json.dumps(WITH_MASTERS))
    saved = merge(ranks(train_two_steps, recipe, make("zero3", "buffer")))
    assert {own["weight"].dtype for own in saved.values()} == {torch.float32, torch.bfloat16}
    outcome = outcome_of(ranks(train_third_step, recipe, make("zero1", "tensor"), saved))
    expected = train_oracle(recipe)
    expected = replace(expected, losses=expected.losses[2:], norms=expected.norms[2:])
    assert_same(outcome, expected, **BF16_ROUNDING)


TWO = ("world_size=2", "data.global_batch_size=2")
KINDS_OF_TINY = (
    "+optimizer.kinds.embeddings={name: sgd, lr: 1e-2}",
    "+optimizer.kinds.matrices={name: muon, momentum: 0.9, moments: bfloat16, layout: parameter}",
    "+optimizer.kinds.heads={moments: bfloat16}",
)


@pytest.mark.parametrize(
    ("stage", "layout"), [("zero1", "parameter"), ("zero2", "tensor"), ("zero3", "buffer")]
)
def test_a_plan_is_what_the_engine_holds_and_sends(stage, layout) -> None:
    words = (f"strategy={stage}", f"strategy.implementation={layout}", "world_size=3")
    more = ("data.global_batch_size=3", "model.hf_config.tie_word_embeddings=false")
    assert_as_planned(composed("model=tiny", *words, *more, *KINDS_OF_TINY))


@pytest.mark.parametrize(
    ("stage", "precision", "master"),
    [
        ("ddp", "bf16", "float32"),
        ("zero1", "bf16_master", "bfloat16"),
        ("zero3", "bf16", "float32"),
    ],
)
def test_a_plan_counts_the_master_of_each_row(stage, precision, master) -> None:
    words = ("model=tiny", f"strategy={stage}", f"precision={precision}", *TWO)
    rows = (f"+optimizer.kinds.{row}.master={master}" for row in ("vectors", "embeddings"))
    of_rows, plain = (assert_as_planned(composed(*words, *more)) for more in (rows, ()))
    assert of_rows.held_bytes("at_rest", 0) != plain.held_bytes("at_rest", 0)


OVER_ALL, OVER_OTHERS = "+optimizer.kinds.vectors.over=all", "strategy.optimizer.over=all"
OF_MATRICES = "name: muon, momentum: 0.9"


@pytest.mark.parametrize(
    ("stage", "layout", "rows"),
    [
        ("zero1", "buffer", (OVER_ALL, "+optimizer.kinds.embeddings.over=all")),
        ("zero2", "tensor", (f"+optimizer.kinds.matrices={{{OF_MATRICES}, over: all}}",)),
        (
            *("zero3", "buffer"),
            (f"+optimizer.kinds.matrices={{{OF_MATRICES}, over: group}}", OVER_OTHERS),
        ),
        ("zero1", "parameter", (f"+optimizer.kinds.matrices={{{OF_MATRICES}}}", OVER_ALL)),
    ],
)
def test_a_plan_counts_the_ranks_of_each_row(stage, layout, rows) -> None:
    engine = (f"strategy={stage}", f"strategy.implementation={layout}")
    groups = ("world_size=6", "data.global_batch_size=6", "strategy.replicas=3")
    assert_as_planned(composed("model=tiny", *engine, *groups, *rows))


def test_moments_of_a_row_over_all_ranks_are_as_many_times_fewer_as_there_are_replicas() -> None:
    words = ("model=tiny", "world_size=8", "data.global_batch_size=8", "strategy=zero2")
    configs = [composed(*words, "strategy.replicas=4", *more) for more in ((), (OVER_ALL,))]
    of_all, of_row = (
        form_of(each, build_on_meta(each), "native").held_bytes("after_step", 0)["optimizer"]
        for each in configs
    )
    model = build_on_meta(configs[0])
    vectors = sum(p.numel() for p in model.module.parameters() if p.ndim < 2)
    num_moments, num_bytes = 2, 4
    fewer = num_moments * num_bytes * vectors * (1 / 2 - 1 / 8)
    assert of_all - of_row == pytest.approx(fewer, rel=0.05)


def test_matrices_with_owners_send_nothing_beside_a_buffer_of_the_rest() -> None:
    """Of `+optimizer.kinds.matrices.layout` alone: Muon's exchange goes, and a chunk of each unit has whole members."""
    words = (
        "model=tiny",
        "optimizer=muon",
        "strategy=zero2",
        "world_size=4",
        "data.global_batch_size=4",
    )
    owned = composed(*words, "+optimizer.kinds.matrices={layout: parameter}")
    forms = [
        form_of(config, build_on_meta(config), "native") for config in (composed(*words), owned)
    ]
    cut, whole = (form.traffic(1).bytes_by_kind for form in forms)
    assert cut.pop("matrices") > 0 and cut.keys() == whole.keys()
    assert_as_planned(owned, "native")
    (unit,) = {tuple(kind for kind in map(kind_of, u)) for u in forms[1].units[1:]}
    assert unit == ("cut", "whole") or unit == ("whole", "cut")


def kind_of(chunk: Chunk) -> str:
    borders = {0, *(member.stop for member in chunk.members)}
    return "whole" if borders.issuperset(chunk.cuts) else "cut"


def test_a_run_says_what_went_where() -> None:
    untied = "model.hf_config.tie_word_embeddings=false"
    config = composed("model=tiny", *KINDS_OF_TINY, untied, "+optimizer.kinds.heads.over=all")
    model = build_on_meta(config)
    groups = parameter_groups(model.module, config.optimizer, model.blocks)
    numel = sum(p.numel() for group in groups for p in group["params"])
    lines = describe_groups(groups, config.optimizer).split("; ")
    assert lines[1].endswith("by sgd lr 0.01 decay 0.1")
    assert lines[2].startswith("matrices: ") and lines[2].endswith(
        "moments bfloat16 layout parameter"
    )
    heads = model.module.get_parameter("lm_head.weight").numel()
    assert lines[-1] == f"heads: {heads:,} by adamw lr 0.001 decay 0.1 moments bfloat16 over all"
    counts = [int(line.split(": ")[1].split()[0].replace(",", "")) for line in lines]
    assert sum(counts) == numel
