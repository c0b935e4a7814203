"""Whether a tokenizer's time and memory grow as its text does. tokenizer.json comes with a model, and may
hold an expression that takes years for sixty characters, or a normalizer that makes gigabytes of them.

Only what is known to be harmless is predictable: the usual parts, and the patterns of the usual models.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_KNOWN_PATTERNS = frozenset(
    [
        r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # the pocket model's
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2's
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 3's, and Qwen's with digits one by one.
        rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        # GPT-4o's, and Mistral's without contractions and with digits one by one.
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    ]
)
_HARMLESS = frozenset(
    [
        *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Nmt", "BertNormalizer"),
        *("ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "Digits", "Punctuation"),
        *("BertPreTokenizer", "CharDelimiterSplit", "UnicodeScripts"),
        *("BertProcessing", "RobertaProcessing"),
    ]
)
_MAX_STEPS = 8  # of a sequence
MAX_GROWTH = 4  # characters that take the place of one
_MAX_ADDED = 16  # pieces of a template of special tokens
_MAX_WORD = 200  # characters


def is_predictable(backend: tokenizers.Tokenizer) -> bool:
    """True if every part before and after the model is one that is known to be harmless."""
    longest_word = getattr(
        backend.model, "max_input_chars_per_word", 0
    )  # WordPiece's, whose time is its square
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    described = (json.loads(part.__getstate__()) for part in parts if part is not None)
    return longest_word <= _MAX_WORD and all(map(_is_harmless, described))


def has_bounded_decoder(backend: tokenizers.Tokenizer) -> bool:
    """False if its decoder, which runs while output comes, may make very much of few tokens."""
    decoder = backend.decoder
    if decoder is None:
        return True
    described = json.loads(decoder.__getstate__())
    steps = described["decoders"] if described["type"] == "Sequence" else [described]
    num_replacing = sum(step["type"] == "Replace" for step in steps)
    return len(steps) <= _MAX_STEPS and num_replacing <= 2 and all(map(_is_bounded, steps))


def _is_bounded(step: dict[str, Any]) -> bool:
    """As `_is_harmless` of a decoder's steps, whose other kinds neither search nor grow."""
    return step["type"] != "Sequence" and (step["type"] != "Replace" or _is_harmless(step))


def _is_harmless(part: dict[str, Any]) -> bool:
    match part["type"]:
        case "Sequence":
            steps = next(value for value in part.values() if isinstance(value, list))
            kinds = [step["type"] for step in steps]
            return len(steps) <= _MAX_STEPS and kinds.count("Replace") <= 2 and all(map(_is_harmless, steps))
        case "Replace":
            return "String" in part["pattern"] and len(part["content"]) <= MAX_GROWTH
        case "Prepend":
            return len(part["prepend"]) <= MAX_GROWTH
        case "Split":
            pattern = part["pattern"]
            return "String" in pattern or pattern["Regex"] in _KNOWN_PATTERNS
        case "TemplateProcessing":
            ids = sum(len(token["ids"]) for token in part["special_tokens"].values())
            return len(part["single"]) + ids <= _MAX_ADDED
        case kind:
            return kind in _HARMLESS
