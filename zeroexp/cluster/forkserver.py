"""A process that imports the ranks' modules once, then forks the ranks of every run from itself.

    sweep  ── {"run": folder} ──────────────────▶  server  ── fork ──▶  rank 0 .. N-1
           ◀───────────── {"ended"} ─────────────          ◀─ pidfds ──
           ── {"points": configs} ──────────────▶          ── fork ──▶  try_points.py
           ◀───────────── {"tried"} ─────────────          ◀─── pipe ──
           ── {"rehearse": folder, "seconds"} ──▶          ── fork ──▶  its rehearsal
           ◀───────────── {"rehearsed"} ─────────          ◀─── pipe ──

The server never makes a thread, a process group or a CUDA context, because these do not survive a fork: a rank starts
as if it had just imported everything. So points are tried in a fork too, where libraries start threads. When the
sweep's end of the connection closes, the server ends its ranks and itself; when the server dies, the kernel kills its
children. So neither case leaves an orphan.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from zeroexp.cluster import emulated_network
from zeroexp.process.cheap_imports import importing_cheaply

with importing_cheaply():
    from zeroexp.process.world import RankInfo, environment_of_rank  # and torch

from zeroexp.check.rules_machine import num_gpus
from zeroexp.cluster.emulated_network import open_nodes
from zeroexp.cluster.job import Ending
from zeroexp.cluster.rank_entry import run_and_leave
from zeroexp.cluster.supervise import end_processes, supervise
from zeroexp.config import plugins
from zeroexp.config.keys import Config, ConfigError, load
from zeroexp.measure.tcp_bytes import LINK
from zeroexp.process import locks, progress, safe_output, signals
from zeroexp.process.watchdog.hung import WatchedRank
from zeroexp.registry import RegistryError
from zeroexp.tracking import attempt, failure

Main = Callable[..., None]  # called with (folder, *, device) in every rank: zeroexp.run.rank.main


def serve(control: Connection, module: Any, main: Main) -> None:
    """Answer requests until the other side closes the connection. The module's `prepare` imports what `main` will
    import, its `import_for` what ranks of a config will, and its `add_rehearsal` rehearses a run that has ended.
    """
    while True:
        try:
            request = control.recv()
        except (EOFError, OSError):  # also in the middle of a request
            return
        try:
            answer = _answer(request, control, module, main)
        except OSError as error:  # a disk may have no room for the reason of an end
            points = "points" in request
            what = "no process can be started" if points else "its end can not be written down"
            answer = {"ended": "failed", "ServerLost": f"{what}: {error}"}
        with contextlib.suppress(BrokenPipeError):  # a cancelled sweep waits for no answer
            control.send(answer)


def _answer(
    request: dict[str, Any], control: Connection, module: Any, main: Main
) -> dict[str, Any]:
    if "run" in request:
        return {"ended": _run(Path(request["run"]), control, module.prepare, main)}
    if configs := request.get("points"):
        with contextlib.suppress(Exception, SystemExit):  # it is met again in the fork
            plugins.load(configs[0].plugins)
            module.import_for(configs[0])
        work = partial(_tried, configs)
    else:
        work = partial(_rehearsed, Path(request["rehearse"]), module)
    return _done_by_fork(work, control, request.get("seconds"))


def _done_by_fork(
    work: Callable[[], dict[str, Any]], control: Connection, seconds: float | None
) -> dict[str, Any]:
    """Return the answer of a fork, which has so many seconds for it, and ends when the sweep hangs up."""
    gc.freeze()  # see `_run_ranks`
    ours, theirs = Pipe(duplex=False)
    pid = _fork(lambda: theirs.send(work()))
    theirs.close()
    answer = None
    if ours in wait([ours, control], seconds):
        with contextlib.suppress(EOFError):
            answer = ours.recv()
    ours.close()
    if answer is None:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return answer or {"ServerLost": "the process that does it has died"}


def _fork(run: Callable[[], object]) -> int:
    """Run in a fork, which ends with this server; return its process."""
    server, pid = os.getpid(), os.fork()
    if pid == 0:

        def begin() -> None:
            signals.end_with_parent(server)
            run()

        run_and_leave(begin)
    return pid


def _tried(configs: Sequence[Config]) -> dict[str, Any]:
    safe_output.ignore_output_errors()
    from zeroexp.check.try_points import try_points

    try:
        plugins.load(configs[0].plugins)
        with open_nodes(configs[0].cluster):  # all are of one cluster
            pass
        return {"tried": try_points(configs)}
    except (Exception, SystemExit) as error:
        return {"tried": _portable(error)}


def _portable(error: BaseException) -> BaseException:
    """Return the error in a form that the sweep can raise: where others are to blame, their frames stay here."""
    if isinstance(error, ConfigError):
        return ConfigError(str(error))
    if problem := plugins.blame_plugin(error):
        return ConfigError(problem)
    if not isinstance(error, (OSError, RegistryError)):
        traceback.print_exc()
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # a class whose arguments are not those of its message, or of another process
        return RuntimeError(f"{type(error).__name__}: {error}")


def _run(folder: Path, control: Connection, prepare: Callable[[Path], None], main: Main) -> Ending:
    attempt.begin(folder, attempt.newest(folder) + 1)
    failure.remove_older_failure(folder)
    with contextlib.ExitStack() as opened:
        try:
            config = load(folder / "config.yaml")
            prepare(folder)
            nodes = opened.enter_context(open_nodes(config.cluster))
        except Exception as error:  # a cache that takes no file, data that cannot be read, others
            failure.write(folder, type(error).__name__, str(error))
            return "failed"
        return _run_ranks(config, nodes, folder, control, main)


def _rehearsed(folder: Path, module: Any) -> dict[str, Any]:
    module.add_rehearsal(folder, device=_device(load(folder / "config.yaml"), ()))
    return {"rehearsed": True}


def _device(config: Config, nodes: Sequence[int]) -> str:
    device = config.cluster.device
    if device == "auto":
        has_all = not nodes and num_gpus() >= config.world_size
        device = "cuda" if has_all else "cpu"
    return device


def _run_ranks(
    config: Config, nodes: list[int], folder: Path, control: Connection, main: Main
) -> Ending:
    """Run the ranks on these nodes, whose namespaces they enter; none where all are on this machine as it is."""
    gc.freeze()  # otherwise a child's first collection copies the pages of all imported objects
    size = config.world_size
    per_node = size // config.cluster.num_nodes
    ranks: list[WatchedRank] = []
    # The folder in which ranks meet goes last, when they have ended.
    with contextlib.ExitStack() as meeting:
        try:
            device = _device(config, nodes)
            # Unlike a free port, nobody can take a file between its choice and its use.
            where = meeting.enter_context(locks.temporary_folder())
            for rank in range(size):
                # Also on nodes of its own the first rank alone samples this machine.
                place = RankInfo(rank, size, local_rank=rank)
                node = nodes[rank // per_node] if nodes else None
                meet = f"file://{where}/ranks"
                ranks.append(_fork_rank(place, node, meet, folder, device, control, main))
        except OSError as error:
            cannot_start = error
        else:
            return supervise(
                ranks, folder, control, config.cluster.timeout_s, config.cluster.hang_s
            )
        finally:
            end_processes(ranks)
    remedy = failure.REMEDIES.get(
        cannot_start.errno or 0, "set TMPDIR to a folder that can be written"
    )
    which = f"rank {len(ranks)} of {size} can not be started"
    message = f"{which}: {cannot_start.strerror or cannot_start}; {remedy}"
    failure.write(folder, "CannotStart", message)  # now there is a file to be had for it
    return "failed"


def _fork_rank(
    place: RankInfo,
    node: int | None,
    rendezvous: str,
    folder: Path,
    device: str,
    control: Connection,
    main: Main,
) -> WatchedRank:
    """Fork a rank, into the namespace `node` if there is one.

    Raises OSError where the system gives no process or file for it.
    """
    descriptor, numbers = progress.create()

    def be_rank() -> None:
        control.close()
        os.setpgid(0, 0)
        # When memory is short, the kernel should kill a rank, since the server can report that.
        with contextlib.suppress(OSError):  # a sandbox whose /proc takes nothing
            Path("/proc/self/oom_score_adj").write_text("500", encoding="utf-8")
        os.environ[progress.DESCRIPTOR] = str(descriptor)
        os.environ.update(environment_of_rank(place), ZEROEXP_RENDEZVOUS=rendezvous)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if node is not None:
            emulated_network.enter(node)
            os.environ["GLOO_SOCKET_IFNAME"] = LINK
        main(folder, device=device)

    pid = _fork(be_rank)
    os.setpgid(pid, pid)  # the child does it too; the first call counts
    os.close(descriptor)  # the next descriptor takes its number
    return WatchedRank(place.rank, pid, numbers, failure.log_path(folder, place.rank))


def main() -> None:
    """Run `python -m zeroexp.cluster.forkserver <socket descriptor> <module:function of a rank>`."""
    # Python 3.12 warns of each fork beside a thread. Arrow's allocator has one where scikit-learn brings it in; it
    # survives forks.
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    control = Connection(int(sys.argv[1]))
    module_name, _, function = sys.argv[2].partition(":")
    with importing_cheaply():
        module = importlib.import_module(module_name)
    serve(control, module, getattr(module, function))


if __name__ == "__main__":
    main()
