"""Requests and responses of the API as msgspec Structs; /openapi.json is made from them.

A field that is not here is refused, so nothing that would change an answer is ignored in silence. Fields that
say nothing about the answer are taken and left (SilentFields); of those that Quire does not have,
a dialect refuses what asks for more (`PostRoute.refused`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, TypeVar, cast

import msgspec
from msgspec import Meta

from ....ipc.params.beam_search import EarlyStopping, LengthPenalty
from ....ipc.params.param_fields import MAX_INT
from ....ipc.params.request_options import MAX_TIMEOUT_S, OPTION_FIELDS, RequestName
from ....ipc.params.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    SAMPLING_FIELDS,
    NumLogprobs,
    Temperature,
    TopP,
)
from ....ipc.params.structured_outputs import StructuredOutputsFields
from ....ipc.protocol.messages import MAX_IDS_PER_ABORT
from ....ipc.protocol.rights import CALLER_OPTIONS
from ...text.messages import ONLY_TEXT, TEXT_TYPES
from .formats import ResponseFormat

T = TypeVar("T", bound=msgspec.Struct)
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
NumTokens = Annotated[int, Meta(ge=0, le=MAX_INT)]
# Where HTTP takes less than RequestOptions does. Less than 0.1 s an idle engine may need to begin, and every
# such request would be a 503.
_Salt: Any = OPTION_FIELDS["cache_salt"].hint
_NARROWER: dict[str, Any] = {
    "cache_salt": Annotated[_Salt, Meta(min_length=1)],
    "queue_timeout_s": Annotated[
        float, Meta(ge=0.1, le=MAX_TIMEOUT_S, description="503 when it has not begun by then")
    ],
}
# SamplingParams says which ones there are, where msgspec would only say that another is none of them.
TruncationSide = Annotated[str, Meta(extra_json_schema={"enum": ["left", "right"]})]
Bias = Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIAS)]
# OpenAI's limits. An answer repeats them, so a stream would hold whatever they are.
User = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class SilentFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's, then vLLM's. request_id: as X-Request-Id, which goes before it.

    metadata: what proxies and tracers put there; the Responses API, which repeats it, takes OpenAI's only.
    """

    user: User | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    request_id: RequestName | None = None
    session_id: str | None = None
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: a last chunk with the usage; continuous_usage_stats: in every chunk too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


# Fields of SamplingParams that are not a request's: they follow from the route, as `stream` does.
_NOT_REQUESTED = {"detokenize", "output_kind", "logprobs", "extra_args", "structured_outputs"}
# Those of several sequences, and those that only completions and chats have.
_OF_SEQUENCES = ("n", "best_of")
_OF_TEXTS = {
    *("max_tokens", "prompt_logprobs", "logprob_token_ids", "truncate_prompt_tokens", "truncation_side"),
    *_OF_SEQUENCES,
}


def declare(name: str, base: type[T], fields: Iterable[str]) -> type[T]:
    """`base` with fields as SamplingParams and RequestOptions have them; None: the request does not say."""
    shared = (*SAMPLING_FIELDS.values(), *OPTION_FIELDS.values())
    hints = {field.name: field.hint for field in shared} | _NARROWER
    declared: list[tuple[str, Any, None]] = [(field, hints[field] | None, None) for field in fields]
    made = msgspec.defstruct(
        name, declared, bases=(base,), module=__name__, kw_only=True, forbid_unknown_fields=True
    )
    return cast(type[T], made)


SchedulingFields = declare("SchedulingFields", SilentFields, CALLER_OPTIONS)
_Declared = declare(
    "_Declared",
    SchedulingFields,
    [name for name in SAMPLING_FIELDS if name not in _NOT_REQUESTED | _OF_TEXTS],
)


