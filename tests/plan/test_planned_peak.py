"""A plan rehearses a part of a step or of a model and finds the peak of all of it, with what libraries allocate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from tests.plan.test_absent_neighbours import real_peak
from tests.plan.test_rehearse import FSDP2_BYTES, config_of
from zeroexp.config.keys import Config
from zeroexp.measure.memory import count_cpu_allocations
from zeroexp.measure.record import Traffic
from zeroexp.plan.extrapolate_depth import depth_of, measure_at_depth, with_depth
from zeroexp.plan.hidden_memory import KernelScratch, prior_product_scratch
from zeroexp.plan.machines import JobShape, Machines
from zeroexp.plan.outcome import RankPeak, RehearsedPeaks, plan_point
from zeroexp.plan.peak import OUTPUTS, product_scratch_of, rehearse_fullest_rank
from zeroexp.plan.rehearse import PHASES, RehearsedRank, prepared, rehearse, rehearse_rank
from zeroexp.plan.speed import Calibration, calibration_path, save, this_machine
from zeroexp.plan.storages import Peak, Storages
from zeroexp.process.world import World

NUM_RANKS, NUM_MICROBATCHES = 2, 5
# So many parameters for each token that states and gradients make the peak, and not activations.
WIDE = (
    *("model=tiny", "data=synthetic", "data.seq_len=8", f"world_size={NUM_RANKS}"),
    f"data.global_batch_size={NUM_MICROBATCHES * NUM_RANKS}",
)
RANDOM_STATES_BYTES = (
    24_000  # of torch, Python and numpy, which a rehearsal leaves out of a checkpoint
)
SCRATCH_BYTES = 256  # of one product, by which the scratch of sums is larger than they are


def planned(config: Config) -> RankPeak:
    return rehearse_fullest_rank(plan_point(config, None, "cpu"))


# Few operations, each of which takes a rehearsal half a millisecond.
VECTORS = ("model=mlp_tiny", "data=vectors", "data.seq_len=8", *WIDE[3:])


@pytest.mark.parametrize(
    ("words", "stage", "implementation", "reduce_each"),
    [
        ((), "zero3", "torch", None),
        ((), "zero1", "buffer", "step"),
        *(
            pytest.param((), *each, marks=pytest.mark.slow)
            for each in (
                ("ddp", "torch", None),
                ("zero2", "torch", None),
                ("zero2", "buffer", "microbatch"),
                ("zero3", "tensor", "step"),
            )
        ),
        # All gradients of a microbatch are one reduction, which is in flight while the next one makes its own.
        (("strategy.unit=model",), "zero2", "parameter", "microbatch"),
        (("data.seq_len=256",), "zero3", "buffer", "step"),  # whose samples are its largest tensors
    ],
)
def test_no_further_microbatch_holds_more(words, stage, implementation, reduce_each):
    engine = (f"strategy={stage}", f"strategy.implementation={implementation}")
    config = config_of(*VECTORS, *words, *engine)
    config.strategy.reduce_each = reduce_each
    fullest = planned(config)
    (whole,) = rehearse(config, ranks=[fullest.rank], reads=False, ranks_per_host=NUM_RANKS).ranks
    assert whole.peak_bytes == fullest.num_bytes


@pytest.mark.parametrize("measured_bytes", [0, 4])
def test_a_plan_takes_the_scratch_of_products_that_was_measured(
    measured_bytes, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    machines = Machines("cpu", JobShape(1, NUM_RANKS))
    prior = product_scratch_of(machines)
    assert prior == prior_product_scratch() and "by this CPU's instructions" in str(prior)
    measured = Calibration(
        *(this_machine(), "2", {"bfloat16": {"64": 1e9}}, 1e9, 1e-5, {"direct": [1e-3, 1e9]}),
        product_scratch=measured_bytes,
    )
    save(measured, calibration_path(Path(OUTPUTS)))
    scratch = product_scratch_of(machines)
    assert scratch is not None and str(scratch).endswith("for each element, measured")
    mode = FakeTensorMode()
    storages = Storages(mode)
    with mode, storages, KernelScratch(scratch):
        left, right = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((8, 64), (64, 2048)))
        product = left @ right
    peak = storages.peaks_of_halves()["build"]["second"].num_bytes
    assert peak == left.nbytes + right.nbytes + product.nbytes + measured_bytes * 8 * 2048


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_products_and_norms_of_bf16_have_their_scratch(ranks, max_grad_norm):
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    small = ("model.hf_config.num_hidden_layers=1", f"data.global_batch_size={NUM_RANKS}")
    config = config_of(*WIDE, *small, "precision=bf16", "strategy=zero3")
    config.optimizer.max_grad_norm = max_grad_norm
    measured = max(ranks(real_peak, prepared(config, None), world_size=NUM_RANKS))
    assert 0 <= measured - planned(config).num_bytes <= SCRATCH_BYTES


@pytest.mark.parametrize(
    ("stage", "implementation"),
    [("zero3", "buffer"), pytest.param("zero1", "torch", marks=pytest.mark.slow)],
)
def test_a_cpu_rank_that_saves_holds_the_copy_of_its_state(ranks, tmp_path, stage, implementation):
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    words = (f"strategy={stage}", f"strategy.implementation={implementation}")
    config = config_of(*WIDE, *words, "checkpoint.every=2")
    peers = (prepared(config, None), NUM_RANKS, tmp_path)
    measured = max(ranks(real_peak, *peers, world_size=NUM_RANKS))
    plan = planned(config)
    assert 0 <= measured - plan.num_bytes <= RANDOM_STATES_BYTES < plan.by_kind["checkpoint copy"]


def test_a_run_that_saves_at_its_end_alone_holds_the_copy_beside_what_rests():
    config = config_of(*WIDE, "strategy=ddp", "checkpoint.every=10000")
    assert "checkpoint copy" not in planned(config).by_kind
    # On one rank weights and two moments are copied, which is more than the gradients and activations of a step.
    config.world_size = 1
    peak = planned(config)
    assert peak.phase == "step"
    assert peak.num_bytes > 6 * 4 * 223_552


def test_a_model_of_which_some_blocks_are_frozen_is_measured_at_its_own_depth():
    def measure(at: Config) -> list[dict[str, int]]:
        return [{"num_blocks": depth_of(at)}]

    config = with_depth(config_of("model=mlp_tiny", "data=vectors"), 20)
    config.model.freeze = ["blocks.?.*"]
    assert measure_at_depth(config, measure) == ([{"num_blocks": 20}], (20,))
    config.model.freeze = ["*bias"]  # of all blocks alike
    found, depths = measure_at_depth(config, measure)
    assert found == [{"num_blocks": 20}] and len(depths) == 3 and max(depths) < 20


def test_the_half_that_holds_most_in_a_deep_model_is_told(monkeypatch):
    """At 4, 6 and 8 blocks the first half holds more, at 20 the second."""

    def made_up(at: Config, rank: int, *_: Any, **__: Any) -> RehearsedRank:
        first, second = (Peak(b, {}, []) for b in (1000 + 10 * depth_of(at), 100 * depth_of(at)))
        halves = {phase: {"first": first, "second": second} for phase in PHASES}
        return RehearsedRank(rank, dict.fromkeys(PHASES, first), {}, Traffic({}, {}), {}, halves)

    monkeypatch.setattr("zeroexp.plan.rehearse.rehearse_rank", made_up)
    rehearsal = rehearse(with_depth(config_of(*VECTORS), 20), ranks=[0])
    assert rehearsal.depths == (4, 6, 8)
    assert rehearsal.ranks[0].peaks["backward"].num_bytes == 100 * 20


@pytest.mark.slow
def test_another_half_of_backward_may_hold_most_in_a_deep_model():
    """Logits make the peak at few blocks, and the gradients that backward leaves at many."""
    words = (*WIDE[:2], "data.seq_len=32", "world_size=1", "data.global_batch_size=1")
    shape = ("vocab_size=32768", "tie_word_embeddings=false", "intermediate_size=1024")
    config = config_of(*words, *(f"model.hf_config.{each}" for each in shape), "strategy=ddp")
    config.model.freeze = ["*embed*"]
    config = with_depth(config, 40)
    (found,) = rehearse(config, reads=False).ranks
    own = rehearse_rank(prepared(config, None), 0, "cpu", reads=False)
    assert found.peaks["backward"] == own.peaks["backward"]


def test_fsdp2_has_the_planned_peak_at_a_reduction_beside_the_copy_of_gloo(ranks):
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    few_words = ("data.vocab_size=32", "model.hf_config.vocab_size=32")
    config = config_of(*WIDE, *few_words, "strategy=zero2", "strategy.implementation=torch")
    plan = planned(config)
    copy = max(size for size, _, _ in plan.largest)
    assert plan.by_kind["messages"] == copy
    measured = max(ranks(real_peak, prepared(config, None), world_size=NUM_RANKS))
    assert 0 <= measured - plan.num_bytes <= plan.late_bytes + FSDP2_BYTES


def real_peak_where_gloo_is_late(world: World, config: Config) -> int:
    """Hold what gloo's two threads hold where both are late: the largest tensor gathered or reduced, and the last."""
    held: list[Tensor] = []
    gather, reduce = DefaultAllGather.__call__, DefaultReduceScatter.__call__

    def hold(last: Tensor) -> None:
        held[:] = [*sorted(held, key=lambda tensor: tensor.nbytes)[-1:], last]

    def gather_and_hold(self: Any, output_tensor: Tensor, *args: Any, **more: Any) -> Any:
        work = gather(self, output_tensor, *args, **more)
        hold(output_tensor)
        return work

    def reduce_and_hold(self: Any, output_tensor: Tensor, input_tensor: Tensor, **more: Any) -> Any:
        work = reduce(self, output_tensor, input_tensor, **more)
        hold(input_tensor.clone())
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultAllGather, "__call__", gather_and_hold)
        patch.setattr(DefaultReduceScatter, "__call__", reduce_and_hold)
        return real_peak(world, config)


