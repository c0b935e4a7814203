"""TextEncoder: texts and pairs of texts -> token ids with the special tokens that the model expects.

Knows no requests and no limits of an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ....ipc.errors import InputError, PromptError, did_you_mean
from ...models.model_files import read_json
from ...models.sentence_transformers import read_modules, read_text_encoding
from ...text.tokenizer import Tokenizer
from ..prompts import Truncation

if TYPE_CHECKING:
    from tokenizers import Encoding


# ModelTexts: what is done with the texts that a model takes, by its files.

# Names of prompts that sentence-transformers' encode_query and encode_document look for, in order.
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")


class ModelTexts(msgspec.Struct, frozen=True, kw_only=True):
    """`prompts`: texts before a text, by name. is_lowered: whether it is made lower case then.

    instruction: of a model whose pairs go into Qwen3-Reranker's template, what it does unless it is told;
    None: pairs are joined by the tokenizer. takes_prompts: what goes before a text is pooled with it, as it
    always is here. pair_prompt: before the first text of a pair. labels: of a classifier's classes, in order.
    trailing_padding_id: a token that a classifier passes over at the end of a prompt.
    """

    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    is_lowered: bool = False
    instruction: str | None = None
    takes_prompts: bool = True
    pair_prompt: str = ""
    labels: tuple[str, ...] = ()
    trailing_padding_id: int | None = None

    def find_prompt(self, name: str | None = None, text: str | None = None) -> str:
        """What goes before a text: `text`, else the prompt of this name, else the model's default.

        Raises InputError for a name that the model does not have, and for a prompt that would not be pooled.
        """
        if text is not None and not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError("prompt", text, "a text that goes before each text")
        if name is not None and name not in list(self.prompts):  # which it may be no key of
            known = ", ".join(map(repr, self.prompts)) or "none"
            allowed = f"absent or the name of a prompt of this model: {known}"
            raise InputError("prompt_name", name, allowed + did_you_mean(str(name), self.prompts))
        prompt = self.prompts.get(name or self.default_prompt_name or "", "") if text is None else text
        if prompt and not self.takes_prompts:
            allowed = "'': this model pools a text without its prompt (include_prompt), which Quire cannot"
            raise InputError("prompt", prompt, allowed)
        return prompt

    def find_named_prompt(self, names: tuple[str, ...]) -> str:
        """The first of these prompts that the model has, else its default."""
        return self.find_prompt(next((name for name in names if name in self.prompts), None))


# Of its model card.
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def read_model_texts(folder: Path) -> ModelTexts:
    """What the files in a model's folder say. Raises ModelError."""
    encoding, modules = read_text_encoding(folder), read_modules(folder)
    paths = [] if modules is None else modules.find("Pooling")
    pools = [read_json(folder / path / "config.json") for path in paths]
    instruction = None
    if encoding.fills_template:
        instruction = encoding.prompts.get(encoding.default_prompt_name or "") or _QWEN3_INSTRUCTION
    return ModelTexts(
        prompts=encoding.prompts,
        default_prompt_name=encoding.default_prompt_name,
        is_lowered=encoding.do_lower_case,
        instruction=instruction,
        takes_prompts=all(pool.get("include_prompt", True) for pool in pools),
        pair_prompt=encoding.pair_prompt,
        labels=encoding.labels,
        trailing_padding_id=encoding.trailing_padding_id,
    )


# Qwen3-Reranker's, of its model card.
_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class TextPair(NamedTuple):
    """Two texts that are judged together."""

    query: str
    document: str


class EncodedText(NamedTuple):
    """Token ids; of a pair, from `type_start` on they are of type 1 where the tokenizer tells types apart."""

    token_ids: Sequence[int]
    type_start: int | None = None


class TextEncoder:
    """Encodes many texts at once, on all cores.

    A `cut` counts special tokens, which stay. Of a pair that is too long the document alone is cut.
    """

    def __init__(self, tokenizer: Tokenizer, texts: ModelTexts) -> None:
        self._tokenizer = tokenizer
        self._texts = texts

    def prepare(self, text: str, prompt: str = "") -> str:
        """The text as it is tokenized, behind `prompt`."""
        return (prompt + text).lower() if self._texts.is_lowered else prompt + text

    def encode_texts(
        self, names: Sequence[str], texts: Sequence[str], cut: Truncation | None
    ) -> list[EncodedText]:
        """Of prepared texts, called `names` in errors. Raises PromptError for a cut that leaves nothing."""
        encodings = self._tokenizer.encode_texts(texts)
        return [
            EncodedText(_cut(name, encoding, cut, 0)) for name, encoding in zip(names, encodings, strict=True)
        ]

    def encode_pairs(
        self,
        names: Sequence[str],
        pairs: Sequence[TextPair],
        cut: Truncation | None,
        instruction: str | None = None,
    ) -> list[EncodedText]:
        """As `encode_texts`. instruction: None takes the model's own.

        Raises PromptError for a query that leaves no room, or an instruction where the model takes none.
        """
        if self._texts.instruction is not None:
            return self._fill_template(names, pairs, cut, instruction or self._texts.instruction)
        if instruction is not None:
            raise PromptError("instruction", instruction, "absent: this model takes none")
        before = self._texts.pair_prompt
        pairs = [TextPair(self.prepare(pair.query, before), self.prepare(pair.document)) for pair in pairs]
        encodings = self._tokenizer.encode_pairs(pairs)
        texts: list[EncodedText] = []
        for name, encoding in zip(names, encodings, strict=True):
            types = encoding.type_ids if self._tokenizer.has_token_type_ids else []
            start = types.index(1) if 1 in types else None
            texts.append(EncodedText(_cut(name, encoding, cut, 1), start))
        return texts

    def _fill_template(
        self, names: Sequence[str], pairs: Sequence[TextPair], cut: Truncation | None, instruction: str
    ) -> list[EncodedText]:
        """Qwen3-Reranker's. The document is last, so a cut of the end leaves the query whole."""
        heads = [f"<Instruct>: {instruction}\n<Query>: {pair.query}\n<Document>: " for pair in pairs]
        bodies = [head + pair.document for head, pair in zip(heads, pairs, strict=True)]
        prefix, suffix, *ids = self._tokenizer.encode_batch(
            [_PREFIX, _SUFFIX, *bodies], add_special_tokens=False
        )
        if cut is not None:
            room = cut.max_tokens - len(prefix) - len(suffix)
            sizes = map(len, self._tokenizer.encode_texts(heads, add_special_tokens=False))
            for name, size, body in zip(names, sizes, ids, strict=True):
                if len(body) > room and size >= room:
                    raise _no_room(name, cut, size + len(prefix) + len(suffix))
                del body[max(room, 0) :]
        return [EncodedText(prefix + body + suffix) for body in ids]


def _cut(name: str, encoding: Encoding, cut: Truncation | None, sequence: int) -> list[int]:
    """Token ids, of which those of the first (0) or second (1) text are cut; special tokens stay."""
    ids = encoding.ids
    excess = 0 if cut is None else len(ids) - cut.max_tokens
    if cut is None or excess <= 0:
        return ids
    sequences = encoding.sequence_ids
    count = sequences.count(sequence)
    if count <= excess:
        raise _no_room(name, cut, len(ids) - count)
    start = sequences.index(sequence) + (count - excess if cut.keeps_start else 0)
    return ids[:start] + ids[start + excess :]


def _no_room(name: str, cut: Truncation, num_others: int) -> PromptError:
    allowed = f"at most {cut.max_tokens}, of which {num_others} are not the text that may be cut"
    return PromptError(name, f"at least {num_others + 1} tokens", allowed)
