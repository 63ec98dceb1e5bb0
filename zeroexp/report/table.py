"""The table at the end of a sweep: what every point cost, one row each, aligned for a terminal.

A column that would say nothing (master weights of an fp32 run, a mean equal to the fullest rank) is left out. Where
two points share strategy, implementation and world size, the settings that tell them apart become columns.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from zeroexp.measure.record import RunSummary, Spread
from zeroexp.tracking.run import Run

MIB = 2**20
ABSENT = "–"
WIDTH = 110  # of the text below the table
SKEW = 1.02  # ranks that differ by less are shown as alike

# What torch's engines leave where, if it is not what the stage's name promises.
NOTES = {
    "zero1/torch": "zero1/torch is DDP + ZeroRedundancyOptimizer: gradients rest replicated, 3P of traffic.",
    "zero2/torch": "zero2/torch is FSDP2 without reshard: parameters rest sharded.",
}


@dataclass(frozen=True)
class Column:
    name: str
    unit: str
    value: Callable[[Run], str]
    left: bool = False  # words are aligned left, numbers right


def show(runs: Sequence[Run]) -> None:
    """Print the table, as wide as the terminal allows; in a pipe as wide as it is."""
    print(render(runs, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))


def render(runs: Sequence[Run], width: int | None = None) -> str:
    """A header of two lines (name, unit), one line per run, and what each number means.

    Where that is wider than `width` characters, two tables: time and traffic, then memory. None = no limit.
    """
    point, memory, traffic = _point(runs), _memory(runs), _traffic(runs)
    tables = [_lines(runs, [*point, *RESULTS, *memory, *traffic, STATUS])]
    if width is not None and len(tables[0][2]) > width:
        first, second = [*point, *RESULTS, *traffic, STATUS], [*point, *memory]
        tables = [[*_lines(runs, first), ""], _lines(runs, second)]
    return "\n".join([*(line for lines in tables for line in lines), *_foot(runs)])


def _lines(runs: Sequence[Run], columns: Sequence[Column]) -> list[str]:
    header = [[c.name for c in columns], [c.unit for c in columns]]
    rows = [[c.value(run) for c in columns] for run in runs]
    widths = [max(map(len, column)) for column in zip(*header, *rows, strict=True)]
    lines = [_aligned(cells, widths, columns) for cells in header + rows]
    rule = "-" * max(map(len, lines[:2]))
    return [*lines[:2], rule, *lines[2:], rule]


def _point(runs: Sequence[Run]) -> list[Column]:
    return [
        Column("strategy", "", lambda run: run.strategy, left=True),
        Column("implementation", "", lambda run: run.implementation, left=True),
        *[_setting(key) for key in _distinguishing_keys(runs)],
        Column("ranks", "", lambda run: str(run.world_size)),
    ]


def _traffic(runs: Sequence[Run]) -> list[Column]:
    return [
        *_bytes(runs, "sent/step", lambda s: s.sent_bytes_per_step),
        *(_bytes(runs, "by TCP", lambda s: s.wire_bytes_per_step) if _shares(runs) else []),
    ]


def _memory(runs: Sequence[Run]) -> list[Column]:
    def kind(name: str, kind: str, *, rare: bool = False) -> list[Column]:
        return _bytes(runs, name, lambda s: s.memory.by_kind[kind], rare=rare)

    return [
        *kind("params", "parameters"),
        *kind("grads", "gradients"),
        *kind("optimizer", "optimizer"),
        *kind("master", "master", rare=True),
        *kind("buffers", "buffers", rare=True),
        *_bytes(runs, "total", lambda s: s.memory.total, always_mean=True),
        *_bytes(runs, "peak", lambda s: s.memory.peak),
    ]


def _setting(key: str) -> Column:
    return Column(key.rpartition(".")[2], "", lambda run: run.config.get(key, ABSENT), left=True)


def _number(read: Callable[[RunSummary], float | None], form: str) -> Callable[[Run], str]:
    def text(run: Run) -> str:
        value = read(run.summary) if run.summary else None
        return ABSENT if value is None else format(value, form)

    return text


def _bytes(
    runs: Sequence[Run],
    name: str,
    spread: Callable[[RunSummary], Spread | None],
    *,
    rare: bool = False,  # no column where nobody has any
    always_mean: bool = False,
) -> list[Column]:
    """The fullest rank, and the mean over ranks where a run's ranks differ."""

    def column(name: str, part: Callable[[Spread], float]) -> Column:
        def mebibytes(summary: RunSummary) -> float | None:
            ranks = spread(summary)
            return None if ranks is None else part(ranks) / MIB

        return Column(name, "MiB", _number(mebibytes, ",.1f"))

    all_ranks = [ranks for run in runs if run.summary and (ranks := spread(run.summary))]
    if rare and not any(ranks.fullest for ranks in all_ranks):
        return []
    columns = [column(name, lambda ranks: ranks.fullest)]
    if always_mean or any(ranks.fullest > SKEW * ranks.mean for ranks in all_ranks):
        columns.append(column("mean", lambda ranks: ranks.mean))
    return columns


