"""Whose word stands in failure.json when several have one, and what it adds to a word that names no remedy."""

import json
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import distributed as dist

from zeroexp.tracking import failure


def cause(folder: Path) -> str:
    return json.loads((folder / failure.FAILURE).read_text())["exception"]


@pytest.mark.parametrize("consequence", [signal.SIGTERM, signal.SIGABRT])
def test_who_is_ended_because_of_a_killed_rank_is_not_the_cause(tmp_path, consequence):
    failure.write_died(tmp_path, 1, -signal.SIGKILL)
    failure.write_died(tmp_path, 0, -consequence)
    assert cause(tmp_path) == "SIGKILL"


def test_a_killed_rank_is_the_cause_of_what_its_peers_said_first(tmp_path):
    failure.write_died(tmp_path, 0, -signal.SIGTERM)
    failure.write_died(tmp_path, 1, -signal.SIGKILL)
    assert cause(tmp_path) == "SIGKILL"


def start_thread() -> None:
    threading.Thread(target=print).start()


def join_gloo() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("start", [start_thread, join_gloo])
def test_a_rank_without_threads_names_the_limit(tmp_path: Path, start: Callable[[], None]) -> None:
    tmp_path.chmod(0o777)
    pid = os.fork()
    if pid == 0:
        os.chdir(tmp_path)  # others may not pass through the folders above
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        os.setuid(os.getuid() or 4321)  # the limit does not hold for root
        try:
            start()
        except RuntimeError as error:
            failure.write_raised(Path(), 0, error)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    message = json.loads((tmp_path / failure.FAILURE).read_text())["message"]
    assert message.startswith("no thread can be started: ")
    assert message.endswith("; raise the limit of processes (ulimit -u), or use fewer ranks")


def test_a_panic_of_the_tokenizers_names_the_limit_too() -> None:
    class PanicException(BaseException): ...

    panic = PanicException("The global thread pool ...: ThreadPoolBuildError { kind: IOError(..)")
    told = failure.explain_no_thread(panic)
    assert told == f"no thread can be started: {os.strerror(11)}; {failure.REMEDIES[11]}"
    assert failure.explain_no_thread(RuntimeError("something else")) is None
