"""Makes a tokenizer.json where a folder has only tokenizer.model (SentencePiece) or tekken.json (Mistral's).

Both are put into the words of a GGUF file's metadata, of which gguf/vocabulary.py makes a tokenizer.json. It
is kept in a cache, in a folder named by the content of what it was made of.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.errors import ModelError
from ...ipc.files.private_cache import CacheUnusableError, PrivateCache
from .gguf.header import GgufHeader
from .gguf.vocabulary import EXPRESSIONS, Vocabulary, make_tokenizer, make_tokenizer_config, spell_bytes
from .model_files import MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES, read_file, read_json, read_json_as

SENTENCE_PIECE, TEKKEN = "tokenizer.model", "tekken.json"
_VERSION = b"1"  # of what is written
_NUM_KEPT = 64
_OTHERS = ("special_tokens_map.json", "chat_template.jinja")  # are taken along as they are
_BPE = 2  # of sentencepiece_model.proto's ModelType
_UNUSED = 5
# Of tekken.json without a list of them, as Mistral Nemo's is (mistral-common's DEPRECATED_SPECIAL_TOKENS).
_FIRST_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_Fields = dict[int, list[Any]]


class _TekkenToken(msgspec.Struct):
    rank: int
    token_bytes: str = ""  # base64
    token_str: str | None = None


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Tekken(msgspec.Struct):
    config: _TekkenConfig
    vocab: list[_TekkenToken]
    special_tokens: list[_TekkenToken] | None = None


def find_tokenizer_folder(folder: Path) -> Path:
    """The folder itself where it has a tokenizer.json, else one with what is made of its other files.

    Raises ModelError: no such file, or one that is corrupt or not read here.
    """
    name = next((each for each in (SENTENCE_PIECE, TEKKEN) if (folder / each).is_file()), None)
    if (folder / "tokenizer.json").is_file() or name is None:
        return folder
    config = read_json(folder / "tokenizer_config.json")
    if (folder / "added_tokens.json").is_file() and "added_tokens_decoder" not in config:
        raise ModelError(
            "tokenizer", str(folder / "added_tokens.json"), "a tokenizer.json that has these tokens"
        )
    others = {
        each: read_file(folder / each, MAX_TEMPLATE_BYTES) for each in _OTHERS if (folder / each).is_file()
    }
    content = read_file(folder / name, MAX_TOKENIZER_BYTES)
    digest = hashlib.sha256(_VERSION)
    for part in (content, msgspec.json.encode(config), *others.values()):
        digest.update(hashlib.sha256(part).digest())
    key = digest.hexdigest()[:24]
    try:
        cache = PrivateCache.open("tokenizers")
        made = cache.find_folder(key)
        if made is None:
            read = _read_sentence_piece if name == SENTENCE_PIECE else _read_tekken
            metadata = read(folder / name, content)
            metadata["general.architecture"] = "phi3"  # the prefix comes before spaces, too
            for flag in ("add_bos_token", "add_eos_token"):
                if isinstance(config.get(flag), bool):
                    metadata[f"tokenizer.ggml.{flag}"] = config[flag]
            vocabulary = Vocabulary(GgufHeader(folder / name, metadata, {}, 0))
            files = {"tokenizer.json": make_tokenizer(vocabulary)}
            files["tokenizer_config.json"] = make_tokenizer_config(vocabulary) | config
            made = cache.put_folder(key, others | {k: msgspec.json.encode(v) for k, v in files.items()})
            cache.remove_old(_NUM_KEPT)
        cache.note_used(key)
    except CacheUnusableError as error:
        raise ModelError("XDG_CACHE_HOME", None, f"a folder that only you may write to ({error})") from error
    return made


def _read_tekken(file: Path, _content: bytes) -> dict[str, Any]:
    """As mistral-common's Tekkenizer: special tokens, then so many of the vocabulary as there is room."""
    tekken = read_json_as(file, MAX_TOKENIZER_BYTES, _Tekken)
    config, num_special = tekken.config, tekken.config.default_num_special_tokens
    special = [f"<SPECIAL_{rank}>" for rank in range(num_special)]
    first = [_TekkenToken(rank, token_str=text) for rank, text in enumerate(_FIRST_SPECIAL)]
    for token in first if tekken.special_tokens is None else tekken.special_tokens:
        if not 0 <= token.rank < num_special or not token.token_str:
            raise ModelError(f"{file.name} special_tokens", token, f"a text, and a rank below {num_special}")
        special[token.rank] = token.token_str
    if config.pattern != EXPRESSIONS["tekken"][0]:
        raise ModelError(f"{file.name} pattern", config.pattern, "Mistral's; or a tokenizer.json")
    letters = spell_bytes()
    try:
        words = [base64.b64decode(token.token_bytes, validate=True) for token in tekken.vocab]
    except (binascii.Error, ValueError) as error:
        raise ModelError(f"{file.name} vocab", str(error), "tokens in base64") from error
    words = words[: config.default_vocab_size - num_special]
    if [token.rank for token in tekken.vocab] != list(range(len(tekken.vocab))) or len({*words}) < len(words):
        raise ModelError(f"{file.name} vocab", f"{len(words)} tokens", "different ones, by rank")
    ranks = {word: rank for rank, word in enumerate(words)}
    spelled = ["".join(letters[byte] for byte in word) for word in words]
    merges: list[str] = []
    for word in words:
        cuts = [(ranks.get(word[:cut]), ranks.get(word[cut:])) for cut in range(1, len(word))]
        pairs = sorted((left, right) for left, right in cuts if left is not None and right is not None)
        merges += [f"{spelled[left]} {spelled[right]}" for left, right in pairs]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "tekken",
        "tokenizer.ggml.tokens": [*special, *spelled],
        "tokenizer.ggml.token_type": [3] * num_special + [1] * len(spelled),
        "tokenizer.ggml.merges": merges,
        **{
            f"tokenizer.ggml.{name}_token_id": special.index(text)
            for name, text in (("bos", "<s>"), ("eos", "</s>"), ("unknown", "<unk>"))
            if text in special
        },
    }


