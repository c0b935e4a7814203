"""Embeddings with OpenAI's Python client, of a pocket model that also embeds.

More of scenarios.py, by its rules: `python vectors.py BASE_URL API_KEY` runs them all.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import openai
from scenarios import MODEL, SCENARIOS, main, raised, scenario

TEXTS = ["The fox sleeps.", "A cat sat on the mat and looked at the moon.", "What is 12 plus 30?"]


def embed(client: openai.OpenAI, given: Any, **fields: Any) -> list[list[float]]:
    return [item.embedding for item in client.embeddings.create(model=MODEL, input=given, **fields).data]


@scenario
def vectors_of_texts(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS)  # as base64, which the client reads
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
    for text, item in zip(TEXTS, answer.data, strict=True):
        [alone] = embed(client, text)
        assert alone == item.embedding
        assert math.isclose(math.hypot(*alone), 1.0, abs_tol=1e-4)
        assert embed(client, text, encoding_format="float") == [alone]


@scenario
def vectors_of_token_ids(client: openai.OpenAI) -> None:
    root = str(client.base_url).removesuffix("/").removesuffix("/v1")
    answer: Any = client.post(f"{root}/tokenize", body={"model": MODEL, "prompt": TEXTS[0]}, cast_to=object)
    wanted = embed(client, TEXTS[0])
    assert embed(client, answer["tokens"]) == wanted
    assert embed(client, [answer["tokens"]] * 2) == wanted * 2


@scenario
def vectors_errors(client: openai.OpenAI) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"given": []}, "input"),
        ({"given": ["One", ""]}, "input[1]"),
        ({"given": "One", "dimensions": 2}, "Matryoshka"),
        ({"given": "word " * 4000}, "max_model_len"),
        ({"given": [-1]}, "input"),
    ]
    for fields, place in cases:
        error = raised(openai.BadRequestError, lambda fields=fields: embed(client, **fields))
        assert place in error.message, error
    raised(openai.NotFoundError, lambda: client.embeddings.create(model="other", input="One"))


if __name__ == "__main__":
    assert SCENARIOS
    sys.exit(main())
