"""PoolingCalls: those of LLM's calls that compute vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, cast

import msgspec

from ..ipc.errors import InputError, did_you_mean
from ..ipc.params.pooling_params import PoolingParams, PoolingTask
from .llm_engine import LLMEngine
from .request_batch import RequestBatch, run_batches
from .requests.prompt_tokenizer import TokenizedPrompt
from .requests.prompts import Prompt, is_many
from .requests.vectors.outputs import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from .requests.vectors.processor import PoolingProcessor
from .requests.vectors.scoring import Texts, prepare_scoring

Params = PoolingParams | Sequence[PoolingParams] | None
Pooled = PoolingRequestOutput[PoolingOutput]


class PoolingOptions(TypedDict, total=False):
    """What LLM's calls take that compute vectors of prompts."""

    truncate_prompt_tokens: int | None
    prompt_name: str | None
    prompt: str | None
    use_tqdm: bool | Callable[..., Any]
    priority: Sequence[int] | None


# vLLM's that Quire does not have, which may be None, with what to do instead.
_VLLMS = {
    "tokenization_kwargs": "absent: truncate_prompt_tokens cuts a prompt (-1: to what fits), "
    "PoolingParams(truncation_side=...) says where",
    "lora_request": "absent: Quire does not have adapters",
}


class PoolingCalls:
    """Over one engine; `request_numbers` make ids."""

    def __init__(self, engine: LLMEngine, request_numbers: Iterator[int]) -> None:
        self._engine = engine
        self._request_numbers = request_numbers
        self._processor = PoolingProcessor(engine.facts, engine.tokenizer)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params,
        task: PoolingTask | None,
        *,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[Pooled]:
        """What is pooled of each prompt, in their order. Arguments and errors are LLM's."""
        _refuse(others)
        self._engine.check_usable()
        has_many = is_many(prompts)
        many = list(cast(Sequence[Prompt], prompts)) if has_many else [cast(Prompt, prompts)]
        each = self._check_each(params, len(many), task, truncate_prompt_tokens)
        names = [f"prompts[{place}]" for place in range(len(many))] if has_many else ["prompt"]
        before = self._processor.find_prompt(prompt_name, prompt)
        tokenized = self._processor.tokenize(many, each, names, prompt=before)
        return self._run(tokenized, each, priority, use_tqdm)

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        params: PoolingParams | None,
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[ScoringRequestOutput]:
        """A score for each pair. Arguments and errors are LLM's."""
        self._engine.check_usable()
        given = _with_truncation(params, truncate_prompt_tokens)
        scoring = prepare_scoring(self._processor, data_1, data_2, given, instruction=instruction)
        each = [scoring.params] * len(scoring.prompts)
        return scoring.make_scores(self._run(scoring.prompts, each, None, use_tqdm))

    def _check_each(
        self, params: Params, num_prompts: int, task: PoolingTask | None, truncation: int | None
    ) -> list[PoolingParams]:
        if params is None or isinstance(params, PoolingParams):
            given = _with_truncation(params, truncation)
            return [self._processor.check_params(given, task)] * num_prompts
        if not isinstance(params, Sequence) or isinstance(params, (str, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError("pooling_params", params, "a PoolingParams, or one for each prompt")
        if len(params) != num_prompts:
            allowed = f"one, or {num_prompts}, one a prompt"
            raise InputError("pooling_params", f"{len(params)} of them", allowed)
        return [self._processor.check_params(_with_truncation(one, truncation), task) for one in params]

    def _run(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[PoolingParams],
        priority: Sequence[int] | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[Pooled]:
        if priority is not None and len(priority) != len(prompts):
            allowed = f"one for each of {len(prompts)} prompts"
            raise InputError("priority", f"{len(priority)} entries", allowed)
        make, numbers = self._processor.make_input, self._request_numbers
        requests = [
            make(str(next(numbers)), prompt, own, rank)
            for prompt, own, rank in zip(prompts, params, priority or [0] * len(prompts), strict=True)
        ]
        return run_batches([RequestBatch[Pooled](self._engine, requests)], use_tqdm)


def _refuse(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in _VLLMS:
            known = PoolingOptions.__annotations__
            raise InputError(name, value, f"no such argument{did_you_mean(name, known)}")
        if value is not None:
            raise InputError(name, value, _VLLMS[name])


def _with_truncation(params: PoolingParams | None, truncation: int | None) -> PoolingParams | None:
    """`params` with the call's own truncate_prompt_tokens, which wins."""
    if truncation is None:
        return params
    return msgspec.structs.replace(params or PoolingParams(), truncate_prompt_tokens=truncation)
