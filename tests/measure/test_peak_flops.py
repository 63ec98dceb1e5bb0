"""What a rank could compute at most, and by which name."""

from __future__ import annotations

import pytest
import torch

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
    ],
)
def test_a_known_device_has_its_dense_figure(device, dtype, teraflops):
    known = datasheet(device, dtype)
    assert known is not None
    assert (known.flops_per_second, known.source) == (teraflops * 1e12, "datasheet")
    assert known.name == f"{device}, dense {str(dtype).removeprefix('torch.')}"


def test_what_no_data_sheet_says_is_not_guessed():
    assert datasheet("NVIDIA T400", torch.float32) is None
    assert datasheet("Tesla V100-SXM2-16GB", torch.bfloat16) is None


def test_a_peak_is_named_or_measured_and_never_without_a_name():
    with worlds.joined_process_group(device="cpu") as world:
        named = peak_flops(world, torch.float32, 400.0)
        assert named and (named.flops_per_second, named.source) == (400e12, "named")
        assert named.name == "cluster.peak_tflops=400"
        measured = peak_flops(world, torch.float32)
    assert measured and measured.source == "calibrated" and measured.flops_per_second > 1e8
    assert measured.name.startswith("768 x 768 product in float32, 1 rank, CPU, ")


def measured_unless_one_can_not(world: World) -> str | None:
    """Rank 1 asks for a product that torch does not have."""
    peak = peak_flops(world, torch.uint16 if world.rank else torch.float32)
    return peak and peak.name


def test_a_rank_that_can_not_measure_loses_the_peak_alone(ranks):
    assert ranks(measured_unless_one_can_not) == [None, None]
