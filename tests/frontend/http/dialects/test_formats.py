"""response_format, structured_outputs and text.format: the grammar that is sent, and 400 with the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grammar_judge import accepts
from openai_fakes import AsgiClient, FakeLLM

GOLDEN = Path(__file__).parents[3] / "golden" / "response_formats.json"


@pytest.mark.parametrize(("path", "body", "yes", "no"), json.loads(GOLDEN.read_bytes()), ids=str)
async def test_a_format_becomes_the_grammar_of_the_request(
    llm: FakeLLM, client: AsgiClient, path: str, body: dict[str, Any], yes: str, no: str
) -> None:
    answer = await client.post(path, body)
    assert answer.status == 200, answer.body
    (call,) = llm.calls
    assert [accepts(call.grammar, text) for text in (yes, no)] == [True, False]
