"""Hundreds of bad requests, as `python -m benchmarks.fuzz` sends them by the ten thousand."""

import asyncio
import sys

import pytest

from benchmarks.fuzz import fuzz
from benchmarks.lib.tiny_server import running


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the server's memory from /proc")
def test_no_bad_request_is_worse_than_a_400() -> None:
    with running() as server:
        outcome = asyncio.run(fuzz(server, 500, seed=1))
    assert outcome.failures == []
    assert set(outcome.answers["good"]) == {"200"}
    assert server.last_words["free_blocks"] == server.last_words["num_blocks"]
