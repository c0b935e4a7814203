"""Whole answers of an engine's own clients: of LLM.generate, LLM.chat, LLM.embed and beam searches."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from ...frontend.llm import LLM
from ...frontend.requests.beam_search import BeamSearchOutput
from ...ipc.errors import RequestFailedError
from ...ipc.params.sampling_params import RequestOutputKind
from .asks import Ask
from .chats import Chat, join_message
from .record import Golden


def answer_all(llm: LLM, asks: Sequence[Ask]) -> list[Golden | str]:
    """Each ask's answer, or why it failed, in their order. Raises EngineDeadError."""
    plain = [ask for ask in asks if ask.beam_width is None and ask.chat is None and not ask.embeds]
    outputs = iter(
        llm.generate(
            [ask.engine_prompt for ask in plain],
            [ask.make_params(RequestOutputKind.FINAL_ONLY) for ask in plain],
            use_tqdm=False,
        )
    )
    answers: list[Golden | str] = []
    for ask in asks:
        if ask.beam_width is not None:
            answers.append(_search(llm, ask))
            continue
        if ask.chat is not None:
            answers.append(_chat(llm, ask, ask.chat))
            continue
        if ask.embeds:
            answers.append(_embed(llm, ask))
            continue
        output = next(outputs)
        answers.append(output.error or Golden(list(output.outputs[0].token_ids), output.outputs[0].text))
    return answers


def join_beams(ask: Ask, found: BeamSearchOutput) -> Golden:
    """What a search has found: the outputs of all beams, one after the other."""
    token_ids = [token for one in found.sequences for token in one.tokens[-len(one.logprobs) :]]
    texts = [(one.text or "").removeprefix(str(ask.prompt)) for one in found.sequences]
    return Golden(token_ids, "".join(texts))


def encode_vector(raw: bytes) -> str:
    """As a server writes it with encoding_format base64."""
    return base64.b64encode(raw).decode()


def _embed(llm: LLM, ask: Ask) -> Golden | str:
    (output,) = llm.embed([ask.engine_prompt], pooling_params=ask.pooling_params, use_tqdm=False)
    return output.error or Golden([], encode_vector(output.outputs.raw))


def _search(llm: LLM, ask: Ask) -> Golden | str:
    try:
        (found,) = llm.beam_search([ask.engine_prompt], ask.make_search())
    except RequestFailedError as error:
        return str(error)
    return join_beams(ask, found)


def _chat(llm: LLM, ask: Ask, chat: Chat) -> Golden | str:
    params = ask.make_params(RequestOutputKind.FINAL_ONLY)
    (output,) = llm.chat(ask.messages, params, use_tqdm=False, **chat.fields)
    one = output.outputs[0]
    return output.error or Golden(list(one.token_ids), join_message(one.message) if one.message else one.text)
