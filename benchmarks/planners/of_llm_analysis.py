"""llm-analysis: formulas of weights, gradients, optimizer and activations, for all ZeRO stages."""

from __future__ import annotations

from importlib import import_module

from benchmarks.planners.point import Answer, Point, need

PLENTY_GB = 1e3  # of the GPU, in which it looks for the largest batch, one by one


def answer(point: Point) -> Answer:
    point.needs_transformer()
    point.needs_dtypes("bf16_master")  # weights of 16 bits at most, gradients as masters
    need(point.shape["tied"], "no word for a head of its own")
    need(point.recompute != "selective", "no word for this selective recomputation")
    analysis, config = import_module("llm_analysis.analysis"), import_module("llm_analysis.config")
    shape = point.shape
    model = config.ModelConfig(
        name="point",
        num_layers=shape["layers"],
        n_head=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        hidden_dim=shape["hidden"],
        ffn_embed_dim=shape["ffn"],
        vocab_size=shape["vocab"],
        max_seq_len=point.seq_len,
        mlp_gated_linear_units=shape["gated"],
    )
    found = analysis.LLMAnalysis(
        model,
        config.GPUConfig("point", PLENTY_GB, 1e3, 1e2, 1e-5, 1e3),
        parallelism_config=config.ParallelismConfig(dp_size=point.world_size),
    ).training(
        batch_size_per_gpu=point.micro_batch,
        seq_len=point.seq_len,
        ds_zero=analysis.DSZeRO(("ddp", "zero1", "zero2", "zero3").index(point.stage)),
        activation_recomputation=analysis.ActivationRecomputation(4 * (point.recompute == "full")),
    )
    return found["(weight+op_state+grad)_memory_per_gpu"], found["estimated_peak_memory_per_gpu"]