def _read_sentence_piece(file: Path, content: bytes) -> dict[str, Any]:
    """The fields of sentencepiece_model.proto that say how a text is cut; others than Llama's are refused."""
    try:
        model = _read_message(content)
        pieces = [_read_message(piece) for piece in model.get(1, [])]
        trainer, normalizer = (_read_message(model.get(number, [b""])[-1]) for number in (2, 3))
        tokens = [piece[1][-1].decode() for piece in pieces]
        scores = [struct.unpack("<f", piece.get(2, [bytes(4)])[-1])[0] for piece in pieces]
        types = [piece.get(3, [1])[-1] for piece in pieces]
        checks = {
            "trainer_spec.model_type": (trainer.get(3, [1])[-1], _BPE),
            "trainer_spec.treat_whitespace_as_suffix": (trainer.get(24, [0])[-1], 0),
            "trainer_spec.byte_fallback": (trainer.get(35, [0])[-1], 1),
            "normalizer_spec.precompiled_charsmap": (len(normalizer.get(2, [b""])[-1]), 0),
            "normalizer_spec.remove_extra_whitespaces": (normalizer.get(4, [1])[-1], 0),
            "normalizer_spec.escape_whitespaces": (normalizer.get(5, [1])[-1], 1),
            "pieces of the type UNUSED": (types.count(_UNUSED), 0),
        }
        ids = {name: trainer.get(number, [default])[-1] for name, number, default in _NAMED_IDS}
        prefix = bool(normalizer.get(3, [1])[-1])
    except (ValueError, KeyError, IndexError, struct.error, AttributeError, TypeError) as error:
        raise ModelError("tokenizer", str(file), f"a SentencePiece model ({error or 'cut off'})") from error
    for name, (value, wanted) in checks.items():
        if value != wanted:
            raise ModelError(f"{file.name} {name}", value, f"{wanted}, as Llama has it; or a tokenizer.json")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": prefix,
        **{f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items() if value < len(tokens)},
    }


_NAMED_IDS = (("unknown", 40, 0), ("bos", 41, 1), ("eos", 42, 2))


def _read_message(content: bytes) -> _Fields:
    """Values by the field's number (protobuf's encoding): numbers, or bytes. ValueError, IndexError."""
    fields: _Fields = {}
    for number, value in _list_fields(memoryview(content)):
        fields.setdefault(number, []).append(value)
    return fields


def _list_fields(content: memoryview) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(content):
        key, at = _read_number(content, at)
        size = {1: 8, 5: 4}.get(key & 7, 0)
        if key & 7 == 0:
            value, at = _read_number(content, at)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            size, at = _read_number(content, at)
        elif not size:
            raise ValueError(f"wire type {key & 7}")
        if at + size > len(content):
            raise ValueError("it is cut off")
        yield key >> 3, bytes(content[at : at + size])
        at += size


def _read_number(content: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number of more than 64 bits")
