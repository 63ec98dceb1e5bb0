"""What ranks do in test_traffic.py."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from zeroexp.measure.traffic import WireMeter
from zeroexp.process import world

PAYLOADS = (0, 1_000, 1_000_000, 3_000_000)  # bytes


def prepare(folder: Path) -> None:
    """Everything is imported above."""


def main(folder: Path, *, device: str) -> None:
    """Rank 0 sends each payload to rank 1, and notes what its meter saw."""
    with world.joined_process_group(device=device) as here:
        seen: list[int | None] = []
        for num_bytes in PAYLOADS:
            meter = WireMeter(here.backend)
            payload = torch.zeros(num_bytes, dtype=torch.uint8)
            if here.rank == 0:
                dist.send(payload, 1)
            else:
                dist.recv(payload, 0)
            seen.append(meter.sent_bytes())
            world.barrier()
        (folder / f"seen{here.rank}.json").write_text(json.dumps(seen))
