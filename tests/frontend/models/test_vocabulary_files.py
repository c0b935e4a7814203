"""A tokenizer.json is made of tokenizer.model and tekken.json, and gives the tokens of their own libraries.

With the libraries at hand, which are no part of the tests, 8,000 random texts agreed for each of two models
that sentencepiece 0.2.3 trained, and 5,800 for each file in mistral-common 1.13.1.
"""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.models import vocabulary_files
from quire.frontend.models.gguf.vocabulary import EXPRESSIONS
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.models.vocabulary_files import find_tokenizer_folder
from quire.frontend.options.engine_args import EngineArgs
from quire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from quire.ipc.errors import ModelError
from refusals import Refusal, refusals


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_number(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def write_field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, int):
        return write_number(number << 3) + write_number(value)
    if isinstance(value, float):
        return write_number(number << 3 | 5) + struct.pack("<f", value)
    return write_number(number << 3 | 2) + write_number(len(value)) + value


def write_sentence_piece(
    folder: Path, trainer: dict[int, Any] | None = None, normalizer: dict[int, Any] | None = None
) -> Path:
    """Llama's kind: the unknown token, BOS, EOS, a token a byte, then texts by their score."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(text, -float(rank), 1) for rank, text in enumerate(["▁a", "bc", "▁abc", "▁", "a", "b", "c"])]
    content = b""
    for text, score, kind in pieces:
        piece = write_field(1, text.encode()) + write_field(2, score) + write_field(3, kind)
        content += write_field(1, piece)
    for number, fields in ((2, {3: 2, 35: 1} | (trainer or {})), (3, {4: 0} | (normalizer or {}))):
        content += write_field(number, b"".join(write_field(*item) for item in fields.items()))
    (folder / "tokenizer.model").write_bytes(content)
    return folder


def spell(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.backend.id_to_token(each) or "" for each in tokenizer.encode(text)]


def test_a_sentence_piece_vocabulary_cuts_as_its_library_does(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(find_tokenizer_folder(write_sentence_piece(tmp_path)))
    assert spell(tokenizer, "abc") == ["<s>", "▁abc"]
    assert spell(tokenizer, " abc a") == ["<s>", "▁", "▁abc", "▁a"]
    assert spell(tokenizer, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert spell(tokenizer, "a</s>") == ["<s>", "▁a", "</s>"]
    assert tokenizer.decode(tokenizer.encode(" abc é", add_special_tokens=False)) == " abc é"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_what_stands_beside_it_counts_and_what_was_made_is_found_again(tmp_path: Path) -> None:
    folder = write_sentence_piece(tmp_path, normalizer={3: 0})
    first = find_tokenizer_folder(folder)
    assert spell(load_tokenizer(first), "abc") == ["<s>", "a", "bc"]
    assert find_tokenizer_folder(folder) == first
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false, "eos_token": "▁abc"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = load_tokenizer(find_tokenizer_folder(folder))
    assert spell(tokenizer, "abc") == ["a", "bc"]
    assert tokenizer.eos_token == "▁abc"
    assert tokenizer.chat_template is not None
    (folder / "tokenizer.json").write_text("{}")
    assert find_tokenizer_folder(folder) == folder  # which wins


REFUSED = [
    ({3: 1}, {}, "model_type=1: expected 2"),
    ({35: 0}, {}, "byte_fallback=0: expected 1"),
    ({}, {4: 1}, "remove_extra_whitespaces=1: expected 0"),
    ({}, {2: b"abc"}, "precompiled_charsmap=3: expected 0"),
]


@pytest.mark.parametrize(("trainer", "normalizer", "said"), REFUSED)
def test_another_way_to_cut_is_refused_by_name(
    tmp_path: Path, trainer: dict[int, Any], normalizer: dict[int, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        find_tokenizer_folder(write_sentence_piece(tmp_path, trainer, normalizer))


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, b"\x0a\xff\xff", b"\x0a\x02\x0b\x0c", b"no model"])
def test_a_corrupt_model_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.model") as caught:
        find_tokenizer_folder(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_every_cut_of_a_model_is_refused_or_read(tmp_path: Path) -> None:
    whole = (write_sentence_piece(tmp_path) / "tokenizer.model").read_bytes()
    for size in range(0, len(whole) - 1, 7):
        (tmp_path / "tokenizer.model").write_bytes(whole[:size])
        with pytest.raises(ModelError):
            find_tokenizer_folder(tmp_path)


def test_a_file_larger_than_any_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_files, "MAX_TOKENIZER_BYTES", 100)
    with pytest.raises(ModelError, match="at most 100 bytes"):
        find_tokenizer_folder(write_sentence_piece(tmp_path))


def test_tokens_in_another_file_are_not_left_out_silently(tmp_path: Path) -> None:
    (write_sentence_piece(tmp_path) / "added_tokens.json").write_text('{"<pad>": 300}')
    with pytest.raises(ModelError, match=r"added_tokens\.json"):
        find_tokenizer_folder(tmp_path)


def write_tekken(folder: Path, **changes: Any) -> Path:
    words = [bytes([byte]) for byte in range(256)] + [b"ab", b" ab", b"bc", "é".encode(), b"unreached"]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode()} for rank, word in enumerate(words)
    ]
    special = [
        {"rank": rank, "token_str": text} for rank, text in enumerate(["<unk>", "<s>", "</s>", "[INST]"])
    ]
    config = {"pattern": EXPRESSIONS["tekken"][0], "default_vocab_size": 264, "default_num_special_tokens": 4}
    tekken = {"config": config, "vocab": vocab, "special_tokens": special, **changes}
    (folder / "tekken.json").write_text(json.dumps(tekken))
    return folder


def test_tekken_has_its_special_tokens_first(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(find_tokenizer_folder(write_tekken(tmp_path)))
    assert len(tokenizer) == 264  # the last word has no room
    assert tokenizer.encode("[INST]abc ab") == [1, 3, 4 + 256, 4 + ord("c"), 4 + 257]
    assert tokenizer.encode("é", add_special_tokens=False) == [4 + 259]
    assert tokenizer.decode([4 + 259, 4 + 257]) == "é ab"


def test_an_older_tekken_file_has_the_special_tokens_of_its_time(tmp_path: Path) -> None:
    config = {
        "pattern": EXPRESSIONS["tekken"][0],
        "default_vocab_size": 300,
        "default_num_special_tokens": 30,
    }
    tokenizer = load_tokenizer(
        find_tokenizer_folder(write_tekken(tmp_path, special_tokens=None, config=config))
    )
    assert tokenizer.encode("[TOOL_CALLS]<SPECIAL_20>ab", add_special_tokens=False) == [9, 20, 30 + 256]


@refusals("tekken_files")
def test_a_tekken_file_that_is_none_is_refused_by_name(tmp_path: Path, refusal: Refusal) -> None:
    refusal.check(lambda changes: find_tokenizer_folder(write_tekken(tmp_path, **changes)), tmp_path)


def test_an_engine_has_the_tokenizer_that_was_made(tmp_path: Path) -> None:
    for file in pocket_folder().iterdir():
        if not file.name.startswith(("tokenizer", "special")):
            (tmp_path / file.name).symlink_to(file)
    write_sentence_piece(tmp_path)
    config = EngineArgs(model=str(tmp_path)).create_engine_config()
    assert config.model.tokenizer == str(find_tokenizer_folder(tmp_path))
    assert "tokenizer.json" in (config.model.noted.tokenizer if config.model.noted else {})
