"""One table of texts in four forms: aligned for a terminal, Markdown, LaTeX, HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from zeroexp.report.columns import Column
from zeroexp.report.measured_points import MeasuredPoint

LONG = 40  # characters of a cell of HTML that may break into lines
LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}"}
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {"·": r"$\cdot$", "±": r"$\pm$", "–": "--", "…": r"\ldots{}"}


@dataclass(frozen=True)
class Table:
    heads: Sequence[tuple[str, str]]  # name and unit of each column
    lefts: Sequence[bool]  # words are aligned left, numbers right
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, points: Sequence[MeasuredPoint], columns: Sequence[Column]) -> Table:
        heads = [(column.name or column.key, column.unit) for column in columns]
        rows = [[column.text(point) for column in columns] for point in points]
        return cls(heads, [not column.form for column in columns], rows)

    @classmethod
    def of_words(cls, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        return cls([(head, "") for head in heads], [True] * len(heads), rows)

    def lines(self) -> list[str]:
        """Return names, units, a rule, the rows and a rule, each column as wide as its longest text."""
        cells = [*zip(*self.heads, strict=True), *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        sides = ["<" if left else ">" for left in self.lefts]
        form = "  ".join(f"{{:{side}{n}}}" for side, n in zip(sides, widths, strict=True))
        aligned = [form.format(*row).rstrip() for row in cells]
        rule = "-" * max(map(len, aligned[:2]))
        return [*aligned[:2], rule, *aligned[2:], rule]

    def as_markdown(self) -> str:
        rules = ["---" if left else "---:" for left in self.lefts]
        rows = [[cell.replace("|", r"\|") for cell in row] for row in self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in [self._names, rules, *rows])

    def as_latex(self) -> str:
        """Return a `tabular` with three rules of the booktabs package."""
        escapes = str.maketrans(LATEX)
        escaped = ([cell.translate(escapes) for cell in row] for row in [self._names, *self.rows])
        head, *body = (" & ".join(row) + r" \\" for row in escaped)
        form = "".join("l" if left else "r" for left in self.lefts)
        rules = [r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
        return "\n".join([rf"\begin{{tabular}}{{{form}}}", *rules, r"\end{tabular}"])

    @property
    def _names(self) -> list[str]:
        return [", ".join(filter(None, head)) for head in self.heads]

    def as_html(self) -> str:
        """Return a table that scrolls sideways where it must."""
        top = "".join(
            f"<th{' class=left' if left else ''}>{escape(name)}<small>{escape(unit)}</small></th>"
            for (name, unit), left in zip(self.heads, self.lefts, strict=True)
        )
        rows = (f"<tr>{''.join(map(_html_cell, row, self.lefts))}</tr>" for row in self.rows)
        body = "\n".join(rows)
        return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _html_cell(text: str, left: bool) -> str:
    long = " long" if left and len(text) > LONG else ""
    return f'<td class="left{long}">{escape(text)}</td>' if left else f"<td>{escape(text)}</td>"