def test_fsdp2_may_hold_what_gloo_lets_go_late(ranks):
    """Two gradients of a tied embedding are summed right after its only block was reduced."""
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    one_block = ("model.hf_config.num_hidden_layers=1", "data.seq_len=8")
    config = config_of(*WIDE, *one_block, "strategy=zero3", "strategy.implementation=torch")
    plan, prepared_config = planned(config), prepared(config, None)
    # In fp32: attention 2 x 64 x 64 + 2 x 64 x 32, MLP 3 x 64 x 176, two norms; embedding 2048 x 64, one norm.
    assert plan.late_bytes == 4 * (12_288 + 33_792 + 128) + 4 * (131_072 + 64)
    late = max(ranks(real_peak_where_gloo_is_late, prepared_config, world_size=NUM_RANKS))
    assert late >= plan.most_bytes
    measured = max(ranks(real_peak, prepared_config, world_size=NUM_RANKS))
    assert plan.num_bytes <= measured <= plan.most_bytes + FSDP2_BYTES


@pytest.mark.parametrize(("limit", "verdict"), [(99, "no"), (109, "tight"), (110, "yes")])
def test_a_rehearsed_point_is_tight_where_it_fits_unless_gloo_is_late(limit, verdict):
    config = config_of(*WIDE, "strategy=zero3", "strategy.implementation=torch")
    peak = RankPeak(0, "backward", 100, {}, {}, [], late_bytes=10)
    outcome = replace(
        plan_point(config, None, "cpu").outcome,
        memory_gib=limit / 2**30,
        rehearsed=RehearsedPeaks([peak], "cpu", ()),
    )
    assert outcome.verdict == verdict
    assert outcome.fits == (verdict == "yes")
