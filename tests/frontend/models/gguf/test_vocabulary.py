"""Vocabularies of GGUF files: the same tokens and texts as transformers' own loading of them gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from quire.frontend.models.gguf import folder, vocabulary
from quire.frontend.models.gguf.folder import open_gguf
from quire.frontend.models.gguf.header import read_header
from quire.frontend.models.gguf.vocabulary import EXPRESSIONS, Vocabulary, make_tokenizer
from quire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from quire.ipc.errors import ModelError
from refusals import Refusal, refusals
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from .files import make_tiny, make_vocabulary

TEXTS = [
    "hello world",
    "  hello   world \n\n\tIt's 12345 o'clock, HELLO'S ",
    "Grüße aus 東京, été ½ ١٢٣ 🙂",
    "<|im_start|>hello<|im_end|> <think>world</think>\r\n\r\n",
    "camelCaseWords/and_paths//x = y+1;\n    return",
    "",
    " ",
]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path / "cache")


def load(tmp_path: Path, **changes: object) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Ours and transformers' of the same file."""
    metadata = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    file = make_tiny(**metadata).write(tmp_path / "model.gguf")
    architecture, values, _ = get_gguf_tokenizer(str(file))
    judge, _ = convert_gguf_tokenizer(architecture, values)
    return load_tokenizer(open_gguf([file]).folder), judge


def assert_equal(ours: Tokenizer, judge: tokenizers.Tokenizer) -> None:
    """The same ids of every text, the same text of every id."""
    for text in TEXTS:
        ids = judge.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids) == judge.decode(ids, skip_special_tokens=False), text
        assert ours.decode(ids, True) == judge.decode(ids), text


