"""What an HTTP process asks of its text process, and what it is answered. Frames over a stream socket.

A frame is a length, a limit in seconds of processor time (0.0 in answers) and a msgpack body. Knows no
processes and no tokenizer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ....ipc.params.structured_outputs import StructuredOutputsFields
from ...formats.grammars.rules import OutputRules
from ...requests.prompts import Truncation
from ...requests.vectors.encoder import ModelTexts
from ...tools import Tool
from ..bodies.schema import ChatMessage

_HEAD = struct.Struct("<If")


class TextArgs(msgspec.Struct, frozen=True, kw_only=True):
    """One text process: the tokenizer's folder and the socket of its jobs.

    is_background: it leaves the processor to others, and gives memory back after each job. chat_template: in
    place of the folder's.
    """

    tokenizer: str
    socket_fd: int
    is_background: bool
    chat_template: str | None = None


class RenderJob(msgspec.Struct, frozen=True, kw_only=True, tag="render"):
    """A conversation to token ids by the chat template. `param`: the request's field, for errors.

    max_model_len: refuse what leaves no room for `num_generated` tokens, once `truncation` has been done.
    tools: what the model may call. schema_places: of each, where its schema stands if it is to be checked
    here; else ''.
    """

    messages: list[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] | None = None
    add_special_tokens: bool = False
    param: str = "messages"
    max_model_len: int | None = None
    truncation: Truncation | None = None
    tools: list[Tool] = []
    num_generated: int = 1
    schema_places: list[str] = []


class EncodeJob(msgspec.Struct, frozen=True, kw_only=True, tag="encode"):
    """Texts to token ids. `names`: what each is called in errors. The rest as in RenderJob."""

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

    source: RenderJob | EncodeJob
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
    """The grammar text of structured outputs, of rules for the turn, or of both, once it compiles.

    place: the request's field that `fields` were made of, None for structured_outputs. is_strict: their JSON
    schema has to keep OpenAI's rules.
    """

    fields: StructuredOutputsFields | None
    place: str | None
    is_strict: bool
    rules: OutputRules | None = None


TextJob = RenderJob | EncodeJob | PoolingJob | TokenizeJob | DetokenizeJob | DecodeJob | GrammarJob


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
decode_job: Callable[[bytes], TextJob] = msgspec.msgpack.Decoder(TextJob).decode
decode_answer: Callable[[bytes], TextAnswer] = msgspec.msgpack.Decoder(TextAnswer).decode


def encode_body(message: TextJob | TextAnswer) -> bytes:
    """Raises UnicodeEncodeError for text that UTF-8 cannot hold, RecursionError for data nested too deep."""
    return _encoder.encode(message)


def make_frame(body: bytes, limit_s: float = 0.0) -> bytes:
    """Bytes for the socket."""
    return _HEAD.pack(len(body), limit_s) + body


class FrameReader:
    """Bytes as they come -> whole frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, float]]:
        """(body, limit in seconds) of each frame that is complete with `data`."""
        self._data += data
        while len(self._data) >= _HEAD.size:
            size, limit_s = _HEAD.unpack_from(self._data)
            end = _HEAD.size + size
            if len(self._data) < end:
                return
            with memoryview(self._data) as view:
                body = bytes(view[_HEAD.size : end])
            del self._data[:end]
            yield body, limit_s
