"""Seconds of a rehearsed step: what each operation costs, and when compute stands still for a move."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.composing import composed
from tests.plan.real_steps import NUM_RANKS, config_of
from tests.small_disks import files_of_at_most
from zeroexp.comm.base import Pending
from zeroexp.config.gpus import GPUS as CATALOGUE
from zeroexp.config.gpus import LINK_SHARE, NETWORKS
from zeroexp.config.job_shape import JobShape
from zeroexp.config.keys import Config, ConfigError
from zeroexp.measure.communication_overlap import meter
from zeroexp.plan import peak
from zeroexp.plan.machines import Machines
from zeroexp.plan.outcome import plan_point
from zeroexp.plan.peak import rehearse_point, with_rehearsal
from zeroexp.plan.rehearse import rehearse
from zeroexp.plan.speed import (
    Calibration,
    Speed,
    calibration_path,
    load,
    prior_speed,
    save,
    speed_of,
    this_machine,
)
from zeroexp.plan.timing import Seconds, Timeline, _flops, step_seconds

SPEED = Speed(
    label="made up",
    product_rates={"float32": {1: 1e6}},
    bytes_per_second=1e9,
    launch_seconds=0.0,
    latency_seconds=0.5,
    link_bytes_per_second=100.0,
)
PRODUCT_SECONDS = 2 * 100**3 / 1e6  # two operations for each of 100^3 pairs: 2 s


def seconds_of(speed: Speed, work: Callable[[Tensor], object]) -> Seconds:
    """What this work on a matrix takes."""
    timeline = Timeline(speed)
    with FakeTensorMode():
        left = torch.empty(100, 100)
        with timeline:
            timeline.enter("forward")
            work(left)
    return timeline.phases["forward"]


def walk(speed: Speed, num_products: int, num_bytes: int) -> Seconds:
    """A move is issued, products run beside it, and it is waited for."""

    def work(left: Tensor) -> None:
        with meter.timing("gather", "unit") as move:
            move.num_bytes, move.in_flight = num_bytes, True
            pending = Pending([])
            pending.move = move
        for _ in range(num_products):
            left @ left
        pending.wait()

    return seconds_of(speed, work)


@pytest.mark.parametrize(
    ("num_products", "exposed"), [(0, 5.5), (1, 5.5 - PRODUCT_SECONDS), (3, 0.0)]
)
def test_a_move_is_exposed_as_far_as_compute_does_not_cover_it(num_products, exposed):
    """500 bytes take 0.5 s and 5 s on the links, products 2 s each."""
    seconds = walk(SPEED, num_products, 500)
    assert seconds.compute == pytest.approx(num_products * PRODUCT_SECONDS)
    assert seconds.exposed == pytest.approx(exposed)


def test_a_move_that_works_in_its_wait_is_exposed_whatever_runs_beside_it():
    assert walk(replace(SPEED, moves_on_wait=True), 3, 500).exposed == pytest.approx(5.5)


@pytest.mark.parametrize(
    ("launch_seconds", "seconds"),
    [(0.25, 0.25 + 2 * PRODUCT_SECONDS), (4.0, 3 * 4.0 + PRODUCT_SECONDS)],
)
def test_a_gpu_waits_only_for_what_its_host_has_not_launched_yet(launch_seconds, seconds):
    """A first product waits for its launch; a second one either for the first, or for its own launch."""
    speed = replace(SPEED, launch_seconds=launch_seconds, overlaps_launch=True)
    # A view is launched as well, and occupies no device.
    found = seconds_of(speed, lambda left: (left @ left, left.t() @ left))
    assert found.compute == pytest.approx(seconds, abs=1e-3)


def test_a_calibrated_operation_takes_its_launch_its_bytes_and_its_products():
    factors = {"launches: forward": 2.0, "products: bytes": 3.0, "products: products": 0.5}
    found = seconds_of(
        replace(SPEED, launch_seconds=1.0, factors=factors), lambda left: left @ left
    )
    # Three matrices of 40,000 bytes.
    spent = dict(zip(factors, (1.0, 1.2e-4, PRODUCT_SECONDS), strict=True))
    assert found.spent == pytest.approx(spent)
    assert found.compute == pytest.approx(2.0 + 3.6e-4 + PRODUCT_SECONDS / 2)


@pytest.mark.parametrize(("rows", "rate"), [(1, 1e9), (64, 1e9), (128, 2e9), (512, 4e9)])
def test_a_product_takes_the_rate_of_its_smallest_dimension_with_its_operands_in_memory(rows, rate):
    rates = {"float32": {64: 1e9, 256: 4e9}}
    speed = replace(SPEED, product_rates=rates, products_read_memory=True)
    for shapes in [(rows, 600, 700), (600, rows, 700), (600, 700, rows)]:
        spent = seconds_of(speed, lambda _, s=shapes: torch.empty(s[:2]) @ torch.empty(s[1:])).spent
        assert spent == pytest.approx({"products: products": 2 * 600 * 700 * rows / rate})


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_whose_heads_share_keys_counts_the_products_of_every_head(kernel):
    attention = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    query, key = torch.empty(2, 8, 64, 16, device="meta"), torch.empty(2, 2, 32, 16, device="meta")
    assert _flops(attention, (query, key, key), {}, None) == 2 * 2 * (2 * 8 * 64 * 32 * 16)
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward")
    assert _flops(backward, (query, query, key, key), {}, None) == 5 * 2 * (2 * 8 * 64 * 32 * 16)


def test_what_fakes_alone_are_asked_costs_no_launch():
    """As many operations as real tensors see: autograd asks fakes for their device thousands of times."""
    timeline, real = Timeline(replace(SPEED, launch_seconds=1.0)), Operations()
    modes = [(FakeTensorMode(), timeline), (nullcontext(), real)]
    for tensors, watching in modes:
        with tensors:
            module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
            with watching:
                timeline.enter("step")
                module(torch.empty(3, 8)).sum().backward()
    phases = timeline.phases
    assert phases["step"].spent["launches: step"] == real.number > 0


def test_what_allocates_or_shows_memory_moves_no_bytes():
    def work(whole: Tensor) -> None:
        whole.new_empty(50).split([20, 30])
        whole.as_strided((10,), (1,)).unsqueeze(0)
        torch.nn.functional.linear(whole[None], whole.t())  # reshaped in C++

    spent = seconds_of(replace(SPEED, launch_seconds=1.0), work).spent
    assert {*spent} == {"launches: forward", "products: products", "products: bytes"}


class Operations(TorchDispatchMode):
    """Counts what is dispatched."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_collectives_that_nobody_tells_widen_the_range():
    phases = {"backward": Seconds(compute=4.0, exposed=2.0), "step": Seconds(compute=1.0)}
    assert step_seconds(phases, 8.0, 0.0) == (8.0, 8.0, 15.0)


