"""Traits of a transport: what the engine and its closed forms need to know of it. No other code asks which it is."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
ALL = "all"  # Options.offload: parameters rest on the host, too
ON_DEVICE, ON_HOST = 0, 1  # places of masters; so are those above, of a file


@dataclass(frozen=True)
class TransportTraits:
    """How one transport carries moves, as far as the engine needs to know."""

    name: str
    reductions_in_flight: int  # reductions that may be in flight beside the one just launched
    bucket_bytes: int | None  # the best size of a reduction; None: a whole unit
    # A move does its work in `wait`, so starting it early gains nothing, and a rank gathers without the others: it
    # copies out of their memory.
    moves_on_wait: bool
    # Moves are the backend's own collectives, which send padding too: all ranks issue the same ones.
    is_collective: bool
    shares_memory: bool  # ranks of a host read each other's memory, uncounted by torch's allocator


# Each reduction in flight holds the gradients of a unit or bucket. Ranks of one host move bytes only while they wait
# for a reduction, so one is enough; small buckets are faster there, since their gradients are still in the cache.
# Messages travel while backward computes, and a second reduction keeps a slow link busy until backward launches the
# next. The links of GPUs are fast and their memory is scarce, so one is enough.
TRAITS = {
    "direct": TransportTraits(
        "direct", 1, 4 * MIB, moves_on_wait=True, is_collective=False, shares_memory=True
    ),
    "gloo": TransportTraits(
        "gloo", 2, None, moves_on_wait=False, is_collective=False, shares_memory=False
    ),
    # Some peers share this rank's host, and messages go to the others.
    "mixed": TransportTraits(
        "mixed", 2, None, moves_on_wait=False, is_collective=False, shares_memory=True
    ),
    "native": TransportTraits(
        "native", 1, None, moves_on_wait=False, is_collective=True, shares_memory=False
    ),
}