class SharedFields(_Declared, kw_only=True, forbid_unknown_fields=True):
    """What a request of any route that generates may say about sampling, by vLLM's names.

    kv_transfer_params, ec_transfer_params, watermarking: vLLM's, refused unless they ask for nothing.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stop_token_ids: list[TokenId] | None = None
    logit_bias: Bias | None = None
    allowed_token_ids: list[TokenId] | None = None
    structured_outputs: StructuredOutputsFields | None = None
    vllm_xargs: dict[str, Any] | None = None  # SamplingParams.extra_args
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    watermarking: bool | None = None


_WithSequences = declare("_WithSequences", SharedFields, _OF_SEQUENCES)


class SamplingFields(_WithSequences, kw_only=True, forbid_unknown_fields=True):
    """As SharedFields, of completions and chats."""

    CHOICES: ClassVar = {
        "response_format": "'text', 'json_object' or an object with a type",
        "response_format.type": "text, json_object, json_schema or structural_tag",
        "early_stopping": 'true, false or "never"',
    }
    max_tokens: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None  # -1: as many as there is room for
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: Annotated[bool, Meta(description="ids of the prompt and of what is new")] | None = None
    return_tokens_as_token_ids: (
        Annotated[bool, Meta(description="tokens of logprobs as 'token_id:5' in place of their text")] | None
    ) = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    use_beam_search: Annotated[bool, Meta(description="the n best sequences by beam search")] | None = None
    length_penalty: LengthPenalty | None = None
    early_stopping: EarlyStopping | None = None
    return_token_offsets: bool | None = None  # vLLM's, of its routes that render
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] | None = None


KNOWN_TYPES_OF_TOOLS = {"tools[]": (("function", "namespace"), "'function'")}
KNOWN_TYPES_OF_CHATS = {"messages[].content[]": (TEXT_TYPES, ONLY_TEXT)} | KNOWN_TYPES_OF_TOOLS


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a message's content; Quire's models read text only."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    cache_control: Any = None  # Anthropic's, here and below: prefixes are cached anyway


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message of a conversation; which roles there are is the model's chat template's to say."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    # Clients add these to what they were answered.
    parsed: Any = None
    provider_specific_fields: dict[str, Any] | None = None
    cache_control: Any = None


class FunctionParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call. parameters: the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool, as chats have it; type: 'function'."""

    type: str = "function"
    function: FunctionParam
    cache_control: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a prompt, or the messages of a conversation."""

    KNOWN_TYPES: ClassVar = KNOWN_TYPES_OF_CHATS
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolParam] | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /abort_requests: ids of answers, or what X-Request-Id called the requests."""

    request_ids: Annotated[list[RequestName], Meta(min_length=1, max_length=MAX_IDS_PER_ABORT)]


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    # Left to the process that decodes them: a list of millions would hold up the event loop.
    tokens: Annotated[
        msgspec.Raw,
        Meta(
            extra_json_schema={
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT},
            }
        ),
    ]
    model: str | None = None


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry a token. text_offset counts characters of `text`."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    """An alternative at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(msgspec.Struct):
    """An alternative of a token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A token of the answer, with its likeliest alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    """Logprobs of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class ServerInfo(msgspec.Struct):
    """Answer of /server_info, by vLLM's names. vllm_config: of this server and its engines, text or JSON."""

    vllm_config: str | dict[str, Any]
    vllm_env: dict[str, str]
    system_env: dict[str, str]


class StatusResponse(msgspec.Struct, omit_defaults=True):
    """Answer of /live, /ready and /abort_requests. models: the status of each, of a server with several."""

    status: str
    models: dict[str, str] = {}


class HealthResponse(msgspec.Struct, omit_defaults=True):
    """Answer of /health: which request gets no token, and how far it is, if one does not.

    for_s: seconds of free time of the device since its last token, or since an engine was asked that does
    not answer. models: what is found of each, of a server with several.
    """

    status: str
    request_id: str = ""
    stage: str = ""
    for_s: float | None = None
    models: dict[str, HealthResponse] = {}
