"""POST /tokenize and /detokenize: the model's tokenizer on its own."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .errors import FieldError
from .prompts import Conversation, encode, render_chat
from .schema import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from .serving import Caller, Serving


async def create_tokenize(
    serving: Serving, _http: Request, request: TokenizeRequest, _caller: Caller
) -> Response:
    """Token ids of a prompt, or of a conversation by the chat template."""
    serving.check_model(request.model)
    tokens = await _tokenize(serving, request)
    strings = [serving.tokenizer.token_text(one) for one in tokens] if request.return_token_strs else None
    body = TokenizeResponse(len(tokens), serving.llm.facts.max_model_len, tokens, strings)
    return Response(msgspec.json.encode(body), media_type="application/json")


async def create_detokenize(
    serving: Serving, _http: Request, request: DetokenizeRequest, _caller: Caller
) -> Response:
    """Text of token ids, special tokens shown."""
    serving.check_model(request.model)
    text = serving.tokenizer.decode(request.tokens, skip_special_tokens=False)
    return Response(msgspec.json.encode(DetokenizeResponse(text)), media_type="application/json")


async def _tokenize(serving: Serving, request: TokenizeRequest) -> list[int]:
    if (request.prompt is None) == (request.messages is None):
        raise FieldError("prompt", request.prompt, "either 'prompt' or 'messages'")
    if request.prompt is not None:
        return await encode(serving.tokenizer, request.prompt, request.add_special_tokens is not False)
    continues = bool(request.continue_final_message)
    adds = request.add_generation_prompt
    chat = Conversation(
        request.messages or [],
        not continues if adds is None else adds,
        continues,
        request.chat_template_kwargs,
        bool(request.add_special_tokens),
    )
    return await render_chat(serving, chat)
