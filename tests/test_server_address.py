"""Whether a server answers."""

from __future__ import annotations

import pytest

from zeroexp.process.server_address import server_answers


@pytest.mark.parametrize("url", ["http://.example.com/", "http://localhost:abc/", "http://[::1/"])
def test_nobody_answers_at_what_is_no_address(url):
    assert not server_answers(url)
