"""Prompts of token ids for real engines, and what they have generated."""

from __future__ import annotations

from quire import RequestOutput


def make_prompts(firsts: dict[int, int], count: int) -> list[dict[str, list[int]]]:
    """The same prompts each time, but for the first tokens that are given."""
    return [{"prompt_token_ids": [firsts.get(i, 100 + i), 200, 300 + i]} for i in range(count)]


def find_tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]
