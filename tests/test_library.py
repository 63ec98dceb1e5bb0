"""The program of docs/library.md, run as it is printed there."""

import ctypes
import gc
import os
import re
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.warm import Warm
from zeroexp.process.world import World
from zeroexp.zero.options import Options

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


@pytest.mark.slow
def test_the_program_trains_the_same_model_on_one_rank_and_on_two(tmp_path):
    """And no thread of the group outlives it: it would abort the process if it let go of a tensor in its end."""
    script, counted = tmp_path / "loop.py", tmp_path / "counted.py"
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


# Steps at whose ends it is counted: a leak grows between any two of them, and a rank's memory of its last 256 moves
# (differs.py) is full before the last.
LOOKS = (10, 70, 130, 270, 330)
MOST_BYTES = 400_000  # torch logs its last 2,000 collectives, with 500 bytes for each
MOST_MORE = 50  # that come and go by chance, as caches of the interpreter; a leak has one for each of 60 steps


class Heap(ctypes.Structure):
    """What glibc's malloc tells of itself; `uordblks` are bytes in use, `hblkhd` those of large blocks."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


HEAP = ctypes.CDLL(None).mallinfo2
HEAP.restype = Heap


def memory_now() -> dict[str, int]:
    """Python's objects and blocks, and the bytes that C++ holds; resident memory moves with what malloc keeps."""
    for _ in range(3):  # an engine of an earlier test ends in more than one collection
        gc.collect()
    heap = HEAP()
    return {
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
        "bytes": heap.uordblks + heap.hblkhd,
    }


def growth_of(loop: str, world: World, transport: str, file: str) -> dict[str, int]:
    """The least that was added between two looks, by kind, where `loop` follows what the program builds."""
    seen: list[dict[str, int]] = []

    def at_end_of(step: int) -> None:
        if step in LOOKS:
            seen.append(memory_now())

    building = program().partition("    for step")[0]
    building = re.sub(r"from zeroexp.process.world.*", "", building).replace(
        "for _ in range(4)", ""
    )
    building = building.replace("*[block() ]", "block(), block()").replace(
        '["1", "2", "3", "4"]', '["1", "2"]'
    )
    building = building.replace("world=world,", "world=world, options=options,")
    names: dict[str, Any] = {
        "__file__": file,
        "joined_process_group": lambda: nullcontext(world),
        "options": Options(transport=transport),
        "at_end_of": at_end_of,
    }
    exec(f"{building}\n    for step in range({LOOKS[-1] + 1}):\n{loop}", names)
    return {kind: min(b[kind] - a[kind] for a, b in pairwise(seen)) for kind in seen[0]}


def trained(world: World, transport: str, file: str) -> dict[str, int]:
    loop = re.search(r"    for step[^\n]*\n(.*)        print", program(), re.DOTALL)
    return growth_of(f"{loop[1]}        at_end_of(step)\n", world, transport, file)


def called(world: World, transport: str, file: str) -> dict[str, int]:
    loop = """
        with torch.no_grad():
            strategy.model(samples[:, :-1])
        at_end_of(step)
"""
    return growth_of(loop, world, transport, file)


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "transport"), [(trained, "direct"), (called, "gloo")])
def test_memory_does_not_grow_with_the_steps(ranks, loop, transport, tmp_path):
    file = tmp_path / "loop.py"
    file.write_text(program())
    for grown in ranks(loop, transport, str(file)):
        assert grown["objects"] <= MOST_MORE and grown["blocks"] <= MOST_MORE, grown
        assert grown["bytes"] <= MOST_BYTES, grown
