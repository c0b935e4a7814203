"""What `quire bench serve` asks: random words or the lines of a file, as ready request bodies."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...ipc.errors import InputError
from ..words import ANIMALS, BOYS, COLORS, GIRLS, LITTLE, PET_NAMES, TOYS
from .load import RecordReader, StreamReader, VectorReader

EndpointKind = Literal["chat", "completions", "embeddings"]
RANDOM = "random"

# A common word is one or two tokens of most vocabularies; the server counts, and its count is reported.
_WORDS = (*GIRLS, *BOYS, *PET_NAMES, *ANIMALS, *LITTLE, *COLORS, *TOYS, "a", "the", "and", "in", "with")
_MAX_LEN = 10_000_000
_RANGE = re.compile(r"([0-9]{1,8})(?:-([0-9]{1,8}))?")
_Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Form:
    """An API: how a body holds a prompt, and what reads the answer. Streams have further fields."""

    path: str
    put_prompt: Callable[[_Prompt], dict[str, Any]]
    reader: type[RecordReader] = StreamReader


def _as_messages(prompt: _Prompt) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}


FORMS: dict[EndpointKind, Form] = {
    "chat": Form("/v1/chat/completions", _as_messages),
    "completions": Form("/v1/completions", lambda prompt: {"prompt": prompt}),
    "embeddings": Form(
        "/v1/embeddings", lambda prompt: {"input": prompt, "encoding_format": "base64"}, VectorReader
    ),
}


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths from `low` to `high`, both possible."""

    low: int
    high: int

    @classmethod
    def parse(cls, field: str, text: str) -> LengthRange:
        """'128' or '64-256'. Raises InputError."""
        match = _RANGE.fullmatch(text)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high <= _MAX_LEN:
            raise InputError(field, text, "a length of at least 1, or a range such as 64-256")
        return cls(low, high)

    def draw(self, rng: random.Random) -> int:
        """A length, every one as likely as the others."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt and the most tokens to answer it with."""

    prompt: _Prompt
    max_tokens: int

    def encode(self, model: str, endpoint: EndpointKind, temperature: float, ignore_eos: bool) -> bytes:
        """The request body: of a streamed answer that ends with the server's token counts, or of a vector."""
        form = FORMS[endpoint]
        body = {"model": model, **form.put_prompt(self.prompt)}
        if form.reader is StreamReader:
            body |= {"max_tokens": self.max_tokens, "temperature": temperature, "stream": True}
            body |= {"stream_options": {"include_usage": True}}
            body |= {"ignore_eos": True} if ignore_eos else {}
        return msgspec.json.encode(body)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def make_random_asks(
    num_prompts: int, input_len: LengthRange, output_len: LengthRange, seed: int | str
) -> list[Ask]:
    """Prompts of `input_len` random words; the same arguments give the same prompts."""
    rng = random.Random(f"bench serve/{seed}")
    asks: list[Ask] = []
    for _ in range(num_prompts):
        words = [rng.choice(_WORDS) for _ in range(input_len.draw(rng))]
        asks.append(Ask(" ".join(words), output_len.draw(rng)))
    return asks


def read_asks(path: str, endpoint: EndpointKind, output_len: LengthRange, seed: int) -> list[Ask]:
    """One ask a line: {"prompt": TEXT} or {"messages": [...]}, and "max_tokens" where it is not `output_len`.

    Raises InputError with the line's number.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise InputError("dataset", path, f"random, or a file of JSON lines ({error.strerror})") from None
    rng = random.Random(f"bench serve/{seed}")
    asks = [
        _read_line(f"{path}:{number}", line, endpoint, output_len.draw(rng))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not asks:
        raise InputError("dataset", path, "a file with at least one line")
    return asks


def _read_line(place: str, text: bytes, endpoint: EndpointKind, max_tokens: int) -> Ask:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.DecodeError as error:
        raise InputError("dataset", place, f"an object with prompt or messages ({error})") from None
    prompt = line.prompt if line.prompt is not None else line.messages
    if not prompt or (line.prompt is not None and line.messages is not None):
        raise InputError("dataset", place, "either prompt or messages, not empty")
    if endpoint != "chat" and not isinstance(prompt, str):
        raise InputError("dataset", place, "a prompt; messages need --endpoint chat")
    if line.max_tokens is not None and not 1 <= line.max_tokens <= _MAX_LEN:
        raise InputError("dataset", place, f"max_tokens from 1 to {_MAX_LEN}")
    return Ask(prompt, max_tokens if line.max_tokens is None else line.max_tokens)
