"""What a rank could compute at most, and by which name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from zeroexp.measure import peak_flops as peaks
from zeroexp.measure.peak_flops import datasheet, peak_flops
from zeroexp.process import world as worlds
from zeroexp.process.world import World


@pytest.mark.parametrize(
    ("device", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.5),  # 1979 counts sparsity
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.4),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),  # 156 is TF32
        ("NVIDIA L40S", torch.bfloat16, 362.0),
        ("NVIDIA L4", torch.bfloat16, 121.0),
        ("NVIDIA A100 80GB PCIe", torch.bfloat16, 312.0),
        ("Tesla V100-SXM2-16GB", torch.float32, 15.7),
        ("Tesla V100-PCIE-16GB", torch.float32, 14.0),
    ],
)
def test_a_known_device_has_its_dense_figure(device, dtype, teraflops):
    assert datasheet(device, dtype) == teraflops * 1e12


@pytest.mark.parametrize(
    "device",
    [
        *("NVIDIA L40", "NVIDIA H200 NVL", "NVIDIA A100X"),
        *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 NVL MIG 1g.12gb"),
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"),
    ],
)
def test_another_device_of_such_a_name_has_no_figure(device):
    assert datasheet(device, torch.bfloat16) is None


def test_what_no_data_sheet_says_is_not_guessed():
    assert datasheet("NVIDIA T400", torch.float32) is None
    assert datasheet("Tesla V100-SXM2-16GB", torch.bfloat16) is None


def test_a_peak_is_named_or_measured_and_never_without_a_name():
    with worlds.joined_process_group(device="cpu") as world:
        named = peak_flops(world, torch.float32, 400.0)
        assert [*named.values()] == [400e12, "named", "cluster.peak_tflops=400"]
        before = torch.get_rng_state()
        measured = peak_flops(world, torch.float32)
    assert torch.equal(torch.get_rng_state(), before), "the last checkpoint holds the run's own"
    rate, source, name = measured.values()
    assert source == "calibrated" and rate > 1e8
    assert name.startswith("fastest product of matrices in float32, 1 rank, CPU, ")


def test_the_fastest_of_the_sizes_counts_and_two_runs_name_one_peak(monkeypatch):
    """A CPU without instructions for bf16 multiplies small matrices four times as fast as large ones."""
    slow, names = {64: 1e-5, 256: 1e-2, 768: 1e-1}, set[str]()
    for seconds in (slow, {64: 1e-2, 256: 1e-2, 768: 1e-3}):
        monkeypatch.setattr(peaks, "_seconds", lambda left, right, of=seconds: of[len(left)])
        with worlds.joined_process_group(device="cpu") as world:
            rate, _, name = peak_flops(world, torch.bfloat16).values()
        names.add(name)
        assert rate == max(2 * size**3 / its for size, its in seconds.items())
    assert len(names) == 1


def test_a_slow_product_is_not_tried_again(monkeypatch):
    """A finished run waits for it: bf16 without instructions for it takes seconds a product."""
    asked: list[int] = []

    def seconds(left: torch.Tensor, right: torch.Tensor) -> float:
        assert len(left.unique()) > 1 < len(right.unique()), "of equal values a GPU is faster"
        asked.append(len(left))
        return 1.0

    monkeypatch.setattr(peaks, "_seconds", seconds)
    with worlds.joined_process_group(device="cpu") as world:
        peaks.measure_peak_flops(world, torch.bfloat16)
    assert asked == peaks.SIZES["cpu"]


def measured_unless_one_can_not(world: World) -> dict[str, Any]:
    """Rank 1 asks for a product that torch does not have."""
    return peak_flops(world, torch.uint16 if world.rank else torch.float32)


def test_a_rank_that_can_not_measure_loses_the_peak_alone(ranks):
    assert ranks(measured_unless_one_can_not) == [{}, {}]


def peak_of_unlike_gpus(world: World, *names: str) -> dict[str, Any]:
    """Products take rank 1 twice as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda _: names[world.rank])
        patch.setattr(peaks, "measure_peak_flops", lambda *_: 4e12 / (1 + world.rank))
        return peak_flops(replace(world, device=torch.device("cuda")), torch.bfloat16)


def test_ranks_of_unlike_gpus_find_one_peak(ranks):
    """Else the one whose GPU has no data sheet here waits for the other, to measure at once."""
    mean, *others = ranks(peak_of_unlike_gpus, "NVIDIA H100 NVL", "Tesla V100-SXM2-16GB")
    assert (mean["peak_flops_per_second"], mean["peak_flops_source"]) == (3e12, "calibrated")
    assert [each["peak_flops_per_second"] for each in others] == [3e12]
    known = ranks(peak_of_unlike_gpus, "NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB")
    name = "NVIDIA H100 NVL and NVIDIA A100-SXM4-80GB, dense bfloat16"
    assert [[*each.values()] for each in known] == [[573.75e12, "datasheet", name]] * 2