MLP = ("model=mlp_tiny", "data=vectors", "data.seq_len=1", "cluster.device=cuda")


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_what_fsdp2_sends_takes_as_long_as_its_closed_form_tells(stage):
    """The output of its reduce-scatters, which a rehearsal shows, is a part of what it sends."""
    config = config_of(*MLP, f"strategy={stage}", "strategy.implementation=torch")
    planned, speed = plan_point(config, None, "cuda"), replace(SPEED, link_bytes_per_second=1e4)
    traffic = planned.form.traffic(0)
    seconds = sum(traffic.bytes_by_kind.values()) / 1e4 + sum(traffic.calls_by_kind.values()) / 2
    found = rehearse_point(planned, ranks=[0], speed=speed)
    assert found.step_seconds[1] == pytest.approx(seconds)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_a_step_of_many_microbatches_reduces_as_often_as_all_of_them_do(strategy):
    words = (*MLP, f"strategy={strategy}", f"data.global_batch_size={NUM_RANKS * 9}")
    planned = plan_point(config_of(*words), None, "cuda")
    speed = replace(SPEED, product_rates={"float32": {1: 1e9}}, link_bytes_per_second=1e6)
    few = rehearse_point(planned, ranks=[0], speed=speed).step_seconds
    whole = rehearse(planned.config, 0, speed=speed).seconds
    assert few[1] == pytest.approx(step_seconds(whole, 0.0, 0.0)[1], rel=0.02)


