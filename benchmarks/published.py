"""Published tables of memory and traffic, cell by cell, and how ours is computed for each.

A table names the study that plans it; a row names a point of that study, and its cells hold the published figures.
Every cell that differs by more than its rounding has a sentence that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose

from zeroexp.plan.form_terms import ITEMSIZE, ClosedForm, OptimizerForm

RATIOS = ("vs baseline", "fullest vs baseline", "times", "saving")  # columns without a unit
MIB, GIB, GB = 2**20, 2**30, 10**9

# What a cell says -> how ours is computed from the forms of its row and of the table's first row.
Engine = tuple[str, str]  # strategy and implementation
Measure = Callable[[ClosedForm, ClosedForm], float]


@dataclass(frozen=True)
class PublishedRow:
    """One row of a published table, and the point of the study that is its own."""

    strategy: str
    implementation: str
    cells: Mapping[str, str]  # column -> published figure, with as many digits as were published
    why: str | None = None  # why ours differ where they do, or what the figure leaves out

    @property
    def engine(self) -> Engine:
        return self.strategy, self.implementation


@dataclass(frozen=True)
class PublishedTable:
    """One published table."""

    study: str
    title: str
    unit: str
    rows: Sequence[PublishedRow]
    measures: Mapping[str, Measure]
    unit_bytes: float = 1.0  # of the unit
    slack: float = 0.51  # units of the last digit that rounding accounts for; more if terms were rounded before
    nominal: float | None = None  # published number of parameters, where it is a round one
    notes: Sequence[str] = field(default_factory=tuple[str])


@dataclass(frozen=True)
class ComparedCell:
    """One cell: the published figure beside ours."""

    row: PublishedRow
    column: str
    published: str
    ours: float
    actual: float | None  # ours without scaling to the nominal number of parameters
    agrees: bool

    @property
    def digits(self) -> int:
        """Digits after the point that were published."""
        return len(self.published.partition(".")[2])


def compare_cells(table: PublishedTable, forms: Mapping[Engine, ClosedForm]) -> list[ComparedCell]:
    """Return every cell of the table whose row is in `forms`, the study's points; the first row must be."""
    baseline = forms[table.rows[0].engine]
    rows = [row for row in table.rows if row.engine in forms]
    return [
        _cell(table, row, column, table.measures[column](forms[row.engine], baseline), baseline)
        for row in rows
        for column in row.cells
    ]


def _cell(
    table: PublishedTable, row: PublishedRow, column: str, measured: float, baseline: ClosedForm
) -> ComparedCell:
    published = row.cells[column]
    is_ratio = column in RATIOS
    actual = measured if is_ratio else measured / table.unit_bytes
    scales = table.nominal is not None and not is_ratio
    ours = actual * table.nominal / num_parameters(baseline) if table.nominal and scales else actual
    digits = len(published.partition(".")[2])
    agrees = isclose(ours, float(published), rel_tol=0, abs_tol=table.slack * 10**-digits)
    return ComparedCell(row, column, published, ours, actual if scales else None, agrees)


# -- measures --------------------------------------------------------------------------------------


def _kinds(form: ClosedForm, kinds: Sequence[str], moment: str = "after_backward") -> list[float]:
    """Return the bytes of these kinds on every rank."""
    held = [form.held_bytes(moment, rank) for rank in range(form.world_size)]
    return [sum(each[kind] for kind in kinds) for each in held]


def mean_of(*kinds: str, moment: str = "after_backward") -> Measure:
    def measure(form: ClosedForm, _: ClosedForm) -> float:
        return sum(_kinds(form, kinds, moment)) / form.world_size

    return measure


STATES = ("parameters", "gradients", "optimizer", "master")
total = mean_of(*STATES)
at_rest = mean_of(*STATES, moment="at_rest")


def fullest(form: ClosedForm, _: ClosedForm) -> float:
    return max(_kinds(form, STATES))


def ratio_to_baseline(form: ClosedForm, baseline: ClosedForm) -> float:
    return total(form, form) / total(baseline, baseline)


def fullest_ratio_to_baseline(form: ClosedForm, baseline: ClosedForm) -> float:
    return fullest(form, form) / total(baseline, baseline)


def one_moment(form: ClosedForm, baseline: ClosedForm) -> float:
    """Half of Adam's state, without the count of steps."""
    moments = form.optimizer.num_moments or OptimizerForm().num_moments
    steps = form.optimizer.bytes_per_tensor * form.held_elements(0).spans.total()
    return (form.held_bytes("at_rest", 0)["optimizer"] - steps) / moments


def cast(form: ClosedForm, _: ClosedForm) -> float:
    """Reduced gradients in the master's dtype, which an optimizer's step needs where they are in another one."""
    reduce, master = form.precision.reduce, form.precision.master
    return form.held_elements(0).owned * ITEMSIZE[master] if reduce != master else 0


def with_cast(form: ClosedForm, baseline: ClosedForm) -> float:
    return total(form, baseline) + cast(form, baseline)


def saving(form: ClosedForm, baseline: ClosedForm) -> float:
    return 1 - with_cast(form, baseline) / at_rest(baseline, baseline)


def times(form: ClosedForm, baseline: ClosedForm) -> float:
    """Return what a rank sends, in units of P (N-1)/N; the mean over ranks, without the norm."""
    ranks = range(form.world_size)
    sent = [form.traffic(rank).bytes_by_kind for rank in ranks]
    mean = sum(v for kinds in sent for k, v in kinds.items() if k != "norm") / form.world_size
    whole = num_parameters(baseline) * form.parameter_itemsize
    return mean / whole * len(ranks) / (len(ranks) - 1)


def num_parameters(baseline: ClosedForm) -> int:
    """Return the elements that a rank of the baseline updates, which is DDP: of a model without frozen ones all."""
    return baseline.held_elements(0).owned


def sent_with_redundant_optimizers(num_slow: int, num_fast: int) -> tuple[float, float]:
    """Return (what crosses slow links, what is sent in all) by one rank, in P, with an optimizer in each slow group.

    Gradients are reduce-scattered over the fast links of a group, their pieces all-reduced over the slow links between
    groups, and parameters gathered over the fast ones.
    """
    inside = (num_fast - 1) / num_fast
    slow = 2 / num_fast * (num_slow - 1) / num_slow
    return slow, 2 * inside + slow
