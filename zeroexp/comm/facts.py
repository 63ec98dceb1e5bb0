"""What the engine and its closed forms need to know of a transport. Nothing else asks which one it is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Facts:
    """One transport, as it carries the moves of these ranks."""

    name: str
    reductions_in_flight: int  # that may be under way beside the one just launched
    bucket_bytes: int | None  # the best size of a reduction; None: a unit
    moves_on_wait: (
        bool  # a move does its work when it is waited for: starting it early gains nothing
    )
    sends_padding: bool
    shares_memory: bool  # ranks read each other's memory, which torch's allocator does not count


# Each reduction in flight holds the gradients of a unit or bucket. Ranks of one host move bytes while they wait for
# them, and one is enough; small buckets win there, since what is handed over is still in the cache. Messages travel
# while backward computes: the second keeps a slow link busy until backward looks again. The links of GPUs are fast,
# and their memory is dear.
TRANSPORTS = {
    "direct": Facts(
        "direct", 1, 4 * MIB, moves_on_wait=True, sends_padding=False, shares_memory=True
    ),
    "gloo": Facts("gloo", 2, None, moves_on_wait=False, sends_padding=False, shares_memory=False),
    "native": Facts(
        "native", 1, None, moves_on_wait=False, sends_padding=True, shares_memory=False
    ),
}
