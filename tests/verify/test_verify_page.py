"""docs/verify.md: its loop, its mistakes and its answers; and loops that can not be run."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.silent_loops import BUGS
from tests.verify.test_verify import answers
from tests.warm import Warm
from zeroexp.process import safe_output
from zeroexp.verify import __main__ as verify_main
from zeroexp.verify.__main__ import main
from zeroexp.verify.compare_steps import Cause, Difference, Verdict

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = ROOT / "pyproject.toml"
PAGE = (ROOT / "docs/verify.md").read_text()
(CODE,) = re.findall(r"^```python\n# loop.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
# What the page does to its loop, the words of its command, and the exit code
MISTAKES = {
    "right": (CODE, (), 0),
    "not divided": (CODE.replace(" / len(batches)\n", "\n"), ("--worlds", "2"), 1),
}


def verify(folder: Path, text: str, *words: str) -> tuple[int, str, str]:
    (folder / "loop.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "zeroexp", "verify", *words]
    done = Warm(command, cwd=folder, env=environment, forks=True)
    printed, errors = done.communicate()
    assert done.returncode is not None
    return done.returncode, printed, errors


def lines(text: str) -> list[str]:
    """The lines, without what rounding and the version of torch make of them."""
    return [
        re.sub(r"\d+%|\d\.\d+e-\d+|torch \S+|PyTorch \S+", "", line).strip()
        for line in text.splitlines()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_the_page_shows_what_it_says(tmp_path: Path, name: str) -> None:
    text, words, code = MISTAKES[name]
    assert (text != CODE) == (code == 1)
    returned, printed, errors = verify(tmp_path, text, "loop.py:my_loop", *words)
    assert (returned, errors) == (code, "")
    assert "\n".join(lines(printed)) in "\n".join(lines(PAGE))


def test_programs_read_the_same(tmp_path: Path) -> None:
    text, *_ = MISTAKES["not divided"]
    code, printed, _ = verify(tmp_path, text, "loop.py:my_loop", "--json", "--worlds", "2")
    (world,) = json.loads(printed)
    found = world["difference"]
    assert code == 1 and world["world_size"] == 2
    assert (found["cause"]["kind"], found["tensor"], found["step"]) == ("scale", "0.weight", 0)
    assert found["bound"] < 1e-4 < 1.9 < found["distance"] < 2.1  # three times as long


def test_what_no_weight_shows_is_said(tmp_path: Path) -> None:
    """A decay of a rate that float32 rounds away in three steps is another model after a million."""
    text = CODE.replace("=0.1,\n    )", "=99,\n    )").replace(", 0.1)\n", ", 99)\n")
    text = text.replace("lr=1e-3", "lr=1e-8").replace(
        "optimizer = build_optimizer(model)",
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-8, weight_decay=0.0)",
    )
    code, printed, _ = verify(tmp_path, text, "loop.py:my_loop", "--json", "--worlds", "2")
    (world,) = json.loads(printed)
    said = [
        "0.weight: weight_decay is 0.0, and the plain process has 0.1; its weights do not show it",
        "no norm reaches max_grad_norm=99, so clipping is not judged; give less",
        "0.weight and 4 more: an update is less than the weight's rounding, and is not judged; give a larger rate",
    ]
    assert (code, world["difference"], world["notes"]) == (0, None, said)


def test_numbers_that_are_not_finite_are_json(monkeypatch: Any, capsys: Any) -> None:
    found = Difference(0, "gradient", "w", 0, float("nan"), 0.1, 1, Cause("unknown", ""))
    monkeypatch.setattr(verify_main, "_verify", lambda _, all: all.append(Verdict(1, 1, 1, found)))
    monkeypatch.setattr(sys, "argv", ["zeroexp verify", "loop.py:x", "--json"])
    monkeypatch.setattr(safe_output, "ignore_output_errors", lambda: None)  # pytest has its own
    assert main() == 1
    (world,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert world["difference"]["distance"] == "NaN"


# Functions behind the page's loop, and what is said of them
CANNOT = {
    "nothing": "no such function; name one that returns a Loop",
    "build_model": "returns Sequential; return a zeroexp.verify.Loop",
    "without_step": "train returns no step; return step, or (model or strategy, step)",
    "without_norm": "Loop(returns_norm=True): step returns a NoneType; return the norm of all gradients",
    "without_strategy": "weights are shown by the strategy alone; return (strategy, step)",
    "divides": "rank 0 of 1: loop.py:{line}: ZeroDivisionError: division by zero",
    "with_dropout": "Loop(loss=...): the same weights and microbatch give {number} and {number}: dropout,",
    "of_an_iterator": "Loop(batch=...): equal generators give different microbatches; draw from the",
    "one_microbatch": "Loop(batch=...): all generators give one microbatch, by which no missing sum",
    "sharded_by_rank": "Loop(batch=...): rank 1 draws others than the plain process from equal generators",
    "of_a_float32": "the plain process computes in float64; have loss and model make their tensors in the dtype",
    "of_a_spectral_norm": "Loop(loss=...): the same weights and microbatch give {number} and {number}: dropout,",
    "of_sparse_gradients": "Loop(model=...): an embedding's gradient is sparse; build it with sparse=False",
    "on_a_plateau": "Loop(scheduler=...): ReduceLROnPlateau steps by what a loop logs; leave it out",
    "always_overflows": "0.weight: all steps of its optimizer overflow; give GradScaler a smaller init_scale",
    "clips_by_value": "the loop clips by value, which the plain process does not: leave it out",
    "held_nowhere": "0.weight: no rank shows it whole, in a model or in a torch optimizer; return (model, step)",
    "wrong_shape": "rank 0 of 1: loop.py:{line}: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    "no_optimizer": "Loop(optimizer=...): returns list; return one torch.optim.Optimizer, or a list",
    "half_a_list": "Loop(optimizer=...): returns int; return one torch.optim.Optimizer, or a",
    "of_another_model": "Loop(optimizer=...): holds others than the weights of the model it is given",
    "of_a_float": "Loop(loss=...): returns float; return one number that trained weights make, or",
    "not_a_number": "Loop(loss=...): is nan at the start; nothing can be compared",
    "no_microbatch": "Loop(microbatches=0): give 1 or more",
    "no_norm": "Loop(max_grad_norm=0.0): give more than 0",
    "dtype_in_words": "Loop(dtype='bfloat16'): give torch.float32, torch.bfloat16 or torch.float16",
    "a_class": "Loop(model=<class 'torch.nn.modules.linear.Linear'>): give a torch.nn.Module as built",
    "three_things": "train returns no step; return step, or (model or strategy, step)",
    "in_a_closure": "0.weight: its gradient is in no torch optimizer that can be read, when its step begins",
    "leaves": "rank 0 of 1: loop.py:{line}: SystemExit: it needs a GPU",
    "sleeps": "rank 0 of 1: not done after 3 s; see whether ranks issue different collectives",
    "ends": "rank 0 of 1: ended with exit code 3",
}
BEHIND = """
import itertools, os, sys, time
from dataclasses import replace
without_step = lambda: replace(my_loop(), train=lambda model: None)
without_norm = lambda: replace(my_loop(), returns_norm=True)
divides = lambda: replace(my_loop(), train=lambda model: lambda batches: 1 / 0)
leaves = lambda: replace(my_loop(), train=lambda model: sys.exit("it needs a GPU"))

