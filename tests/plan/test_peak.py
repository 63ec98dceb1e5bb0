"""A plan rehearses fewer microbatches than a step has, and finds the peak of all of them; gloo's copies are in it."""

from __future__ import annotations

import pytest

from tests.plan.test_absent_neighbours import real_peak
from tests.plan.test_rehearse import FSDP2_BYTES, config_of
from zeroexp.config import Config
from zeroexp.measure.memory import count_cpu_allocations
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.machines import machines_of
from zeroexp.plan.outcome import RankPeak, outcome_of
from zeroexp.plan.peak import rehearse_fullest_rank
from zeroexp.plan.rehearse import prepared, rehearse

NUM_RANKS, NUM_MICROBATCHES = 2, 5
# So many parameters for each token that states and gradients make the peak, and not activations.
WIDE = (
    *("model=tiny", "data=synthetic", "data.seq_len=8", f"world_size={NUM_RANKS}"),
    f"data.global_batch_size={NUM_MICROBATCHES * NUM_RANKS}",
)
SAMPLE_BYTES = 2 * 8 * 8  # tokens and labels of a microbatch, which are there before it begins


def planned(config: Config) -> RankPeak:
    machines = machines_of(config, "cpu")
    form = form_of(config, build_on_meta(config), machines.transport)
    return rehearse_fullest_rank(config, machines, form, outcome_of("", config, form, machines))


@pytest.mark.parametrize(
    ("stage", "implementation", "reduce_each"),
    [
        ("ddp", "torch", None),
        ("zero2", "torch", None),
        ("zero3", "torch", None),
        ("zero1", "buffer", "step"),
        ("zero2", "buffer", "microbatch"),
        ("zero3", "tensor", "step"),
    ],
)
def test_no_further_microbatch_holds_more(stage, implementation, reduce_each):
    config = config_of(*WIDE, f"strategy={stage}", f"strategy.implementation={implementation}")
    config.strategy.reduce_each = reduce_each
    fullest = planned(config)
    (whole,) = rehearse(config, ranks=[fullest.rank], reads=False, ranks_per_host=NUM_RANKS).ranks
    assert 0 <= whole.peak_bytes - fullest.num_bytes <= NUM_MICROBATCHES * SAMPLE_BYTES


def test_fsdp2_has_the_planned_peak_at_a_reduction_beside_the_copy_of_gloo(ranks):
    """A thread of gloo may let go of a copy late, so that one more is held than is planned."""
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    few_words = ("data.vocab_size=32", "model.hf_config.vocab_size=32")
    config = config_of(*WIDE, *few_words, "strategy=zero2", "strategy.implementation=torch")
    plan = planned(config)
    copy = max(size for size, _, _ in plan.largest)
    assert plan.by_kind["messages"] == copy
    measured = max(ranks(real_peak, prepared(config, None), world_size=NUM_RANKS))
    known = FSDP2_BYTES + NUM_MICROBATCHES * SAMPLE_BYTES
    assert 0 <= measured - plan.num_bytes <= known + copy
