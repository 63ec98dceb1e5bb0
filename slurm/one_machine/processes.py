"""Daemons that outlive the command that starts them, nodes as namespaces, and their certain end.

[Note: a node] is one slurmd in its own UTS and mount namespace: it has its own host name, and a hosts file that
knows all nodes (gloo and NCCL resolve them). The UTS namespace is pinned to a file, so that "every process of this
node" has an exact meaning, however processes were forked, and no other process can be hit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class ClusterError(Exception):
    """One line for the user."""


def find_program(name: str) -> str | None:
    """Daemons lie in sbin, which a user's PATH may lack."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def start_daemon(folder: Path, command: list[str], name: str) -> None:
    """Start a process in its own session; which one it is goes to pids/<name>."""
    program = find_program(command[0])
    assert program is not None, "up checks that every program is there"
    with (folder / "logs" / f"{name}.out").open("ab") as log:
        process = subprocess.Popen(
            [program, *command[1:]],
            env=slurm_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )
    (folder / "pids" / name).write_text(
        f"{process.pid} {start_time(process.pid)}", encoding="utf-8"
    )


def start_slurmd(folder: Path, node: str) -> None:
    """Start one node, see [Note: a node]; a crashed one gets a fresh namespace."""
    namespace = folder / "nodes" / node
    unpin(namespace)
    namespace.touch()
    slurmd = f"exec {find_program('slurmd')} -D -N {node}"
    inside = f"hostname {node} && mount --bind '{folder}/hosts' /etc/hosts && {slurmd}"
    unshare = ["unshare", "--mount", f"--uts={namespace}", "--propagation", "private"]
    network = folder / "networks" / node
    enter = ["nsenter", f"--net={network}"] if network.exists() else []
    start_daemon(folder, [*enter, *unshare, "sh", "-c", inside], node)


def run_client(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm against this cluster, whatever SLURM_CONF says outside."""
    environment = slurm_environment(folder)
    return subprocess.run(
        command, env=environment, encoding="utf-8", capture_output=True, timeout=120
    )


def require_client(folder: Path, *command: str) -> None:
    result = run_client(folder, *command)
    if result.returncode:
        raise ClusterError(f"{' '.join(command)}: {result.stderr.strip()}")


def slurm_environment(folder: Path) -> dict[str, str]:
    """Ours plus SLURM_CONF, less what an enclosing Slurm job has set."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))
    }
    return kept | {"SLURM_CONF": str(folder / "slurm.conf")}


def wait_until(done: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout_s:.0f} s in vain until {what}")
        time.sleep(0.05)


def kill_node(namespace: Path) -> None:
    """Kill every process of a node; again until none is left, for one may fork while we look."""
    while found := namespace_processes(namespace):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def namespace_processes(namespace: Path) -> list[int]:
    """Processes whose UTS namespace is the one pinned at this file; a dead one has left its namespaces."""
    wanted, found = identity(namespace), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # Ended meanwhile; or not even root may look, and then it is none of a node's.
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if identity(entry / "ns" / "uts") == wanted:
                    found.append(int(entry.name))
    return found


def identity(namespace: Path) -> tuple[int, int]:
    status = namespace.stat()
    return status.st_dev, status.st_ino


def unpin(namespace: Path) -> None:
    """Let a namespace go; a pinned one is a file of another device than its folder."""
    if namespace.exists() and namespace.stat().st_dev != namespace.parent.stat().st_dev:
        subprocess.run(["umount", str(namespace)], check=True)
    namespace.unlink(missing_ok=True)


def kill_recorded(pid_file: Path) -> None:
    """Kill the daemon recorded here, if its pid still names that same process."""
    if not pid_file.exists():
        return
    pid, started = map(int, pid_file.read_text(encoding="utf-8").split())
    while start_time(pid) == started:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to this process's start, which with the pid names it for ever; None if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