@pytest.mark.parametrize(
    ("words", "device", "transport"),
    [
        (["strategy=zero3"], "cpu", "direct"),
        (["strategy=zero3", "strategy.gather_codec=int8"], "cpu", "gloo"),
        (["strategy=zero3", "strategy.implementation=torch"], "cpu", "gloo"),
        (["strategy=ddp", "strategy.implementation=torch"], "cpu", "gloo"),
        (["strategy=zero3"], "cuda", "native"),
        (["strategy=zero3", "strategy.implementation=torch"], "cuda", "native"),
    ],
)
def test_the_speed_is_that_of_the_transport_that_the_engine_uses(
    monkeypatch, words, device, transport
):
    def told(config: Config, machines: Machines, transport: str) -> Speed:
        raise ConfigError(transport)

    monkeypatch.setattr(peak, "speed_of", told)
    planned = plan_point(config_of("model=mlp_tiny", "data=vectors", *words), None, device)
    assert with_rehearsal(planned).outcome.not_rehearsed == transport


def test_a_calibration_is_of_ranks_of_one_thread_that_have_a_core_each(monkeypatch, tmp_path):
    rates, links = {"float32": {"64": 1e9}}, {"direct": [1e-5, 1e9]}
    calibration = Calibration(this_machine(), "2", rates, 1e9, 1e-5, links)
    save(calibration, calibration_path(tmp_path))
    config, many = Config(outputs=str(tmp_path)), Machines("cpu", JobShape(1, 1 << 20))
    alone = Machines("cpu", JobShape(1, 1))
    assert "not calibrated" not in speed_of(config, alone, "direct").label
    assert "not calibrated" in speed_of(config, many, "direct").label
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # as in a container
    pair = Machines("cpu", JobShape(1, 2))
    assert "not calibrated" in speed_of(config, pair, "direct").label
    config.cluster.threads_per_rank = 2
    assert "not calibrated" in speed_of(config, alone, "direct").label


ONE_NODE, TWO_NODES = (Machines("cuda", JobShape(nodes, 8)) for nodes in (1, 2))
ONE_HOST = Machines("cpu", JobShape(1, 2))


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_prior_of_a_gpu_is_its_data_sheet_and_the_network_between_nodes(name):
    gpu = CATALOGUE[name]
    for network in NETWORKS.values():
        inside, between = (
            prior_speed(each, "native", gpu, network) for each in (ONE_NODE, TWO_NODES)
        )
        assert "not calibrated" in inside.label
        assert inside.product_rate(torch.bfloat16) < 1e12 * gpu.tflops["bfloat16"]
        assert inside.link_bytes_per_second == LINK_SHARE * gpu.link_bytes_per_second
        slower = min(inside.link_bytes_per_second, network.node_bytes_per_second)
        assert between.link_bytes_per_second == slower
        assert between.link_rate("gather") == slower
        assert between.link_rate("secondary") == inside.link_bytes_per_second
        assert between.latency_seconds > inside.latency_seconds


def test_gpus_of_a_node_share_its_network_for_what_crosses_it():
    """Of a ring one of eight ranks sends out of its node; of what goes to each rank 8 of 15 parts leave it."""
    words = "cluster.gpu=H100", "cluster.network=nvlink-ethernet", "world_size=16"
    speed = speed_of(composed("model=tiny", "cluster=slurm", *words), TWO_NODES, "native")
    node = NETWORKS["nvlink-ethernet"].node_bytes_per_second
    assert speed.link_rate("gather") == pytest.approx(node)
    assert speed.link_rate("matrices") == pytest.approx(node / 8 * 15 / 8)


def test_the_prior_of_a_cpu_is_that_of_one_core():
    speed = prior_speed(ONE_HOST, "direct")
    assert speed.label.endswith("not calibrated: run zeroexp calibrate")
    assert speed.product_rate(torch.bfloat16) < speed.product_rate(torch.float32)
    assert speed.product_rate(torch.float32, 1) < speed.product_rate(torch.float32, 64)
    assert speed.moves_on_wait and not prior_speed(ONE_HOST, "gloo").moves_on_wait


