"""What a difference looks like.

A plain gradient is a sum of rows, one for each microbatch of each rank. A loop's gradient is fitted by the same rows
(least squares), and the factor of each tells a scale (all are k), a sum that is missing (one rank's are there alone),
microbatches that were dropped, a mean of means. What they do not fit is tried with the weights before the last step,
with other steps' batches, with each use of a tied weight, and in fewer bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isclose

import torch
from torch import Tensor

from zeroexp.verify.local_elements import LocalElements
from zeroexp.verify.observe import Seen, Settings
from zeroexp.verify.rounding_oracle import Oracle, Whole, distance

Wrong = list[tuple[int, LocalElements]]  # (rank, what it holds), in the order of weights
# What a difference looks like: its kind in one word, and a sentence. Of several stories the first one counts.
Story = tuple[str, str]
CLOSE = 0.01  # relative distance from a factor that has a name
UNSUMMED = "no sum", "each rank has the gradient of its own batches, and no other's"


def of_start(wrong: Wrong) -> Iterator[Story]:
    if low := _bits(piece for _, piece in wrong):
        yield "dtype", f"they have no more bits than {low}"
    ranks = _listed({rank for rank, _ in wrong})
    yield "start", f"rank {ranks} begins with other weights: a seed, or no broadcast"


@dataclass
class GradientLook:
    """What explains a gradient."""

    oracle: Oracle
    weights: list[Whole]  # before each step, and after the last
    step: int
    rows: Whole
    bounds: dict[str, float]
    left: Whole | None = None  # what the optimizer found in the step before, perhaps clipped
    factor: float = 1.0  # by which the plain process clips
    clipping: bool = False  # whether gradients were right before the loop clipped them
    calls: dict[str, int] = field(default_factory=dict[str, int])  # of optimizers, once they step
    clips: dict[str, int] = field(default_factory=dict[str, int])  # calls of clipping
    unlike: str = ""  # a weight that one of the two trains alone, which changes the norm

    def __post_init__(self) -> None:
        self.counts = self.oracle.counts.clone()  # of this step, before others are tried

    def stories(self, wrong: Wrong) -> Iterator[Story]:
        """Explain all pieces together where they tell one story, else those of the first weight."""
        exact = {name: each.sum(0) * self.factor for name, each in self.rows.items()}
        name = wrong[0][1].name
        first = [(rank, piece) for rank, piece in wrong if piece.name == name]
        if (calls := self.calls.get(name, 0)) > 1:
            yield "optimizer", f"it steps {calls} times"
        if (clips := self.clips.get(name, 0)) > 1:
            yield "norm", f"it is clipped {clips} times in a step"
        yield from _of_no_numbers(first)
        if not any(piece.values.any() for _, piece in first):
            yield "frozen", "it is zero"
        if self.unlike:
            yield "frozen", self.unlike
        near = (distance(p, exact) < 0.05 * float(exact[p.name].norm()) for _, p in wrong)
        if (low := _bits(piece for _, piece in wrong)) and all(near):
            yield "dtype", f"it was rounded to {low} on its way: no element has more bits"
        yield from self._by_rows(wrong)
        yield from self._by_rows(first)
        yield from self._of_few_elements(first)
        yield from self._of_one_weight([piece for _, piece in first], exact[name])
        yield "unknown", "it looks like nothing known"

    def _by_rows(self, wrong: Wrong) -> Iterator[Story]:
        if factors := self._factors(wrong, self.rows):
            yield from self._read(factors)
        if self.left is not None:
            before = self.weights[self.step - 1]
            if self._factors(wrong, self.oracle.contributions(before, self.step)):
                yield "stale", "it is the gradient of the weights before the last step"
            last = self.oracle.contributions(before, self.step - 1)
            exact = {name: each.sum(0) for name, each in last.items()}
            if any(self._factors(_without(wrong, each), self.rows) for each in (exact, self.left)):
                yield "stale", "the gradient of the step before is still in it"
        for step in range(self.step + 2):
            if self._factors(wrong, self.oracle.contributions(self.weights[self.step], step)):
                yield "data", f"it is the gradient of the batches of step {step}"

    def _of_few_elements(self, wrong: Wrong) -> Iterator[Story]:
        """Explain a weight of too few elements for a fit by one factor: of all rows, or of each rank's own."""
        size, bound = self.oracle.world_size, self.bounds[wrong[0][1].name]
        rows = self.rows[wrong[0][1].name]
        of_ranks = rows.view(size, -1, rows.shape[1]).sum(1)

        def scales(basis: Mapping[int, Tensor]) -> dict[int, float] | None:
            fits = {r: _fit(basis[r][p.where, None], p.values.double(), bound, 1) for r, p in wrong}
            found = {rank: float(each) for rank, each in fits.items() if each is not None}
            return found if len(found) == len(wrong) else None

        own = scales(dict(enumerate(of_ranks)))
        if own and all(min(abs(each - 1), abs(each / size - 1)) < CLOSE for each in own.values()):
            yield UNSUMMED
        of_all = scales(dict.fromkeys((r for r, _ in wrong), of_ranks.sum(0)))
        # Any number is a multiple of one other: the factor must have a name.
        if of_all and (rows.shape[1] > 1 or all(map(self._named, of_all.values()))):
            yield from self._of_scales(of_all)

    def _factors(self, wrong: Wrong, rows: Whole) -> dict[int, Tensor] | None:
        """Return, for each rank, the factors [ranks, microbatches] that make its pieces; None if there are none."""
        found: dict[int, Tensor] = {}
        for rank in sorted({rank for rank, _ in wrong}):
            pieces = [piece for each, piece in wrong if each == rank]
            basis = torch.cat([rows[piece.name][:, piece.where] for piece in pieces], dim=1).T
            values = torch.cat([piece.values.double() for piece in pieces])
            bound = sum(self.bounds[name] ** 2 for name in {piece.name for piece in pieces}) ** 0.5
            factors = _fit(basis, values, bound)
            if factors is None:
                return None
            found[rank] = factors.view(self.oracle.world_size, -1)
        return found

    def _read(self, factors: dict[int, Tensor]) -> Iterator[Story]:
        yield from self._of_means(next(iter(factors.values())))
        if all(_is_even(each) for each in factors.values()):
            yield from self._of_scales({rank: float(each.mean()) for rank, each in factors.items()})
        used = {
            r: {i for i, row in enumerate(f) if not _is_zero(row, f)} for r, f in factors.items()
        }
        if any(len(ranks) == self.oracle.world_size for ranks in used.values()):
            yield from self._of_microbatches(factors)
        if all(ranks == {rank} for rank, ranks in used.items()):
            yield UNSUMMED
        # The first rank of each group of ranks that have one another's batches, and no others
        groups = {min(ranks, default=-1): ranks for ranks in used.values()}
        if len(groups) > 1 and all(
            used[r] == each for each in groups.values() for r in each & {*used}
        ):
            shown = " and ".join(_listed(each) for each in groups.values())
            yield "no sum", f"ranks {shown} sum among themselves alone"
        yield (
            "data",
            f"it is made of the batches of rank {_listed(set.union(*used.values()))} alone",
        )

    def _of_means(self, factors: Tensor) -> Iterator[Story]:
        """Tell factors that labels explain, which may be nearly as many, from those that are even by themselves."""
        for of, counts in (("microbatch", self.counts), ("rank", self.counts.sum(1, keepdim=True))):
            if _spread(factors * counts) < min(2 * CLOSE, 0.1 * _spread(factors)):
                text = f"it is a mean of the means of each {of}, whose labels are unequal"
                yield "mean of means", text

    def _of_microbatches(self, of_ranks: dict[int, Tensor]) -> Iterator[Story]:
        factors = next(iter(of_ranks.values()))
        columns = range(factors.shape[1])
        kept = [m for m in columns if not _is_zero(factors[:, m], factors)]
        if len(kept) < len(columns):
            yield "microbatches", f"only microbatch {_listed(kept)} of each rank counts"
        alone: list[int] = []
        for m in columns if self.oracle.world_size > 1 else ():
            used = {
                rank: [i for i, each in enumerate(found[:, m]) if not _is_zero(each, found)]
                for rank, found in of_ranks.items()
            }
            if all(ranks == [rank] for rank, ranks in used.items()):
                alone.append(m)
            elif len(used) > 1 and all(len(ranks) == 1 for ranks in used.values()):
                made = {rank for ranks in used.values() for rank in ranks}
                yield "data", f"microbatch {m} is made of the batch of rank {_listed(made)} alone"
        if alone:
            yield "no sum", f"microbatch {_listed(alone)} is not summed between ranks"
        shown = "; ".join(" ".join(f"{each:.2f}" for each in row) for row in factors.tolist())
        yield "weighting", f"microbatches count [{shown}] times, a rank after the other"

    def _of_scales(self, scales: dict[int, float]) -> Iterator[Story]:
        low, high = min(scales.values()), max(scales.values())
        if self.clipping or self.factor < 1:
            yield from self._of_norms(list(scales.values()))
        shown = ", ".join(f"{each:.3g}" for each in scales.values())
        if high - low > CLOSE * abs(high):
            yield "scale", f"ranks scale it by {shown}"
        if f"{high:.4g}" != "1":
            yield "scale", f"it is x {high:.4g}{self._named(high)}"

    def _of_norms(self, scales: list[float]) -> Iterator[Story]:
        """Explain gradients that are scaled where they are clipped."""
        if self.oracle.loop.max_grad_norm is None:
            yield "norm", "the loop clips and the plain process does not: give max_grad_norm"
        if all(abs(each - 1) < CLOSE for each in scales):
            yield "norm", "it is not clipped"
        norms = [self.factor / each for each in scales]
        shown = ", ".join(f"{each:.3g}" for each in norms)
        if max(norms) > (1 + CLOSE) * min(norms):
            yield "norm", f"ranks clip by norms of their own, x {shown}: of their shards"
        yield "norm", f"it is clipped by a norm x {norms[0]:.3g}{self._named(norms[0])}"

    def _of_one_weight(self, pieces: list[LocalElements], exact: Tensor) -> Iterator[Story]:
        name, shape = pieces[0].name, self.oracle.shapes[pieces[0].name]
        yield from self._tied(pieces[0])
        yield from self._decayed(pieces[0], exact)
        off, zero = (torch.zeros(len(exact), dtype=torch.bool) for _ in range(2))
        for piece in pieces:
            meant, values = exact[piece.where], piece.values.double()
            off[piece.where] |= (values - meant).abs() > self.bounds[name] / len(exact) ** 0.5
            zero[piece.where] |= (values == 0) & (meant != 0)
        if zero.any() and not (off & ~zero).any():
            yield "rows", f"{_rows(zero, shape)} are zero"
        if 0 < off.sum() <= len(off) // 2:
            yield "rows", f"{_rows(off, shape)} differ, and no others of it"
        if self.oracle.loop.dtype == torch.float32:
            half = self.weights[self.step], self.step, self.rows, torch.bfloat16
            bound = self.oracle.rounding(*half)[name]
            if all(distance(piece, {name: exact}) <= bound for piece in pieces):
                also = ": it, a codec, or another small term in the loss"
                yield (
                    "dtype",
                    "it is no further away than computing in 16 bits would bring it" + also,
                )

    def _decayed(self, piece: LocalElements, exact: Tensor) -> Iterator[Story]:
        weight = self.weights[self.step][piece.name]
        basis = torch.stack([exact, weight], dim=1)[piece.where]
        factors = _fit(basis, piece.values.double(), self.bounds[piece.name])
        if factors is not None and abs(float(factors[0]) - 1) < CLOSE:
            k = f"{float(factors[1]):.3g}"
            yield "weighting", f"it has {k} x the weights added, as of an L2 term in the loss"

    def _tied(self, piece: LocalElements) -> Iterator[Story]:
        untied = self.oracle.contributions(self.weights[self.step], self.step, untied=True)
        rows = untied[piece.name]
        num_uses = len(rows) // len(self.rows[piece.name])
        uses = rows.view(-1, num_uses, rows.shape[1]).sum(0)[:, piece.where]
        factors = _fit(uses.T, piece.values.double(), self.bounds[piece.name])
        if num_uses > 1 and factors is not None:
            shown = ", ".join(f"{abs(each):.2f}" for each in factors.tolist())
            yield "tied", f"{num_uses} modules share it, and their gradients count {shown} times"

    def _named(self, k: float) -> str:
        """Say what a factor may be, likeliest first."""
        ranks, microbatches = self.oracle.world_size, self.oracle.loop.microbatches
        names = {
            "the number of ranks, a sum where a mean is meant": ranks,
            "1 / the number of ranks, a mean where a sum is meant": 1 / ranks,
            "the number of microbatches, by which nobody divided": microbatches,
            "1 / the number of microbatches, divided twice": 1 / microbatches,
            "ranks x microbatches, divided by neither": ranks * microbatches,
            "1 / (ranks x microbatches)": 1 / (ranks * microbatches),
            "the square root of the number of ranks": ranks**0.5,
            "1 / the square root of the number of ranks": ranks**-0.5,
            "counted twice": 2.0,
        }
        fitting = [
            name for name, value in names.items() if value != 1 and abs(k / value - 1) < CLOSE / 2
        ]
        return ": " + ", or ".join(fitting) if fitting else ""


