"""Megatron-LM's theoretical memory report: bf16 with fp32 gradients and masters, replicated or ZeRO-1."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

from benchmarks.planners.point import Answer, Point, need

MB = 1 << 20  # as the report means it


def answer(point: Point) -> Answer:
    point.needs_stage("ddp", "zero1")
    point.needs_dtypes("bf16_master")
    point.needs_transformer()
    need(point.recompute == "none", "no word for recomputation without sequence parallelism")
    report = import_module("megatron.training.theoretical_memory_usage")
    states, _, total = report.report_theoretical_memory(_arguments(point))
    return states * MB, total * MB


def _arguments(point: Point) -> SimpleNamespace:
    shape = point.shape
    sizes = dict.fromkeys(
        (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
            *("expert_tensor_parallel_size", "expert_model_parallel_size"),
        ),
        1,
    )
    nothing = dict.fromkeys(
        (
            *("num_experts", "moe_shared_expert_intermediate_size", "moe_latent_size"),
            *("mtp_num_layers", "virtual_pipeline_model_parallel_size", "hybrid_layer_pattern"),
            "recompute_granularity",
        )
    )
    return SimpleNamespace(
        **sizes,
        **nothing,
        is_hybrid_model=False,
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        num_attention_heads=shape["heads"],
        kv_channels=shape["hidden"] // shape["heads"],
        group_query_attention=shape["kv_heads"] != shape["heads"],
        num_query_groups=shape["kv_heads"],
        multi_latent_attention=False,
        ffn_hidden_size=shape["ffn"],
        swiglu=shape["gated"],
        add_bias_linear=not shape["gated"],
        normalization="RMSNorm" if shape["gated"] else "LayerNorm",
        padded_vocab_size=shape["vocab"],
        untie_embeddings_and_output_weights=not shape["tied"],
        sequence_parallel=False,
        use_distributed_optimizer=point.stage == "zero1",
        world_size=point.world_size,
        data_parallel_size=point.world_size,
        micro_batch_size=point.micro_batch,
        seq_length=point.seq_len,
    )
