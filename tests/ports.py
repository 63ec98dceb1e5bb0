"""A port on loopback that is free when somebody listens there, however much later that is."""

from __future__ import annotations

import socket


def kept_port() -> tuple[socket.socket, int]:
    """As long as the socket is open nobody else gets the port; whoever allows to reuse addresses may listen there."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    return kept, kept.getsockname()[1]
