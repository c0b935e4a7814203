"""`quire bench fair`: its client process, and in the slow run the bar that it measures."""

from __future__ import annotations

import re

import pytest
from quire.ipc.errors import QuireError
from quire.tools.bench.fair import ClientProcess, Effect, run_fair


def test_the_ratio_is_of_medians():
    effect = Effect(alone_s=[0.01, 0.02, 9.0], flooded_s=[0.03, 0.03, 0.001])
    assert effect.ratio == pytest.approx(1.5)


def test_a_client_that_cannot_attach_is_an_error(capfd: pytest.CaptureFixture[str]):
    client = ClientProcess("nobody-has-this-name")
    try:
        with pytest.raises(QuireError, match="a client ended"):
            client.measure(1, 8)
    finally:
        client.close()
    assert "nobody-has-this-name" in capfd.readouterr().err


@pytest.mark.slow
def test_a_flood_at_most_doubles_the_median_time_to_first_token(capsys: pytest.CaptureFixture[str]):
    assert run_fair(num_rounds=3, num_requests=20, model="pocket") == 0
    ratios = [float(ratio) for ratio in re.findall(r"([0-9.]+)x$", capsys.readouterr().out, re.MULTILINE)]
    assert len(ratios) == 2
    assert max(ratios) <= 2.0
