"""Every command of every page is taken by the program that it names, words and quotes as a shell reads them.

What would train goes as far as the batch files of its points: `cluster.dry_run=true` composes, checks and prints. What
reads a sweep reads one that has been trained for it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_data import ANSWER, QUESTION, give_a_chat_template
from tests.warm import Warm
from zeroexp.commandline.commands import VERBS, module_of

ROOT = Path(__file__).resolve().parent.parent
SITE = "slurm/site.example/cluster/mysite.yaml"
PAGES = ["docs/slurm.md", SITE, "README.md", "CONTRIBUTING.md"]
# tests/test_extending.py gives the commands of extending.md beside the files that it adds.
OTHERS = {"slurm.md", "extending.md"}
PAGES += sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md") if path.name not in OTHERS)
COMMAND = re.compile(r"^(?:    |#   )(zeroexp(?: .*)?)$|`(zeroexp(?: [^`]*)?)`", re.MULTILINE)
SETTING = re.compile(r"`('?\+?(?:cluster|checkpoint|outputs|tracking|data|resume)[\w.]*=[^`]*)`")
FOR_A_PLACE = {
    "<sweep>": "compare",
    "<run>": "run",
    "study=<name>": "study=table_b",
    "outputs/before outputs/after": "outputs/compare outputs/compare",
    " ... ": " ",
    "/scratch/$USER": "scratch/$USER",
    "=N": "=10",
    "=K": "=1",
    "<folder>": "outputs/compare/run",
    "resume=outputs/theirs": "resume=outputs/compare/run",
    "resume=RUN_A,RUN_B": "resume=outputs/compare/run",
    "model.path=DIR data=hf": "model.path=TALKS data=hf",
}
MY_LAYOUT = """
from zeroexp.cut.layout import LAYOUTS

LAYOUTS.add("mylayout", LAYOUTS["buffer"])
"""
TINY = ["model=tiny", "data=synthetic"]
# Words that name a checkpoint or weights need the model that was saved.
SAVED = ("resume=", "model.weights=")
ELSEWHERE = {
    "hydra/sweeper=optuna": "tests/cluster/test_sweep.py and test_slurm_sweep.py run it",
    "--advise": "it takes a minute; tests/plan/test_advise.py asks for a small model",
    "verify": "tests/verify/test_verify_page.py runs it",
    "data=yelp": "it asks the network for the data",
    "cluster.link=": "a link needs root; tests/cluster/test_emulated_network.py makes one",
    "study=slow_link": "as above",
}


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every command of ours, with its continuation lines."""
    found: dict[tuple[str, str], None] = {}
    for page in PAGES:
        text = re.sub(r"\\\n +", "", (ROOT / page).read_text())
        for match in COMMAND.finditer(text):
            found[page, " ".join((match[1] or match[2]).split("\n"))] = None
    return list(found)


def settings() -> list[tuple[str, str]]:
    """(page, one command) of all settings of a page that stand by themselves between backticks."""
    # Those of data.md belong to different kinds of data, so that no command can have all of them.
    pages = [page for page in PAGES if page != "docs/data.md"]
    by_page = {page: SETTING.findall((ROOT / page).read_text()) for page in pages}
    first = {
        page: {word.partition("=")[0]: word for word in words} for page, words in by_page.items()
    }
    return [
        (page, " ".join(["zeroexp", *words.values()])) for page, words in first.items() if words
    ]


FIRST_PAGE = {command: page for page, command in reversed([*commands(), *settings()])}
CASES = [
    pytest.param(command, id=f"{Path(page).name}: {command}"[:90])
    for command, page in reversed(FIRST_PAGE.items())
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home with the example of a site under the name that it is given, and a sweep that has been trained."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "slurm").symlink_to(ROOT / "slurm")
    shutil.copy(ROOT / "README.md", folder)
    (folder / "docs").mkdir()
    example = (ROOT / SITE).read_text()
    (make_site,) = re.findall(r"^#   (cp -r .*)$", example, re.MULTILINE)
    subprocess.run(["bash", "-c", make_site], cwd=folder, env=environment(folder), check=True)
    shutil.copy(folder / "site/cluster/juwels.yaml", folder / "site/cluster/mysite.yaml")
    words = [*TINY, "study.name=compare", "cluster.device=cpu", "world_size=1", "train.steps=10"]
    run(folder, [*words, "tracking=files", "checkpoint.every=10", "train.trace_steps=[5]"])
    (trained,) = (folder / "outputs/compare").glob("zero3*")
    trained.rename(trained.with_name("run"))
    run(folder, ["export", "outputs/compare/run", "--to", "DIR"])
    run(folder, ["export", "outputs/compare/run", "--to", "FOLDER", "--format", "dcp"])
    rows = [f"a word,{1 + i % 5},{('bad', 'fine', 'good')[i % 3]}" for i in range(9)]
    (folder / "reviews.csv").write_text("\n".join(["review,stars,verdict", *rows, ""]))
    (folder / "mymodule.py").write_text(MY_LAYOUT)
    (folder / "corpus").mkdir()
    for name in ("train", "test"):
        (folder / f"corpus/{name}.txt").write_text("a line\n" * 9)
    shutil.copytree(folder / "DIR", folder / "TALKS")
    give_a_chat_template(folder / "TALKS")
    (folder / "chat.jsonl").write_text(f"{json.dumps({'messages': QUESTION + ANSWER})}\n" * 99)
    yield folder


def environment(folder: Path) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "HOME": str(folder), "USER": "me", "PYTHONPATH": paths}


