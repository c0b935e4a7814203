"""The vocabulary in a GGUF file's metadata as tokenizer.json and tokenizer_config.json.

Two kinds: "gpt2", byte-level BPE with merges, and "llama", a SentencePiece vocabulary whose merges follow
from scores. What comes out equals what transformers makes of the same file.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from ....ipc.protocol.messages import MAX_EOS_TOKEN_IDS
from ..families.config_fields import ConfigFields
from .header import GgufHeader

# How a byte-level vocabulary cuts text into words: the expressions of the models' own tokenizer.json files,
# which llama.cpp has under these names of tokenizer.ggml.pre (llama-vocab.cpp).
_LETTERS = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_LETTERS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?i:{_LETTERS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"(?i:{_LETTERS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_SLASHES}"
_TAIL = f"(?i:{_LETTERS})?"
_GPT4O = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_TAIL}|{_BEFORE}{_UPPER}+{_LOWER}*{_TAIL}|\p{{N}}{{1,3}}{_SLASHES}"
_DIGITS = r"\p{N}"

_HANS = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")

# Of each: the expressions, one after the other, of which each match is a word of its own.
EXPRESSIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jina-en", "jina-es", "jina-de", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("exaone4", "granite-docling", "trillion"), (_GPT2,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("smaug-bpe", "midm-2.0", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "solar-open": (_QWEN2,),
    "seed-coder": (_SEED,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", _HANS, _DEEPSEEK3)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (_DIGITS, _GPT2)),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
}
# A word that is a token is taken whole, whatever its merges give; and BOS comes first where no key says.
TAKES_WORDS = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2", "tekken")
)


Json = dict[str, Any]

_PREFIX = "tokenizer.ggml."
TOKENS = f"{_PREFIX}tokens"
_SPACE = "\u2581"  # how SentencePiece writes one
_REPLACE_SPACES: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of token_type
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDS = ("eos", "eot", "eom")
# Tokens that end a turn or a text in any model that has them, whatever type the file gives them: llama.cpp's
# list (is_eog in llama-vocab.cpp), which makes control tokens of them.
_END_TEXTS = frozenset(
    [
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "[EOS]", "[EOT]"),
        *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<|tool_response>", "<EOT>", "_<EOT>"),
        *(
            "<end_of_utterance>",
            "<|endoftext|>",
            "<|end_of_text|>",
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
        ),
    ]
)
_CONTROL_ENDS = ("</s>", "<eos>")  # only as control tokens: Gemma has tags of HTML, too
# Merges are looked for in every place of every token: 262,144 tokens of Gemma have 2,000,000 characters.
MAX_MERGED_CHARACTERS = 16 << 20
MAX_MERGED_TOKEN = 1024
MAX_ADDED_TOKENS = 65_536  # of Gemma 6,500; 1,900,000 took a tokenizer 11 s and 1.5 GB
MAX_MERGES = 2_000_000  # that follow from the tokens; of Gemma 580,000


class Vocabulary:
    """The metadata's lists, checked against each other."""

    def __init__(self, header: GgufHeader) -> None:
        values = {
            key.removeprefix(_PREFIX): value
            for key, value in header.metadata.items()
            if key.startswith(_PREFIX)
        }
        self.fields = ConfigFields(values, _PREFIX, header.file.name)
        self.architecture: str = header.metadata["general.architecture"]
        self.templates = {
            key.removeprefix("tokenizer.chat_template").removeprefix("."): value
            for key, value in header.metadata.items()
            if key.startswith("tokenizer.chat_template") and isinstance(value, str)
        }
        self.tokens: list[str] = self._list("tokens", str)
        types = self._list("token_type", int, len(self.tokens)) or [_NORMAL] * len(self.tokens)
        self.ends = _find_end_texts(self.tokens, types)
        self.types: list[int] = [
            _CONTROL if token in self.ends else kind for token, kind in zip(self.tokens, types, strict=True)
        ]
        self.kind = self.fields.get("model")
        self.pre: str = self.fields.get("pre", "default")
        if not isinstance(self.pre, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise self.fields.error("pre", self.pre, "a text")
        if self.kind not in ("gpt2", "llama", "gemma4"):
            allowed = "gpt2 (byte-level BPE), llama (SentencePiece) or gemma4 (the same with merges)"
            raise self.fields.error("model", self.kind, allowed)

    def _list(self, key: str, type_: type, length: int | None = None) -> list[Any]:
        """Entries of one type, one a token; no such key: none."""
        value = self.fields.get(key)
        if value is None and length is not None:
            return []
        is_list = isinstance(value, list) and all(type(each) is type_ for each in cast(list[Any], value))
        if not is_list or not value or (length is not None and len(cast(list[Any], value)) != length):
            shown = f"{len(cast(list[Any], value))} entries" if is_list else value
            allowed = f"a list of {type_.__name__}, one a token" + (f": {length}" if length else "")
            raise self.fields.error(key, shown, allowed)
        return cast(list[Any], value)

    def read_scores(self) -> list[float]:
        """A score for each token."""
        scores = self._list("scores", float, len(self.tokens))
        if not scores:
            raise self.fields.error("scores", None, "a list of a number a token")
        return scores

    def read_merges(self) -> list[tuple[str, str]] | None:
        """Pairs of texts in their order; None without the key."""
        merges = self.fields.get("merges")
        if merges is None:
            return None
        pairs: list[tuple[str, str]] = []
        for merge in self._list("merges", str):
            split = cast(str, merge).find(" ", 1)  # the first text may begin with one
            if split < 0 or split == len(merge) - 1:
                raise self.fields.error("merges", merge, "two texts with a space between them")
            pairs.append((merge[:split], merge[split + 1 :]))
        return pairs

    def find_token_id(self, name: str) -> int | None:
        """The token that a key names; ModelError when there is no such token."""
        key = f"{name}_token_id"
        if key not in self.fields:
            return None
        return self.fields.integer(key, low=0, high=len(self.tokens) - 1)

    def find_token(self, name: str) -> str | None:
        """The same as a text."""
        token_id = self.find_token_id(name)
        return None if token_id is None else self.tokens[token_id]

    def list_added(self) -> list[Json]:
        """Tokens that are found in a text before it is cut into words."""
        num_added = self.types.count(_CONTROL) + self.types.count(_USER_DEFINED)
        if num_added > MAX_ADDED_TOKENS:
            allowed = f"at most {MAX_ADDED_TOKENS} tokens of the types {_CONTROL} and {_USER_DEFINED}"
            raise self.fields.error("token_type", f"{num_added} of them", allowed)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": index, "content": token, **flags, "special": kind == _CONTROL}
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]


