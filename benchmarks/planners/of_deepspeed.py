"""DeepSpeed's estimators of model states, for 16-bit training: they are told numbers of parameters alone."""

from __future__ import annotations

from importlib import import_module

from benchmarks.planners.point import NO_PEAK, Answer, Point


def answer(point: Point) -> Answer:
    point.needs_stage("zero2", "zero3")
    point.needs_dtypes("bf16_master", "paper16")
    where = {"num_gpus_per_node": point.world_size, "num_nodes": 1, "cpu_offload": False}
    if point.stage == "zero2":
        zero = import_module("deepspeed.runtime.zero.stage_1_and_2")
        _, states = zero.estimate_zero2_model_states_mem_needs(point.num_parameters, **where)
    else:
        sizes = point.num_parameters, point.largest_module
        zero = import_module("deepspeed.runtime.zero.stage3")
        _, states, _ = zero.estimate_zero3_model_states_mem_needs(
            *sizes, **where, cpu_offload_params=False
        )
    return states, NO_PEAK
