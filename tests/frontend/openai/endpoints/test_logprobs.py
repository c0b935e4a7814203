"""Logprobs of many positions: the same JSON as of few, and no time that grows faster than they do."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from openai_fakes import AsgiClient, FakeLLM, run_with_app
from quire.frontend.logprobs import Logprob
from quire.frontend.openai.endpoints.logprobs import (
    make_chat_logprobs,
    make_completion_logprobs,
    make_prompt_logprobs,
)
from quire.frontend.openai.serving import Serving

POSITIONS = [None, *({n: Logprob(-n / 10, 1, f"t{n}"), 7: Logprob(-1.0, 2, "\u00e9")} for n in range(10, 20))]


@pytest.mark.parametrize(
    "make",
    [
        lambda positions: make_chat_logprobs(positions, 2).content,
        lambda positions: make_completion_logprobs(positions, 2, 0).top_logprobs,
        make_prompt_logprobs,
    ],
    ids=["chat", "completions", "prompt"],
)
def test_many_positions_are_encoded_as_few_are(make: Callable[[Any], list[Any]]):
    few = json.loads(msgspec.json.encode(make(POSITIONS)))
    assert json.loads(msgspec.json.encode(make(POSITIONS * 30))) == few * 30


def test_the_echo_of_a_long_prompt_with_logprobs_takes_time_as_it_is_long():
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        num_tokens = 100_000  # the sums of all beginnings would take a minute
        body = {"prompt": [7] * num_tokens, "echo": True, "logprobs": 0, "max_tokens": 1, "n": 2}
        answer = await client.post("/v1/completions", body)
        for choice in answer.json["choices"]:
            offsets = choice["logprobs"]["text_offset"]
            assert offsets[1] == len(choice["logprobs"]["tokens"][0])
            assert [b - a for a, b in itertools.pairwise(offsets)][1:-1] == [2] * 99_998

    run_with_app(scenario, max_model_len=200_000)
