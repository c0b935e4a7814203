"""Beam search for users: parameters in, sequences with scores out. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...ipc.errors import RequestFailedError, SamplingParamsError
from ...ipc.params.beam_search import BeamSearchParams
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.messages import BeamHypothesis, FinishReason
from ...ipc.protocol.token_ids import decode_token_ids
from ..logprobs import Logprob, LogprobsList, LogprobsTable
from ..outputs import CompletionOutput, RequestOutput
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer
from .input_processor import EngineInput, InputProcessor, PreparedParams


class BeamSearchSequence(msgspec.Struct):
    """One sequence. tokens and text: prompt and output, as in vLLM; logprobs: each output token's own.

    score: cum_logprob over (number of output tokens) ** length_penalty; sequences are in its order.
    finish_reason: 'stop' at end-of-sequence, whose token counts in both though it is not shown, or 'length'.
    """

    tokens: list[int]
    logprobs: Sequence[dict[int, Logprob] | None]
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None
    score: float


class BeamSearchOutput(msgspec.Struct):
    """The sequences of a prompt, best first."""

    sequences: list[BeamSearchSequence]


def prepare_beam_search(processor: InputProcessor, params: Any) -> PreparedParams:
    """What the engine takes for `params`. Raises SamplingParamsError."""
    if not isinstance(params, BeamSearchParams):
        raise SamplingParamsError("params", params, "a BeamSearchParams")
    params.verify()
    sampling = SamplingParams(
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        temperature=0.0,
    )
    return processor.prepare_beam_search(sampling, params.to_search())


def make_beam_completions(
    request: EngineInput, beams: Sequence[BeamHypothesis], tokenizer: Tokenizer | None
) -> list[CompletionOutput]:
    """What a search has found as a request's sequences, numbered from the best one on."""
    return [_make_completion(request, index, beam, tokenizer) for index, beam in enumerate(beams)]


def _make_completion(
    request: EngineInput, index: int, beam: BeamHypothesis, tokenizer: Tokenizer | None
) -> CompletionOutput:
    table = LogprobsTable()
    table.add(beam.logprobs)
    token_ids = decode_token_ids(beam.logprobs.token_ids)
    is_cut = beam.finish_reason is FinishReason.STOP and not request.params.include_stop_str_in_output
    text = ""
    if tokenizer is not None:
        detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, request.params)
        detokenizer.add_all(token_ids[:-1] if is_cut else token_ids)
        text = detokenizer.sendable_text(True)
    text_of = None if tokenizer is None else tokenizer.token_text
    return CompletionOutput(
        index,
        text,
        token_ids,
        beam.cumulative_logprob,
        LogprobsList(table, 0, table.num_positions, text_of),
        str(beam.finish_reason),
        None,
        beam.score,
    )


def to_beam_search_output(
    output: RequestOutput, tokenizer: Tokenizer | None, shows_eos: bool
) -> BeamSearchOutput:
    """The answer to LLM.beam_search. Raises RequestFailedError if the engine has failed the request."""
    if output.error is not None:
        raise RequestFailedError(output.error, output.error_code)
    prompt = output.prompt
    if prompt is None and tokenizer is not None:
        prompt = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True)
    sequences = [
        BeamSearchSequence(
            output.prompt_token_ids + _cut(one, shows_eos),
            one.logprobs or [],
            one.cumulative_logprob or 0.0,
            None if prompt is None else prompt + one.text,
            one.finish_reason,
            one.stop_reason,
            one.beam_score or 0.0,
        )
        for one in output.outputs
    ]
    return BeamSearchOutput(sequences)


def _cut(one: CompletionOutput, shows_eos: bool) -> list[int]:
    return one.token_ids if shows_eos or one.finish_reason != "stop" else one.token_ids[:-1]
