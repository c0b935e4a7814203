"""Which tokenizers may be used in an event loop."""

from __future__ import annotations

from typing import Any

import pytest
from quire.frontend.model_folder import pocket_folder
from quire.frontend.tokenizer import Tokenizer, load_tokenizer
from quire.frontend.tokenizer_cost import is_predictable
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