def run(folder: Path, words: list[str]) -> str:
    done = Warm([sys.executable, "-m", "zeroexp", *words], cwd=folder, env=environment(folder))
    output, errors = done.communicate()
    assert done.returncode == 0, f"{words}: {errors}"
    return output


def words_of(command: str, folder: Path) -> list[str]:
    """What a shell makes of the words behind `zeroexp`, once placeholders have a value."""
    for name, value in FOR_A_PLACE.items():
        command = command.replace(name, value)
    shell = ["bash", "-c", f"printf '%s\\0' {command}"]
    done = subprocess.run(
        shell, cwd=folder, env=environment(folder), capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[1:-1]


def as_a_dry_run(words: list[str]) -> list[str]:
    """The words of a run, so that no rank starts; a cluster that is Slurm's stays."""
    only_local = ("cluster=local", "cluster.requeue=false", "cluster.device=auto")
    kept = [word for word in words if word not in only_local]
    if not any(word.startswith("cluster=") for word in kept):
        kept.append("cluster=slurm")
    if not any(word.startswith(("cluster.device=", "--config-dir")) for word in kept):
        kept.append("cluster.device=cpu")
    if any(word.startswith(SAVED) for word in kept):
        kept += TINY
    elif "model.path=DIR" in kept:  # trained on synthetic data, so that it has no tokenizer
        kept.append("data=synthetic")
    if not any(word.startswith("tracking.") for word in kept):
        kept.append("tracking=files")
    if not any(word.startswith(("outputs=", "resume=")) for word in kept):
        kept.append("outputs=dry")  # the sweep that was trained stays the newest
    return [*kept, "cluster.dry_run=true", "cluster.rehearse_s=0"]


@pytest.mark.slow
@pytest.mark.parametrize("command", CASES)
def test_a_command_of_a_page_is_taken(place: Path, command: str) -> None:
    if known := next((reason for word, reason in ELSEWHERE.items() if word in command), None):
        pytest.skip(known)
    words = words_of(command, place)
    if module_of(words) or {"--rerun", "--cfg", "--help"} & {*words}:
        reads_a_sweep(place, words)
    else:
        output = run(place, as_a_dry_run(words))
        assert "#SBATCH --nodes=" in output


def reads_a_sweep(place: Path, words: list[str]) -> None:
    # Newer than dry runs that go on from it.
    (place / "outputs/compare/run/config.yaml").touch()
    if words[0] == "export":  # it writes over nothing
        shutil.rmtree(place / "outputs/compare/run/exported", ignore_errors=True)
        shutil.rmtree(place / "DIR" if "DIR" in words else place / "nothing", ignore_errors=True)
    command = [sys.executable, "-m", "zeroexp", *words]
    # It starts processes by multiprocessing, which a warm one may not.
    if words[0] == "calibrate":
        done = subprocess.run(
            command, cwd=place, env=environment(place), stderr=subprocess.PIPE, text=True
        )
        no_gpu = "cuda" in words and "torch finds no GPU here" in done.stderr
        assert done.returncode == (2 if no_gpu else 0), done.stderr
        return
    done = Warm(command, cwd=place, env=environment(place))
    _, errors = done.communicate()
    nothing_failed = "nothing there has failed" in errors and "--rerun" in words
    if words[0] == "sync":  # the sweep is tracked by files alone
        assert "MLflow tracks none of its runs" in errors
    assert done.returncode == (2 if nothing_failed or words[0] == "sync" else 0), errors


def test_commands_are_found() -> None:
    found = commands()
    assert len(found) > 30
    ours = dict(settings())["docs/slurm.md"]
    assert all(f" {key}=" in ours for key in ("cluster.device", "outputs", "'cluster.slurm.srun"))
    verbs = {command.split()[1] for _, command in found if " " in command}
    assert verbs >= {*VERBS} - {"run"}, "each verb stands on some page"


def test_each_key_of_own_data_has_a_command_with_it() -> None:
    text = (ROOT / "docs/data.md").read_text()
    named = set(re.findall(r"\b((?:data|model|train)\.[a-z]\w+)\b", text)) - {"data.md"}
    given = {
        word.lstrip("'").partition("=")[0]
        for page, command in commands()
        if page == "docs/data.md"
        for word in command.split()
    }
    assert {"data.split", "data.labels", "data.vocab_size"} < named <= given