# What transformers has no expression for it cuts as GPT-2 does.
@pytest.mark.parametrize("pre", sorted({*EXPRESSIONS} & {*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2", "default"}))
def test_byte_level_tokens_are_those_of_transformers(pre: str, tmp_path: Path):
    ours, judge = load(tmp_path, pre=pre)
    assert_equal(ours, judge)
    special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert set(ours.special_token_texts.values()) == special
    assert (ours.bos_token, ours.eos_token) == ("<|endoftext|>", "<|im_end|>")


# Of names that transformers has no expression for: what the models' own tokenizer.json files cut.
@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("deepseek-v3", ["It", "'s", " ", "123", "45", " ", "\u6771\u4eac\u3067", ".x", "();\n\n"]),
        (
            "seed-coder",
            ["It", "'s", " ", "1", "2", "3", "4", "5", " \u6771\u4eac\u3067", ".x", "();", "\n\n"],
        ),
        ("glm4", ["It", "'s", " ", "123", "45", " \u6771\u4eac\u3067", ".x", "();\n\n"]),
        (
            "exaone",
            ["It", "'s", " ", "1", "2", "3", "4", "5", " \u6771\u4eac\u3067", ".", "x", "();", "\n\n"],
        ),
    ],
)
def test_text_is_cut_into_the_words_of_the_model(pre: str, words: list[str], tmp_path: Path):
    ours, _ = load(tmp_path, pre=pre)
    text = "It's 12345 \u6771\u4eac\u3067.x();\n\n"
    made = msgspec.json.encode(make_tokenizer(Vocabulary(read_header(tmp_path / "model.gguf"))))
    cut = tokenizers.Tokenizer.from_str(made.decode()).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words
    assert ours.decode(ours.encode(text, False)) == text


WORDS = ["\u2581", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "\u2581hello", "wor", "ld"]
WORDS += [
    "\u2581w",
    "\u2581wor",
    "\u2581world",
    "\u2581\u2581",
    "I",
    "t",
    "'",
    "s",
    "or",
    "lo",
    "1",
    "2",
    "<",
]


def make_sentence_piece(**changes: object) -> dict[str, object]:
    """A SentencePiece vocabulary: control tokens, bytes, words with falling scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(index) for index in range(len(WORDS))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
        "merges": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": None,
        **changes,
    }


def test_sentence_piece_tokens_are_those_of_transformers(tmp_path: Path):
    ours, judge = load(tmp_path, **make_sentence_piece())
    assert_equal(ours, judge)
    assert ours.encode("hello world") == [1, *judge.encode("hello world", add_special_tokens=False).ids]
    assert ours.decode(ours.encode("hello <s>world", False)) == "hello <s>world"


# Gemma 4's converter writes merges, in an order of their own.
MERGES = ["o r", "w or", "l d", "h e", "l l", "he ll", "l o", "\u2581 w", "\u2581 \u2581"]


@pytest.mark.parametrize("architecture", ["phi3", "gemma", "gemma4"])
def test_families_with_rules_of_their_own_have_transformers_tokens(architecture: str, tmp_path: Path):
    changes: dict[str, object] = {"model": "gemma4", "merges": MERGES} if architecture == "gemma4" else {}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in make_sentence_piece(**changes).items()}
    writer = make_tiny(**metadata, **{"general.architecture": architecture})
    file = writer.write(tmp_path / "model.gguf")
    judge, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(file))[:2])
    ours = tokenizers.Tokenizer.from_str(
        msgspec.json.encode(make_tokenizer(Vocabulary(read_header(file)))).decode()
    )
    assert_equal(Tokenizer(ours, {}, None), judge)


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path):
    ours, _ = load(tmp_path, **make_sentence_piece(add_bos_token=False, add_eos_token=True))
    ids = ours.encode("hello")
    assert (ids[-1], 1 in ids) == (2, False)
    ours, _ = load(tmp_path, pre="llama-bpe", add_bos_token=None)
    assert ours.encode("hello")[0] == ours.bos_token_id


def test_a_word_that_is_a_token_is_taken_whole_where_llama_cpp_does(tmp_path: Path):
    vocabulary = make_vocabulary()
    tokens: Any = vocabulary["tokenizer.ggml.tokens"]
    tokens = ["xyz" if each == "\u0143" else each for each in tokens]  # no merges make it
    ours, _ = load(tmp_path, pre="llama-bpe", tokens=tokens)
    assert len(ours.encode("xyz", False)) == 1
    ours, _ = load(tmp_path, pre="qwen2", tokens=tokens)
    assert len(ours.encode("xyz", False)) == 3


def test_the_chat_template_is_the_file_s(tmp_path: Path):
    ours, _ = load(tmp_path)
    assert ours.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>hi"
    file = make_tiny(**{"tokenizer.chat_template.tool_use": "tools"}).write(tmp_path / "two.gguf")
    tokenizer = load_tokenizer(open_gguf([file]).folder)
    assert tokenizer.template_source.startswith("tools")


@refusals("gguf_vocabulary")
def test_a_bad_vocabulary_is_refused_by_its_key(refusal: Refusal, tmp_path: Path):
    def read(changes: dict[str, Any]) -> object:
        changes = make_sentence_piece(**changes) if changes.pop("of", "") else changes
        metadata = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        return open_gguf([make_tiny(**metadata).write(tmp_path / "model.gguf")])

    refusal.check(read)


def test_tokens_of_too_many_parts_that_are_tokens_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(vocabulary, "MAX_MERGES", 100)
    metadata = make_sentence_piece(tokens=["x" * length for length in range(1, 288)])
    file = make_tiny(**{f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    with pytest.raises(
        ModelError, match=r"tokens='105 pairs at x{15}': expected tokens of which at most 100 pairs"
    ):
        open_gguf([file.write(tmp_path / "model.gguf")])


def test_too_many_tokens_that_are_found_before_words_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(vocabulary, "MAX_ADDED_TOKENS", 100)
    file = make_tiny(**{"tokenizer.ggml.token_type": [3, 4] * 134 + [1]})
    with pytest.raises(
        ModelError, match=r"token_type='268 of them': expected at most 100 tokens of the types 3 and 4"
    ):
        open_gguf([file.write(tmp_path / "model.gguf")])
