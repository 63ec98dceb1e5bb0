"""Ports that a job chooses and publishes, and the store that ranks of several hosts meet in."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from zeroexp.process import ports
from zeroexp.process.ports import SCHEME
from zeroexp.process.rendezvous import open_store


def free_neighbours() -> tuple[int, int]:
    """Two free ports beside each other."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
                return port, port + 1
            except OSError:
                continue


def test_a_taken_port_is_passed_over():
    first, last = free_neighbours()
    with (
        ports.listen_on_free_port("127.0.0.1", f"{first}-{last}") as one,
        ports.listen_on_free_port("127.0.0.1", f"{first}-{last}") as other,
    ):
        found = {each.getsockname()[1] for each in (one, other)}
        assert found == {first, last}
        with pytest.raises(OSError, match=f"no port of {first}-{last} is free"):
            ports.listen_on_free_port("127.0.0.1", f"{first}-{last}")


@pytest.mark.parametrize("told", ["", "5", "5-", "9-5", "0-5", "5-99999", "a-b", "1-2-3"])
def test_what_is_no_range_is_refused(told):
    with pytest.raises(ValueError):
        ports.parse_port_range(told)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_listens_for_one_machine_is_reached_there_alone(host):
    with ports.listen_on_free_port(host) as listener:
        port = listener.getsockname()[1]
        assert listener.getsockname()[0] == host
        socket.create_connection((host, port), timeout=60).close()


def test_who_listens_for_several_machines_is_reached_by_both_kinds_of_address():
    with ports.listen_on_free_port("node1") as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            socket.create_connection((host, port), timeout=60).close()


def test_a_port_is_read_once_it_is_published(tmp_path):
    file = tmp_path / "new" / "port"
    file.parent.mkdir()
    assert ports.read_published_port(file) is None
    with ThreadPoolExecutor() as threads:
        found = threads.submit(ports.await_published_port, file, 600)
        ports.publish_port(file, 4711)
        assert found.result() == 4711
    with pytest.raises(TimeoutError, match="rank 0 has told no port"):
        ports.await_published_port(tmp_path / "never", 0)


def met(address: str, size: int = 2) -> list[dist.Store]:
    """The stores of all ranks, which come together."""
    with ThreadPoolExecutor(size) as threads:
        return list(
            threads.map(
                lambda rank: open_store(address, rank=rank, size=size, timeout_seconds=60),
                range(size),
            )
        )


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(ports.SECRET, "5ec5e7" * 8)
    return "5ec5e7" * 8


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ranks_meet_in_a_store_whose_port_nobody_knew(tmp_path: Path, secret: str, host: str):
    file = tmp_path / "port"
    mine, theirs = met(f"{SCHEME}{host}{file}")
    mine.set("word", "said")
    assert theirs.get("word") == b"said"
    # Who knows the port and no secret neither reads nor replaces a word by its name.
    port = ports.read_published_port(file)
    assert port is not None
    stranger = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    assert not stranger.check(["word"])
    stranger.set("word", "replaced")
    assert theirs.get("word") == b"said"


def test_a_range_is_kept(tmp_path: Path, secret: str, monkeypatch: pytest.MonkeyPatch):
    first, last = free_neighbours()
    monkeypatch.setenv(ports.RANGE, f"{first}-{last}")
    with ports.listen_on_free_port("127.0.0.1", f"{first}-{first}"):
        stores = met(f"{SCHEME}127.0.0.1{tmp_path / 'port'}")
        assert ports.read_published_port(tmp_path / "port") == last
        del stores
