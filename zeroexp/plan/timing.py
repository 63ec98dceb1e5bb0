"""The seconds of a rehearsed step: every operation and every move, in the order in which the real schedule runs them.

    compute    ####op####op####wait....op####
    links      ......move 1.....move 2.....

Each operation costs what its products or its bytes cost, whichever is more, and a launch. A move begins on the links
when it is issued and the links are free, and whoever waits for it stands still until it has arrived. Where moves do
their work in the wait (ranks of one host), they cost their time there. torch's engines tell nothing of their waits:
their collectives count as links that overlap compute, and the range reaches to what no overlap would cost.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from zeroexp.measure.verbs import TimedMove, meter
from zeroexp.plan.speed import Speed

CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
VIEWS = frozenset(
    {
        "detach",
        "view",
        "t",
        "transpose",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "permute",
        "split",
    }
)


@dataclass
class Seconds:
    """These seconds tell where the time of one phase goes."""

    compute: float = 0.0
    links: float = 0.0  # moves on their way, beside compute or not
    exposed: float = 0.0  # compute stands still for moves
    untold: float = 0.0  # collectives whose waits nobody tells

    @property
    def total(self) -> float:
        return self.compute + self.exposed


class Timeline(TorchDispatchMode):
    """Follows one rank's compute and links; without a speed it follows nothing."""

    def __init__(self, speed: Speed | None) -> None:
        super().__init__()
        self._speed = speed
        self._now = self._free = 0.0  # of compute; when the links are free
        self._arrives: dict[int, float] = {}  # move -> when it arrives
        self._phase = Seconds()
        self._phases: dict[str, Seconds] = {}

    def __enter__(self) -> Timeline:
        meter.observe = self._moved if self._speed else None
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        meter.observe = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._speed is not None:
            self._compute(func, args, kwargs or {}, result, self._speed)
        return result

    def enter(self, phase: str) -> None:
        self._phase = self._phases.setdefault(phase, Seconds())

    def forget(self) -> None:
        """Drop what was counted so far; moves in flight stay."""
        self._phases = {}

    def by_phase(self) -> dict[str, Seconds]:
        return self._phases

    def _compute(self, func: Any, args: Any, kwargs: Any, result: Any, speed: Speed) -> None:
        if func.namespace == "c10d":
            if meter.is_issuing:  # told as a move
                return
            sent = sum(each.nbytes for each in tree_iter(args[0]) if isinstance(each, Tensor))
            self._phase.untold += speed.latency_seconds + sent / speed.link_bytes_per_second
            return
        work = _work_seconds(func, args, kwargs, result, speed)
        seconds = (
            max(work, speed.launch_seconds)
            if speed.overlaps_launch
            else work + speed.launch_seconds
        )
        self._now += seconds
        self._phase.compute += seconds

    def _moved(self, move: TimedMove) -> None:
        """Put a move on the links when it has been issued, and stand still when it is waited for."""
        assert self._speed is not None
        if move.num_bytes == 0:
            return
        takes = self._speed.latency_seconds + move.num_bytes / self._speed.link_bytes_per_second
        if move.waited is None:
            self._phase.links += takes
            self._free = max(self._now, self._free) + takes
            self._arrives[id(move)] = self._free
            return
        arrives = self._arrives.pop(id(move), self._now)
        stands_still = takes if self._speed.moves_on_wait else max(0.0, arrives - self._now)
        self._now += stands_still
        self._phase.exposed += stands_still


def _work_seconds(func: Any, args: Any, kwargs: Any, result: Any, speed: Speed) -> float:
    packet = func._overloadpacket
    if packet.__name__ in VIEWS:
        return 0.0
    tensors = [each for each in tree_iter((args, kwargs, result)) if isinstance(each, Tensor)]
    if not tensors:
        return 0.0
    moved = sum(each.numel() * each.element_size() for each in tensors) / speed.bytes_per_second
    flops = _flops(packet, args, kwargs, result)
    return max(moved, flops / speed.product_rate(tensors[0].dtype)) if flops else moved


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    if packet.__name__.startswith(CPU_ATTENTION):
        is_backward = packet.__name__.endswith("backward")
        query, key = (args[1], args[2]) if is_backward else (args[0], args[1])
        return (10 if is_backward else 4) * prod(query.shape) * key.shape[-2]
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def step_seconds(
    phases: dict[str, Seconds], microbatches: float, untold: float, unsure: float
) -> tuple[float, float, float]:
    """Return (least, expected, most) seconds of a step.

    microbatches: how many of the step one rehearsed microbatch stands for. untold: seconds of collectives that the
    rehearsal did not show, as those of DistributedDataParallel's reducer.
    """
    times = {name: 1.0 if name == "step" else microbatches for name in phases}
    told = sum(times[name] * each.total for name, each in phases.items())
    untold += sum(times[name] * each.untold for name, each in phases.items())
    return max(told, untold) * (1 - unsure), max(told, untold), (told + untold) * (1 + unsure)