@dataclass
class UpdateLook:
    """What explains weights after a step."""

    before: Whole
    after: Whole  # as the plain optimizer leaves them
    settings: dict[str, Settings]  # of the plain optimizer, for each weight
    seen: list[Seen]  # of each rank
    shapes: dict[str, torch.Size]

    def stories(self, wrong: Wrong) -> Iterator[Story]:
        rank, piece = wrong[0]
        own = [(r, each) for r, each in wrong if each.name == piece.name]
        yield from _of_no_numbers(own)
        if (calls := self.seen[rank].calls.get(piece.name, 0)) > 1:
            yield "optimizer", f"it steps {calls} times"
        if differing := self._settings(rank, piece.name):
            yield "optimizer", differing
        still = {r for r, each in own if _is_copy(each, self.before)}
        if rank in still:
            kind = "frozen" if len(still) == len(self.seen) else "stale"
            yield kind, f"rank {_listed(still)} keeps the weights from before the step"
        if torch.equal(self.before[piece.name], self.after[piece.name]):
            yield "frozen", "it changes, and the plain optimizer leaves it as it is"
        if low := _bits(piece for _, piece in wrong):
            yield "dtype", f"they have no more bits than {low}"
        before, after = self.before[piece.name], self.after[piece.name]
        moved, meant = piece.values.double() - before[piece.where], (after - before)[piece.where]
        kept = torch.zeros(len(after), dtype=torch.bool)
        kept[piece.where] = (moved == 0) & (meant != 0)
        if kept.any():
            yield "rows", f"{_rows(kept, self.shapes[piece.name])} do not change on rank {rank}"
        k = float(moved @ meant / (meant @ meant).clamp(min=1e-30))
        rest = float((moved - k * meant).norm())  # what a factor does not explain
        is_near = rest < CLOSE * float(moved.norm())
        if is_near and rest < 0.1 * float((moved - meant).norm()):
            yield "scale", f"the update is x {k:.4g} of the plain optimizer's"
        told = "it is not the plain optimizer's update from the same gradients"
        near = ", though near it, as where an optimizer that needs whole tensors steps on pieces"
        yield "optimizer", told + (near if is_near else "")

    def settings_of_one_class(self, name: str) -> str:
        """Say how the settings of optimizers of one class differ, as where a rate is too small to show it."""
        classes = {each.settings[name][0] for each in self.seen if name in each.settings}
        if name not in self.settings or classes != {self.settings[name][0]}:
            return ""
        return next(filter(None, (self._settings(r, name) for r in range(len(self.seen)))), "")

    def _settings(self, rank: int, name: str) -> str:
        """Say how the optimizer of this rank, or of the weight's owner, differs from the plain one, if it does."""
        used = [each.settings[name] for each in self.seen if name in each.settings]
        own = self.seen[rank].settings.get(name, *used[:1])
        return _unlike(own, self.settings[name]) if own and name in self.settings else ""