def test_a_calibration_is_kept_and_one_of_another_machine_is_refused_in_one_line(tmp_path):
    path = calibration_path(tmp_path)
    assert load(path) is None
    here = Calibration(
        this_machine(), "2", {"float32": {"64": 1e9}}, 1e9, 1e-5, {"gloo": [1e-3, 1e9]}
    )
    save(here, path)
    assert load(path) == here
    path.write_text(json.dumps({**asdict(here), "what_it_had_before": 1}))
    assert load(path) == here
    path.write_text(json.dumps({**asdict(here), "machine": "an abacus, 1 cores"}))
    with pytest.raises(ConfigError, match="of another machine \\(an abacus, 1 cores") as refused:
        load(path)
    assert "\n" not in str(refused.value) and "zeroexp calibrate" in str(refused.value)
    for wrong in (
        {"bytes_per_second": 0},
        {"bytes_per_second": "fast"},
        {"products": {"float32": {"64": float("nan")}}},
        {"products": {"float32": [1e9]}},
        {"links": {"gloo": [1e-3, -1e9]}},
        {"links": {"gloo": [1e-3]}},
        {"launch_seconds": -1e-5},
    ):
        path.write_text(json.dumps({**asdict(here), **wrong}))
        with pytest.raises(ConfigError, match=r"no calibration .*run zeroexp calibrate again"):
            load(path)


def test_a_disk_that_fills_leaves_the_calibration_of_before(tmp_path):
    path = calibration_path(tmp_path)
    save(GPUS, path)
    with files_of_at_most(10), pytest.raises(OSError, match="too large"):
        save(GPUS, path)
    assert load(path) == GPUS and [*path.parent.iterdir()] == [path]


def test_without_a_calibration_that_can_be_read_a_peak_is_rehearsed_as_well(tmp_path):
    calibration_path(tmp_path).parent.mkdir()
    calibration_path(tmp_path).write_text("{")
    config = config_of("model=mlp_tiny", "data=vectors", f"outputs={tmp_path}")
    peaks = rehearse_point(plan_point(config, None, "cpu"))
    assert peaks.fullest.num_bytes > 0 and "no calibration" in peaks.speed


def test_a_calibration_that_can_not_be_read_hides_no_word_of_the_line(tmp_path):
    file = calibration_path(tmp_path, "cuda")
    file.parent.mkdir()
    file.write_text("{")
    config = Config(outputs=str(tmp_path))
    config.cluster.network = "infiniband-hdr"
    label = speed_of(config, TWO_NODES, "native").label
    assert label.startswith("NVIDIA H100, infiniband-hdr") and "no calibration" in label
    config.cluster.gpu = "L4"
    assert (
        speed_of(config, TWO_NODES, "native").label == "NVIDIA L4, infiniband-hdr, not calibrated"
    )


GPUS = Calibration(
    machine="8 x Abacus",
    torch="2",
    products={"float32": {"16": 1e12, "4096": 4e12}},
    bytes_per_second=1e12,
    launch_seconds=1e-6,
    links={"native": [1e-5, 1e11]},
    device="cuda",
)


def test_a_calibration_of_gpus_holds_on_machines_without_any(tmp_path, monkeypatch):
    """Plans of GPUs take its rates, and its links inside a node; those between nodes stay the prior's."""
    monkeypatch.chdir(tmp_path)
    config, named = Config(outputs="elsewhere"), Config(outputs="elsewhere")
    named.cluster.gpu = "B200"
    assert speed_of(config, ONE_NODE, "native") == prior_speed(ONE_NODE, "native")
    save(GPUS, calibration_path(Path("elsewhere"), "cuda"))
    assert speed_of(Config(), ONE_NODE, "native") == prior_speed(ONE_NODE, "native")
    inside, between = speed_of(config, ONE_NODE, "native"), speed_of(config, TWO_NODES, "native")
    assert inside.label == "calibrated on 8 x Abacus"
    assert inside.product_rate(torch.float32, 4096) == pytest.approx(4e12)
    assert inside.overlaps_launch
    assert (inside.latency_seconds, inside.link_bytes_per_second) == (1e-5, 1e11)
    assert between.label == "calibrated on 8 x Abacus; links of nvlink-infiniband, not calibrated"
    assert between.product_rates == inside.product_rates
    network = prior_speed(TWO_NODES, "native").link_bytes_per_second
    assert between.link_bytes_per_second == min(network, 1e11)
    groups = composed("strategy.replicas=2", "world_size=16", "data.global_batch_size=16")
    groups.outputs = "elsewhere"  # each lies in a node
    assert speed_of(groups, TWO_NODES, "native").link_rate("gather") == 1e11
    not_measured = speed_of(named, ONE_NODE, "native")
    assert not_measured.label.startswith("NVIDIA B200")
    assert speed_of(config, ONE_HOST, "direct") == prior_speed(ONE_HOST, "direct")
