"""The planned peak of CPU ranks is that of real ones: of a part of a step, with peers, kernels, autograd and gloo."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.crossed import every_nth
from tests.plan.real_steps import (
    CPU,
    ELEMENT_BYTES,
    ELEMENT_OF_BF16,
    SCRATCH_BYTES,
    Steps,
    among_peers,
    config_of,
    packed_bytes,
    product_bytes,
    quick_or_slow,
)
from zeroexp.config.keys import Config
from zeroexp.measure.memory import AllocationMeter
from zeroexp.plan.hidden_memory import AutogradSums, product_scratch_bytes
from zeroexp.plan.outcome import RankPeak, plan_point
from zeroexp.plan.peak import rehearse_point
from zeroexp.plan.rehearse import rehearse
from zeroexp.plan.storages import Storages

# So many parameters for each token that states and gradients make the peak, and not activations.
TWO = ("world_size=2", "data.global_batch_size=10")
WIDE = ("model=tiny", "data=synthetic", "data.seq_len=8", *TWO)
# Few operations, each of which takes a rehearsal half a millisecond.
VECTORS = ("model=mlp_tiny", "data=vectors", "data.seq_len=8", *TWO)
RANDOM_STATES_BYTES = 24_000  # of torch, Python and numpy, which a rehearsal's checkpoint lacks


def planned(config: Config) -> RankPeak:
    return rehearse_point(plan_point(config, None, "cpu")).fullest


def most(real: list[Steps]) -> int:
    return max(each.peak_bytes for each in real)


# -- a part of a step ------------------------------------------------------------------------------

PARTS = [
    ("zero3", "torch", "strategy.unit=null"),
    ("zero1", "buffer", "strategy.reduce_each=step"),
    # All gradients of a microbatch are one reduction, which is in flight while the next one makes its own.
    ("zero2", "parameter", "strategy.reduce_each=microbatch strategy.unit=model"),
    # Its samples are its largest tensors.
    ("zero3", "buffer", "strategy.reduce_each=step data.seq_len=256"),
]
MORE_PARTS = [
    ("ddp", "torch", "strategy.unit=null"),
    ("zero2", "torch", "strategy.unit=null"),
    ("zero2", "buffer", "strategy.reduce_each=microbatch"),
    ("zero3", "tensor", "strategy.reduce_each=step"),
]


@pytest.mark.parametrize(("stage", "implementation", "words"), quick_or_slow(PARTS, MORE_PARTS))
def test_no_further_microbatch_holds_more(stage, implementation, words):
    engine = (f"strategy={stage}", f"strategy.implementation={implementation}")
    config = config_of(*VECTORS, *engine, *words.split())
    fullest = planned(config)
    whole = rehearse(config, fullest.rank, ranks_per_host=2)
    assert whole.peak_bytes == fullest.num_bytes


# -- kernels and autograd --------------------------------------------------------------------------


ONE_LAYER = "model.hf_config.num_hidden_layers=1"
ONE_BLOCK = (ONE_LAYER, "data.global_batch_size=2", "strategy=zero3")
SCRATCH = {
    "a product, and a norm": (*ONE_BLOCK, "precision=bf16"),
    "a product": (*ONE_BLOCK, "precision=bf16", "optimizer.max_grad_norm=null"),
    # Autograd adds two gradients.
    "a tied embedding under autocast": (
        *(ONE_LAYER, "strategy=ddp", "strategy.implementation=torch", "precision=autocast"),
    ),
}


@pytest.mark.usefixtures("counted")
@every_nth(2, "words", SCRATCH.values(), ids=SCRATCH)
def test_products_and_norms_of_bf16_have_their_scratch(ranks, words):
    config = config_of(*WIDE, *words)
    measured = most(ranks(among_peers, config, 2, world_size=2))
    assert 0 <= measured - planned(config).num_bytes <= packed_bytes(config)


@pytest.mark.usefixtures("counted")
def test_a_bf16_product_has_so_much_scratch_for_each_element_as_a_plan_says():
    """What its thin operands are packed into falls out of the difference, or is little of it."""
    thin = [torch.ones(rows, 16, dtype=torch.bfloat16) for rows in (256, 512)]
    few, many = (product_bytes(each, each.T) for each in thin)
    per_element = (many - few) / (512**2 - 256**2)
    assert abs(per_element - ELEMENT_OF_BF16 - product_scratch_bytes()) < 0.5


def used_twice(weight: Tensor) -> Tensor:
    return (weight * 2).sum() + (weight * 3).sum()


def first_as_a_view(weight: Tensor) -> Tensor:
    return (weight * 2).sum() + (weight.t() * 3).sum()


def first_held_by_a_hook(weight: Tensor) -> Tensor:
    twice, later = weight * 2, weight * 3
    later.register_hook(lambda gradient: held.append(gradient * 3))
    return twice.sum() + later.sum()


def first_used_by_another(weight: Tensor) -> Tensor:
    """The gradient of a sum is that of both its terms, and both are used once more."""
    one, other = weight * 2, weight * 3
    return (one + other).sum() + one.sum() + other.sum()


def residual(weight: Tensor) -> Tensor:
    inner = weight * 2
    return ((inner + torch.tanh(inner)) * 3).sum()


held: list[Tensor] = []
USES = (used_twice, first_as_a_view, first_held_by_a_hook, first_used_by_another, residual)


def backward_of(use: Callable[[Tensor], Tensor]) -> None:
    held.clear()
    weight = torch.zeros(256, 256, requires_grad=True)
    use(weight).backward()


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("use", USES)
def test_a_tensor_that_is_used_twice_has_the_peak_of_real_tensors(use):
    """Gradients are added in place where autograd does so with real tensors, and anew where it does not."""
    gc.collect()
    meter = AllocationMeter(CPU)
    before = meter.peak_bytes() or 0
    backward_of(use)
    measured = (meter.peak_bytes() or 0) - before
    mode = FakeTensorMode()
    storages = Storages(mode, torch.device("cpu"))
    with mode, storages, AutogradSums():
        backward_of(use)
    rehearsed = storages.peaks()["build"].num_bytes
    held.clear()
    # Sums and their gradients have one element.
    assert abs(measured - rehearsed) <= 8 * ELEMENT_BYTES, (measured, rehearsed)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    ("stage", "implementation"), quick_or_slow([("zero3", "buffer")], [("zero1", "torch")])
)
def test_a_cpu_rank_that_saves_holds_the_copy_of_its_state(ranks, tmp_path, stage, implementation):
    words = (f"strategy={stage}", f"strategy.implementation={implementation}")
    config = config_of(*VECTORS, *words, "checkpoint.every=2")
    measured, plan = most(ranks(among_peers, config, 2, tmp_path, world_size=2)), planned(config)
    assert 0 <= measured - plan.num_bytes <= RANDOM_STATES_BYTES < plan.by_kind["checkpoint copy"]


@pytest.mark.slow
def test_a_run_that_saves_at_its_end_alone_holds_the_copy_beside_what_rests():
    config = config_of(*WIDE, "strategy=ddp", "checkpoint.every=10000")
    assert "checkpoint copy" not in planned(config).by_kind
    # On one rank weights and two moments are copied, which is more than the gradients and activations of a step.
    config.world_size = 1
    peak = planned(config)
    assert peak.phase == "step"
    assert peak.num_bytes > 6 * 4 * 223_552


# -- matrices that are whole for a moment -----------------------------------------------------------


@pytest.mark.slow
def test_matrices_that_ranks_bring_together(ranks):
    """One block of wide matrices and few words: the step holds most."""
    few = ("data.vocab_size=32", "model.hf_config.vocab_size=32", *ONE_BLOCK[:2])
    words = ("strategy=zero2", "strategy.implementation=tensor", "optimizer=muon")
    config = config_of(*WIDE, *few, *words, "strategy.matrix_step=gather")
    plan, measured = planned(config), most(ranks(among_peers, config, 2, world_size=2))
    assert plan.phase == "step"
    assert 0 <= measured - plan.num_bytes <= packed_bytes(config)


# -- messages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "kinds", "num_matrices"),
    [("block", (), 2), ("block", ("+optimizer.kinds.vectors.lr=0.5",), 2), ("layer", (), 1)],
)
def test_gradients_are_packed_after_their_weights_are_freed(unit, kinds, num_matrices):
    """Embedding and head, most of this model, move together with the root, or each as a unit of its own.

    A rank of an accelerator holds 14 bytes of bf16 weights, fp32 masters and moments of each parameter that it owns,
    and the sums of units before; beside them the bf16 gradients of one unit, and their fp32 message, also where norms
    are another optimizer's. The unit's own sums come after its gradients.
    """
    words, width = 1 << 16, 64
    sizes = (f"data.vocab_size={words}", f"model.hf_config.vocab_size={words}", "world_size=8")
    model = ("model=tiny", "model.hf_config.tie_word_embeddings=false", "data=synthetic", *sizes)
    batch = ("data.seq_len=8", "data.micro_batch_size=1", "data.global_batch_size=8")
    strategy = ("strategy=zero3", f"strategy.unit={unit}", "precision=bf16_master")
    rank = rehearse(config_of(*model, *batch, *strategy, *kinds))
    message = num_matrices * words * width * 4
    rests = (14 * 2 + 4 * (2 - num_matrices)) * words * width / 8
    assert rank.peak_phase == "backward"
    assert rests + 1.5 * message <= rank.peak_bytes < rests + 1.75 * message


# -- gloo ------------------------------------------------------------------------------------------

FSDP2 = "strategy.implementation=torch"


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_fsdp2_has_the_planned_peak_at_a_reduction_beside_the_copy_of_gloo(ranks):
    few_words = ("data.vocab_size=32", "model.hf_config.vocab_size=32")
    config = config_of(*WIDE, *few_words, "strategy=zero2", FSDP2)
    plan = planned(config)
    copy = max(size for size, _, _ in plan.largest)
    assert plan.by_kind["messages"] == copy
    # A thread of gloo may let go late, on busy cores: of as much once more, which no plan counts.
    measured = most(ranks(among_peers, config, 2, world_size=2))
    assert 0 <= measured - plan.num_bytes <= copy + SCRATCH_BYTES


# -- beside FSDP2 --------------------------------------------------------------------------------------


UNTIED = "model.hf_config.tie_word_embeddings=false"


@every_nth(
    4,
    "theirs, keep, unit",
    [
        (theirs, keep, unit)
        for unit in ("block", "layer")
        for theirs, keep in (("zero3", "last"), ("zero2", "all"))
    ],
)
def test_ranks_on_which_masters_alone_rest_hold_no_more_than_those_of_fsdp2(theirs, keep, unit):
    """FSDP2 casts its fp32 shards as it gathers too, and keeps them gathered until backward where it is called ZeRO-2.

    On GPUs, where messages are the backend's. Rows of a tied embedding are left out: FSDP2 adds their two gradients up
    in bf16.
    """
    words = (*WIDE, f"strategy.unit={unit}", "precision=bf16_master", UNTIED, "world_size=8")
    on_gpus = (*words, "data.global_batch_size=8", "cluster.device=cuda")
    peaks = [
        rehearse_point(plan_point(config_of(*on_gpus, *engine), None, "cuda")).fullest.num_bytes
        for engine in (
            ("strategy=zero3", f"strategy.keep={keep}", "strategy.parameters.dtype=master"),
            (f"strategy={theirs}", "strategy.implementation=torch"),
        )
    ]
    assert peaks[0] <= peaks[1]


def test_a_gpu_before_hopper_reserves_smaller_workspaces():
    """Of cuBLAS, for the two threads that launch: 32 MiB each, or 8 MiB and 128 KiB; in segments of 2 MiB."""
    reserved = {}
    for gpu in ("H100", "A100"):
        config = config_of(*VECTORS, "strategy=zero2", "cluster.device=cuda", f"cluster.gpu={gpu}")
        peaks = rehearse_point(plan_point(config, None, "cuda"), ranks=[0])
        reserved[gpu] = peaks.fullest.reserved_bytes
    assert reserved["H100"] - reserved["A100"] == 2 * (32 - 10) << 20
