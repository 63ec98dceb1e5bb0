"""What a planner is told of a point, and what it may answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Said = float | str  # bytes, or why the planner can't say
Answer = tuple[Said, Said]  # model states, and the peak
NO_PEAK = "model states alone"


class CannotSay(ValueError):
    """The planner has no word for this point; the message is the reason."""


def need(holds: bool, reason: str) -> None:
    if not holds:
        raise CannotSay(reason)


@dataclass(frozen=True)
class Point:
    """One point in numbers; bytes are of one rank."""

    name: str
    source: str  # who measured: cpu (here) | gpu | published
    config: dict[str, Any]  # ours
    strategy: str
    implementation: str
    precision: str
    world_size: int
    micro_batch: int
    seq_len: int
    recompute: str  # none | full | selective
    num_parameters: int
    largest_module: int  # parameters that one module has itself
    # layers, hidden, heads, kv_heads, ffn, vocab, tied, gated; nothing for a model that is no transformer
    shape: dict[str, Any] = field(default_factory=dict[str, Any])
    scale: float = 1.0  # the published number of parameters, over the model's
    reserved: bool = False  # the peak is what a GPU's allocator reserved
    states: float | None = None  # measured after backward, the mean over ranks
    peak: float | None = None  # measured, of the fullest rank

    @property
    def stage(self) -> str:
        return self.strategy.removesuffix("_allreduce")

    def needs_stage(self, *stages: str) -> None:
        need(self.stage in stages, f"no word for {self.stage}")

    def needs_dtypes(self, *precisions: str) -> None:
        need(self.precision in precisions, f"no word for these dtypes ({self.precision})")

    def needs_transformer(self) -> None:
        need(bool(self.shape), "transformers alone")
