"""The points: those trained here, those of a GPU and of publications, with the bytes that they took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from benchmarks.planners.point import Point
from benchmarks.published import GIB, MIB, STATES
from benchmarks.published_tables import TABLE_A, TABLE_B, TABLE_C, TABLE_D
from benchmarks.real_runs import summary_of
from zeroexp.config.keys import Config, ModelConfig, from_mapping
from zeroexp.models.module import build_model
from zeroexp.plan.__main__ import composed_points

NUM_RANKS = 2
SMALL = "model=small data=synthetic data.vocab_size=2048 data.seq_len=64"
SHAPES = {
    "llama 7M tied, 1 x 64": f"{SMALL} model.hf_config.hidden_size=256 model.hf_config.intermediate_size=704 "
    "model.hf_config.num_attention_heads=4 model.hf_config.num_key_value_heads=2 data.micro_batch_size=1",
    "llama 8M, 4 x 64": f"{SMALL} model.hf_config.hidden_size=384 model.hf_config.intermediate_size=1024 "
    "model.hf_config.num_attention_heads=6 model.hf_config.num_key_value_heads=3 data.micro_batch_size=4 "
    "model.hf_config.num_hidden_layers=4 model.hf_config.tie_word_embeddings=false",
    "gpt2 4M, 2 x 128": "model=gpt2_tiny data=synthetic data.vocab_size=2048 data.seq_len=128 data.micro_batch_size=2 "
    "model.hf_config.n_embd=256 model.hf_config.n_layer=4 model.hf_config.n_head=4",
}
ROWS = [
    *(("ddp", "buffer"), ("zero1", "buffer"), ("zero2", "buffer"), ("zero3", "buffer")),
    *(("zero3", "parameter"), ("ddp", "torch"), ("zero2", "torch"), ("zero3", "torch")),
]
EVERY = (
    f"strategy=ddp,zero1,zero2,zero3 strategy.implementation=buffer,parameter,torch precision=fp32,bf16_master "
    f"world_size={NUM_RANKS} data.global_batch_size={4 * NUM_RANKS} train.warmup_steps=2 train.steps=2"
)

SMOLLM = "model=smollm2_360m data=synthetic data.seq_len=1024 data.global_batch_size=8 data.micro_batch_size=8"
TITAN = (
    "model=llama3_8b data=synthetic data.seq_len=8192 data.micro_batch_size=2 train.activation_checkpointing=true "
    "train.recompute_except=[aten.mm:2,aten._scaled_dot_product_flash_attention_for_cpu]"
)
# docs/measured.md, "One GPU" and "A published run on eight and 128 H100s": name, words, row, peak, whether reserved.
OF_GPUS = [
    (
        "SmolLM2-360M on one H200",
        f"{SMOLLM} world_size=1",
        ("zero3", "buffer"),
        19_925 * MIB,
        False,
    ),
    ("SmolLM2-360M on one H200", f"{SMOLLM} world_size=1", ("zero3", "torch"), 19_908 * MIB, False),
    *(
        (
            f"Llama 3.1 8B on {n} H100s",
            f"{TITAN} world_size={n}",
            ("zero3", "torch"),
            gib * GIB,
            True,
        )
        for n, gib in ((8, 82.4), (128, 67.0))
    ),
]


def of_gpus() -> Iterator[Point]:
    for name, words, row, peak, reserved in OF_GPUS:
        line = f"{words} strategy={row[0]} strategy.implementation={row[1]} precision=bf16_master"
        (config,) = composed(f"{line} cluster.device=cuda")
        yield replace(point_of(name, "gpu", config), peak=peak, reserved=reserved)


def of_publications() -> Iterator[Point]:
    """Yield the rows of published tables that say what all model states take together."""
    for table in (TABLE_A, TABLE_B, TABLE_C, TABLE_D):
        of_study = {
            _row(each): each for each in composed(f"study={table.study} cluster.device=cuda")
        }
        for row in table.rows:
            if (figure := row.cells.get("total")) is None:
                continue
            found = point_of(f"Table {table.study[-1].upper()}", "published", of_study[row.engine])
            scale = (table.nominal or found.num_parameters) / found.num_parameters
            yield replace(found, states=float(figure) * table.unit_bytes, scale=scale)


def of_this_machine() -> Iterator[Point]:
    """Yield the points that are trained here, before they are."""
    for shape, words in SHAPES.items():
        for config in composed(f"{words} {EVERY} cluster.device=cpu"):
            if _row(config) in ROWS:
                # One microbatch a rank: planners are told of no other.
                config.data.global_batch_size = NUM_RANKS * config.data.micro_batch_size
                yield point_of(shape, "cpu", config)


def measured(point: Point) -> Point:
    """Train; return the point with what its ranks held."""
    memory = summary_of(config_of(point)).memory
    if memory.peak is None:
        raise SystemExit("peaks are not counted here; a C++ compiler is needed")
    held = memory.mean_at["after_backward"]
    return replace(point, states=sum(held[kind] for kind in STATES), peak=memory.peak.fullest)


# -- a point in numbers ----------------------------------------------------------------------------


def composed(words: str) -> list[Config]:
    """Return what the words mean, without what is refused: an engine of torch's may lack dtypes."""
    return [each.config for each in composed_points(words.split()).points if not each.refusal]


def config_of(point: Point) -> Config:
    return from_mapping(Config, point.config)


def point_of(name: str, source: str, config: Config) -> Point:
    module = build_model(config.model, seed=0, device="meta").module
    own = [sum(p.numel() for p in each.parameters(recurse=False)) for each in module.modules()]
    train = config.train
    recompute = "selective" if train.recompute_every or train.recompute_except else "full"
    return Point(
        name=f"{name}, {' '.join(_row(config))}, {config.precision.name}",
        source=source,
        config=asdict(config),
        strategy=config.strategy.name,
        implementation=config.strategy.implementation,
        precision=config.precision.name,
        world_size=config.world_size,
        micro_batch=config.data.micro_batch_size,
        seq_len=config.data.seq_len,
        recompute=recompute if train.activation_checkpointing else "none",
        num_parameters=sum(p.numel() for p in module.parameters()),
        largest_module=max(own),
        shape=_shape_of(config.model),
    )


def _row(config: Config) -> tuple[str, str]:
    return config.strategy.name, config.strategy.implementation


def _shape_of(model: ModelConfig) -> dict[str, Any]:
    hf = model.hf_config
    if model.family == "llama":
        return {
            "layers": hf["num_hidden_layers"],
            "hidden": hf["hidden_size"],
            "heads": hf["num_attention_heads"],
            "kv_heads": hf.get("num_key_value_heads", hf["num_attention_heads"]),
            "ffn": hf["intermediate_size"],
            "vocab": hf["vocab_size"],
            "tied": hf.get("tie_word_embeddings", False) or model.task != "causal",
            "gated": True,
        }
    if model.family == "gpt2":
        return {
            "layers": hf["n_layer"],
            "hidden": hf["n_embd"],
            "heads": hf["n_head"],
            "kv_heads": hf["n_head"],
            "ffn": 4 * hf["n_embd"],
            "vocab": hf["vocab_size"],
            "tied": True,
            "gated": False,
        }
    return {}
