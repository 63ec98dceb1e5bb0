from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from zeroexp.measure.record import Traffic, sum_of_traffic
from zeroexp.measure.tcp_bytes import ByteMeter, wire_meter
from zeroexp.process.world import World, barrier

PAYLOADS = (0, 1_000, 1_000_000, 3_000_000)  # bytes


def sent_of_each_payload(world: World) -> list[int]:
    """Rank 0 sends each payload to rank 1: what each rank's meter saw."""
    seen: list[int] = []
    for num_bytes in PAYLOADS:
        meter = wire_meter(world.backend)
        payload = torch.zeros(num_bytes, dtype=torch.uint8)
        if world.rank == 0:
            dist.send(payload, 1)
        else:
            dist.recv(payload, 0)
        seen.append(meter.take_bytes() or 0)
        barrier()
    return seen


def test_bytes_of_gloo_are_counted_to_the_byte(ranks):
    sent, received = ranks(sent_of_each_payload)
    header = sent[0]  # gloo's own, the same for every message
    assert header < 200
    assert [num_bytes - header for num_bytes in sent] == [*PAYLOADS]
    assert max(received) < 1_000  # receiving is not sending


def test_unsent_bytes_count_as_written_and_local_sockets_do_not_count():
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    left, right = socket.socketpair()
    with server, client, accepted, left, right:
        meter = wire_meter("gloo")
        left.sendall(b"x" * 5_000)
        client.setblocking(False)
        written = client.send(b"x" * 100_000_000)  # nobody reads: most stays in the kernel
        assert meter.take_bytes() == written


def test_what_passes_no_socket_is_unknown():
    assert wire_meter("nccl").take_bytes() is None


def test_a_meter_counts_from_when_it_was_last_asked():
    meter = ByteMeter(iter([5, 8, 8, 20, None]).__next__)
    assert [meter.take_bytes() for _ in range(4)] == [3, 0, 12, None]


def test_traffic_adds_up_by_kind():
    gather = Traffic({"gather": 10, "norm": 1}, {"gather": 2, "norm": 1})
    assert sum_of_traffic([gather, Traffic({"gather": 5}, {"gather": 1})]) == Traffic(
        {"gather": 15, "norm": 1}, {"gather": 3, "norm": 1}
    )
