"""slurm.conf, gres.conf and the nodes' hosts file of a cluster on one machine."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .network import HOST, address
from .processes import ClusterError

PORTS = range(30_000, 32_000)
REMEMBERS_SECONDS = 10  # squeue an ended job, where sacct goes on; without accounting nobody would

SLURM_CONF = """\
ClusterName=minicluster
SlurmctldHost={host}({address})
SlurmctldPort={ctld_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/logs/slurmctld.log
SlurmdLogFile={folder}/logs/%n.log
# Without cgroups: process trees by /proc, no memory accounting; binding to CPUs where it is asked for.
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
JobAcctGatherType=jobacct_gather/none
PropagateResourceLimits=NONE
MpiDefault=none
# Nodes may claim more CPUs than this machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Short times, so that failures show within seconds.
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
KillWait=5
SlurmdTimeout=10
MessageTimeout=5
InactiveLimit=0
MinJobAge={remembers_s}
JobRequeue=1
ReturnToService=2
# Jobs of `high` evict those of `low`, which start again.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=10 MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""

# munged's second door: without AccountingStoragePass the clients of slurmdbd look for the system's socket.
ACCOUNTING = """\
AccountingStorageEnforce=limits
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStoragePass={folder}/munge.socket
"""


@dataclass(frozen=True)
class Shape:
    """What the cluster pretends to be."""

    nodes: int
    cpus: int  # of one node
    gpus: int  # of one node; names of /dev/null, so that Slurm has something to hand out
    network: (
        int | None
    )  # number of its bridge (network.py); None: nodes share this machine's network
    binds: bool  # tasks to the CPUs of this machine that they are given, which a node then cannot invent

    @property
    def node_names(self) -> list[str]:
        return [f"node{index}" for index in range(1, self.nodes + 1)]

    def address_of(self, index: int) -> str:
        """Of a node from 1 on, or of this machine (HOST)."""
        return "127.0.0.1" if self.network is None else address(self.network, index)


def write_configuration(folder: Path, shape: Shape, dbd_port: int | None) -> None:
    """Write slurm.conf, gres.conf and hosts into `folder`; `dbd_port` None means no accounting."""
    ctld_port, *node_ports = free_ports(1 + shape.nodes)
    text = SLURM_CONF.format(
        host=socket.gethostname().partition(".")[0],
        address=shape.address_of(HOST),
        ctld_port=ctld_port,
        folder=folder,
        task_plugin="task/affinity" if shape.binds else "task/none",
        remembers_s=3600 if dbd_port is None else REMEMBERS_SECONDS,
    )
    if dbd_port is not None:
        text += ACCOUNTING.format(dbd_port=dbd_port, folder=folder)
    if shape.gpus:
        text += "GresTypes=gpu\n"
        for index in range(shape.gpus):
            (folder / f"gpu{index}").symlink_to("/dev/null")
        (folder / "gres.conf").write_text(
            f"Name=gpu File={folder}/gpu[0-{shape.gpus - 1}]\n", encoding="utf-8"
        )
    text += "".join(node_line(shape, index, port) for index, port in enumerate(node_ports, start=1))
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    hosts = "".join(
        f"{shape.address_of(index)} {name}\n"
        for index, name in enumerate(shape.node_names, start=1)
    )
    (folder / "hosts").write_text(
        Path("/etc/hosts").read_text(encoding="utf-8") + "\n" + hosts, encoding="utf-8"
    )


def node_line(shape: Shape, index: int, port: int) -> str:
    gpus = f" Gres=gpu:{shape.gpus}" if shape.gpus else ""
    resources = f"CPUs={shape.cpus} RealMemory={memory_mib()}{gpus}"
    name, place = shape.node_names[index - 1], shape.address_of(index)
    return f"NodeName={name} NodeAddr={place} Port={port} {resources} State=UNKNOWN\n"


def free_ports(count: int) -> list[int]:
    """Below those that the system hands out by itself: nobody is given one between this choice and its use."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise ClusterError(f"{count} free ports from {PORTS.start} on are not to be had")


def memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