def _of_no_numbers(wrong: Wrong) -> Iterator[Story]:
    ranks = {rank for rank, piece in wrong if not piece.values.isfinite().all()}
    if ranks:
        yield "unknown", f"it is not finite on rank {_listed(ranks)}"


def of_missing(lacking: Tensor, whole: bool, shape: torch.Size, skipped: bool) -> Iterator[Story]:
    if skipped:
        yield "optimizer", "it steps 0 times: no torch optimizer is called in this step"
    if whole:
        yield "frozen", "no optimizer holds it or has a gradient of it, and it does not change"
    yield "rows", f"no optimizer holds {_rows(lacking, shape)}, which do not change"


def _is_copy(piece: LocalElements, weights: Whole) -> bool:
    return torch.equal(piece.values, weights[piece.name][piece.where].to(piece.values.dtype))


def _unlike(used: Settings, plain: Settings) -> str:
    """Say how the loop's optimizer of a weight differs from the plain one; an empty text if it does not."""
    if used[0] != plain[0]:
        return f"it is {used[0]}, and the plain process has {plain[0]}"
    for key, meant in plain[1].items():
        own = used[1].get(key, meant)
        are_floats = isinstance(own, float) and isinstance(meant, float)
        if not (isclose(own, meant) if are_floats else own == meant):
            return f"{key} is {own}, and the plain process has {meant}"
    return ""


