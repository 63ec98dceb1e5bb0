"""Watch one step: what it allocates, what each verb and each block of the model does, and when.

Only traced steps are watched. Their hooks look at addresses and clocks and keep no tensor, so that a traced step
allocates what others do. It is slower, and no time counts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from zeroexp.interface.strategy import ModelStates
from zeroexp.measure.allocations import Log, logging_allocations
from zeroexp.measure.causes import Change, Reading, changes_by_cause, read_states
from zeroexp.measure.communication_overlap import TimedMove
from zeroexp.measure.memory import local_tensor
from zeroexp.measure.record import CAUSES, Peak
from zeroexp.measure.time_spans import Interval, interval_at

GATHERS = ("gather", "secondary")  # verbs that fill pools
OUTSIDE = "(outside of blocks)"
LOSS = "(loss)"


@dataclass
class StepTrace:
    """Trace of one step; `finish` turns it into numbers. Times are seconds of time.perf_counter."""

    began_at: float = field(default_factory=time.perf_counter)
    log: Log | None = None  # None where nothing can log allocations
    readings: list[Reading] = field(default_factory=list[Reading])
    # (when, address, cause)
    noted: list[tuple[float, int, str]] = field(default_factory=list[tuple[float, int, str]])
    # (when, "forward" | "backward" | "", block) where a block begins or, with "", ends
    block_turns: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])
    # When backward reached the model's output.
    backward_reached_output_at: list[float] = field(default_factory=list[float])
    phases: list[Interval] = field(default_factory=list[Interval])
    moves: list[TimedMove] = field(default_factory=list[TimedMove])
    changes: list[Change] = field(default_factory=list[Change])  # none where nothing can log

    def note_model_states(self, states: ModelStates) -> None:
        self.readings.append(read_states(states, time.perf_counter()))

    def finish(
        self, marks: list[tuple[str | None, Any]], moves: list[TimedMove], shared_bytes: int
    ) -> None:
        """Take the marks of the step's clock and the moves that ended in it, once the step is over."""
        self.moves = moves
        self.phases = [(phase, start, end) for (phase, start), (_, end) in pairwise(marks) if phase]
        if self.log is not None:
            births = [*self._moves(), *self._losses(), *self._recomputed()]
            self.changes = changes_by_cause(
                self.log, self.phases, births, self.readings, self.noted, shared_bytes
            )

    @property
    def ended_at(self) -> float:
        return self.phases[-1][2]

    def unit_spans(self) -> Iterator[tuple[str, str, float, float]]:
        """Yield (block, "forward" | "backward", from, to) of each turn of a block.

        In backward a block ends where the next one begins, or with the phase.
        """
        ends = [end for name, _, end in self.phases if name in ("forward", "backward")]
        turns = [*self.block_turns, (inf, "", "")]
        for (began, turn, unit), (following, *_) in pairwise(turns):
            if turn:
                over = min((end for end in ends if end > began), default=began)
                yield unit, turn, began, min(over, following)

    def peak(self, step: int) -> Peak | None:
        """Return the moment at which most was held, by cause; None where nothing logs allocations."""
        if not self.changes:
            return None
        when, block, held = max(self.changes, key=lambda change: sum(change[2].values()))
        when = max(when, self.began_at)
        moves = [(f"{m.verb} {m.what}", *span) for m in self.moves for span in spans_of(m).values()]
        units = [(unit, start, end) for unit, _, start, end in self.unit_spans()]
        verb, unit, phase = (interval_at(each, when) for each in (moves, units, self.phases))
        return Peak(
            step=step,
            num_bytes=sum(held.values()),
            bytes_by_cause={cause: held[cause] for cause in CAUSES if held.get(cause)},
            operator=block.operator if block is not None else "",
            verb=verb[0] if verb else None,
            phase=phase[0] if phase else "",
            unit=unit[0] if unit else None,
            seconds=when - self.began_at,
            step_seconds=self.ended_at - self.began_at,
        )

    @contextmanager
    def hooking(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> Generator[None]:
        """Hook the blocks, the model's output and the gradients of its parameters."""
        with ExitStack() as stack:
            hook = stack.enter_context
            for name, block in blocks.items():
                hook(block.register_forward_pre_hook(partial(self._block_begins, name)))
                hook(block.register_forward_hook(partial(self._block_ends, name)))
            hook(model.register_forward_hook(self._after_model))
            for parameter in model.parameters():
                if parameter.requires_grad:
                    hook(_hook(parameter, partial(self._note, "gradients")))
            yield

    def _block_begins(self, name: str, _block: nn.Module, _inputs: Any) -> None:
        self.block_turns.append((time.perf_counter(), "forward", name))

    def _block_ends(self, name: str, _block: nn.Module, _inputs: Any, output: Any) -> None:
        self.block_turns.append((time.perf_counter(), "", name))
        for tensor in _differentiable(output):
            _hook(tensor, partial(self._backward_reaches_block, name))

    def _backward_reaches_block(self, name: str, _gradient: Tensor) -> None:
        self.block_turns.append((time.perf_counter(), "backward", name))

    def _after_model(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
        self.block_turns.append((time.perf_counter(), "", LOSS))
        for tensor in _differentiable(output):
            self._note("logits", tensor)
            _hook(tensor, self._backward_of_output)

    def _backward_of_output(self, gradient: Tensor) -> None:
        self._note("logits", gradient)
        self.backward_reached_output_at.append(time.perf_counter())
        # Else a block's output is the model's, and its hook has run.
        if self.block_turns[-1][2] == LOSS:
            self._backward_reaches_block(OUTSIDE, gradient)

    def _note(self, cause: str, tensor: Tensor) -> None:
        storage = local_tensor(tensor).untyped_storage()
        self.noted.append((time.perf_counter(), storage.data_ptr(), cause))

    def _moves(self) -> list[Interval]:
        """Return when this thread issued moves or waited for them; gathers count first."""
        moves = sorted(self.moves, key=lambda move: move.verb not in GATHERS)
        return [
            ("pools" if move.verb in GATHERS else "buckets", *span)
            for move in moves
            for span in spans_of(move).values()
        ]

    def _losses(self) -> list[Interval]:
        """Return from each output of the model to the backward that reaches it."""
        starts = [when for when, _, name in self.block_turns if name == LOSS]
        reached = self.backward_reached_output_at
        return [("logits", s, min((e for e in reached if e > s), default=s)) for s in starts]

    def _recomputed(self) -> list[Interval]:
        backward = [each for each in self.phases if each[0] == "backward"]
        return [
            ("activations", start, end)
            for _, turn, start, end in self.unit_spans()
            if turn == "forward" and interval_at(backward, start)
        ]


@contextmanager
def tracing_step(
    model: nn.Module, blocks: Mapping[str, nn.Module], device: torch.device
) -> Generator[StepTrace]:
    """Watch what happens inside. On a GPU the times are those of the host, which runs ahead of the device."""
    trace = StepTrace()
    with trace.hooking(model, blocks), logging_allocations(device) as trace.log:
        yield trace
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def spans_of(move: TimedMove) -> dict[str, tuple[float, float]]:
    """Return when this thread issued the move and when it waited for it: part -> (from, to)."""
    marks = {"issue": (move.began_at, move.issued), "wait": (move.waited, move.ended_at)}
    return {
        part: (start, end)
        for part, (start, end) in marks.items()
        if isinstance(start, float) and isinstance(end, float)
    }


def _hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    register: Any = tensor.register_hook  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return register(hook)


def _differentiable(output: Any) -> list[Tensor]:
    leaves = tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
