"""Inputs: the texts or token ids of a request, with the names that it has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ...requests.prompts import Truncation
from ...requests.vectors.model_texts import DOCUMENT_PROMPTS, QUERY_PROMPTS, ModelTexts
from ..bodies.vectors import DocumentText, Texts
from ..errors import FieldError
from ..serving import PromptInput

# What a caller says of its texts -> names that models have for the prompt of such texts.
_QUERY, _DOCUMENT = (*QUERY_PROMPTS, "search_query"), (*DOCUMENT_PROMPTS, "search_document")
_PROMPTS_OF_TYPES = {
    "query": _QUERY,
    "search_query": _QUERY,
    "document": _DOCUMENT,
    "passage": _DOCUMENT,
    "search_document": _DOCUMENT,
    "classification": ("classification",),
    "clustering": ("clustering",),
}
_ALLOWED = "a text, texts, token ids, or lists of token ids"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What vectors are made of. `names`: of each, for errors. prompt: goes before each text.

    queries: then `given` are documents, each read together with its query or with the only one.
    num_queries: how many of `given`, the first ones, are queries, and the others documents of their own.
    max_tokens_per_text: longer documents are cut. truncation: then what is still too long of a document and
    what goes with it, where the request has no truncation of its own.
    """

    given: Sequence[PromptInput]
    names: Sequence[str]
    prompt: str = ""
    queries: Sequence[str] | None = None
    num_queries: int = 0
    max_tokens_per_text: int | None = None
    truncation: Truncation | None = None


def read_inputs(field: str, given: Texts, max_inputs: int, prompt: str = "") -> Inputs:
    """One input or many, each a text or token ids. Raises FieldError."""
    if isinstance(given, str):
        return Inputs([given], [field], prompt)
    kinds = set(map(type, given))
    if kinds == {int}:
        return Inputs([cast(list[int], given)], [field], prompt)
    if given and kinds not in ({str}, {list}):
        raise FieldError(field, given, _ALLOWED)
    return Inputs(cast(list[PromptInput], given), list_names(field, len(given), max_inputs), prompt)


def find_prompt(texts: ModelTexts, prompt_name: str | None, input_type: str | None) -> str:
    """What a request wants before its texts. Raises InputError for a prompt that the model does not have.

    input_type: what kind of texts they are; its prompt is the model's default where it has none of that kind.
    """
    if prompt_name is not None or input_type is None:
        return texts.find_prompt(prompt_name)
    if input_type not in _PROMPTS_OF_TYPES:
        raise FieldError("input_type", input_type, f"one of {', '.join(map(repr, _PROMPTS_OF_TYPES))}")
    return texts.find_named_prompt(_PROMPTS_OF_TYPES[input_type])


def read_texts(
    field: str, given: str | Sequence[DocumentText], max_inputs: int
) -> tuple[list[str], list[str]]:
    """Texts and their names. Raises FieldError."""
    if isinstance(given, str):
        return [given], [field]
    names = list_names(field, len(given), max_inputs)
    return [one if isinstance(one, str) else one.text for one in given], names


def list_names(field: str, count: int, max_inputs: int) -> list[str]:
    """What a list's items are called. Raises FieldError for none, or too many."""
    if not count:
        raise FieldError(field, [], "at least one")
    if count > max_inputs:
        raise FieldError(field, f"a list of {count}", f"at most {max_inputs} (max_inputs)")
    return [f"{field}[{place}]" for place in range(count)]
