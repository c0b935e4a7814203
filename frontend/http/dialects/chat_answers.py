"""Answers of /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..bodies.schema import ChoiceLogprobs, PromptLogprobs, Usage


class AnswerFunction(msgspec.Struct, omit_defaults=True):
    """What is called. arguments: a JSON object's text; in chunks, more of it."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class AnswerToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    function: AnswerFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The assistant's message. Thoughts have both of the names that clients read."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    tool_parse_error: bool | UnsetType = UNSET  # true: a call could not be read and stays in the content


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of /v1/chat/completions. prompt_token_ids, token_ids of choices: with return_token_ids."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class DeltaToolCall(msgspec.Struct, kw_only=True):
    """What is new of a call: first its id and name, then its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: AnswerFunction


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """What is new of one answer."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    tool_parse_error: bool | UnsetType = UNSET  # as in a ChatChoice


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """A chunk of a streamed chat. prompt_token_ids: in the first, with return_token_ids."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
