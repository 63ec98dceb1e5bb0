"""`zeroexp report [FOLDER ...]`: what sweeps or runs cost, from the files of their folders alone.

    zeroexp report                                 the newest sweep in outputs/ as a table
    zeroexp report outputs/a outputs/b             both, and which points moved from a to b
    zeroexp report outputs/a --html report.html    one page with every chart, which needs no network
    zeroexp report outputs/a --csv - --json a.json numbers for other programs; - is standard output

Exit codes: 0 fine; 1 a number that must be exact varies between repeats of a point, what `study.must_equal` names
differs, or a study's claim does not hold; 2 refused in one line. A folder that cannot be read costs one line on
standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zeroexp.config.keys import ConfigError
from zeroexp.process import safe_output
from zeroexp.process.json_output import parser_of
from zeroexp.report import exports, markdown
from zeroexp.report.columns import (
    POINT,
    Column,
    all_columns,
    beside_names,
    chosen_columns,
    exported_columns,
    printed_columns,
)
from zeroexp.report.conclusions import Conclusions, conclude
from zeroexp.report.measured_points import MeasuredPoint, points_of
from zeroexp.report.moved_points import lines_of_moved, points_that_moved
from zeroexp.report.reading import read_runs
from zeroexp.report.results_table import print_lines, print_table
from zeroexp.report.tables import Table
from zeroexp.report.writing import writing

FINE, BROKEN, REFUSED = 0, 1, 2
STANDARD_OUTPUT = "-"
ONE_SWEEP = ("figure", "write", "markdown")  # what shows a single sweep
TEXTS = ("markdown", "csv", "json", "latex", "torchtitan")
RUNS = "*/*/config.yaml"  # of a folder of sweeps


def main() -> int:
    safe_output.ignore_output_errors()
    try:
        return _report(_arguments())
    except ConfigError as error:
        print(f"zeroexp: {error}", file=sys.stderr)
        return REFUSED


def _report(arguments: argparse.Namespace) -> int:
    _refuse_crowded_output(arguments)
    if arguments.columns and not any(getattr(arguments, each) for each in (*TEXTS, "write")):
        raise ConfigError("--columns: chooses those of a text; name one, as --csv -, or --write")
    folders = arguments.folders or _newest(Path("outputs"))
    for option in ONE_SWEEP:
        if getattr(arguments, option) and len(folders) > 1:
            raise ConfigError(f"--{option}: it shows one sweep, not {len(folders)}; name one")
    read = [read_runs(folder) for folder in folders]
    problems = [line for _, lines in read for line in lines]
    for line in problems:
        print(f"zeroexp: {line}", file=sys.stderr)
    sweeps = [points_of(runs) for runs, _ in read]
    points = sweeps[0] if len(sweeps) == 1 else points_of([run for runs, _ in read for run in runs])
    conclusions = conclude(points, arguments.reference)
    if all(getattr(arguments, option) != STANDARD_OUTPUT for option in TEXTS):
        _show(folders, sweeps, conclusions)
    for line in conclusions.broken:
        print(f"zeroexp: {line}", file=sys.stderr)
    _write(arguments, points, problems, conclusions)
    return BROKEN if conclusions.broken else FINE


def _refuse_crowded_output(arguments: argparse.Namespace) -> None:
    """Standard output takes one text, and a page is a file."""
    printed = [f"--{option}" for option in TEXTS if getattr(arguments, option) == STANDARD_OUTPUT]
    if len(printed) > 1:
        raise ConfigError(f"{' and '.join(printed)}: - takes one of them; name files for the rest")
    if str(arguments.html) == STANDARD_OUTPUT:
        raise ConfigError("--html -: a page is a file; name one, as --html report.html")


def _show(
    folders: Sequence[Path], sweeps: Sequence[Sequence[MeasuredPoint]], conclusions: Conclusions
) -> None:
    """Print the tables, then what is concluded of one sweep, or which points moved between two."""
    for folder, points in zip(folders, sweeps, strict=True):
        print(f"{folder}\n")
        print_table(points)
        print()
    if len(sweeps) == 1:
        print_lines([*conclusions.verdicts, *conclusions.doubts])
    elif len(sweeps) == 2:
        print_lines(lines_of_moved(*points_that_moved(*sweeps)))
    held = [claim.line for claim in conclusions.claims if claim.holds]  # the others stand below
    print_lines(conclusions.claim_lines or held)


def _write(
    arguments: argparse.Namespace,
    points: Sequence[MeasuredPoint],
    problems: Sequence[str],
    conclusions: Conclusions,
) -> None:
    if arguments.html:
        from zeroexp.report import page  # with plotly, which takes its time to import

        page.save(points, problems, arguments.html, conclusions)
    if arguments.figure:
        from zeroexp.report import figure, page  # so does matplotlib

        figure.save_figure(page.chart_of(arguments.chart, points, conclusions), arguments.figure)
    printed, exported = _columns(arguments.columns, points, conclusions)
    if arguments.write:
        markdown.replace_in(arguments.write, markdown.render(points, printed))
    texts = {
        "markdown": lambda: markdown.render(points, printed),
        "csv": lambda: exports.as_csv(points, exported),
        "json": lambda: exports.as_json(points, exported, conclusions, problems),
        "torchtitan": lambda: exports.as_torchtitan(points),
        "latex": lambda: Table.of(points, beside_names([POINT], printed)).as_latex(),
    }
    for option, text in texts.items():
        if where := getattr(arguments, option):
            _put(option, where, text())


def _columns(
    chosen: str | None, points: Sequence[MeasuredPoint], conclusions: Conclusions
) -> tuple[Sequence[Column], Sequence[Column]]:
    """Return the columns of printed texts and those of CSV and JSON: the same where --columns names some."""
    if chosen:
        columns = chosen_columns(all_columns(points, conclusions), chosen.split(","))
        return columns, columns
    return printed_columns(points, conclusions), exported_columns(points, conclusions)


def _put(option: str, where: str, text: str) -> None:
    if where == STANDARD_OUTPUT:
        print(text)
        return
    with writing(option, where, "use a file in a folder that you may write to, or -"):
        Path(where).write_text(f"{text}\n", encoding="utf-8")


def _newest(outputs: Path) -> list[Path]:
    configs = [*outputs.glob(RUNS)]
    if not configs:
        raise ConfigError("outputs/ holds no sweep; run one first: zeroexp")
    # A page that is written again renews the folder of its sweep, and the config of no run.
    return [max(configs, key=lambda config: config.stat().st_mtime).parent.parent]


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "zeroexp report")
    parser.add_argument("folders", nargs="*", type=Path, metavar="outputs/<sweep>")
    parser.add_argument("--html", type=Path, metavar="FILE", help="one page with every chart")
    parser.add_argument("--reference", metavar="POINT", help="what others are compared with")
    for option in TEXTS:
        told = "the results as text; without FILE, or -, printed"
        parser.add_argument(
            f"--{option}", nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help=told
        )
    parser.add_argument("--columns", metavar="NAME,...", help="of these texts, as CSV names them")
    parser.add_argument("--figure", type=Path, metavar="FILE.svg|pdf", help="draw a chart")
    parser.add_argument("--chart", default="memory", metavar="NAME", help="which; memory")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE.md", help="put the table between that page's markers"
    )
    return parser.parse_intermixed_args(_printing_before_folders(sys.argv[1:]))


def _printing_before_folders(words: Sequence[str]) -> list[str]:
    """Put - between a text's option and a folder, which is a sweep to show and no file: as in --json outputs/a.

    Raises ConfigError for what may be a sweep, misspelled: a file beside sweeps whose name has no suffix.
    """
    options, apart = {f"--{option}" for option in TEXTS}, list[str]()
    for word in words:
        is_named = bool(apart) and apart[-1] in options and not word.startswith("-")
        if is_named and Path(word).is_dir():
            apart.append(STANDARD_OUTPUT)
        elif is_named and not Path(word).suffix and any(Path(word).parent.glob(RUNS)):
            raise ConfigError(f"{apart[-1]} {word}: no such sweep; for a file give it a suffix")
        apart.append(word)
    return apart


if __name__ == "__main__":
    sys.exit(main())
