"""Inputs -> what the engine takes: few short texts as they are, others as token ids of a text process.

One job tokenizes all texts of a request.
"""

from __future__ import annotations

import asyncio

from ....ipc.params.pooling_params import PoolingParams
from ....ipc.protocol.token_ids import decode_token_ids
from ...requests.vectors.encoder import EncodedText, TextPair
from ...requests.vectors.processor import PoolingPrompt
from ..serving import Caller, Serving
from ..text_process.jobs import PoolingJob, TokenIds
from .inputs import Inputs
from .prompts import MAX_INLINE_LENGTH

_MAX_INLINE_TEXTS = 8
_DECODED_A_TURN = 64  # texts whose token ids are unpacked in a turn of the event loop


async def tokenize_inputs(
    serving: Serving, caller: Caller, inputs: Inputs, params: PoolingParams
) -> list[PoolingPrompt]:
    """Each input as it is where the engine's own tokenizing does, else its token ids."""
    places = [place for place, given in enumerate(inputs.given) if isinstance(given, str)]
    texts = [str(inputs.given[place]) for place in places]
    queries = None if inputs.queries is None else list(inputs.queries)
    if not texts:
        return list(inputs.given)
    is_cut = inputs.max_tokens_per_text is not None or inputs.truncation is not None
    if not is_cut and _can_inline(serving, texts, queries or [inputs.prompt]):
        if queries is None:
            return list(inputs.given)
        return [TextPair(queries[place % len(queries)], text) for place, text in enumerate(texts)]
    asked = serving.llm.pooling.processor.find_truncation(params)
    job = PoolingJob(
        texts=texts,
        names=[inputs.names[place] for place in places],
        max_tokens=serving.llm.facts.max_model_len,
        model=serving.model_texts,
        prompt=inputs.prompt,
        queries=queries,
        truncation=asked or inputs.truncation,
        max_tokens_per_text=inputs.max_tokens_per_text,
        num_whole=0 if asked else inputs.num_queries,
    )
    answer = await serving.text.run(job, caller.tenant)
    assert isinstance(answer, TokenIds)
    prompts: list[PoolingPrompt] = list(inputs.given)
    for number, (place, packed, type_start) in enumerate(
        zip(places, answer.packed, answer.type_starts, strict=True)
    ):
        prompts[place] = EncodedText(decode_token_ids(packed), type_start)
        if number % _DECODED_A_TURN == _DECODED_A_TURN - 1:
            await asyncio.sleep(0)
    return prompts


def _can_inline(serving: Serving, texts: list[str], others: list[str]) -> bool:
    """Whether texts, each of them behind one of `others`, may be tokenized in the event loop."""
    size = sum(map(len, texts)) + len(texts) * max(map(len, others))
    return size <= MAX_INLINE_LENGTH and len(texts) <= _MAX_INLINE_TEXTS and serving.tokenizer.is_predictable
