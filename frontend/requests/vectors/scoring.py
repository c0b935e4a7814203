"""Scores of pairs: by a classifier that sees both texts, or by the cosine of two embeddings."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from ....ipc.errors import InputError, PromptError
from ....ipc.params.pooling_params import PoolingParams
from ..prompts import ParsedPrompt
from .encoder import DOCUMENT_PROMPTS, QUERY_PROMPTS, TextPair
from .outputs import PoolingOutput, PoolingRequestOutput, ScoringOutput, ScoringRequestOutput, to_score
from .processor import PoolingProcessor
from .tasks import check_task

Texts = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class Scoring:
    """What is sent to score pairs, and how answers become scores.

    num_queries: how many prompts, the first ones, are queries, whose embeddings are compared with those of
    the others; None: each prompt is a pair.
    """

    prompts: list[ParsedPrompt]
    params: PoolingParams
    num_queries: int | None

    def make_scores(
        self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]
    ) -> list[ScoringRequestOutput]:
        """A score for each pair, from an output for each prompt."""
        if self.num_queries is None:
            return [to_score(output) for output in outputs]
        queries, documents = outputs[: self.num_queries], outputs[self.num_queries :]
        if len(queries) == 1:
            queries = [queries[0]] * len(documents)
        return [_compare(query, document) for query, document in zip(queries, documents, strict=True)]


def prepare_scoring(
    processor: PoolingProcessor,
    data_1: Texts,
    data_2: Texts,
    params: PoolingParams | None,
    *,
    names: tuple[str, str] = ("data_1", "data_2"),
    instruction: str | None = None,
) -> Scoring:
    """Check and tokenize: one text with one or many, or as many with as many, called `names` in errors.

    Embeddings of the first texts get the model's prompt for queries, the others that for documents, where it
    has such. instruction: what a model that takes one is to judge by. Raises InputErrors.
    """
    check_task(processor.facts, "score")
    queries, documents = _read_texts(names[0], data_1), _read_texts(names[1], data_2)
    if len(queries) not in (1, len(documents)):
        allowed = f"one text, or as many as {names[1]}, which are {len(documents)}"
        raise InputError(names[0], f"{len(queries)} texts", allowed)
    document_names = _number(names[1], data_2)
    if processor.scores_pairs:
        checked = processor.check_params(params, "classify")
        firsts = queries * len(documents) if len(queries) == 1 else queries
        pairs = [TextPair(*pair) for pair in zip(firsts, documents, strict=True)]
        each = [checked] * len(pairs)
        return Scoring(
            processor.tokenize(pairs, each, document_names, instruction=instruction), checked, None
        )
    if instruction is not None:
        raise InputError("instruction", instruction, "absent: this model takes none")
    checked = processor.check_params(params, "embed")
    tokenized: list[ParsedPrompt] = []
    for texts, numbered, prompts in (
        (queries, _number(names[0], data_1), QUERY_PROMPTS),
        (documents, document_names, DOCUMENT_PROMPTS),
    ):
        prompt = processor.texts.find_named_prompt(prompts)
        tokenized += processor.tokenize(texts, [checked] * len(texts), numbered, prompt=prompt)
    return Scoring(tokenized, checked, len(queries))


def _read_texts(name: str, data: Texts) -> list[str]:
    if not isinstance(data, Sequence) or isinstance(data, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(name, data, "a text or a list of texts")
    texts = [data] if isinstance(data, str) else list(data)
    if not texts:
        raise InputError(name, data, "at least one text")
    for text, numbered in zip(texts, _number(name, data), strict=True):
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PromptError(numbered, text, "a text")
    return texts


def _number(name: str, data: Texts) -> list[str]:
    return [name] if isinstance(data, str) else [f"{name}[{place}]" for place in range(len(data))]


def _compare(
    query: PoolingRequestOutput[PoolingOutput], document: PoolingRequestOutput[PoolingOutput]
) -> ScoringRequestOutput:
    failed = next((output for output in (query, document) if output.error is not None), document)
    score = math.nan
    if failed.error is None:
        first, second = (memoryview(output.outputs.raw).cast("f") for output in (query, document))
        score = compute_cosine(first, second)
    return ScoringRequestOutput(
        f"{query.request_id}_{document.request_id}",
        ScoringOutput(score),
        query.prompt_token_ids + document.prompt_token_ids,
        query.num_cached_tokens + document.num_cached_tokens,
        True,
        failed.finish_reason,
        failed.error,
        failed.error_code,
    )


def compute_cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """The cosine of the angle between two vectors; 0 where one has no length."""
    lengths = _multiply(first, first) * _multiply(second, second)
    return _multiply(first, second) / math.sqrt(lengths) if lengths else 0.0


def _multiply(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(map(operator.mul, first, second))
