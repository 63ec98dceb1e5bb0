"""Write a sweep's results as a Markdown table, under a sentence that says when, where and by which command it ran."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap

from zeroexp.config.keys import ConfigError
from zeroexp.report.columns import STATUS, printed_columns
from zeroexp.report.settings import Column, point_columns
from zeroexp.tracking.run import Run

MEASURED = "measured"
BEGIN, END = (f"<!-- {MEASURED}: {word} -->" for word in ("begin", "end"))
LINE = 100  # characters of prose


def render(runs: Sequence[Run]) -> str:
    """Return the table with the fullest rank's bytes only; the terminal's table also has means and explanations."""
    shared = [column for column in point_columns(runs) if not column.differs(runs)]
    point = [column for column in point_columns(runs) if column.differs(runs)]
    status = [STATUS] if any(run.status != "done" for run in runs) else []
    columns = [*point, *printed_columns(runs), *status]
    sentence = " ".join([_circumstances(runs), _shared(shared, runs)])
    return f"{wrapped(sentence)}\n\n{_table(runs, columns)}"


def replace_in(page: Path, text: str, name: str = MEASURED) -> None:
    """Put `text` between the markers of this name. Raises ConfigError if the page has none or cannot be written."""
    begin, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    try:
        before, _, rest = page.read_text(encoding="utf-8").partition(begin)
        _, marker, after = rest.partition(end)
        if not marker:
            raise ConfigError(
                f"--write {page}: has no place for it; add the lines {begin} and {end}"
            )
        page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {page}: {error.strerror}; use a page that is there") from None


def wrapped(sentence: str) -> str:
    return "\n".join(wrap(sentence, LINE, break_long_words=False, break_on_hyphens=False))


def _table(runs: Sequence[Run], columns: Sequence[Column]) -> str:
    names = [f"{c.name}, {c.unit}" if c.unit.startswith("ms") else c.name for c in columns]
    rules = ["---" if column.left else "---:" for column in columns]
    rows = [[column.value(run).replace("|", r"\|") for column in columns] for run in runs]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [names, rules, *rows])


def _circumstances(runs: Sequence[Run]) -> str:
    """Return the day, command, machine and versions of the first run that tells; all runs of a sweep share them."""
    facts = next((run.environment for run in runs if "command" in run.environment), {})
    if not facts:
        return "No run tells when, where and with which command it ran."
    day = datetime.fromtimestamp(min(runs[0].times.values(), default=0.0), UTC).date()
    parts = [
        f"Measured on {day} with `{facts['command']}`",
        f"{facts.get('machine.processor', facts['host'])}, {facts['machine.num_cpus']} cores",
        f"Python {facts['versions.python']}, torch {facts['versions.torch']}",
    ]
    return f"{'; '.join(parts)}."


def _shared(shared: Sequence[Column], runs: Sequence[Run]) -> str:
    models = dict.fromkeys(run.config["model.name"] for run in runs)
    words = [f"model {' and '.join(models)}", *(f"{c.name} {c.value(runs[0])}" for c in shared)]
    return f"All points: {', '.join(words)}. Bytes are MiB of the fullest rank."
