"""Logits processors as an operator writes them: engines of tests name them, module:Class."""

from __future__ import annotations

from typing import Self

import torch
from quire import LogitsProcessor, LogitsRequest
from torch import Tensor


class Unlike(LogitsProcessor):
    """extra_args {"unlike": n}: none of the last n tokens again, and the prompt's first one likelier."""

    def __init__(self, num_last: int, request: LogitsRequest) -> None:
        self._num_last = num_last
        self._favourite = request.prompt_token_ids[0]
        self._seen = list(request.output_token_ids)

    @classmethod
    def for_request(cls, request: LogitsRequest) -> Self | None:
        num_last = request.extra_args.get("unlike")
        return None if num_last is None else cls(num_last, request)

    def append(self, token_id: int) -> None:
        self._seen.append(token_id)

    def apply(self, logits: Tensor) -> None:
        logits[self._favourite] += 2.0
        logits[self._seen[-self._num_last :]] = -torch.inf


class Only(LogitsProcessor):
    """extra_args {"only": [ids]}: nothing else; has no state and makes new logits."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    @classmethod
    def for_request(cls, request: LogitsRequest) -> Self | None:
        return cls(request.extra_args["only"]) if "only" in request.extra_args else None

    def apply(self, logits: Tensor) -> Tensor:
        kept = torch.full_like(logits, -torch.inf)
        kept[self._token_ids] = logits[self._token_ids]
        return kept


class Fails(LogitsProcessor):
    """extra_args {"fails_at": n}: raises at the n-th token."""

    def __init__(self, fails_at: int, num_output: int) -> None:
        self._fails_at, self._num_output = fails_at, num_output

    @classmethod
    def for_request(cls, request: LogitsRequest) -> Self | None:
        fails_at = request.extra_args.get("fails_at")
        return None if fails_at is None else cls(fails_at, len(request.output_token_ids))

    def append(self, token_id: int) -> None:
        del token_id
        self._num_output += 1

    def apply(self, logits: Tensor) -> None:
        del logits
        if self._num_output >= self._fails_at:
            raise LookupError("what this processor needs is not there")


class Unfinished(LogitsProcessor):
    """Does not say what `apply` does."""

    @classmethod
    def for_request(cls, request: LogitsRequest) -> Self | None:
        del request
        return None


def not_a_class() -> None:
    """Only a function."""
