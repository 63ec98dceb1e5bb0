"""What moves are asked to be, and traits of a transport: what the engine and its closed forms need to know of it.

`zero/` asks for a trait, never for the name of a transport.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.cut.chunk import HOST_PARTS
from zeroexp.cut.rank_grid import GridOptions

MIB = 1 << 20
ON_DEVICE, ON_HOST = 0, 1  # places of masters; so are those above, of a file


@dataclass(frozen=True, kw_only=True)
class MoveOptions(GridOptions):
    """How an engine moves bytes between ranks, and to the host.

    Codecs, secondary copies and pieces on the host travel by messages, since memory that is shared is not sent.
    """

    transport: str = "auto"  # a word of comm.collectives.TRANSPORTS
    # Reductions have a communicator of their own over the backend's collectives, so that no gather waits for one.
    reductions_apart: bool = False
    # What travels in fewer bytes, and is rounded: int8, float8 or int4 (codec.py); None: it is exact.
    gather_codec: str | None = None  # parameters that rest sharded
    # Parameters rest as their masters, which are cast when they are gathered, or encoded once a step (gather_codec).
    masters_rest: bool = False
    reduce_codec: str | None = None  # gradients that are reduce-scattered
    # What `reduce_codec` leaves out of a gradient is kept in float32, and added to the next one.
    error_feedback: bool = False
    # Ranks of a node, who keep what they gather until weights change, so that later gathers of a step stay among them
    # (ZeRO++: hpZ, secondary.py); None: every gather goes over all ranks.
    secondary_partition: int | None = None
    # A word of HOST_PARTS: masters that rest on the host are updated there. None: nothing does.
    offload: str | None = None
    # The share of the elements of which that holds: whole chunks, see place_on_host (cut/layout.py).
    offload_fraction: float = 1.0
    # The folder of a file for each rank, mapped into its memory, in which lies what rests on the host; None: no file.
    offload_folder: str | None = None

    @property
    def host_parts(self) -> frozenset[str]:
        """The kinds of states that rest on the host; masters that are pieces take these along."""
        parts = HOST_PARTS.get(self.offload or "", frozenset[str]())
        return parts | {"parameters"} if self.masters_rest and "master" in parts else parts

    @property
    def pieces_on_host(self) -> bool:
        """Whether parameters that rest sharded rest on the host."""
        return "parameters" in self.host_parts

    @property
    def shares_updates(self) -> bool:
        """Whether replicas update shares of anything (replicas.py), see `Chunk.over_all`."""
        return False

    @property
    def sums_each_step(self) -> bool:
        """Whether reductions are of all ranks; else of the group, and `sum_between` alone leaves it."""
        return True


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
