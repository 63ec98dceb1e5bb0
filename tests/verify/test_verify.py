"""`zeroexp verify` names faults by their kind and raises no alarm over right loops."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.silent_loops import BUGS, adamw
from tests.verify.loops import rows
from tests.warm import Warm
from zeroexp.verify.compare_steps import CLIPPED
from zeroexp.verify.local_elements import Places
from zeroexp.verify.loop_to_verify import Loop
from zeroexp.verify.observe import LoopRecorder
from zeroexp.verify.rounding_oracle import Oracle, Updates

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# One of each engine of which a loop is written by hand, and faults that are explained in different ways.
QUICK_RIGHT = [1, 8, 9]
QUICK_BUGS = ["divided_twice", "norm_of_a_shard", "optimizer_before_sharding"]
QUICK_BUGS += ["seeded_by_rank", "mean_of_ranks"]


def answers(
    file: Path, asked: Sequence[tuple[str, int] | tuple[str, int, float]], further: Path = ROOT
) -> list[Any]:
    """What is said of each function on so many ranks. further: a folder of plugins."""
    paths = os.pathsep.join(map(str, (ROOT, further)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    words = ["tests.verify.verify_many", str(file), json.dumps(asked)]
    done = Warm([sys.executable, "-m", *words], cwd=ROOT, env=environment, forks=True)
    printed, errors = done.communicate()
    assert done.returncode == 0, errors
    return json.loads(printed)


def kinds(names: list[str]) -> dict[str, str | None]:
    said = answers(
        ROOT / "benchmarks/silent_loops.py", [(name, BUGS[name].ranks) for name in names]
    )
    return {name: each and each[0] for name, each in zip(names, said, strict=True)}


def alarms(numbers: list[int]) -> dict[str, Any]:
    table = rows()
    said = answers(HERE / "loops.py", [(f"right_{n}", table[n].world) for n in numbers])
    return {str(table[n]): each for n, each in zip(numbers, said, strict=True) if each}


def test_some_faults_are_named_by_their_kind():
    assert kinds(QUICK_BUGS) == {name: BUGS[name].kind for name in QUICK_BUGS}


def test_what_torch_clips_of_a_large_weight_is_within_the_bound():
    """Its norm in float32 is farther off than what else is rounded."""
    torch.manual_seed(0)
    model = nn.Embedding(1 << 16, 64)
    unused: Any = max
    loop = Loop(
        model=model, loss=unused, batch=unused, optimizer=unused, train=unused, max_grad_norm=1.0
    )
    model.weight.grad = torch.randn_like(model.weight)
    exact = model.weight.grad.double().flatten()
    factor, off = Oracle(loop, 1).clipping({"weight": exact})
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    found = (model.weight.grad.double().flatten() - exact * factor).norm() / exact.norm()
    assert CLIPPED * factor < found <= off < 0.01 * factor


def test_a_frozen_integer_parameter_is_left_as_it_is():
    model = nn.Linear(2, 2)
    model.register_parameter("count", nn.Parameter(torch.tensor([3]), requires_grad=False))
    unused: Any = max
    loop = Loop(model=model, loss=unused, batch=unused, optimizer=adamw, train=unused)
    exact, bounds = Updates(loop).step(Oracle(loop, 1).initial, {})
    assert exact["count"].tolist() == [3.0] and bounds["count"] == 0


def test_what_a_fused_step_divides_by_a_loss_scale_is_seen_divided():
    model = nn.Linear(2, 1, bias=False)
    places = Places(model, {"weight": model.weight.detach().clone()})
    recorder, scaler = LoopRecorder(places), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with recorder.recording_step():
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
    (gradient,) = recorder.record.steps[0].gradients
    assert gradient.values.tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_some_right_loops_raise_no_alarm():
    assert {rows()[n].engine for n in QUICK_RIGHT} == {"ddp", "fsdp2", "sharded"}
    assert alarms(QUICK_RIGHT) == {}


# Loops as users write them (masters, freed parameters, schedules), and the kind of what is wrong with them
BY_HAND = {
    "masters": None,
    "masters_of_copied_blocks": None,
    "masters_of_two": None,
    "masters_stay": "stale",
    "freed": None,
    "freed_and_scaled": "scale",
    "normed": None,
    "rate_of_zero": "optimizer",
    "scheduled": None,
    "scheduled_faster": "optimizer",
    "batch_of_rank_0": "data",
    "not_a_number": "unknown",
    "keeps_clipped_gradients": "stale",
    "leaves_out_a_step": "optimizer",
    "clipped_in_bfloat16": None,
    "clipped_by_hand": None,
    "of_the_world": None,
    "of_python": None,
    "of_python_stale": "stale",
    "turned": None,
    "logs_its_own_norm": None,
    "schedule_of_one": None,
    "sums_in_its_step": None,
    "centralizes": None,
    "counts_labels_of_all_ranks": None,
    "counts_by_the_environment": None,
    "counts_by_an_import": None,
    "counts_by_a_group": None,
    "counts_as_it_was_made": None,
    "counts_and_shares": None,
    "counts_and_sums": None,
    "counts_and_takes_a_mean": "scale",
    "sums_in_a_group_of_its_own": None,
    "clips_in_a_hook": None,
    "overflows": None,
    "moves_as_it_overflows": "frozen",
    "overflows_for_a_rule_of_its_own": None,
    "waits_as_it_overflows": None,
    "runs_ahead_as_it_overflows": "optimizer",
    "one_overflows": None,
    "one_overflows_and_is_clipped": None,
    "one_overflows_in_a_fused_step": None,
    "one_overflows_and_moves": "frozen",
    "one_overflows_and_another_moves": "optimizer",
    "one_overflows_on_one_rank": "stale",
    "one_overflows_and_its_schedule_waits": None,
    "masters_overflow": None,
    "of_a_dataclass": None,
    "clips_each_microbatch": "norm",
    "freezes_and_clips": "frozen",
    "trains_what_is_frozen": "frozen",
    "trains_what_is_frozen_and_clips": "frozen",
    "decays_in_its_loss": "weighting",
    "means_and_a_zero": "mean of means",
    "means_of_nearly_as_many": "mean of means",
    "unscaled_once_too_often": "scale",
}


def test_loops_by_hand_are_equal_or_named_by_their_kind():
    said = answers(HERE / "loops_by_hand.py", [(name, 2) for name in BY_HAND])
    assert {n: each and each[0] for n, each in zip(BY_HAND, said, strict=True)} == BY_HAND


# Right loops and wrong ones that one process can not judge, and how what is said of them begins
UNEQUAL = "Loop(loss=...): sums or gathers over ranks what differs between them"
IN_ITS_STEP = "Loop(optimizer=...): sums or gathers over ranks in its step"
NO_STAND_IN = (
    "the plain process: {}: a collective, or a reduction, that one process can not stand in for"
)
REFUSED = {
    "counts_unequal_labels": UNEQUAL,
    "means_beside_unequal_labels": UNEQUAL,
    "gathers_with_gradients": NO_STAND_IN,
    "coalesces_its_counts": NO_STAND_IN,
    "rounds_all_away": "no gradient is more than its rounding, so that none is judged",
    "sums_in_both_steps": IN_ITS_STEP,
    "takes_means_in_both_steps": IN_ITS_STEP,
    "takes_means_by_a_number_that_it_keeps": IN_ITS_STEP,
    "sums_in_a_group_that_it_keeps": IN_ITS_STEP,
    "shards_both_optimizers": NO_STAND_IN,
    "sums_before_and_in_both_steps": IN_ITS_STEP,
    "one_always_overflows": "blocks.0.down.bias: all steps of its optimizer overflow",
}


def test_what_one_process_can_not_stand_in_for_is_refused():
    said = answers(HERE / "loops_by_hand.py", [(name, 2, 300.0) for name in REFUSED])
    for (name, begins), (word, text) in zip(REFUSED.items(), said, strict=True):
        text = re.sub(r"\w+\.py:\d+", "{}", text)
        assert (word, text[: len(begins)]) == ("refused", begins), name


# Loops with two optimizers and weights of one element, and how what is said of them begins
OF_TWO = {
    "two": None,
    "second_decays": "weight_decay is 0.1, and the plain process has 0.0",
    "second_is_first": "lr is 0.01, and the plain process has 0.005",
    "gain_steps_twice": "it steps 2 times",
    "gain_is_left_out": "each rank has the gradient of its own batches",
    "gain_overflows": "it is not finite on rank 0-2",
    "gain_is_zero": "it is zero",
    "gain_is_summed": "it is x 3: the number of ranks",
}


@pytest.mark.slow
def test_what_differs_in_one_of_two_optimizers_or_in_one_number_is_named():
    said = answers(HERE / "loops_by_hand.py", [(name, 3) for name in OF_TWO])
    for (name, begins), each in zip(OF_TWO.items(), said, strict=True):
        assert (each and each[1][: len(begins or "")]) == begins, name


@pytest.mark.slow
def test_a_sum_between_groups_of_ranks_that_is_left_out_is_named():
    ((kind, text, *_),) = answers(HERE / "loops_by_hand.py", [("sums_in_pairs", 4)])
    assert (kind, text) == ("no sum", "ranks 0-1 and 2-3 sum among themselves alone")


@pytest.mark.slow
def test_all_faults_are_named_by_their_kind():
    assert len([each for each in BUGS.values() if each.thread]) >= 25
    assert kinds(list(BUGS)) == {name: each.kind for name, each in BUGS.items()}
    assert (
        answers(
            ROOT / "benchmarks/silent_loops.py", [("zero_right", world) for world in (1, 2, 3, 4)]
        )
        == [None] * 4
    )


@pytest.mark.parametrize(
    "number", [pytest.param(20, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.wide)]
)
def test_as_many_right_loops_raise_no_alarm(number):
    """Engines take turns."""
    assert alarms(list(range(number))) == {}