def _find_end_texts(tokens: list[str], types: list[int]) -> dict[str, int]:
    ends = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token in _END_TEXTS or (kind == _CONTROL and token in _CONTROL_ENDS)
    }
    if not ends.keys().isdisjoint(("<|call|>", "<|calls|>")):  # gpt-oss and Solar go on after a message's end
        ends.pop("<|end|>", None)
    return ends


def find_end_ids(header: GgufHeader) -> list[int]:
    """Tokens that end an output: the named ones, and those whose text says so."""
    vocabulary = Vocabulary(header)
    ends = [token_id for name in _ENDS if (token_id := vocabulary.find_token_id(name)) is not None]
    ends += vocabulary.ends.values()
    return list(dict.fromkeys(ends))[:MAX_EOS_TOKEN_IDS]


def make_tokenizer(vocabulary: Vocabulary) -> Json:
    """tokenizer.json of it."""
    make = _make_byte_level if vocabulary.kind == "gpt2" else _make_sentence_piece
    added = {"added_tokens": vocabulary.list_added(), "post_processor": _make_ends(vocabulary)}
    return {"version": "1.0", "truncation": None, "padding": None, **added, **make(vocabulary)}


def make_tokenizer_config(vocabulary: Vocabulary) -> Json:
    """tokenizer_config.json of it: names of special tokens, and the chat templates."""
    config: Json = {name: vocabulary.find_token(key) for name, key in _NAMED.items()}
    templates = vocabulary.templates
    if set(templates) == {""}:
        config["chat_template"] = templates[""]
    elif templates:
        config["chat_template"] = [
            {"name": name or "default", "template": text} for name, text in templates.items()
        ]
    return {name: value for name, value in config.items() if value is not None}


def _make_byte_level(vocabulary: Vocabulary) -> Json:
    pre = vocabulary.pre
    if pre not in EXPRESSIONS:
        raise vocabulary.fields.error("pre", pre, f"one of {', '.join(EXPRESSIONS)}")
    merges = vocabulary.read_merges()
    if merges is None:
        raise vocabulary.fields.error("merges", None, "a list of pairs of texts")
    # Text of control tokens is plain; a word is spelled in an alphabet that has a letter for each byte.
    letters = spell_bytes()
    known = frozenset(letters)
    plain = {_CONTROL, _USER_DEFINED}
    vocab = {
        token if kind in plain or known.issuperset(token) else _spell(token, letters): index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
    }
    model = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "ignore_merges": pre in TAKES_WORDS}
    split = [
        {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}
        for text in EXPRESSIONS[pre]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, byte_level]},
        "decoder": byte_level,
        "model": _make_bpe(vocab, merges, **model),
    }