def _without(wrong: Wrong, whole: Whole) -> Wrong:
    """Take its part of these off each piece."""
    return [
        (rank, LocalElements(p.name, p.where, p.values.double() - whole[p.name][p.where]))
        for rank, p in wrong
    ]


def _fit(basis: Tensor, values: Tensor, bound: float, least: int = 2) -> Tensor | None:
    """Return the factors of the columns that make the values within the bound; None if there are none.

    least: elements for each factor, below which none is told.
    """
    if len(values) < least * basis.shape[1] or not values.isfinite().all():
        return None
    factors = torch.linalg.lstsq(basis, values[:, None], driver="gelsd").solution[:, 0]
    largest = max(1.0, float(factors.abs().max()))
    return factors if float((values - basis @ factors).norm()) <= 2 * bound * largest else None


def _is_even(factors: Tensor) -> bool:
    return _spread(factors) <= 2 * CLOSE


def _spread(factors: Tensor) -> float:
    """How far factors are from their mean, relatively."""
    mean = float(factors.mean())
    return float((factors - mean).abs().max()) / max(abs(mean), 5e-8)


def _is_zero(part: Tensor, factors: Tensor) -> bool:
    return bool(part.abs().max() < 2 * CLOSE * factors.abs().max()) if part.numel() else False


def _bits(pieces: Iterable[LocalElements]) -> str | None:
    """Name a dtype of 16 bits in which all these values are exact."""
    values = torch.cat([piece.values.float() for piece in pieces])
    values = values[values != 0]
    for dtype in (torch.bfloat16, torch.float16):
        if len(values) > 8 and torch.equal(values.to(dtype).float(), values):
            return str(dtype).removeprefix("torch.")
    return None


def _rows(mask: Tensor, shape: torch.Size) -> str:
    rows = mask.view(*shape[:1], -1).any(-1).nonzero().flatten().tolist()
    return f"row {_listed(rows)} of {len(mask.view(*shape[:1], -1))}"


def _listed(numbers: Iterable[int]) -> str:
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)
