"""What a request says of sampling reaches the engine over every route that has the field."""

from __future__ import annotations

from typing import Any

import pytest
from openai_fakes import AsgiClient, FakeLLM
from quire.ipc.params.repetition_detection import RepetitionDetectionParams

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_sixteen_stop_texts_are_fine(llm: FakeLLM, client: AsgiClient, path: str) -> None:
    stops = [f"stop {place}" for place in range(16)]
    answer = await client.post(path, BODIES[path] | {"stop": stops})
    assert answer.status == 200, answer.body
    assert llm.calls[0].params.stop == stops


@pytest.mark.parametrize("path", list(BODIES)[:2])
async def test_an_end_by_repetition_and_a_prompt_without_the_cache_can_be_asked_for(
    llm: FakeLLM, client: AsgiClient, path: str
) -> None:
    detection = {"max_pattern_size": 8, "min_count": 4}
    asked = {"repetition_detection": detection, "skip_reading_prefix_cache": True}
    assert (await client.post(path, BODIES[path] | asked)).status == 200
    params = llm.calls[0].params
    assert params.repetition_detection == RepetitionDetectionParams(**detection)
    assert not params.reads_prefix_cache