def _make_sentence_piece(vocabulary: Vocabulary) -> Json:
    is_gemma = vocabulary.architecture.startswith("gemma")
    tokens = vocabulary.tokens
    if is_gemma:  # its tokens of several spaces are stored as such, and merged in the vocabulary's order
        tokens = [_SPACE * len(each) if each and not each.strip(" ") else each for each in tokens]
    merges = vocabulary.read_merges()
    if merges is None:
        scores = [-float(index) for index in range(len(tokens))] if is_gemma else vocabulary.read_scores()
        merges = _find_merges(vocabulary, tokens, scores)
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = {"unk_token": vocabulary.find_token("unknown"), "fuse_unk": True, "byte_fallback": True}
    has_prefix = vocabulary.fields.boolean("add_space_prefix", not is_gemma)
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    made: Json = {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": _SPACE,
            "prepend_scheme": "first" if has_prefix else "never",
            "split": False,
        },
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _make_bpe(vocab, merges, **unknown),
    }
    if vocabulary.architecture == "phi3":  # whose prefix comes before spaces, too, and after special tokens
        steps_before = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
        made["normalizer"] = {"type": "Sequence", "normalizers": [*steps_before, _REPLACE_SPACES]}
        made["pre_tokenizer"] = None
    if is_gemma:
        made["normalizer"] = _REPLACE_SPACES
        made["pre_tokenizer"] = None
    return made


def _find_merges(vocabulary: Vocabulary, tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the one with the best score first."""
    longest = max(map(len, tokens))
    if longest > MAX_MERGED_TOKEN or sum(map(len, tokens)) > MAX_MERGED_CHARACTERS:
        allowed = f"at most {MAX_MERGED_TOKEN} characters a token, and {MAX_MERGED_CHARACTERS} together"
        raise vocabulary.fields.error("tokens", f"one of {longest} characters", allowed)
    ids = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, str, str]] = []
    for token, score in dict(zip(tokens, scores, strict=True)).items():
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        # The vocabulary's own texts: copies of their parts could take a hundred times its memory.
        merges += [(score, tokens[ids[left]], tokens[ids[right]]) for left, right in pairs]
        if len(merges) > MAX_MERGES:
            allowed = f"tokens of which at most {MAX_MERGES} pairs make another"
            raise vocabulary.fields.error("tokens", f"{len(merges)} pairs at {token[:40]}", allowed)
    merges.sort(key=lambda each: (each[0], len(each[1]), len(each[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _make_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **settings: Any) -> Json:
    rest: Json = {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    return {"type": "BPE", **rest, **settings, "vocab": vocab, "merges": merges}


def _make_ends(vocabulary: Vocabulary) -> Json | None:
    """What puts BOS before a text and EOS behind it."""
    starts = vocabulary.kind != "gpt2" or vocabulary.pre in TAKES_WORDS
    adds_bos = vocabulary.fields.boolean("add_bos_token", starts)
    adds_eos = vocabulary.fields.boolean("add_eos_token", False)
    first = vocabulary.find_token_id("bos") if adds_bos else None
    last = vocabulary.find_token_id("eos") if adds_eos else None
    if first is None and last is None:
        return None

    def wrap(letter: str, type_id: int) -> list[Json]:
        parts = [first, letter, last]
        return [
            {"Sequence": {"id": part, "type_id": type_id}}
            if isinstance(part, str)
            else {"SpecialToken": {"id": vocabulary.tokens[part], "type_id": type_id}}
            for part in parts
            if part is not None
        ]

    named = {vocabulary.tokens[each]: each for each in (first, last) if each is not None}
    special = {token: {"id": token, "ids": [each], "tokens": [token]} for token, each in named.items()}
    return {
        "type": "TemplateProcessing",
        "single": wrap("A", 0),
        "pair": wrap("A", 0) + wrap("B", 1),
        "special_tokens": special,
    }


def _spell(text: str, letters: list[str]) -> str:
    return "".join(letters[byte] for byte in text.encode())


@cache
def spell_bytes() -> list[str]:
    """GPT-2's letter for each byte: itself where it is printed, else one from 256 on."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]
