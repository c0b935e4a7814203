"""Whole answers of an engine's own clients: of LLM.generate, LLM.chat, LLM.embed and beam searches."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from ...frontend.llm import LLM
from ...frontend.outputs import RequestOutput
from ...frontend.requests.beam_search import BeamSearchOutput
from ...ipc.errors import RequestFailedError
from ...ipc.params.sampling_params import RequestOutputKind
from .asks import Ask
from .chats import join_message
from .record import Golden


def answer_all(llm: LLM, asks: Sequence[Ask]) -> list[Golden | str]:
    """Each ask's answer, or why it failed, in their order. Raises EngineDeadError."""
    plain = [ask for ask in asks if ask.is_plain]
    prompts = [ask.engine_prompt for ask in plain]
    params = [ask.make_params(RequestOutputKind.FINAL_ONLY) for ask in plain]
    outputs = iter(llm.generate(prompts, params, use_tqdm=False))
    return [_join_output(next(outputs)) if ask.is_plain else _answer_alone(llm, ask) for ask in asks]


def _join_output(output: RequestOutput) -> Golden | str:
    one = output.outputs[0]
    return output.error or Golden(list(one.token_ids), join_message(one.message) if one.message else one.text)


def _answer_alone(llm: LLM, ask: Ask) -> Golden | str:
    """By a call of its own."""
    if ask.chat is not None:
        params = ask.make_params(RequestOutputKind.FINAL_ONLY)
        return _join_output(llm.chat(ask.messages, params, use_tqdm=False, **ask.chat.fields)[0])
    if ask.embeds:
        (vector,) = llm.embed([ask.engine_prompt], pooling_params=ask.pooling_params, use_tqdm=False)
        return vector.error or Golden([], encode_vector(vector.outputs.raw))
    try:
        (found,) = llm.beam_search([ask.engine_prompt], ask.make_search())
    except RequestFailedError as error:
        return str(error)
    return join_beams(ask, found)


def join_beams(ask: Ask, found: BeamSearchOutput) -> Golden:
    """What a search has found: the outputs of all beams, one after the other."""
    token_ids = [token for one in found.sequences for token in one.tokens[-len(one.logprobs) :]]
    texts = [(one.text or "").removeprefix(str(ask.prompt)) for one in found.sequences]
    return Golden(token_ids, "".join(texts))


def encode_vector(raw: bytes) -> str:
    """As a server writes it with encoding_format base64."""
    return base64.b64encode(raw).decode()
