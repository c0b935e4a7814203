"""`quire bench http`: the server, its fake engine and the client that counts."""

from __future__ import annotations

import asyncio

import pytest
from quire.tools.bench.http import measure_chunk_cost

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_chunk_of_every_stream_is_counted_and_has_a_cost(path: str) -> None:
    cost = asyncio.run(measure_chunk_cost(path, num_streams=8, num_chunks=1000))
    assert cost.chunks_per_s > 100
    assert cost.server_us > 0  # the kernel counts in 10 ms, so the run must be longer
    assert 20 < cost.rss_mb < 200
