"""What `quire bench serve` asks: random words or the lines of a file, as ready request bodies."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...ipc.errors import InputError
from ..words import ANIMALS, BOYS, COLORS, GIRLS, LITTLE, PET_NAMES, TOYS

EndpointKind = Literal["chat", "completions", "embeddings"]
RANDOM = "random"
PATHS: dict[EndpointKind, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
}

# A common word is one or two tokens of most vocabularies; the server counts, and its count is reported.
_WORDS = (*GIRLS, *BOYS, *PET_NAMES, *ANIMALS, *LITTLE, *COLORS, *TOYS, "a", "the", "and", "in", "with")
_MAX_LEN = 10_000_000
_RANGE = re.compile(r"([0-9]{1,8})(?:-([0-9]{1,8}))?")
_Message = dict[str, Any]


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

    prompt: str | list[_Message]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """What every request body says besides its prompt."""

    model: str
    endpoint: EndpointKind
    temperature: float
    ignore_eos: bool


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[_Message] | None = None
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
        _read_line(path, number, line, endpoint, output_len.draw(rng))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not asks:
        raise InputError("dataset", path, "a file with at least one line")
    return asks


def encode_body(ask: Ask, options: BodyOptions) -> bytes:
    """The request body: of a streamed answer that ends with the server's token counts, or of a vector."""
    if options.endpoint == "embeddings":
        return msgspec.json.encode({"model": options.model, "input": ask.prompt, "encoding_format": "base64"})
    body: dict[str, Any] = {
        "model": options.model,
        "max_tokens": ask.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.endpoint == "completions":
        body["prompt"] = ask.prompt
    else:
        is_text = isinstance(ask.prompt, str)
        body["messages"] = [{"role": "user", "content": ask.prompt}] if is_text else ask.prompt
    return msgspec.json.encode(body)


def _read_line(path: str, number: int, text: bytes, endpoint: EndpointKind, max_tokens: int) -> Ask:
    place = f"{path}:{number}"
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
