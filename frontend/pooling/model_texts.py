"""ModelTexts: what a model's files say of the texts that it takes, as sentence-transformers writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from ...ipc.errors import InputError, ModelError, did_you_mean
from ..models.model_files import read_json

# Names of prompts that sentence-transformers' encode_query and encode_document look for, in order.
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")


class ModelTexts(msgspec.Struct, frozen=True, kw_only=True):
    """`prompts`: texts before a text, by name. is_stripped, is_lowered: what is done with it then.

    instruction: of a model whose pairs go into Qwen3-Reranker's template, what it does unless it is told;
    None: pairs are joined by the tokenizer. labels: of a classifier's classes, in order.
    """

    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    is_stripped: bool = False
    is_lowered: bool = False
    instruction: str | None = None
    labels: tuple[str, ...] = ()

    def find_prompt(self, name: str | None = None, text: str | None = None) -> str:
        """What goes before a text: `text`, else the prompt of this name, else the model's default.

        Raises InputError for a name that the model does not have.
        """
        if text is not None:
            if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InputError("prompt", text, "a text that goes before each text")
            return text
        if name is None:
            return self.prompts.get(self.default_prompt_name or "", "")
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            hint = did_you_mean(str(name), self.prompts)
            allowed = f"None or the name of a prompt of this model: {known}{hint}"
            raise InputError("prompt_name", name, allowed)
        return self.prompts[name]

    def find_named_prompt(self, names: tuple[str, ...]) -> str:
        """The first of these prompts that the model has, else its default."""
        return self.find_prompt(next((name for name in names if name in self.prompts), None))


# Of its model card.
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def read_model_texts(folder: Path) -> ModelTexts:
    """What the files in a model's folder say. Raises ModelError for what is no text there."""
    config = read_json(folder / "config.json")
    written = read_json(folder / "config_sentence_transformers.json")
    transformer = read_json(folder / "sentence_bert_config.json")
    prompts, default = _read_prompts(written)
    return ModelTexts(
        prompts=prompts,
        default_prompt_name=default,
        is_stripped=(folder / "modules.json").is_file(),
        is_lowered=transformer.get("do_lower_case") is True,
        instruction=_QWEN3_INSTRUCTION if config.get("model_type") == "qwen3" else None,
        labels=_read_labels(config),
    )


def _read_prompts(written: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    field = "config_sentence_transformers.json prompts"
    given = written.get("prompts") or {}
    default = written.get("default_prompt_name")
    try:
        prompts = msgspec.convert(given, dict[str, str | None])
    except msgspec.ValidationError as error:
        raise ModelError(field, given, f"an object of names to texts ({error})") from None
    if default is not None and default not in prompts:
        raise ModelError("config_sentence_transformers.json default_prompt_name", default, "one of `prompts`")
    return {name: text for name, text in prompts.items() if text is not None}, default


def _read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of classes in the order of their numbers; () where not all have one."""
    given = config.get("id2label")
    if not isinstance(given, dict):
        return ()
    names = cast(dict[str, Any], given)
    found = [names.get(str(number)) for number in range(len(names))]
    return tuple(one for one in found if isinstance(one, str)) if None not in found else ()
