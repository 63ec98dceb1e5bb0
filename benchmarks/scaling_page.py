"""`python -m benchmarks.scaling_page > docs/scaling.md`: large models on many GPUs, predicted, as a page.

Every row is a rehearsal of the real engine at its world size, once for each network: 25 minutes for all. No GPU is
needed, and nothing here was measured: the page says what is assumed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from benchmarks.table import grid
from zeroexp.config.gpus import GPUS, LINK_SHARE, NETWORKS, USUAL_GPU, Network
from zeroexp.plan.__main__ import composed_points
from zeroexp.plan.outcome import PlannedPoint, RehearsedPeaks
from zeroexp.plan.peak import rehearse_point
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.speed import MEMORY_SHARE, PRODUCT_SHARE, prior_speed
from zeroexp.process import safe_output

GIB, WIDTH = 2**30, 100
SCALED_ON = [NETWORKS[name] for name in ("nvlink-infiniband", "nvlink-ethernet")]
COMMAND = "python -m benchmarks.scaling_page > docs/scaling.md"


@dataclass(frozen=True)
class Scaled:
    """One model of the page."""

    title: str
    words: tuple[str, ...]  # of the command line: the model, and the tokens of a rank's step
    sizes: tuple[int, ...]  # world sizes
    strategies: tuple[str, ...] = ("ddp", "zero1", "zero2", "zero3")


SHARED = (
    *("data=synthetic", "precision=bf16_master", "train.activation_checkpointing=true"),
    *("strategy.implementation=buffer", "cluster.device=cuda"),
)
SIZES = (8, 64, 1024)
MODELS = (
    Scaled(
        "LLaMA 7B, two samples of 2,048 tokens a rank",
        ("model=llama_7b", "data.seq_len=2048", "data.micro_batch_size=2"),
        SIZES,
    ),
    Scaled(
        "LLaMA 2 70B, one sample of 4,096 tokens a rank",
        ("model=llama_70b", "data.seq_len=4096"),
        SIZES,
    ),
)
INTRODUCTION = (
    "How does each strategy scale to a thousand GPUs, and where does it stop? A prediction, for the order of "
    f"strategies, not for milliseconds: nothing was measured. `{COMMAND}` [rehearses](plan.md) the real engine at each "
    "world size."
)
COLUMNS = (
    "*peak*: GiB of the fullest rank, with activations; then ms of the expected step on each network, 35 % to either "
    "side; all at 8, 64 and 1,024 ranks. A rank's work stays the same (weak scaling): what ms grow by is waiting."
)


def assumptions() -> list[str]:
    """Return a sentence for each thing that is assumed."""
    return [
        f"GPUs are the {USUAL_GPU} of its data sheet, without sparsity: {PRODUCT_SHARE:.0%} of its products and "
        f"{MEMORY_SHARE:.0%} of its memory rate are reached, without torch.compile. Eight are a node.",
        *map(_told, SCALED_ON),
        "A message goes round one ring through all ranks, bounded by a node's rate. Nobody else uses the network, and "
        "no rank is slower than another.",
        "bf16 with fp32 masters and gradient sums, AdamW, blocks recomputed in backward, one microbatch a step, one "
        "block gathered ahead. NCCL's own buffers are not in the peak.",
    ]


def main() -> int:
    safe_output.ignore_output_errors()
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(page(MODELS))
    return 0


def page(models: Sequence[Scaled]) -> str:
    assumed = "\n".join(_wrapped(f"* {text}", indent="  ") for text in assumptions())
    parts = ["# Scaling on paper", _wrapped(INTRODUCTION), _wrapped(COLUMNS), *map(section, models)]
    return "\n\n".join([*parts, "## What is assumed", assumed])


def section(model: Scaled) -> str:
    """Return the table of one model: a row for each strategy, a column for each number at each world size."""
    first, *others = (f"{size:,}" for size in model.sizes)
    names = ["peak", *(each.name for each in SCALED_ON)]
    columns = [column for name in names for column in (f"{name}, {first}", *others)]
    found: dict[str, list[list[str]]] = {}
    for planned in planned_points(model):
        found.setdefault(planned.config.strategy.name, []).append(_numbers(planned))
    rows = [
        [name, *(cell for number in zip(*cells, strict=True) for cell in number)]
        for name, cells in found.items()
    ]
    return "\n\n".join([f"## {model.title}", grid(["strategy", *columns], rows)])


def planned_points(model: Scaled) -> list[PlannedPoint]:
    """Plan every strategy at every size."""
    swept = (
        f"strategy={','.join(model.strategies)}",
        f"world_size={','.join(map(str, model.sizes))}",
    )
    return Plans(composed_points([*model.words, *SHARED, *swept])).planned


def _numbers(planned: PlannedPoint) -> list[str]:
    """Return the peak in GiB, and the milliseconds of a step on each network."""
    print(f"{planned.outcome.name}: rehearsing", file=sys.stderr, flush=True)
    found = on_networks(planned, SCALED_ON)
    peak = found[0].fullest.num_bytes / GIB
    return [f"{peak:,.1f}", *(f"{1000 * each.step_seconds[1]:,.0f}" for each in found)]


def on_networks(planned: PlannedPoint, networks: Sequence[Network]) -> list[RehearsedPeaks]:
    """Rehearse the fullest rank of a planned point on GPUs that each of these networks connects."""
    speeds = [prior_speed(planned.machines, "native", network=each) for each in networks]
    ranks = [planned.outcome.fullest_rank]
    return [rehearse_point(planned, ranks=ranks, speed=each) for each in speeds]


def _told(network: Network) -> str:
    inside = LINK_SHARE * GPUS[USUAL_GPU].link_bytes_per_second
    latency, hop = 1e6 * network.latency_seconds, 1e6 * network.hop_seconds
    return (
        f"`{network.name}`: a GPU sends {inside / 1e9:.0f} GB/s inside its node, a node "
        f"{network.node_bytes_per_second / 1e9:.0f} GB/s to others; a move takes {latency:.0f} us, and {hop:.0f} us "
        "more for each further node."
    )


def _wrapped(text: str, indent: str = "") -> str:
    return "\n".join(
        wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)
    )


if __name__ == "__main__":
    sys.exit(main())
