"""SimuMax: Megatron-LM's layers one by one, with what each keeps for backward."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from benchmarks.planners.point import Answer, Point, need

SYSTEM = "configs/system/a100_pcie.json"  # for its seconds, which are not asked for


def answer(point: Point) -> Answer:
    point.needs_stage("ddp", "zero1")  # of the others it says that they are not supported yet
    point.needs_dtypes("bf16_master", "paper16")
    point.needs_transformer()
    need(point.shape["gated"], "no word for learned positions and biases")
    need(not point.shape["tied"], "no word for tied embeddings")
    need(point.recompute == "none", "no word for this selective recomputation")
    config, planner = import_module("simumax.core.config"), import_module("simumax.core.perf_llm")
    shape = point.shape
    strategy = config.StrategyConfig(
        seq_len=point.seq_len,
        micro_batch_size=point.micro_batch,
        micro_batch_num=1,
        world_size=point.world_size,
        zero_state=int(point.stage == "zero1"),
        use_fp32_accum_grad=point.precision == "bf16_master",
        enable_recompute=False,
    )
    model = config.ModelConfig(
        hidden_size=shape["hidden"],
        head_num=shape["heads"],
        kv_head_num=shape["kv_heads"],
        head_size=shape["hidden"] // shape["heads"],
        intermediate_size=shape["ffn"],
        layer_num=shape["layers"],
        vocab_size=shape["vocab"],
        use_swiglu=True,
    )
    model.padded_vocab_size = False
    system = Path(config.__file__ or "").parents[2] / SYSTEM
    performance = planner.PerfLLM()
    performance.configure(strategy, model, config.SystemConfig.init_from_config_file(str(system)))
    performance.run_estimate()
    chunk = planner.FIRST_CHUNK  # the only one without pipelines
    held = performance.model_chunk_dict[chunk].get_model_info()
    states = held.dense_weight_bytes + held.dense_grad_bytes + held.dense_state_bytes
    return states, states + performance.pp_state_peak_point[chunk].peak_mem
