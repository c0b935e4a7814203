"""What each token adds to a text, so that a text grows token by token and depends on nothing but its tokens.

The decoders of tokenizer.json say it: those that look at a token alone are asked about it once, bytes are put
together by whoever reads them, and what is done to the joined text is a few words here. Knows no requests.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import tokenizers

_MAX_KEPT = 65536  # pieces of a table, which then starts anew
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_OF_ONE_TOKEN = frozenset(["Replace", "Metaspace", "WordPiece"])
_ONE_EACH = "quire.one_each"


def _show_each(error: UnicodeError) -> tuple[str, int]:
    """SentencePiece's way with bytes that are no character: a sign for each."""
    assert isinstance(error, UnicodeDecodeError)
    return "\N{REPLACEMENT CHARACTER}" * (error.end - error.start), error.end


codecs.register_error(_ONE_EACH, _show_each)


class _Table(dict[Any, Any]):
    """What `make` says of a key, kept."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> Any:
        if len(self) >= _MAX_KEPT:
            self.clear()
        value = self[key] = self._make(key)
        return value


class TokenPieces(msgspec.Struct, frozen=True):
    """Pieces of UTF-8, with or without special tokens. Made by `make_pieces`.

    first: by token id, the piece of a text's first token; None of one that is left out, and is no first one.
    later: the piece of any further token, b"" of one that is left out. `follows`: by (the token shown before
        it, its id), of shown ones alone.
    errors: how bytes that are no character are decoded.
    num_stripped, stripped: so many of this character are taken off the text's beginning.
    """

    first: dict[int, bytes | None]
    later: dict[Any, bytes]
    follows: bool = False
    errors: str = "replace"
    num_stripped: int = 0
    stripped: str = ""


class _Decoder(msgspec.Struct):
    """The steps of a decoder that come before tokens are joined, and what comes after."""

    steps: list[Any] = []
    bytes: str | None = None  # the step that makes bytes of tokens
    strip: Any = None


def make_pieces(backend: tokenizers.Tokenizer, skips_special: bool) -> TokenPieces:
    """The pieces of a tokenizer's tokens; `skips_special` leaves special ones out."""
    added = backend.get_added_tokens_decoder() if skips_special else {}
    skipped = {token.content for token in added.values() if token.special}

    def text_of(token_id: int) -> str | None:
        text = backend.id_to_token(token_id)
        return None if text in skipped else text

    decoder = None if backend.decoder is None else _read_decoder(backend.decoder)
    if backend.decoder is not None and decoder is None:
        return _make_pairs(backend, text_of)
    make = _make_joiner() if decoder is None else _make_piece(decoder)
    strip = {} if decoder is None or decoder.strip is None else decoder.strip

    def make_first(token_id: int) -> bytes | None:
        text = text_of(token_id)
        return None if text is None else make([text])

    def make_later(token_id: int) -> bytes:
        text = text_of(token_id)
        return b"" if text is None else make(["", text])

    return TokenPieces(
        _Table(make_first),
        _Table(make_later),
        errors=_ONE_EACH if decoder is not None and decoder.bytes == "ByteFallback" else "replace",
        num_stripped=strip.get("start", 0),
        stripped=strip.get("content", ""),
    )


def _read_decoder(decoder: Any) -> _Decoder | None:
    """The decoder by tokens; None if it cannot be applied token by token."""
    described = json.loads(decoder.__getstate__())
    read, is_joined = _Decoder(), False
    for step in described["decoders"] if described["type"] == "Sequence" else [described]:
        match step["type"]:
            case kind if kind in _OF_ONE_TOKEN and not is_joined and read.bytes is None:
                read.steps.append(step)
            case "Metaspace" if not is_joined:
                read.steps.append(step)
            case "Replace" if read.bytes != "ByteLevel" and read.strip is None and _is_of_one(step):
                read.steps.append(step)
            case "ByteLevel" | "ByteFallback" as kind if not is_joined and read.bytes is None:
                read.bytes, is_joined = kind, kind == "ByteLevel"
            case "Fuse":
                is_joined = True
            case "Strip" if is_joined and read.strip is None and step["stop"] == 0:
                read.strip = step
            case _:
                return None
    return read


def _is_of_one(step: dict[str, Any]) -> bool:
    """True if it replaces single characters, which are the same before tokens are joined and afterwards."""
    return len(step["pattern"].get("String", "")) == 1


def is_readable(decoder: Any) -> bool:
    """False if bytes are put together to characters in a way that cannot be followed token by token."""
    described = decoder.__getstate__().decode()
    return _read_decoder(decoder) is not None or not ("ByteFallback" in described or "ByteLevel" in described)


def _make_joiner() -> Callable[[list[str]], bytes]:
    """The joiner for a tokenizer without a decoder: spaces between tokens."""
    return lambda tokens: " ".join(tokens).encode("utf-8", "surrogatepass")


def _make_piece(decoder: _Decoder) -> Callable[[list[str]], bytes]:
    """The piece of the last of some tokens, of which one before it is empty."""
    from tokenizers.decoders import Fuse

    alone: Any = Fuse()
    alone.__setstate__(json.dumps({"type": "Sequence", "decoders": decoder.steps}).encode())
    byte_of = {char: byte for byte, char in enumerate(_byte_characters())}

    def make(tokens: list[str]) -> bytes:
        text = alone.decode(tokens)
        if decoder.bytes == "ByteLevel" and all(char in byte_of for char in text):
            return bytes(byte_of[char] for char in text)
        if decoder.bytes == "ByteFallback" and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(match[1])
        return text.encode()

    return make


def _byte_characters() -> list[str]:
    """GPT-2's characters for the bytes from 0 to 255: printable ones stand for themselves."""
    chars: list[str] = []
    num_others = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or (0xA1 <= byte <= 0xFF and byte != 0xAD):
            chars.append(chr(byte))
        else:
            chars.append(chr(256 + num_others))
            num_others += 1
    return chars


def _make_pairs(backend: tokenizers.Tokenizer, text_of: Callable[[int], str | None]) -> TokenPieces:
    """What a token adds to the one before it alone, where a decoder is not known any better."""
    decoder: Any = backend.decoder

    def make_first(token_id: int) -> bytes | None:
        text = text_of(token_id)
        return None if text is None else decoder.decode([text]).encode()

    def make_later(pair: tuple[int, int]) -> bytes:
        before, text = map(text_of, pair)
        context, both = decoder.decode([before]), decoder.decode([before, text])
        return (both.removeprefix(context) if both.startswith(context) else decoder.decode([text])).encode()

    return TokenPieces(_Table(make_first), _Table(make_later), follows=True)
