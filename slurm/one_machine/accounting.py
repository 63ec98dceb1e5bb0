"""MariaDB and slurmdbd, both private to one cluster, so that `sacct` has something to say."""

from __future__ import annotations

import secrets
import socket
import subprocess
from pathlib import Path

from .processes import ClusterError, require_client, run_client, start_daemon, wait_until

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={dbd_port}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
LogFile={folder}/logs/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=slurm
StoragePass={password}
"""


def start_accounting(folder: Path, dbd_port: int, sql_port: int) -> None:
    write_accounting_configuration(folder, dbd_port, sql_port)
    start_database(folder, sql_port)
    start_daemon(folder, ["slurmdbd", "-D"], "slurmdbd")
    show = ("sacctmgr", "--noheader", "show", "cluster")
    wait_until(lambda: run_client(folder, *show).returncode == 0, "slurmdbd answers")
    for what in (("cluster", "minicluster"), ("account", "all"), ("user", "root", "account=all")):
        require_client(folder, "sacctmgr", "--immediate", "add", *what)


def write_accounting_configuration(folder: Path, dbd_port: int, sql_port: int) -> None:
    names = {"folder": folder, "dbd_port": dbd_port, "sql_port": sql_port}
    password = secrets.token_hex(16)
    (folder / "slurmdbd.conf").touch(mode=0o600)  # slurmdbd refuses a file others may read
    (folder / "slurmdbd.conf").write_text(
        SLURMDBD_CONF.format(password=password, **names), encoding="utf-8"
    )
    user = "'slurm'@'127.0.0.1'"
    grant = f"CREATE USER {user} IDENTIFIED BY '{password}';\nGRANT ALL ON *.* TO {user};\n"
    (folder / "grant.sql").touch(mode=0o600)
    (folder / "grant.sql").write_text(grant, encoding="utf-8")


def start_database(folder: Path, port: int) -> None:
    install = ["mariadb-install-db", "--no-defaults", f"--datadir={folder}/sql", "--user=root"]
    made = subprocess.run(
        [*install, "--skip-test-db"], capture_output=True, encoding="utf-8", timeout=120
    )
    if made.returncode:
        raise ClusterError(f"mariadb-install-db: {(made.stdout + made.stderr).strip()}")
    flags = [
        f"--datadir={folder}/sql",
        f"--socket={folder}/sql.socket",
        f"--pid-file={folder}/sql.pid",
    ]
    flags += [f"--init-file={folder}/grant.sql", "--user=root", "--skip-name-resolve"]
    flags += ["--bind-address=127.0.0.1", f"--port={port}"]
    start_daemon(folder, ["mariadbd", "--no-defaults", *flags], "mariadbd")
    wait_until(lambda: listens(port), "MariaDB listens")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
