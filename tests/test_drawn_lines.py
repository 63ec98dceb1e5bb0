"""Command lines that nobody wrote end as any line must: refused in one line, or accepted.

Single words and pairs of them, drawn for every key by its type; LINES=2000 draws as many, and SEED=1 others.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections.abc import Iterator

import pytest

from tests.composing import compose_once, options
from zeroexp import __main__ as zeroexp
from zeroexp.cluster.sweep import Sweep
from zeroexp.config.keys import KEYS
from zeroexp.config.plugins import REGISTRIES

BASE = (
    "model=tiny data=synthetic data.seq_len=16 data.global_batch_size=2 world_size=1 tracking=files"
)
BASE += " train.steps=1 train.warmup_steps=0 cluster.device=cpu cluster.rehearse_s=0"
# Keys of Slurm have a meaning only there; a dry run needs none.
ON_SLURM = "cluster=slurm cluster.dry_run=true"
OF_TYPE = {
    "int": "-1 0 1 3 4294967296 1e20 1.5 nan inf",
    "float": "-1 -0.0 0 1e-300 0.5 1 1e300 nan -inf",
    "bool": "true 0 maybe",
    "str": "3 a/b ../x ümläut ~x $HOME a=b -x " + "x" * 300,
    "list": "[] [1,2] [-1] [a] [[1]] [nan,0.9] [1,null]",
    "dict": "{} {mem:3} {a:{b:1}} {1:2}",
}
FOR_ALL = [
    "null",
    "abc",
    "[1]",
    "{a:1}",
    "???",
    "${nope}",
    "'",
    "1,1",
    "range(5,5)",
    "choice()",
    "glob(*)",
]
LOOSE = "= =3 train +a=1 ~train train.steps@x=3 world_size=all,1 train..steps=1 hydra.mode=RUN ü=3"
LOOSE += " outputs=${outputs} --nope --cfg --rerun --config-name=nope -x hydra/launcher=nope \x00"


class Accepted(BaseException):
    """Every check has passed, and the first rank would start now."""


def words() -> Iterator[str]:
    for key, item in KEYS.items():
        registered = [word for registry in REGISTRIES.get(key, ()) for word in registry]
        values = [*item.metadata.get("choices", ()), *registered, *FOR_ALL]
        kinds = [kind for kind in OF_TYPE if kind in str(item.type)] or [*OF_TYPE]
        values += [value for kind in kinds for value in OF_TYPE[kind].split(" ")]
        yield from (f"{key}={value}" for value in values)
    for group in ("data", "strategy", "cluster", "precision", "optimizer", "study"):
        yield from (f"{group}={value}" for value in [*options(group), *FOR_ALL, "../x"])
    yield from LOOSE.split(" ")


def drawn() -> list[list[str]]:
    number = int(os.environ.get("LINES", "20"))
    dice, every = random.Random(int(os.environ.get("SEED", "0"))), sorted({*words()})
    return [dice.sample(every, 1 + index % 2) for index in range(number)]


def given(line: list[str]) -> list[str]:
    """The line with what it leaves open, so that what is accepted is a second's work."""
    own = {word.lstrip("+~").partition("=")[0] for word in line}
    base = [*BASE.split(), *(ON_SLURM.split() if any("slurm." in key for key in own) else ())]
    return [*(word for word in base if word.partition("=")[0] not in own), *line]


@pytest.mark.slow
@pytest.mark.parametrize("line", drawn(), ids=lambda line: " ".join(line)[:80])
def test_a_drawn_line_is_accepted_or_refused_in_one_line(line, tmp_path, monkeypatch, capsys):
    def accept(*_: object) -> None:
        raise Accepted

    compose_once(monkeypatch)
    monkeypatch.setattr(Sweep, "_execute", accept)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zeroexp", *given(line)])
    try:
        code = zeroexp.main()
    except Accepted:
        code = 0
    except SystemExit as end:
        code = end.code
    except Exception:
        pytest.fail(traceback.format_exc())
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err
    if code:
        assert code == zeroexp.REFUSED and not printed.out
        assert printed.err.startswith("zeroexp: ") and printed.err.count("\n") == 1
