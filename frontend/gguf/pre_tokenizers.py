"""How a byte-level vocabulary cuts text into words, by the names of tokenizer.ggml.pre.

The expressions are those of the models' own tokenizer.json files, which llama.cpp has under these names
(llama-vocab.cpp).
"""

from __future__ import annotations

_LETTERS = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_LETTERS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?i:{_LETTERS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"(?i:{_LETTERS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_SLASHES}"
_ENDS = f"(?i:{_LETTERS})?"
_GPT4O = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDS}|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDS}|\p{{N}}{{1,3}}{_SLASHES}"
_DIGITS = r"\p{N}"

# Of each: the expressions, one after the other, of which each match is a word of its own.
EXPRESSIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jina-en", "jina-es", "jina-de", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("smaug-bpe", "midm-2.0"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"), (_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (_DIGITS, _GPT2)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
}
# A word that is a token is taken whole, whatever its merges give; and BOS comes first where no key says.
TAKES_WORDS = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2", "tekken")
)