def _shares(runs: Sequence[Run]) -> bool:
    """True if a run's ranks handed one another more than TCP carried: they share memory."""
    pairs = [
        (run.summary.sent_bytes_per_step, run.summary.wire_bytes_per_step)
        for run in runs
        if run.summary
    ]
    return any(sent and wire and sent.mean > SKEW * wire.mean for sent, wire in pairs)


def _status(run: Run) -> str:
    reason = (run.reason or "").strip()
    status = run.status if run.num_attempts == 1 else f"{run.status} (attempt {run.num_attempts})"
    return f"{status}: {reason.splitlines()[0]}" if reason else status


def _distinguishing_keys(runs: Sequence[Run]) -> list[str]:
    """Settings in which two runs differ that agree in strategy, implementation and world size."""
    alike: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        alike.setdefault((run.label, run.world_size), []).append(run)
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [
        key
        for key in keys
        if any(len({run.config.get(key) for run in group}) > 1 for group in alike.values())
    ]


def _aligned(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> str:
    padded = [
        cell.ljust(width) if column.left else cell.rjust(width)
        for cell, width, column in zip(cells, widths, columns, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _foot(runs: Sequence[Run]) -> list[str]:
    summaries = [run.summary for run in runs if run.summary]
    steps = sorted({(s.num_steps, s.num_warmup_steps) for s in summaries})
    counted = " or ".join(f"{n} steps after {warmup} of warm-up" for n, warmup in steps)
    sentences = [
        f"step, tokens/s: rank 0 over {counted}." if steps else "",
        "params, grads, optimizer: the most held at any of the moments at rest, after forward, after backward, after "
        "step, on the fullest rank (mean: over ranks, where they differ by more than 2 %).",
        "total: the most of all kinds held at one moment, so it may be less than their sum.",
        "peak: the most allocated at once during any step, activations included; – where it cannot be known.",
        "sent/step: what the rank that sends most handed to others in one step",
        "(by TCP: what of it left through the network; ranks of one host may read each other's memory)."
        if _shares(runs)
        else "through the network.",
        *_private_notes(runs),
        *[NOTES[label] for label in dict.fromkeys(r.label for r in runs) if label in NOTES],
    ]
    return wrap(" ".join(filter(None, sentences)), WIDTH)


def _private_notes(runs: Sequence[Run]) -> list[str]:
    """Memory that no pool bounds: a model whose modules run inside one another."""
    counts = {run.label: run.summary.num_private_units for run in runs if run.summary}
    return [
        f"{label}: {count} units ran while their pool was in use and got memory of their own."
        for label, count in counts.items()
        if count
    ]


RESULTS = [
    Column("loss", "last step", _number(lambda s: s.final_loss, ".4f")),
    Column("step", "ms median", _number(lambda s: s.step_seconds_median * 1e3, ",.1f")),
    Column("step", "ms p95", _number(lambda s: s.step_seconds_p95 * 1e3, ",.1f")),
    Column("tokens/s", "all ranks", _number(lambda s: s.tokens_per_second, ",.0f")),
]
STATUS = Column("status", "", _status, left=True)
