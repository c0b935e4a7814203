"""`quire bench route`: its traffic, and in the slow run the bars that it measures."""

from __future__ import annotations

import random
import re

import pytest
from quire.tools.bench.route import NUM_CONVERSATIONS, NUM_PREFIXES, RouteOptions, draw_prompts, run_route


def test_conversations_share_prefixes_and_random_prompts_share_nothing():
    talks = list(draw_prompts("prefix", 2, random.Random(1)))
    assert len(talks) == 2 * NUM_CONVERSATIONS
    assert len({tuple(prompt[:512]) for prompt in talks}) == NUM_PREFIXES
    assert len({tuple(prompt[:536]) for prompt in talks}) == NUM_CONVERSATIONS
    assert len({tuple(prompt) for prompt in talks}) == 2 * NUM_CONVERSATIONS
    others = list(draw_prompts("random", 2, random.Random(1)))
    assert len({tuple(prompt[:16]) for prompt in others}) == len(others) == len(talks)


@pytest.mark.slow
def test_the_router_finds_far_more_than_turns_and_takes_no_longer_for_random_prompts(
    capsys: pytest.CaptureFixture[str],
):
    assert run_route(RouteOptions(rounds=3, turns=5, at_once=16, frontends=1, model="pocket")) == 0
    cached, _, random_time = map(float, re.findall(r"([0-9.]+)x$", capsys.readouterr().out, re.MULTILINE))
    assert cached >= 1.8
    assert random_time <= 1.15  # 1.03 on a machine that has nothing else to do
