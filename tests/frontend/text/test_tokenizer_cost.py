"""Which tokenizers may be used in an event loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.text.tokenizer import Tokenizer, has_bounded_decoder, is_predictable, load_tokenizer
from quire.ipc.errors import ModelError
from tokenizers import Regex, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordPiece

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make(**parts: Any) -> Backend:
    backend = Backend(parts.pop("model", BPE()))
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def split(pattern: Any) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel()])


@pytest.mark.parametrize(
    "backend",
    [
        make(),
        make(pre_tokenizer=split(Regex(LLAMA_3))),
        make(pre_tokenizer=split(Regex(LLAMA_3.replace("{1,3}", ""))), normalizer=normalizers.NFC()),
        make(pre_tokenizer=split("x")),
        make(pre_tokenizer=pre_tokenizers.Metaspace()),
        make(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
        make(
            post_processor=processors.TemplateProcessing("<s> $A", "<s> $A $B", special_tokens=[("<s>", 1)])
        ),
        make(model=WordPiece(max_input_chars_per_word=100)),
    ],
    ids=str,
)
def test_the_usual_ones_may(backend: Backend):
    assert is_predictable(backend)


@pytest.mark.parametrize(
    "backend",
    [
        make(pre_tokenizer=split(Regex("(a+)+$"))),
        make(normalizer=normalizers.Replace(Regex("(a+)+$"), "")),
        make(normalizer=normalizers.Replace("a", "a" * 1000)),
        make(normalizer=normalizers.Sequence([normalizers.Replace("a", "aaaa")] * 4)),
        make(normalizer=normalizers.Sequence([normalizers.NFC()] * 100)),
        make(normalizer=normalizers.Prepend("x" * 1000)),
        make(
            post_processor=processors.TemplateProcessing(" ".join(["$A"] * 1000), "$A $B", special_tokens=[])
        ),
        make(model=WordPiece(max_input_chars_per_word=1_000_000)),
    ],
    ids=lambda backend: str(backend)[-60:],
)
def test_what_may_take_time_or_memory_without_end_may_not(backend: Backend):
    assert not is_predictable(backend)


def test_the_test_models_may(byte_level: Tokenizer, metaspace: Tokenizer):
    assert byte_level.is_predictable
    assert metaspace.is_predictable
    assert load_tokenizer(pocket_folder()).is_predictable


@pytest.mark.parametrize(
    "steps",
    [
        [{"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 8}],
        [{"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}] * 9,
        [{"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": ""}],
        [{"type": "Sequence", "decoders": [{"type": "Fuse"}]}],
    ],
)
def test_a_decoder_that_may_make_much_of_little_is_refused_by_name(
    tmp_path: Path, steps: list[dict[str, Any]]
) -> None:
    tokenizer = json.loads((pocket_folder() / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load_tokenizer(tmp_path).decode([300])
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], *steps]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"tokenizer\.json decoder=.*at most 2 replacements"):
        load_tokenizer(tmp_path)


def test_the_decoders_of_usual_models_are_taken() -> None:
    llama = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    tokenizer = json.loads((pocket_folder() / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "Sequence", "decoders": llama}
    assert has_bounded_decoder(Backend.from_str(json.dumps(tokenizer)))
