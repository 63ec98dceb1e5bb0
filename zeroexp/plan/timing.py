"""The seconds of a rehearsed step: every operation and every move, in the order in which the real schedule runs them.

    compute    ####op####op####wait....op####
    links      ......move 1.....move 2.....

Each operation costs what its products or its bytes cost, whichever is more. On a CPU its launch comes on top; the host
of a GPU launches ahead of it, so that the device waits only for what has not been launched yet. A move begins on the
links when it is issued and the links are free, and whoever waits for it stands still until it has arrived. Where moves
do their work in the wait (ranks of one host), they cost their time there. torch's engines tell nothing of their waits:
what their closed forms send counts as links that overlap compute, and the range reaches to what no overlap would cost.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from zeroexp.measure.communication_overlap import TimedMove, meter
from zeroexp.measure.memory import on_host
from zeroexp.plan.speed import Speed
from zeroexp.plan.storages import LocalOperations

ATTENTION = "_scaled_dot_product"
GROUPED_PRODUCT = "_grouped_mm"  # of experts: each row with the weight of one
# Parts of names of operations that compute more than they read: exponentials, and sums over rows.
SLOW = (
    *("silu", "gelu", "softmax", "exp", "log", "pow", "rsqrt"),
    *("embedding", "index", "mean", "sum"),
)
CACHE_BYTES = 1 << 20  # an operation on so much finds it in a core's cache
# which verbs cost alike
VERBS = {
    **dict.fromkeys(("publish", "matrices", "secondary"), "gather"),
    **dict.fromkeys(("hand_over", "replicas"), "reduce"),
}
PRODUCTS = "products"
NO_KERNEL = "views"  # the kind of an operation that the host does alone
# Operations that allocate, or show the same memory otherwise than as a view.
WITHOUT_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view"})


@dataclass
class Seconds:
    """Seconds of one phase, by what they go to."""

    compute: float = 0.0
    exposed: float = 0.0  # compute stands still for moves
    # What the seconds are spent on -> seconds by the tables of a speed; a calibration weighs them.
    spent: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def total(self) -> float:
        return self.compute + self.exposed


class Timeline(LocalOperations):
    """Follows one rank's compute and links at one speed; without any it follows nothing."""

    def __init__(self, speed: Speed | None) -> None:
        super().__init__()
        self._speed = speed
        self.phases: dict[str, Seconds] = {}
        self._now = self._free = 0.0  # of compute; when the links are free
        self._launched = 0.0  # when the host of a GPU has launched the last operation
        self._arrives: dict[int, float] = {}  # move -> when it arrives
        self._name, self._phase, self._times = "build", Seconds(), 1.0

    def __enter__(self) -> Timeline:
        if self._speed:
            meter.observe = partial(self._moved, self._speed)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        meter.observe = None
        super().__exit__(*error)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        # What only fakes answer here is a question, and no operation.
        if self._speed and func.namespace != "prim":
            self._compute(self._speed, func, args, kwargs, result)
        return result

    def enter(self, phase: str, times: float = 1.0) -> None:
        """Enter a phase; `times`: for how many like it of a step this one stands."""
        self._name, self._times = phase, times
        self._phase = self.phases.setdefault(phase, Seconds())

    def forget(self) -> None:
        """Drop what was counted so far; moves in flight stay."""
        self.phases = {}

    def _compute(self, speed: Speed, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.namespace == "c10d":
            return  # of a move of ours, which is told, or of torch's engines: see step_seconds
        if speed.moves_on_wait and meter.is_moving:  # the move's own time has it
            return
        kind, by_bytes, by_products = _work(func, args, kwargs, result, speed)
        launch = f"launches: {self._name}", speed.launch_seconds
        spent = dict([launch, (f"{kind}: bytes", by_bytes), (f"{kind}: products", by_products)])
        self._note(spent)
        if speed.overlaps_launch:
            self._launched += speed.launch_seconds
            waits = max(0.0, self._launched - self._now) if kind != NO_KERNEL else 0.0
            seconds = waits + max(by_bytes, by_products)
        elif speed.factors:
            seconds = speed.seconds_of(spent)
        else:
            seconds = max(by_bytes, by_products) + speed.launch_seconds
        self._now += seconds
        self._phase.compute += self._times * seconds

    def _moved(self, speed: Speed, move: TimedMove) -> None:
        """Put a move on the links when it has been issued, and stand still when it is waited for."""
        if move.num_bytes == 0:
            return
        kind = VERBS.get(move.verb, move.verb)
        sent = move.num_bytes / speed.link_rate(move.verb)
        spent = {f"{kind}: moves": speed.latency_seconds, f"{kind}: sent": sent}
        takes = speed.seconds_of(spent)
        if move.waited is None:
            self._note(spent)
            self._free = max(self._now, self._launched, self._free) + takes
            self._arrives[id(move)] = self._free
            return
        arrives = self._arrives.pop(id(move), self._now)
        stands_still = takes if speed.moves_on_wait else max(0.0, arrives - self._now)
        self._now += stands_still
        self._phase.exposed += self._times * stands_still

    def _note(self, spent: dict[str, float]) -> None:
        known = self._phase.spent
        for name, seconds in spent.items():
            if seconds:
                known[name] = known.get(name, 0.0) + seconds


def _work(func: Any, args: Any, kwargs: Any, result: Any, speed: Speed) -> tuple[str, float, float]:
    """Return of which kind an operation is, the seconds of its bytes, and the seconds of its products."""
    packet = func._overloadpacket
    tensors = [each for each in tree_iter((args, kwargs, result)) if isinstance(each, Tensor)]
    if func.is_view or packet.__name__ in WITHOUT_KERNEL or not tensors:
        return NO_KERNEL, 0.0, 0.0
    num_bytes = sum(each.numel() * each.element_size() for each in tensors)
    flops = _flops(packet, args, kwargs, result)
    kind = _operation_kind(packet.__name__, num_bytes, flops)
    rate = (on_host.is_entered and speed.host_bytes_per_second) or speed.bytes_per_second
    by_bytes, dtype = num_bytes / rate, tensors[0].dtype
    if kind != PRODUCTS:
        return kind, by_bytes, flops / speed.product_rate(dtype)
    smallest = min(min(each.shape[-2:]) for each in tensors if each.dim() > 1)
    by_products = flops / speed.product_rate(dtype, smallest)
    return kind, 0.0 if speed.products_read_memory else by_bytes, by_products


def _operation_kind(name: str, num_bytes: int, flops: float) -> str:
    if flops:
        return "attention" if name.startswith(ATTENTION) else PRODUCTS
    if name.startswith("_fused_"):
        return "optimizer"
    if any(part in name for part in SLOW):
        return "slow functions"
    return "cached" if num_bytes < CACHE_BYTES else "memory"


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    # torch counts none on the CPU, and before 2.13 none where heads of the query share a key.
    if packet.__name__.startswith(ATTENTION):
        is_backward = packet.__name__.endswith("backward")
        query, key = (args[1], args[2]) if is_backward else (args[0], args[1])
        return (10 if is_backward else 4) * prod(query.shape) * key.shape[-2]
    if packet.__name__ == GROUPED_PRODUCT:
        return 2 * args[0].numel() * args[1].shape[-1]
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def compute_seconds(phases: dict[str, Seconds]) -> float:
    """Return the seconds of a step in which a rank computes."""
    return sum(each.compute for each in phases.values())


def step_seconds(
    phases: dict[str, Seconds], untold: float, unsure: float
) -> tuple[float, float, float]:
    """Return (least, expected, most) seconds of a step; untold: of the moves of torch's engines."""
    told = sum(each.total for each in phases.values())
    return max(told, untold) * (1 - unsure), max(told, untold), (told + untold) * (1 + unsure)
