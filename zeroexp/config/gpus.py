"""GPUs and networks by name: what the data sheets of their vendors say, for plans and for utilisation. No torch.

Figures are peaks without sparsity. Memory is the data sheet's GB, read as GiB; a driver shows up to 2 % less of it (L4:
6 %), and cluster.reserved_gib sets that aside. A link is one direction of what joins the GPU to the others of its node,
which is half of the sum that data sheets print. Sources:

    A100     NVIDIA A100 Tensor Core GPU data sheet (SXM, 80 GB), June 2021
    H100     NVIDIA H100 Tensor Core GPU data sheet (SXM), March 2023
    H200     NVIDIA H200 Tensor Core GPU data sheet (SXM), November 2023
    B200     NVIDIA Blackwell architecture technical brief and HGX B200 data sheet, March 2024
    L4       NVIDIA L4 Tensor Core GPU data sheet, March 2023; its link is PCIe 4.0 of 16 lanes
    MI300X   AMD Instinct MI300X data sheet, December 2023; its links are seven of Infinity Fabric
"""

from __future__ import annotations

from dataclasses import dataclass

# Dense teraflops of data sheets, by the first words of the device's name: float32 without TF32, which torch
# does not use unless it is told to; bfloat16 and float16 on tensor cores. A longer name comes before its beginning.
# What goes on with one of OTHERS is another device, or a part of this one.
OTHERS = {"MIG", "Laptop", "NVL", "D"}
DENSE = {
    "NVIDIA B200": {"float32": 75.0, "bfloat16": 2250.0, "float16": 2250.0},
    "NVIDIA H200": {"float32": 67.0, "bfloat16": 989.5, "float16": 989.5},
    "NVIDIA H100 PCIe": {"float32": 51.2, "bfloat16": 756.4, "float16": 756.4},
    "NVIDIA H100 NVL": {"float32": 60.0, "bfloat16": 835.5, "float16": 835.5},
    "NVIDIA H100": {"float32": 67.0, "bfloat16": 989.5, "float16": 989.5},
    "NVIDIA A100": {"float32": 19.5, "bfloat16": 312.0, "float16": 312.0},
    "NVIDIA L40S": {"float32": 91.6, "bfloat16": 362.0, "float16": 362.0},
    "NVIDIA L4": {"float32": 30.3, "bfloat16": 121.0, "float16": 121.0},
    "AMD Instinct MI300X": {"float32": 163.4, "bfloat16": 1307.4, "float16": 1307.4},
    "NVIDIA GeForce RTX 4090": {"float32": 82.6, "bfloat16": 165.2, "float16": 165.2},
    "Tesla V100-PCIE": {"float32": 14.0, "float16": 112.0},
    "Tesla V100": {"float32": 15.7, "float16": 125.0},
}


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; a key of DENSE is its name."""

    name: str
    memory_gib: float
    memory_bytes_per_second: float
    link_bytes_per_second: float  # of one direction
    workspace_bytes: int = 32 << 20  # of cuBLAS, for each thread that launches: torch asks for it
    unseen_share: float = 0.02  # of its memory, at most, that a driver does not show

    @property
    def tflops(self) -> dict[str, float]:
        """Return 1e12 floating-point operations a second, by dtype."""
        return DENSE[self.name]


@dataclass(frozen=True)
class Network:
    """What joins nodes of GPUs, as it is reached in practice. Bytes are those of one direction."""

    name: str
    node_bytes_per_second: float  # of one node, to the others
    latency_seconds: float  # of a move inside a node
    hop_seconds: float  # more for each further node


BEFORE_HOPPER = (8 << 20) + (128 << 10)  # see Gpu.workspace_bytes
# GiB and bytes a second of memory; bytes a second of links.
GPUS = {
    "H100": Gpu("NVIDIA H100", 80, 3.35e12, 450e9),
    "A100": Gpu("NVIDIA A100", 80, 2.039e12, 300e9, BEFORE_HOPPER),
    "H200": Gpu("NVIDIA H200", 141, 4.8e12, 450e9),
    "B200": Gpu("NVIDIA B200", 180, 8.0e12, 900e9),
    "L4": Gpu("NVIDIA L4", 24, 0.3e12, 32e9, BEFORE_HOPPER, 0.06),
    "MI300X": Gpu("AMD Instinct MI300X", 192, 5.3e12, 448e9),
}
USUAL_GPU = "H100"
# Eight ports of 400 Gbit/s a node, four of 200, one of 100; nine tenths of each are reached.
NETWORKS = {
    each.name: each
    for each in (
        Network("nvlink-infiniband", 8 * 45e9, 20e-6, 5e-6),
        Network("nvlink-ethernet", 11e9, 20e-6, 25e-6),
        Network("infiniband-hdr", 4 * 22.5e9, 20e-6, 5e-6),
    )
}
USUAL_NETWORK = "nvlink-infiniband"
LINK_SHARE = 0.8  # of a GPU's links that large messages reach
