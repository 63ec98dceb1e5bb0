"""Calculon: the blocks of a GPT, without embeddings, under data parallelism with or without a sharded optimizer."""

from __future__ import annotations

import json
import logging
from importlib import import_module
from pathlib import Path

from benchmarks.planners.point import Answer, Point, need

SYSTEM = "systems/h100_80g_nvl8.json"  # for its seconds, which are not asked for
DATATYPES = {"fp32": "float32", "bf16_master": "float16", "paper16": "float16"}


def answer(point: Point) -> Answer:
    point.needs_stage("ddp", "zero1")
    point.needs_transformer()
    need(not point.shape["gated"], "no word for a gated MLP")
    need(point.recompute == "none", "no word for this selective recomputation")
    calculon = import_module("calculon")
    path = Path(calculon.__file__ or "").parents[1] / SYSTEM
    system = json.loads(path.read_text(encoding="utf-8"))
    for engine in ("matrix", "vector"):
        system[engine]["float32"] = system[engine]["float16"]
    shape = point.shape
    model = calculon.Llm(
        calculon.Llm.Application(
            {
                "hidden": shape["hidden"],
                "feedforward": shape["ffn"],
                "seq_size": point.seq_len,
                "attn_heads": shape["heads"],
                "attn_size": shape["hidden"] // shape["heads"],
                "num_blocks": shape["layers"],
            }
        ),
        logging.getLogger(),
    )
    system = calculon.System(system)
    model.compile(system, calculon.Llm.Execution.from_json(_execution(point)))
    model.run(system)
    states = model.get_weight_space() + model.get_weight_grad_space() + model.get_optimizer_space()
    return states, model.get_mem_tier1_cap_req()


def _execution(point: Point) -> dict[str, object]:
    return {
        "num_procs": point.world_size,
        "tensor_par": 1,
        "pipeline_par": 1,
        "data_par": point.world_size,
        "tensor_par_net": 1,
        "pipeline_par_net": 1,
        "data_par_net": int(point.world_size > 8),
        "batch_size": point.micro_batch * point.world_size,
        "microbatch_size": point.micro_batch,
        "datatype": DATATYPES[point.precision],
        "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": "none",
        "pipeline_interleaving": 1,
        "optimizer_sharding": point.stage == "zero1" and point.world_size > 1,
        "tensor_par_comm_type": "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": False,
        "data_par_overlap": False,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
