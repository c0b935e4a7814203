"""use_beam_search over HTTP: what reaches the engine, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from openai_fakes import AsgiClient, FakeLLM, run_with_app
from quire.frontend.http.serving import Serving
from quire.ipc.params.beam_search import BeamSearch
from quire.ipc.params.sampling_params import SamplingParams

COMPLETIONS = "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.mark.parametrize("path", PROMPTS)
def test_a_request_becomes_one_search_without_what_is_recommended_for_sampling(path: str):
    async def scenario(llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        llm.defaults = SamplingParams(temperature=0.3, top_k=5, repetition_penalty=1.3)
        serving.open()
        asked = {"use_beam_search": True, "n": 3, "length_penalty": 0, "early_stopping": "never"}
        answer = await client.post(
            path, PROMPTS[path] | asked | {"temperature": 0.7, "seed": 3, "top_p": 1.0}
        )
        assert answer.status == 200, answer.body
        assert [one["index"] for one in answer.json["choices"]] == [0, 1, 2]
        assert llm.searches == [BeamSearch(3, 0.0, "never")]
        assert llm.calls[0].params.repetition_penalty == 1.0

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 5}, "n"),  # max_num_seqs is 4
        ({"best_of": 4}, "best_of"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"top_k": 4}, "top_k"),
        ({"stop": ["a"]}, "stop"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"length_penalty": 5.5}, "length_penalty"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 1.0}, "length_penalty"),
        ({"use_beam_search": None, "early_stopping": False}, "early_stopping"),
    ],
)
def test_what_a_search_cannot_go_by_is_refused_with_its_field(fields: dict[str, Any], param: str):
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = {"prompt": "a", "use_beam_search": True, "n": 2} | fields
        answer = await client.post(COMPLETIONS, body)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert not llm.calls

    run_with_app(scenario)
