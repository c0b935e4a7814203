"""Text <-> token ids over the `tokenizers` library, without transformers.

Reads tokenizer.json and, for special tokens and the chat template, tokenizer_config.json as transformers 5
does: whether BOS or EOS is added is tokenizer.json's post-processor's to say, add_bos_token is not looked at.
Knows no requests; incremental decoding is the detokenizer's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ...ipc.decoding import convert
from ...ipc.errors import ModelError
from ..models.model_files import MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES, check_file, read_file, read_json
from .token_pieces import TokenPieces, is_readable, make_pieces

if TYPE_CHECKING:
    import tokenizers

    from .bounded_template import BoundedTemplate, RenderProcess
    from .chat_template import ChatTemplate

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TOKEN_TEXT_CACHE_SIZE = 65536  # texts of single ids, for logprobs
# The library's `encode` keeps the interpreter's lock, its batch call does not; the latter starts threads, and
# says so to whoever forks afterwards, so short texts (1 ms) do without it. Where the library starts none, all
# texts take it: it computes no offsets, so 136 tokens take 48 us and not 71.
_LOCKED_LENGTH = 4000
_THREADS = "TOKENIZERS_PARALLELISM"  # the library's variable, which it reads at each call


_TOOL_USE = "tool_use"  # transformers' name of the template for conversations with tools


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class Tokenizer:
    """A model's tokenizer. Made by `load_tokenizer`.

    Attributes: `backend` (tokenizers.Tokenizer), `special_tokens` (name such as 'bos_token' -> text),
    `response_template` (how outputs are written, as tokenizer_config.json says it, not checked; or None),
    `has_token_type_ids` (whether the model is told which tokens are a pair's second text, and not what types
    its encodings have).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        template: str | None,
        response_template: object = None,
        tool_use_template: str | None = None,
        has_token_type_ids: bool = True,
    ):
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self._template = template
        self._tool_use_template = tool_use_template
        self.response_template = response_template
        self.has_token_type_ids = has_token_type_ids
        self._renders: dict[int, RenderProcess] = {}  # by the process that it is a child of
        self.token_text = lru_cache(_TOKEN_TEXT_CACHE_SIZE)(self.decode)
        self.find_pieces = cache(self._make_pieces)
        self._locked_length = 0 if os.environ.get(_THREADS) == "false" else _LOCKED_LENGTH

    def __len__(self) -> int:
        return self.vocab_size

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's own vocabulary may be larger (padded)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token(self) -> str | None:
        """The text of the token that a sequence begins with; None: there is none."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The text of the token that ends a sequence; None: there is none."""
        return self.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of `bos_token`; None without one."""
        return self._id_of(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`; None without one."""
        return self._id_of(self.eos_token)

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out when special tokens are skipped."""
        return frozenset(self.special_token_texts)

    @cached_property
    def special_token_texts(self) -> dict[int, str]:
        """By id, the texts of the tokens that decoding leaves out when special tokens are skipped."""
        added = self.backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds BOS and the like where the model wants them.

        Raises UnicodeEncodeError or TypeError for text that UTF-8 cannot hold (lone surrogates).
        """
        return self.encode_texts([text], add_special_tokens)[0].ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode` for many texts, on all cores."""
        return [encoding.ids for encoding in self.encode_texts(texts, add_special_tokens)]

    def encode_texts(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[tokenizers.Encoding]:
        """As `encode_batch`, not yet as lists: `len` of one is its number of tokens, `ids` makes the list.

        Long texts, and several, are encoded without the interpreter's lock and without offsets.
        """
        if len(texts) == 1 and len(texts[0]) <= self._locked_length:
            return [self.backend.encode(texts[0], add_special_tokens=add_special_tokens)]
        return self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tokenizers.Encoding]:
        """As `encode_texts`, of two texts each, joined by the model's special tokens."""
        return self.backend.encode_batch_fast(list(pairs), add_special_tokens=True)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids; ids that the tokenizer does not know are left out."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token alone adds to a text, which may be a part of a character."""
        return self.find_pieces(False).first[token_id] or b""

    def _make_pieces(self, skips_special: bool) -> TokenPieces:
        """What each token adds to a text that grows."""
        return make_pieces(self.backend, skips_special)

    @cached_property
    def is_predictable(self) -> bool:
        """Whether short texts are encoded in a short time, as far as that can be told."""
        return is_predictable(self.backend)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat_template` is something; loads nothing."""
        return self._template is not None

    @property
    def template_source(self) -> str:
        """The text of the chat templates, first that for tools; '' without any."""
        return "\n".join(text for text in (self._tool_use_template, self._template) if text is not None)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, None if it has none; for processes that are bounded as a whole."""
        if self._template is None:
            return None
        from .chat_template import ChatTemplate

        tools = self._tool_use_template
        tool_use = None if tools is None else ChatTemplate(tools, self.special_tokens)
        return ChatTemplate(self._template, self.special_tokens, tool_use)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Text of a conversation by the model's template, or by the caller's own `chat_template`.

        Raises PromptError for messages that are malformed or that the template refuses, ModelError when there
        is no template.
        """
        template = self.find_chat_template(chat_template)
        return template.render(messages, add_generation_prompt, continue_final_message, template_kwargs)

    def find_chat_template(self, source: str | None = None) -> BoundedTemplate:
        """The caller's own template `source`, else the model's. Raises ModelError when there is none."""
        from .bounded_template import BoundedTemplate

        tool_use = None if source is not None else self._tool_use_template
        source = self._template if source is None else source
        if source is None:
            raise ModelError("chat_template", None, "a model that has one, or the argument chat_template")
        return BoundedTemplate(self.find_render_process(), source, self.special_tokens, tool_use)

    def find_render_process(self) -> RenderProcess:
        """Where this process's chats are rendered; not yet started if none was."""
        owner = os.getpid()
        if owner not in self._renders:  # none yet, or in a fork the parent's
            from .bounded_template import RenderProcess

            self._renders = {owner: RenderProcess()}
        return self._renders[owner]

    def close(self) -> None:
        """End the process that renders, if there is one; the next chat starts another. Idempotent."""
        if self._renders:
            self.find_render_process().close()

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """transformers' spelling of `render_chat`: the text, or its token ids."""
        text = self.render_chat(
            conversation, chat_template, add_generation_prompt, continue_final_message, **template_kwargs
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


def encode_without_threads() -> None:
    """Have the library start no threads in this process, whose cores others need. Before `load_tokenizer`."""
    os.environ[_THREADS] = "false"


def load_tokenizer(folder: str | Path, chat_template: str | None = None) -> Tokenizer:
    """Load a folder's tokenizer; raises ModelError naming the file that is missing or unreadable.

    `chat_template`: in place of the folder's, also of that for tools.
    """
    import tokenizers

    path = Path(folder)
    file = path / "tokenizer.json"
    try:
        check_file(file, MAX_TOKENIZER_BYTES)
    except FileNotFoundError:
        raise ModelError("tokenizer", str(path), "a folder with a tokenizer.json") from None
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for whatever it cannot parse
        raise ModelError("tokenizer", str(file), f"a file that tokenizers can read ({error})") from error
    if not has_bounded_decoder(backend):
        allowed = f"at most 2 replacements of a text by one of at most {MAX_GROWTH} characters"
        raise ModelError(f"{file} decoder", backend.decoder, allowed)
    if backend.decoder is not None and not is_readable(backend.decoder):
        allowed = "ByteLevel or ByteFallback with steps that can be followed token by token"
        raise ModelError(f"{file} decoder", backend.decoder, allowed)
    backend.no_truncation()
    backend.no_padding()
    config = read_json(path / "tokenizer_config.json")
    _check_splitting(backend, config)
    named = read_named_tokens(config, read_json(path / "special_tokens_map.json"))
    _add_missing_tokens(backend, config, named)
    templates = _read_templates(path, config) if chat_template is None else {"default": chat_template}
    inputs: Any = config.get("model_input_names")
    return Tokenizer(
        backend,
        named,
        templates.get("default"),
        config.get("response_template"),
        templates.get(_TOOL_USE),
        has_token_type_ids=not isinstance(inputs, list) or "token_type_ids" in cast(list[Any], inputs),
    )


def _check_splitting(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Refuse what transformers would split a text by in place of tokenizer.json."""
    if config.get("split_special_tokens"):
        raise _bad_tokens("split_special_tokens", config["split_special_tokens"], "false")
    prefix, splitter = config.get("add_prefix_space"), backend.pre_tokenizer
    if prefix is None or splitter is None:
        return
    described = json.loads(splitter.__getstate__())
    for step in described["pretokenizers"] if described["type"] == "Sequence" else [described]:
        if step["type"] == "ByteLevel" and step["add_prefix_space"] != prefix:
            allowed = f"{step['add_prefix_space']}, as tokenizer.json has it".lower()
            raise _bad_tokens("add_prefix_space", prefix, allowed)


def read_named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the special tokens, by their name in a chat template (`bos_token`).

    `config`: tokenizer_config.json, which wins over `special_map`, special_tokens_map.json.
    """
    named: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        text = _token_text(config.get(name)) or _token_text(special_map.get(name))
        if text is not None:
            named[name] = text
    return named


def _token_text(value: Any) -> str | None:
    """A special token is written as a text or as an object with `content`."""
    content = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Make special what tokenizer_config.json calls special and tokenizer.json does not."""
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = _read_declared_tokens(config)
    for text in [*named.values(), *_read_extra_tokens(config)]:
        missing.setdefault(text, {})["special"] = True
    backend.add_tokens([AddedToken(text, **flags) for text, flags in missing.items() if text not in known])


def _read_declared_tokens(config: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """Text and flags of each token in `added_tokens_decoder`, by id. Raises ModelError."""
    declared = config.get("added_tokens_decoder") or {}
    allowed = "an object of token ids to objects with a text 'content' and flags true or false"
    if not isinstance(declared, dict):
        raise _bad_tokens("added_tokens_decoder", declared, allowed)
    entries = cast(dict[str, Any], declared)
    if not all(_TOKEN_ID.fullmatch(token_id) for token_id in entries):
        raise _bad_tokens("added_tokens_decoder", list(entries), allowed)
    tokens: dict[str, dict[str, bool]] = {}
    for token_id in sorted(entries, key=int):
        text = _token_text(entries[token_id]) if isinstance(entries[token_id], dict) else None
        if text is not None:
            flags = {name: entries[token_id][name] for name in _TOKEN_FLAGS if name in entries[token_id]}
            if not all(isinstance(value, bool) for value in flags.values()):
                raise _bad_tokens(f"added_tokens_decoder.{token_id}", entries[token_id], allowed)
            tokens[text] = flags
    return tokens


def _read_extra_tokens(config: Mapping[str, Any]) -> list[str]:
    for name in ("additional_special_tokens", "extra_special_tokens"):
        if extra := config.get(name):
            if not isinstance(extra, (list, dict)):
                raise _bad_tokens(name, extra, "a list or an object of texts")
            values = (
                cast(dict[str, Any], extra).values() if isinstance(extra, dict) else cast(list[Any], extra)
            )
            return [text for text in map(_token_text, values) if text is not None]
    return []


def _bad_tokens(name: str, value: object, allowed: str) -> ModelError:
    return ModelError(f"tokenizer_config.json {name}", value, allowed)


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """'default' in chat_template.jinja and 'tool_use' in a folder beside it, else tokenizer_config.json's."""
    texts = {
        "default": _read_template(folder / "chat_template.jinja"),
        _TOOL_USE: _read_template(folder / "additional_chat_templates" / f"{_TOOL_USE}.jinja"),
    }
    templates = {name: text for name, text in texts.items() if text is not None}
    return _read_listed(config.get("chat_template")) | templates if "default" not in templates else templates


def _read_template(file: Path) -> str | None:
    try:
        text = read_file(file, MAX_TEMPLATE_BYTES).decode()
        return text.replace("\r\n", "\n").replace("\r", "\n")  # as every file that is opened as text
    except UnicodeDecodeError as error:
        raise ModelError("chat_template", str(file), f"readable UTF-8 text ({error})") from error
    except FileNotFoundError:
        return None


def _read_listed(template: object) -> dict[str, str]:
    """tokenizer_config.json's chat_template: one, or a list with their names."""
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    if not isinstance(template, list):
        raise _bad_tokens("chat_template", template, "a text, or a list of {name, template}")
    try:
        named = convert(template, list[_NamedTemplate])
    except msgspec.ValidationError as error:
        raise _bad_tokens("chat_template", template, f"a list of {{name, template}} ({error})") from None
    return {entry.name: entry.template for entry in named}


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
    """Whether a tokenizer's time and memory grow as its text does.

    tokenizer.json comes with a model, and may hold an expression that takes years for sixty characters, or a
    normalizer that makes gigabytes of them. Only what is known to be harmless is predictable: the usual
    parts, and the patterns of the usual models.
    """
    # WordPiece's, whose time is its square.
    longest_word = getattr(backend.model, "max_input_chars_per_word", 0)
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