def without_strategy():
    from zeroexp.cut.stage import STAGES
    from zeroexp.engines.sharded import Sharded
    from zeroexp.process import world as worlds
    make = lambda groups: torch.optim.AdamW(groups, lr=1e-3)
    def train(model):
        groups, world = [{"params": list(model.parameters())}], worlds.current(model)
        strategy = Sharded(
            model, blocks=["1"], stage=STAGES["zero3"], param_groups=groups, optimizer_factory=make, world=world
        )
        def step(batches):
            with strategy.microbatch(last=True):
                strategy.backward(loss_of(strategy.model, batches[0]) / world.size)
            strategy.step()
            strategy.zero_grad()
        return step
    return replace(my_loop(), train=train)

def with_dropout():
    loss = lambda model, batch: nn.functional.dropout(model[0](batch[0])).sum()
    return replace(my_loop(), loss=loss)

def of_an_iterator():
    numbers = itertools.count()
    return replace(my_loop(), batch=lambda _: random_batch(torch.Generator().manual_seed(next(numbers))))

def one_microbatch():
    drawn = random_batch(torch.Generator())
    return replace(my_loop(), batch=lambda _: drawn)

def sharded_by_rank():
    own = torch.randint(50, (8, 9))[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
    draw = lambda generator: own[torch.randperm(len(own), generator=generator)[:2]]
    return replace(my_loop(), batch=lambda generator: (draw(generator)[:, :-1], draw(generator)[:, 1:]))

def of_a_float32():
    return replace(my_loop(), loss=lambda model, batch: (model(batch[0]).flatten(0, 1) @ torch.ones(50)).sum())

wrong_shape = lambda: replace(my_loop(), loss=lambda model, batch: (model(batch[0])[0] @ torch.ones(7, 1)).sum())

def of_a_spectral_norm():
    model = build_model()
    nn.utils.parametrizations.spectral_norm(model[1])
    return replace(my_loop(), model=model)

def of_sparse_gradients():
    return replace(my_loop(), model=nn.Sequential(nn.Embedding(50, 16, sparse=True), nn.Linear(16, 50)))

on_a_plateau = lambda: replace(my_loop(), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)

def always_overflows():
    def train(model):
        optimizer, scaler = build_optimizer(model), torch.amp.GradScaler("cpu", 2.0**127)
        def step(batches):
            scaler.scale(1e30 * loss_of(model, batches[0])).backward()
            scaler.step(optimizer)
            scaler.update()
        return step
    return replace(my_loop(), train=train)

def clips_by_value():
    def train(model):
        def step(batches):
            loss_of(model, batches[0]).backward()
            nn.utils.clip_grad_value_(model.parameters(), 9.0)
            nn.utils.clip_grad_value_(model.parameters(), 1e-9)
        return step
    return replace(my_loop(), train=train)

def held_nowhere():
    def train(model):
        for each in model.parameters():
            each.data = torch.empty(0)
        return lambda batches: None
    return replace(my_loop(), train=train)

def in_a_closure():
    def train(model):
        optimizer = build_optimizer(model)
        def step(batches):
            def closure():
                loss = loss_of(model, batches[0])
                loss.backward()
                return loss
            optimizer.step(closure)
        return step
    return replace(my_loop(), train=train)

no_optimizer = lambda: replace(my_loop(), optimizer=lambda model: [])
half_a_list = lambda: replace(my_loop(), optimizer=lambda model: [build_optimizer(model), 3])
of_another_model = lambda: replace(my_loop(), optimizer=lambda model: build_optimizer(build_model()))
of_a_float = lambda: replace(my_loop(), loss=lambda model, batch: 1.0)
not_a_number = lambda: replace(my_loop(), loss=lambda model, batch: loss_of(model, batch) * torch.nan)
no_microbatch = lambda: replace(my_loop(), microbatches=0)
no_norm = lambda: replace(my_loop(), max_grad_norm=0.0)
dtype_in_words = lambda: replace(my_loop(), dtype="bfloat16")
a_class = lambda: replace(my_loop(), model=nn.Linear)
three_things = lambda: replace(my_loop(), train=lambda model: (model, print, 3))
sleeps = lambda: replace(my_loop(), train=lambda model: time.sleep(99))
ends = lambda: replace(my_loop(), train=lambda model: os._exit(3))
"""


@pytest.mark.slow
def test_what_can_not_be_run_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "loop.py"
    file.write_text(CODE + BEHIND)
    of = {text.partition(" = ")[0]: n for n, text in enumerate(file.read_text().splitlines(), 1)}
    asked = [
        (name, 1 + ("rank 1" in said or "strategy" in name), 3.0 if name == "sleeps" else 300.0)
        for name, said in CANNOT.items()
    ]
    for (name, said), (word, told) in zip(CANNOT.items(), answers(file, asked), strict=True):
        shown = re.sub(r"\d+\.\d+", "NUMBER", told) if "{number}" in said else told
        said = said.format(line=of.get(name), number="NUMBER")
        assert word == "refused" and said in shown and "\n" not in told


@pytest.mark.slow
def test_what_differs_is_told_though_other_numbers_of_ranks_can_not_be_run(tmp_path: Path) -> None:
    text, *_ = MISTAKES["not divided"]
    text = text.replace(
        "def train(model):", "def train(model):\n    assert 2 > dist.get_world_size(), 'one'"
    )
    text = text.replace("import torch\n", "import torch\nimport torch.distributed as dist\n", 1)
    code, printed, errors = verify(tmp_path, text, "loop.py:my_loop", "--json", "--worlds", "1,2")
    assert code == 1 and [each["world_size"] for each in json.loads(printed)] == [1]
    assert "scale: it is x 3" in errors and "AssertionError: one" in errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["other.py:my_loop"],
            "other.py:my_loop: no such file, or no function; give FILE:FUNCTION",
        ),
        ([__file__], f"{__file__}: no such file, or no function; give FILE:FUNCTION"),
        (
            [f"{__file__}:x", "--worlds", "x"],
            "--worlds x: no numbers of ranks; give some, as 1,2,4",
        ),
        ([f"{__file__}:x", "--steps", "0"], "--steps 0: none; give at least 1"),
        ([f"{__file__}:x", "--seconds", "nan"], "--seconds nan: no time; give more than 0"),
        (
            ["a.py:x", "--steps", "3", "b.py:x"],
            "b.py:x: one loop at a time; give FILE:FUNCTION, or the words of a run",
        ),
        ([f"{PYPROJECT}:x"], "pyproject.toml: no Python file; give FILE.py:FUNCTION"),
    ],
)
def test_a_wrong_word_is_refused(monkeypatch, capsys, words, said):
    monkeypatch.setattr(sys, "argv", ["zeroexp verify", *words])
    monkeypatch.setattr(safe_output, "ignore_output_errors", lambda: None)  # pytest has its own
    assert main() == 2
    assert capsys.readouterr().err == f"zeroexp: {said}\n"


def test_the_page_of_bugs_has_each_published_one_with_its_thread_and_kind() -> None:
    rows = (ROOT / "docs/silent_bugs.md").read_text().splitlines()
    for bug in (each for each in BUGS.values() if each.thread):
        assert f"{bug.was} | [{bug.thread}]({bug.url}) | `{bug.kind}`" in rows
