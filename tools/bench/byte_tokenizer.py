"""A byte-level tokenizer of made-up words for the bench's models, as large as their vocabularies.

Their own names tokens t0, t1, ...; a grammar needs tokens with texts. No merges: a text becomes bytes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import pre_tokenizers

EOS = "</s>"
EOS_TOKEN_ID = 1
_SPECIAL = ("<s>", EOS, "<unk>")
_SYLLABLES = [first + second for first in "bcdfghjklmnprstvwz" for second in "aeiou"]
_ENDS = ("er", "ing", "ion", "ed", "es", "st", "th")
_JSON = ('":', '", "', '{"', '"}', '":{"', "\n  ", "},", '[{"', '"]', '":"', "true", "false", "null", '": ')


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json into a model's folder."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {"id": token_id, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token_id, text in enumerate(_SPECIAL)
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": _make_vocab(vocab_size), "merges": []},
    }
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))


def _make_vocab(size: int) -> dict[str, int]:
    """Special tokens, bytes, what JSON is made of, numbers, then words: half of them after a space."""
    vocab = {text: place for place, text in enumerate(_SPECIAL)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(character, len(vocab))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rng = random.Random(0)
    texts = [*_JSON, *map(str, range(1000))]
    while len(vocab) < size:
        text = texts.pop() if texts else _make_word(rng)
        [(written, _)] = byte_level.pre_tokenize_str(text)
        vocab.setdefault(written, len(vocab))
    return vocab


def _make_word(rng: random.Random) -> str:
    word = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 4))) + rng.choice(("", *_ENDS))
    kind = rng.random()
    if kind < 0.5:
        return " " + word
    return word.capitalize() if kind < 0.6 else word + rng.choice(("", "", "", '"', ",", ".", ")"))
