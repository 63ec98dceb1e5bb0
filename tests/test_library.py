"""The program of docs/library.md, run as it is printed there."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.warm import Warm

ROOT = Path(__file__).parents[1]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node=2"]
TORCHRUN += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


def program() -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)[0]


def losses(folder: Path, words: list[str], num_ranks: int) -> list[float]:
    """The global loss of every step of `python -m WORDS`: each rank prints its share."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = Warm([sys.executable, "-m", *words], env=env, cwd=folder)
    printed, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors
    shares = re.findall(r"step (\d+) rank \d+ loss ([\d.]+)", printed)
    by_step = [[float(loss) for step, loss in shares if int(step) == index] for index in range(10)]
    assert all(len(each) == num_ranks for each in by_step)
    return [sum(each) for each in by_step]


THREADS = """
def threads():
    import os
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return [name for name in names if name.startswith("pt_gloo")]
"""


def test_the_program_trains_the_same_model_on_one_rank_and_on_two(tmp_path):
    """And no thread of the group outlives it: it would abort the process if it let go of a tensor in its end."""
    script, counted = tmp_path / "train.py", tmp_path / "counted.py"
    script.write_text(program())
    one = losses(tmp_path, [script.stem], 1)
    inside = "    for step in range(10):\n"
    assert inside in program()
    # Its first lines stay: they are what it trains on.
    text = program().replace(
        inside, f"    from counting import threads\n    assert threads()\n{inside}"
    )
    counted.write_text(f"{text}\nassert not threads(), strategy  # which lives on\n")
    (tmp_path / "counting.py").write_text(THREADS)
    two = losses(tmp_path, [*TORCHRUN, str(counted)], 2)  # whose ranks import everything
    assert one[-1] < one[0] - 1
    assert two == pytest.approx(one, abs=1e-4)  # printed to six places, summed in another order
