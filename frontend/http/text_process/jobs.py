"""What an HTTP process asks of its text process, and what it is answered: msgpack in bounded_jobs' frames.

Knows no processes and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ....ipc.decoding import make_msgpack_decoder
from ....ipc.params.structured_outputs import StructuredOutputsParams
from ...formats.grammars.rules import OutputRules
from ...formats.offered_tools import CHAT_FIELDS, ToolFields
from ...requests.prompts import Truncation
from ...requests.vectors.encoder import ModelTexts
from ...tools import Tool, ToolChoice
from ..bodies.schema import ChatMessage


class TextArgs(msgspec.Struct, frozen=True, kw_only=True):
    """One text process: the tokenizer's folder and the socket of its jobs.

    is_background: it leaves the processor to others, and gives memory back after each job. chat_template: in
    place of the folder's.
    """

    tokenizer: str
    socket_fd: int
    is_background: bool
    chat_template: str | None = None


class Conversation(msgspec.Struct, kw_only=True, omit_defaults=True, tag="render"):
    """What a request of any API asks the model to continue, and how; to token ids by the chat template.

    choice: of `tools`. parallel: a turn may have several calls. variables: of the chat template, over those
    that stand for reasoning_effort. thinking_token_budget: thoughts end after so many tokens.
    shows_reasoning: thoughts are among the events. format: what the answer after thoughts looks like, which
    the text process is not told. param, fields: what the request calls the messages and its tools.
    max_model_len: refuse what leaves no room for `num_generated` tokens, once `truncation` has been done.
    """

    messages: list[ChatMessage]
    tools: list[Tool] = []
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    variables: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    shows_reasoning: bool = True
    format: GrammarJob | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    param: str = "messages"
    fields: ToolFields = CHAT_FIELDS
    max_model_len: int | None = None
    truncation: Truncation | None = None
    num_generated: int = 1

    @property
    def may_call(self) -> bool:
        """Whether the answer may have calls."""
        return bool(self.tools) and self.choice.mode != "none"

    @property
    def template_variables(self) -> dict[str, Any] | None:
        """What the chat template is told. Some read reasoning_effort, others only enable_thinking."""
        effort = self.reasoning_effort
        if effort is None:
            return self.variables
        return {"reasoning_effort": effort, "enable_thinking": effort != "none", **(self.variables or {})}


class EncodeJob(msgspec.Struct, frozen=True, kw_only=True, tag="encode"):
    """Texts to token ids. `names`: what each is called in errors. The rest as in Conversation."""

    texts: list[str]
    names: list[str]
    add_special_tokens: bool
    max_model_len: int | None = None
    truncation: Truncation | None = None


class PoolingJob(msgspec.Struct, frozen=True, kw_only=True, tag="pooling"):
    """Texts, or each of them behind its query or the only one, to token ids for vectors.

    `texts` and `names` as in EncodeJob. A text is cut to max_tokens_per_text, then the prompt as
    `truncation` says; then it has at most max_tokens. The first num_whole texts are not cut. model: what its
    files say of texts.
    """

    texts: list[str]
    names: list[str]
    max_tokens: int
    model: ModelTexts
    prompt: str = ""
    queries: list[str] | None = None
    truncation: Truncation | None = None
    max_tokens_per_text: int | None = None
    num_whole: int = 0


class TokenizeJob(msgspec.Struct, frozen=True, kw_only=True, tag="tokenize"):
    """The whole answer of /tokenize, or of /v1/messages/count_tokens if it `only_counts`: no event loop is to
    hold as many ids as there may be.
    """

    source: Conversation | EncodeJob
    max_model_len: int
    wants_strings: bool = False
    only_counts: bool = False


class DetokenizeJob(msgspec.Struct, frozen=True, kw_only=True, tag="detokenize"):
    """The whole answer of /detokenize. `token_ids`: the request's JSON."""

    token_ids: bytes


class DecodeJob(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    """The text of token ids, special tokens shown. `token_ids`: packed."""

    token_ids: bytes


class GrammarJob(msgspec.Struct, frozen=True, kw_only=True, tag="grammar"):
    """What a grammar is made of: what the answer looks like, rules of the turn that it is part of, or both.
    The answer is its text, once it compiles.

    place: the request's field that `params` were made of, None for structured_outputs. is_strict: their JSON
    schema has to keep OpenAI's rules.
    """

    params: StructuredOutputsParams | None = None
    place: str | None = None
    is_strict: bool = False
    rules: OutputRules | None = None


TextJob = Conversation | EncodeJob | PoolingJob | TokenizeJob | DetokenizeJob | DecodeJob | GrammarJob


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process's first word: jobs are taken."""


class TokenIds(msgspec.Struct, frozen=True, tag="ids"):
    """Token ids of each text, packed. type_starts: of pairs, as EncodedText has them."""

    packed: list[bytes]
    type_starts: list[int | None] = []


class Body(msgspec.Struct, frozen=True, tag="body"):
    """An HTTP answer, as JSON."""

    json: bytes


class Text(msgspec.Struct, frozen=True, tag="text"):
    """What was decoded, or a grammar."""

    text: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request's own fault: what is wrong with which field of it."""

    message: str
    field: str
    code: str | None = None


TextAnswer = Ready | TokenIds | Body | Text | Refused

_encoder = msgspec.msgpack.Encoder()
decode_job: Callable[[bytes], TextJob] = make_msgpack_decoder(TextJob)
decode_answer: Callable[[bytes], TextAnswer] = make_msgpack_decoder(TextAnswer)


def encode_body(message: TextJob | TextAnswer) -> bytes:
    """Raises UnicodeEncodeError for text that UTF-8 cannot hold, RecursionError for data nested too deep."""
    return _encoder.encode(message)
