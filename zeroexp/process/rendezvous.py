"""The store through which the ranks of a job find each other, at a port that rank 0 chooses and publishes.

    job://<host of rank 0>/<file in the job's shared folder>
    file://<file on this machine>       whole, where torch's own init method ends it at "#" or "?"

torch's TCPStore asks no caller who it is. So it listens on the loopback where all ranks share a host, and every key
begins with a secret of the job: who does not know it can only disturb by chance. Whoever can reach the port and reads
the store's own list of keys is not kept out; docs/slurm.md says what has to be trusted.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from zeroexp.process import ports


def open_store(address: str, *, rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """Return the job's store. Rank 0 serves it; the others wait until its port is published. Raises TimeoutError."""
    timeout = timedelta(seconds=timeout_seconds)
    if address.startswith(ports.FILE_SCHEME):
        store = dist.FileStore(address.removeprefix(ports.FILE_SCHEME), size)
        store.set_timeout(timeout)
        return store
    host, _, path = address.removeprefix(ports.SCHEME).partition("/")
    file = Path(f"/{path}")
    secret = os.environ[ports.SECRET]
    if rank == 0:
        listener = ports.listen_on_free_port(host, os.environ.get(ports.RANGE), backlog=size)
        port = listener.getsockname()[1]
        served = listener.detach()  # the store closes it
        store = dist.TCPStore(
            host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=served
        )
        ports.publish_port(file, port)
    else:
        port = ports.await_published_port(file, timeout_seconds)
        store = dist.TCPStore(host, port, size, False, timeout, wait_for_workers=False)
    return dist.PrefixStore(secret, store)
