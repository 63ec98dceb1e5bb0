from __future__ import annotations

import json
import socket
from pathlib import Path

from tests import rank_code
from zeroexp.cluster.job import Job
from zeroexp.config import keys as configs
from zeroexp.config.keys import Config
from zeroexp.measure.record import Traffic, sum_of_traffic
from zeroexp.measure.traffic import WireMeter


def test_bytes_of_gloo_are_counted_to_the_byte(local, tmp_path):
    (tmp_path / "logs").mkdir()
    configs.save(Config(world_size=2), tmp_path / "config.yaml")
    rank_code.choose(tmp_path, "tests.measure.wire_main:main")
    outcome = local.run(Job(tmp_path))
    assert outcome.status == "done"
    sent, received = (
        json.loads(Path(tmp_path / f"seen{rank}.json").read_text(encoding="utf-8"))
        for rank in (0, 1)
    )
    header = sent[0]  # gloo's own, the same for every message
    assert header < 200
    assert [num_bytes - header for num_bytes in sent] == [0, 1_000, 1_000_000, 3_000_000]
    assert max(received) < 1_000  # receiving is not sending


def test_unsent_bytes_count_as_written_and_local_sockets_do_not_count():
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    left, right = socket.socketpair()
    with server, client, accepted, left, right:
        meter = WireMeter("gloo")
        left.sendall(b"x" * 5_000)
        client.setblocking(False)
        written = client.send(b"x" * 100_000_000)  # nobody reads: most stays in the kernel
        assert meter.sent_bytes() == written


def test_what_passes_no_socket_is_unknown():
    assert WireMeter("nccl").sent_bytes() is None


def test_traffic_adds_up_by_kind():
    gather = Traffic({"gather": 10, "norm": 1}, {"gather": 2, "norm": 1})
    assert sum_of_traffic([gather, Traffic({"gather": 5}, {"gather": 1})]) == Traffic(
        {"gather": 15, "norm": 1}, {"gather": 3, "norm": 1}
    )
