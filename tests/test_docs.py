"""What the pages promise about themselves: width of prose, length of the README, files that they name."""

from __future__ import annotations

import ast
import re
import tokenize
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from zeroexp.report.markdown import BEGIN, END, LINE

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
FOLDERS = ("zeroexp", "hydra_plugins", "conf", "benchmarks", "examples", "slurm", "tests", "docs")
PATHS = [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in ROOT.glob(f"{name}/**/*.*"))]
FILES = [f"/{path.relative_to(ROOT)}" for path in PATHS]
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of each line that is neither table nor code, whether fenced or indented."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        fence = line.startswith("```")
        fenced ^= fence
        if not (fence or fenced or re.search(r" \| |^(\||    |-+\|)", line)):
            yield number, line


def test_code_and_tables_are_no_prose() -> None:
    text = "a\n```sh\nb\n```\n    c\n| d |\n* e\n  f\ng | h\n---|---:"
    assert list(prose(text)) == [(1, "a"), (7, "* e"), (8, "  f")]


def test_prose_is_wrapped() -> None:
    wide = [
        f"{page.name}:{n}"
        for page in PAGES
        for n, line in prose(page.read_text(encoding="utf-8"))
        if len(line) > LINE
    ]
    assert wide == [], f"wrap at {LINE} columns"


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120


def test_named_files_are_there() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        its_own = re.findall(r"^```\w*\n# (\S+)$", text, re.MULTILINE)  # a reader writes these
        names = set(re.findall(r"\w[\w/]*\.(?:py|md|svg|yaml|cpp)\b", text)) - set(its_own)
        there = {name for name in names if any(file.endswith(f"/{name}") for file in FILES)}
        missing += [f"{page.name}: {name}" for name in names - there]
    assert missing == []


def test_the_readme_names_the_files_that_are_the_algorithm() -> None:
    """Those with a star in the guide of the folder, in its order; the guide itself names every file."""
    guide = (ROOT / "zeroexp/zero/__init__.py").read_text()
    starred = re.findall(r"^ +(\w+\.py) \*", guide, re.MULTILINE)
    assert len(starred) > 3
    places = [README.read_text().find(f"`{name}`") for name in starred]
    assert -1 not in places and places == sorted(places), f"README.md names {starred}"


def test_table_and_picture_of_the_readme_show_the_same_runs() -> None:
    _, _, rest = README.read_text().partition(BEGIN)
    lines = [line.strip("| ").split(" | ") for line in rest.partition(END)[0].splitlines()]
    header, _, *rows = [cells for cells in lines if len(cells) > 1]
    names = ["-".join([*row[:2], "n2"]) for row in rows]
    peaks = {
        name: float(row[header.index("peak, MiB")]) for name, row in zip(names, rows, strict=True)
    }
    texts = [
        "".join(element.itertext()).strip()
        for element in ET.parse(ROOT / "docs/memory.svg").iter()
        if element.tag.endswith("}text")
    ]
    assert [text for text in texts if text.endswith("-n2")] == list(peaks)
    drawn = [float(text.partition(", peak ")[2]) for text in texts if ", peak " in text]
    assert drawn == pytest.approx(list(peaks.values()), abs=0.6)


SOURCES = sorted(
    path for path in PATHS if path.suffix == ".py" and path.is_relative_to(ROOT / "zeroexp")
)
# Names on the pages that no code holds: those of others, and two that are made of parts.
ON_PAGES = {
    *("set_requires_gradient_sync", "odeint_adjoint"),
    *("MLFLOW_TRACKING_TOKEN", "ReqNodeNotAvail", "PartitionConfig"),
    *("plan_total_mib", "plan_error_total_mib", "plan_step_ms"),
}


def names_that_exist() -> set[str]:
    """Every name in the code and its short strings, in YAML and TOML, and of every file."""
    names = {word for path in PATHS for word in re.findall(r"\w+", str(path.relative_to(ROOT)))}
    for path in [*PATHS, ROOT / "pyproject.toml"]:
        if path.suffix in (".yaml", ".toml"):
            names |= set(re.findall(r"[A-Za-z_]\w+", path.read_text()))
        elif path.suffix == ".py":
            for kind, text in tokens_of(path):
                if kind == tokenize.NAME:
                    names.add(text)
                elif kind == tokenize.STRING and "\n" not in text and len(text) < 60:
                    names |= set(re.findall(r"[A-Za-z_]\w*", text))
    return names


@cache
def tokens_of(path: Path) -> list[tuple[int, str]]:
    tokens = tokenize.generate_tokens(StringIO(path.read_text(encoding="utf-8")).readline)
    return [(token.type, token.string) for token in tokens]


@cache
def docstrings_of(path: Path) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    docs = [ast.get_docstring(node) for node in nodes if isinstance(node, documented)]
    return [text for text in docs if text]


def prose_of(path: Path) -> str:
    """The comments and docstrings of a source, the whole text of a page."""
    if path.suffix != ".py":
        return re.sub(
            r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
        )
    comments = [text for kind, text in tokens_of(path) if kind == tokenize.COMMENT]
    return "\n".join([*docstrings_of(path), *comments])


def test_names_in_prose_exist() -> None:
    """Names in backticks; and of a source the files that it names (those of pages: above)."""
    names, wrong = names_that_exist(), []
    files = {file.rpartition("/")[2] for file in FILES}
    for path in [*SOURCES, *PAGES]:
        text, place = prose_of(path), path.relative_to(ROOT)
        for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", text):
            exists = name.split(".")[-1] in (names | ON_PAGES if path in PAGES else names)
            wrong += [] if exists else [f"{place}: {name}"]
        if path in SOURCES:
            wrong += [
                f"{place}: {n}" for n in re.findall(r"\b[a-z_]+\.py\b", text) if n not in files
            ]
    assert wrong == []


NO_THING = re.compile(r"(This (?!rank|machine)|It|They|These|That|After|Before)\b")


def test_docstrings_name_the_thing_first() -> None:
    """A reader asks what stands here, and "This object ..." or "It ..." keeps the answer back."""
    wrong = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in SOURCES
        for text in docstrings_of(path)
        if NO_THING.match(text)
    ]
    assert wrong == []
