"""ModelTexts: what is done with the texts that a model takes, by its files."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ....ipc.errors import InputError, did_you_mean
from ...models.model_files import read_json
from ...models.sentence_transformers import read_modules, read_text_encoding

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
        found = self.prompts.get(name or self.default_prompt_name or "", "") if text is None else text
        if found and not self.takes_prompts:
            allowed = "'': this model pools a text without its prompt (include_prompt), which Quire cannot"
            raise InputError("prompt", found, allowed)
        return found

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
