"""POST /tokenize and /detokenize: the model's tokenizer on its own."""

from __future__ import annotations

from starlette.responses import Response

from ...output_formats.offered_tools import check_tools
from ..bodies.schema import DetokenizeRequest, TokenizeRequest
from ..errors import FieldError
from ..serving import Caller, Serving
from ..text.jobs import Body, DetokenizeJob, EncodeJob, RenderJob, TextJob, TokenizeJob
from .chat import make_prompt_conversation
from .conversation import make_render_job
from .prompts import check_conversation
from .unsupported import TOKENIZE_RULES, check_supported


async def create_tokenize(serving: Serving, request: TokenizeRequest, caller: Caller) -> Response:
    """Token ids of a prompt, or of a conversation by the chat template."""
    check_supported(request, TOKENIZE_RULES)
    job = TokenizeJob(
        source=_make_source(serving, request),
        max_model_len=serving.llm.facts.max_model_len,
        wants_strings=bool(request.return_token_strs),
    )
    return await _respond(serving, job, caller)


async def create_detokenize(serving: Serving, request: DetokenizeRequest, caller: Caller) -> Response:
    """Text of token ids, special tokens shown."""
    return await _respond(serving, DetokenizeJob(token_ids=bytes(request.tokens)), caller)


async def _respond(serving: Serving, job: TextJob, caller: Caller) -> Response:
    answer = await serving.text.run(job, caller.tenant)
    assert isinstance(answer, Body)
    return Response(answer.json, media_type="application/json")


def _make_source(serving: Serving, request: TokenizeRequest) -> RenderJob | EncodeJob:
    if (request.prompt is None) == (request.messages is None):
        raise FieldError("prompt", request.prompt, "either 'prompt' or 'messages'")
    if request.prompt is not None:
        adds = request.add_special_tokens is not False
        return EncodeJob(texts=[request.prompt], names=["prompt"], add_special_tokens=adds)
    conversation = make_prompt_conversation(request)
    check_tools(conversation.tools, conversation.choice)
    job = make_render_job(conversation)
    check_conversation(serving, job)
    return job
