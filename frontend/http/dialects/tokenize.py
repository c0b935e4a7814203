"""POST /tokenize and /detokenize: the model's tokenizer on its own."""

from __future__ import annotations

from starlette.responses import Response

from ..bodies.schema import DetokenizeRequest, TokenizeRequest
from ..caller import Caller
from ..errors import FieldError, missing_field
from ..serving import Serving
from ..text_process.jobs import Conversation, DetokenizeJob, EncodeJob, TokenizeJob
from .chat import REFUSED_OF_PROMPTS, make_prompt_conversation
from .conversation import check_source
from .prompts import answer_by_text
from .route import PostRoute


async def create_tokenize(serving: Serving, request: TokenizeRequest, caller: Caller) -> Response:
    """Token ids of a prompt, or of a conversation by the chat template."""
    job = TokenizeJob(
        source=_make_source(serving, request),
        max_model_len=serving.llm.facts.max_model_len,
        wants_strings=bool(request.return_token_strs),
    )
    return await answer_by_text(serving, job, caller)


async def create_detokenize(serving: Serving, request: DetokenizeRequest, caller: Caller) -> Response:
    """Text of token ids, special tokens shown."""
    return await answer_by_text(serving, DetokenizeJob(token_ids=bytes(request.tokens)), caller)


def _make_source(serving: Serving, request: TokenizeRequest) -> Conversation | EncodeJob:
    if request.prompt is None and request.messages is None:
        raise missing_field("prompt", "a text; or 'messages' instead")
    if request.prompt is not None and request.messages is not None:
        raise FieldError("prompt", request.prompt, "absent with 'messages'")
    if request.prompt is not None:
        adds = request.add_special_tokens is not False
        return EncodeJob(texts=[request.prompt], names=["prompt"], add_special_tokens=adds)
    return check_source(serving, make_prompt_conversation(request))


ROUTES = [
    PostRoute("/tokenize", TokenizeRequest, create_tokenize, refused=REFUSED_OF_PROMPTS),
    PostRoute("/detokenize", DetokenizeRequest, create_detokenize),
]
