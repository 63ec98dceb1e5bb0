"""The first step and weight in which a loop differs from one process, in the order in which a step unfolds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from zeroexp.verify import explain_difference
from zeroexp.verify.explain_difference import GradientLook, Story, UpdateLook, Wrong
from zeroexp.verify.local_elements import LocalElements, whole
from zeroexp.verify.loop_to_verify import Loop, NoLoop, drawn_by
from zeroexp.verify.observe import Record, Seen
from zeroexp.verify.rounding_oracle import MARGIN, Expected, Oracle, Updates, Whole, distance

START, RAW = "weights at the start", "gradient before clipping"
GRADIENT, UPDATE = "gradient at the optimizer", "weights after the step"
CLIPPED = 1e-5  # relative rounding of a norm and of the product with it, in float32
NORM = 1e-3  # how far, relatively, a norm may be off for the way in which it is summed


@dataclass
class Cause:
    """What a difference looks like, in one word and in a sentence."""

    kind: str
    text: str


@dataclass
class Difference:
    """Where a loop first differs from one process."""

    step: int
    what: str
    tensor: str
    rank: int
    distance: float  # relative to what the rank should hold of it
    bound: float  # of that, by rounding
    num_tensors: int  # that differ at this place
    cause: Cause


@dataclass
class Verdict:
    """What is known of a loop on one number of ranks."""

    world_size: int
    num_steps: int
    num_weights: int
    difference: Difference | None = None
    used: float = 0.0  # the largest part of a bound that rounding used
    rounding: float = 0.0  # the median bound of a gradient, relative to it
    notes: list[str] = field(default_factory=list)


def judge(loop: Loop, records: list[Record], of_one: float = 0.0) -> Verdict:
    """Return the first difference of what ranks saw, or none. Raises NoLoop where they drew other microbatches.

    of_one: what `first_norm` of this loop is where it is made on one rank.
    """
    for rank, record in enumerate(records):
        if record.drawn != drawn_by(loop, rank, len(record.steps)):
            raise NoLoop(
                f"Loop(batch=...): rank {rank} draws others than the plain process from equal generators, or another "
                "number of them: let no rank, and no random numbers but the generator's, decide"
            )
    return _Judge(loop, records, of_one).judge()


class _Judge:
    def __init__(self, loop: Loop, records: list[Record], of_one: float) -> None:
        self.loop, self.records = loop, records
        self.oracle, self.updates = Oracle(loop, len(records), of_one), Updates(loop)
        num_steps = len(records[0].steps)
        self.verdict = Verdict(len(records), num_steps, len(self.oracle.shapes))
        self.weights = [self._whole(self._held(step)) for step in range(num_steps + 1)]
        self.unseen = ""  # a setting that differs, where no weight has shown it
        # What no step has shown so far: a difference between microbatches, and an active clipping.
        self.is_one_microbatch = True
        self.is_never_clipped = loop.max_grad_norm is not None
        self.is_judged = False  # whether any gradient is more than its rounding
        self.drowned: dict[str, None] = {}  # weights whose update is less than its rounding

    def judge(self) -> Verdict:
        exact = self.oracle.initial
        found = self._first(
            0, START, self._held(0), (exact, dict.fromkeys(exact, 0.0)), explain_difference.of_start
        )
        if not found:
            self._refuse_hidden()
        for step in range(self.verdict.num_steps):
            seen = [record.steps[step] for record in self.records]
            found = found or self._gradient(step, seen) or self._update(step, seen)
        self.verdict.difference = found
        if not found:
            self._note_unjudged()
        return self.verdict

    def _note_unjudged(self) -> None:
        """Say what is not known to be equal though nothing differs. Raises NoLoop where no sum could be judged."""
        steps = [each for record in self.records for each in record.steps]
        stepped = {name for each in steps for name in each.settings}
        if never := {name for each in steps for name in each.skipped} - stepped:
            raise NoLoop(
                f"{min(never)}: all steps of its optimizer overflow; "
                "give GradScaler a smaller init_scale, or more --steps"
            )
        if not self.is_judged:
            raise NoLoop(
                "no gradient is more than its rounding, so that none is judged: give Loop(loss=...) whose parts cancel "
                "less, or a Loop(dtype=...) of more bits"
            )
        if self.is_one_microbatch:
            raise NoLoop(
                "Loop(batch=...): all generators give one microbatch, by which no missing sum shows; draw from them"
            )
        if self.unseen:
            self._note(self.unseen)
        if self.is_never_clipped:
            too_large = f"max_grad_norm={self.loop.max_grad_norm:g}"
            self._note(f"no norm reaches {too_large}, so clipping is not judged; give less")
        if drowned := [*self.drowned]:
            more = f" and {len(drowned) - 1} more" * (len(drowned) > 1)
            problem = "an update is less than the weight's rounding, and is not judged"
            self._note(f"{drowned[0]}{more}: {problem}; give a larger rate")

    def _refuse_hidden(self) -> None:
        for name, values in self.weights[0].items():
            if not values.isnan().any():
                continue
            remedy = "return (model, step) from train, with the model that holds it"
            raise NoLoop(
                f"{name}: no rank shows it whole, in a model or in a torch optimizer; {remedy}"
            )

    def _gradient(self, step: int, seen: list[Seen]) -> Difference | None:
        kept = _kept(seen)
        of_all = not any(each.settings for each in seen)
        if kept:
            of = "no weight" if of_all else f"nothing of the optimizer of {min(kept)}"
            self._note(f"step {step} overflows, and changes {of}; nothing else of it is judged")
        if kept and of_all:
            return None
        weights, raw = self.weights[step], [each.raw for each in seen]
        rows = self.oracle.contributions(weights, step)
        alike = (torch.equal(each, each[:1].expand_as(each)) for each in rows.values())
        is_one = self.oracle.counts.numel() > 1 and all(alike)
        self.is_one_microbatch = self.is_one_microbatch and is_one
        exact = {name: each.sum(0) for name, each in rows.items() if name not in kept}
        bounds = self.oracle.rounding(weights, step, rows, self.loop.dtype)
        self._note_rounding(exact, bounds)
        before = [record.steps[step - 1].gradients for record in self.records]
        left = self._whole(before) if step else None
        look = GradientLook(self.oracle, self.weights, step, rows, bounds, left)
        look.clips = {name: max(each.clips.get(name, 0) for each in seen) for name in exact}
        if found := self._first(step, RAW, raw, (exact, bounds), look.stories):
            return found
        infinite: Whole = {}
        if any(raw):
            own = self._whole(raw)
            infinite = {name: own[name] for name in kept if own[name].isinf().any()}
            exact = {n: own[n] if own[n].isfinite().all() else each for n, each in exact.items()}
            bounds = {name: _of_clipping(name, raw) * float(e.norm()) for name, e in exact.items()}
            look.clipping, look.unlike = True, self._unlike(seen, rows)
        factor, of_norm = self.oracle.clipping(exact | infinite)
        self.is_never_clipped = self.is_never_clipped and factor == 1
        if factor < 1 and not any(raw):
            if found := self._norm(step, seen, exact | infinite, bounds):
                return found
            if seen[0].norm is None:
                self._note("clipping hides a factor of all gradients, as it is not torch's own")
        expected = (
            {n: e * factor for n, e in exact.items()},
            {n: bounds[n] * factor + of_norm * float(e.norm()) for n, e in exact.items()},
        )
        look.factor = factor
        look.calls = {name: max(each.calls.get(name, 0) for each in seen) for name in exact}
        gradients = [each.gradients for each in seen]
        found = self._first(step, GRADIENT, gradients, expected, look.stories)
        if found and any(each.inner for each in seen):
            # Its own step sums or clips; a rule that changes gradients is the plain optimizer's too.
            inner = [each.inner or each.gradients for each in seen]
            found = self._first(step, GRADIENT, inner, expected, look.stories)
            for each, own in zip(seen, inner, strict=True):
                each.gradients = own
        return found or self._missing(step, seen, expected[0])

    def _norm(
        self, step: int, seen: list[Seen], exact: Whole, bounds: dict[str, float]
    ) -> Difference | None:
        """Compare the norm that ranks tell, by which a factor shows that their clipping takes out again."""
        meant = float(torch.cat(list(exact.values())).norm())
        # A norm in float32 is off by 1e-4 where one tensor has ten million elements.
        bound = sum(each**2 for each in bounds.values()) ** 0.5 / meant + NORM
        for rank, own in ((rank, each.norm) for rank, each in enumerate(seen)):
            if own is not None and not abs(own - meant) <= bound * meant:
                text = f"the norm of all gradients is x {own / meant:.3g}, which clipping hides"
                off = abs(own / meant - 1)
                return Difference(
                    step, "norm", "gradients", rank, off, bound, 1, Cause("scale", text)
                )
        return None

    def _unlike(self, seen: list[Seen], rows: Whole) -> str:
        """Say which weight's gradient is in one of the two norms alone; an empty text if none is, or nobody knows."""
        there = [piece for each in seen for piece in (*each.raw, *each.gradients)]
        names = {piece.name for piece in there if piece.values.any()}
        if further := sorted(names - {*rows}):
            return f"{further[0]} has a gradient, and is frozen in Loop(model=...)"
        lacking = [name for name, each in rows.items() if name not in names and each.sum(0).any()]
        if lacking and not any(each.has_strangers for each in self.records):
            return f"{lacking[0]} has no gradient when the loop clips"
        return ""

    def _missing(self, step: int, seen: list[Seen], exact: Whole) -> Difference | None:
        """Find weights, or elements of them, whose gradient no rank's optimizer has."""
        there = self._whole(each.gradients for each in seen)
        before, after = self.weights[step], self.weights[step + 1]
        ever = any(each.settings for record in self.records for each in record.steps)
        skipped = ever and not any(each.settings for each in seen)
        for name, meant in exact.items():
            lacking = there[name].isnan() & (meant != 0)
            if not lacking.any():
                continue
            changes = bool((before[name] != after[name])[lacking].any())
            if changes or any(each.has_strangers for each in self.records):
                raise NoLoop(
                    f"{name}: its gradient is in no torch optimizer that can be read, when its step begins: "
                    "let one hold the model's weights or plain copies of them, and call backward before step()"
                )
            entire, shape = bool(there[name].isnan().all()), self.oracle.shapes[name]
            cause = explain_difference.of_missing(lacking, entire, shape, skipped)
            return Difference(step, GRADIENT, name, 0, 1.0, 0.0, 1, Cause(*next(cause)))
        return None

    def _update(self, step: int, seen: list[Seen]) -> Difference | None:
        gradients = self._whole([each.gradients for each in seen])
        gradients = {name: each for name, each in gradients.items() if not each.isnan().any()}
        kept = _kept(seen)
        self.updates.catch_up({name: own for each in seen for name, own in each.settings.items()})
        before, settings = self.weights[step], (self.updates.settings(), seen)
        expected = self.updates.step(before, gradients, overflows=bool(kept))
        expected[1].update(dict.fromkeys(kept, 0.0))
        for name in gradients:
            moved = float((expected[0][name] - before[name]).norm())
            if expected[1][name] > 0.5 * moved > 0:
                self.drowned[name] = None
        look = UpdateLook(before, expected[0], *settings, self.oracle.shapes)
        found = self._first(step, UPDATE, self._held(step + 1), expected, look.stories)
        for name in () if found else before:
            if unseen := look.settings_of_one_class(name):
                self.unseen = f"{name}: {unseen}; its weights do not show it"
                break
        return found

    def _first(
        self,
        step: int,
        what: str,
        held: list[list[LocalElements]],
        expected: Expected,
        stories: Callable[[Wrong], Iterator[Story]],
    ) -> Difference | None:
        """Compare every rank's pieces, and explain those that differ if any does."""
        exact, bounds = expected
        order = {name: index for index, name in enumerate(exact)}
        wrong: Wrong = []
        most_bytes = _most_bytes(held) if what in (START, UPDATE) else {}
        for rank, piece in ((rank, piece) for rank, each in enumerate(held) for piece in each):
            if piece.name not in exact:
                continue
            off, bound = distance(piece, exact), bounds[piece.name]
            if piece.values.itemsize < most_bytes.get(piece.name, 0):
                off -= _of_copying(piece, exact)
            if not off <= bound:  # also where it is no number
                wrong.append((rank, piece))
            elif bound:
                self.verdict.used = max(self.verdict.used, off / bound)
        if not wrong:
            return None
        wrong.sort(key=lambda each: (order[each[1].name], each[0]))
        rank, piece = wrong[0]
        size = max(float(exact[piece.name][piece.where].norm()), 1e-30)
        relative = distance(piece, exact) / size, bounds[piece.name] / size
        number, cause = len({p.name for _, p in wrong}), Cause(*next(stories(wrong)))
        return Difference(step, what, piece.name, rank, *relative, number, cause)

    def _held(self, step: int) -> list[list[LocalElements]]:
        """The weights that each rank holds before a step, or after the last."""
        return [[*each.steps, each][step].weights for each in self.records]

    def _whole(self, held: Iterable[list[LocalElements]]) -> Whole:
        return whole((piece for each in held for piece in each), self.oracle.shapes)

    def _note_rounding(self, exact: Whole, bounds: dict[str, float]) -> None:
        relative = {
            name: bounds[name] / float(each.norm()) for name, each in exact.items() if each.any()
        }
        ordered = sorted(relative.values()) or [0.0]
        self.verdict.rounding = ordered[len(ordered) // 2]
        self.is_judged |= any(each <= 0.5 for each in relative.values())
        for name, each in relative.items():
            if each > 0.5:
                self._note(f"{name}: its gradient is rounding alone, and is not judged")

    def _note(self, text: str) -> None:
        if text not in self.verdict.notes:
            self.verdict.notes.append(text)


def _kept(seen: list[Seen]) -> set[str]:
    """Weights whose optimizer's step GradScaler leaves out on all ranks that hold any of them."""
    stepped = {name for each in seen for name in each.settings}
    return {name for each in seen for name in each.skipped} - stepped


def _of_clipping(name: str, raw: list[list[LocalElements]]) -> float:
    """How far, relatively, rounding takes a gradient that torch clips in the gradient's own dtype."""
    found = [piece.values.dtype for each in raw for piece in each if piece.name == name]
    return max([CLIPPED, *(MARGIN / 2 * torch.finfo(each).eps for each in found)])


def _most_bytes(held: list[list[LocalElements]]) -> dict[str, int]:
    """The bytes of an element of each weight where it has most: of its master, if there is one."""
    most: dict[str, int] = {}
    for piece in (piece for each in held for piece in each):
        most[piece.name] = max(most.get(piece.name, 0), piece.values.itemsize)
    return most


def _of_copying(piece: LocalElements, exact: Whole) -> float:
    """How far a master's copy in this piece's dtype is from it, rounded to the nearest."""
    meant = exact[piece.name][piece.where]
    return float((meant.to(piece.values.dtype).double() - meant).norm())
