"""POST /api/chat, /api/generate, /api/embed and /api/embeddings, for Ollama's clients.

An answer is told in lines, each with a part of the message and the last with counts; or in one line.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

from ....ipc.errors import SamplingParamsError
from ....ipc.params.sampling_params import SamplingParams
from ....ipc.params.structured_outputs import StructuredOutputsParams
from ... import events as turn
from ...formats.answer_reader import AnswerReader
from ...formats.offered_tools import check_num_tools
from ...outputs import RequestMetrics, RequestOutput
from ..bodies.schema import ChatMessage, ToolParam
from ..caller import Caller
from ..errors import FieldError, as_api_error, encode_ollama_error
from ..serving import Serving, make_id
from ..stream import NDJSON, Json, JsonResponse, respond
from ..text_process.jobs import Conversation, GrammarJob
from . import ollama_body as body
from . import vector_request as pooling
from .chat import make_tool
from .conversation import MessageDraft, ParsedOutputs, parse_outputs, prepare_conversation
from .logprobs import make_beside, make_chat_logprobs
from .ollama_models import MODEL_ROUTES
from .prompts import prepare_params, tokenize_prompts
from .route import PostRoute, Refused, is_off
from .sampling import make_params
from .tool_input import read_input
from .usage import take_last

# A request -> parameters, and the Conversation that all APIs make of theirs.

_OPTION_NAMES = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_REFUSED_OPTIONS: Refused = {
    "num_predict": ("-1, -2 or at least 1", lambda value: value != 0),
    "typical_p": ("1: typical sampling is not supported", lambda value: value == 1),
    "tfs_z": ("1: tail-free sampling is not supported", lambda value: value == 1),
    "mirostat": ("0: mirostat is not supported", lambda value: value == 0),
    "vocab_only": ("false", is_off),
    "embedding_only": ("false: /api/embed makes embeddings", is_off),
}
_EFFORTS = {"max": "high"}  # templates know no more than OpenAI's


def _make_params(serving: Serving, request: body.GenerationFields) -> SamplingParams:
    options = request.options or body.OllamaOptions()
    for name, (allowed, is_allowed) in _REFUSED_OPTIONS.items():
        if (value := getattr(options, name)) is not None and not is_allowed(value):
            raise FieldError(f"options.{name}", value, allowed, "unsupported_field")
    values: dict[str, Any] = {name: getattr(options, name) for name in body.SAMPLED}
    values["repetition_penalty"] = options.repeat_penalty
    values["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    values = {name: value for name, value in values.items() if value is not None}
    window = 64 if options.repeat_last_n is None else options.repeat_last_n
    if window == 0:  # of no token: penalties are off
        values |= _NO_PENALTIES
    elif 0 < window < serving.llm.facts.max_model_len and options.repeat_penalty not in (None, 1):
        allowed = "1, or with options.repeat_last_n=-1: it is over the whole prompt and output"
        raise FieldError("options.repeat_penalty", options.repeat_penalty, allowed)
    max_tokens = options.num_predict if (options.num_predict or 0) > 0 else None
    try:
        return make_params(serving, request, max_tokens, **values)
    except SamplingParamsError as error:
        name = _OPTION_NAMES.get(error.field, error.field)
        raise SamplingParamsError(f"options.{name}", error.value, error.allowed) from None


def _make_conversation(
    request: body.GenerationFields, param: str, messages: list[ChatMessage], tools: Sequence[ToolParam] = ()
) -> Conversation:
    check_num_tools(len(tools))
    continues = messages[-1].role == "assistant" and not messages[-1].tool_calls
    conversation = Conversation(
        messages=messages,
        tools=[make_tool(number, tool) for number, tool in enumerate(tools)],
        format=_find_format(request.format),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        param=param,
    )
    if isinstance(request.think, bool):
        conversation.variables = {"enable_thinking": request.think}
    elif request.think is not None:
        conversation.reasoning_effort = _EFFORTS.get(request.think, request.think)
    return conversation


def _find_format(value: str | dict[str, Any] | None) -> GrammarJob | None:
    if value == {}:
        raise FieldError("format", value, '"json", or a JSON schema that is not empty')
    if not value:
        return None
    if isinstance(value, str):
        return GrammarJob(params=StructuredOutputsParams(json_object=True), place="format")
    # Objects have the properties that are named, which is all that Ollama's grammars know; not where parts of
    # one are named apart.
    is_closed = b'"allOf"' not in msgspec.json.encode(value)
    params = StructuredOutputsParams(json=value, disable_additional_properties=is_closed)
    return GrammarJob(params=params, place="format")


def _make_messages(messages: list[body.OllamaMessage], max_messages: int) -> list[ChatMessage]:
    """Results are told by the ids of their calls, which Ollama's clients may leave out."""
    if len(messages) > max_messages:  # before any is looked at
        raise FieldError("messages", f"{len(messages)} messages", f"at most {max_messages} (max_messages)")
    made: list[ChatMessage] = []
    waiting: defaultdict[str, deque[str]] = defaultdict(deque)  # calls by their tool; '': all of them
    for place, message in enumerate(messages):
        if message.images:
            images = f"{len(message.images)} images"
            raise FieldError(f"messages[{place}].images", images, "none: only text is supported")
        texts, thoughts = ([text] if text else [] for text in (message.content, message.thinking))
        draft = MessageDraft(message.role.lower(), texts, thoughts, call_id=message.tool_call_id)
        for number, call in enumerate(message.tool_calls or ()):
            named: Json = {name: value for name, value in call.items() if value is not None}
            draft.calls.append({"id": f"call_{place}_{number}", "type": "function", **named})
            if not isinstance(call_id := draft.calls[-1]["id"], str):
                raise FieldError(f"messages[{place}].tool_calls[{number}].id", call_id, "a text")
            function: Any = named.get("function")
            tool = str(function.get("name")) if isinstance(function, dict) else ""
            for name in {"", tool}:
                waiting[name].append(call_id)
        queue = waiting[message.tool_name or ""]
        if draft.role == "tool" and draft.call_id is None and queue:
            draft.call_id = queue.popleft()
        made.append(msgspec.structs.replace(draft.finish(), name=message.tool_name))
    return made


# Events of an answer -> its lines.


class _Answer:
    """One answer while it comes into being."""

    def __init__(self, serving: Serving, request: body.GenerationFields) -> None:
        self.id = make_id("ollama")
        self._model = request.model  # as the request calls it
        self._is_chat = isinstance(request, body.OllamaChatRequest)
        self._tokenizer = serving.tokenizer
        self._num_top = (request.top_logprobs or 0) if request.logprobs else None
        self._began = time.monotonic()
        self._calls = turn.AssistantMessage()

    def make_loaded(self) -> Response:
        """What is answered where nothing is to be generated."""
        return respond(self._make_line({}, done=True, done_reason="load"), self.id)

    async def complete(self, outputs: ParsedOutputs, reader: AnswerReader) -> Json:
        """The whole answer as one line."""
        output, answers = await take_last(outputs)
        parts = self._read(answers[0])
        whole: Json = {"content": "".join(part.get("content", "") for part in parts)}
        if thinking := "".join(part.get("thinking", "") for part in parts):
            whole["thinking"] = thinking
        if calls := [call for part in parts for call in part.get("tool_calls", ())]:
            whole["tool_calls"] = calls
        logprobs = await make_beside(output, lambda: self._make_logprobs(output))
        return self._make_line(whole, done=True, **self._make_end(output, reader), **logprobs)

    async def stream(self, outputs: ParsedOutputs, reader: AnswerReader) -> AsyncGenerator[bytes, None]:
        """The lines, as they come."""
        async with aclosing(outputs):
            async for output, answers in outputs:
                logprobs = await make_beside(output, lambda output=output: self._make_logprobs(output))
                parts = self._read(answers[0])
                if logprobs and not parts:
                    parts = [{}]
                lines = [self._make_line(part, **logprobs) for part in parts[:1]]
                lines += [self._make_line(part) for part in parts[1:]]
                if output.finished:
                    lines.append(self._make_line({}, done=True, **self._make_end(output, reader)))
                if lines:
                    yield b"".join(msgspec.json.encode(line) + b"\n" for line in lines)

    def _read(self, events: Iterable[turn.OutputEvent]) -> list[Json]:
        """What events tell of the message; a call once it is complete."""
        parts: list[Json] = []
        for event in events:
            match event:
                case turn.TextDelta(text):
                    parts.append({"content": text})
                case turn.ReasoningDelta(text):
                    parts.append({"thinking": text})
                case turn.ToolCallEnd(index):
                    call = self._calls.tool_calls[index]
                    function = {"index": index, "name": call.name, "arguments": read_input(call.arguments)}
                    parts.append({"tool_calls": [{"id": call.call_id, "function": function}]})
                case _:
                    self._calls.add(event)
        return parts

    def _make_line(self, part: Json, *, done: bool = False, **more: Any) -> Json:
        line: Json = {"model": self._model, "created_at": datetime.now(UTC)}
        if self._is_chat:
            line["message"] = {"role": "assistant", "content": "", **part}
        else:
            line |= {"response": part.pop("content", ""), **part}
        return line | {"done": done, **more}

    def _make_logprobs(self, output: RequestOutput) -> Json:
        positions = output.outputs[0].logprobs
        if self._num_top is None or not positions:
            return {}
        return {"logprobs": make_chat_logprobs(positions, self._num_top, self._tokenizer).content}

    def _make_end(self, output: RequestOutput, reader: AnswerReader) -> Json:
        metrics = output.metrics or RequestMetrics(arrival_time=0.0)
        begun = metrics.scheduled_ts or metrics.queued_ts or metrics.arrival_time
        first = metrics.first_token_ts or begun
        end: Json = {
            "done_reason": output.outputs[0].finish_reason,
            "total_duration": _to_ns(time.monotonic() - self._began),
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": _to_ns(first - begun),
            "eval_count": metrics.num_generation_tokens,
            "eval_duration": _to_ns((metrics.last_token_ts or first) - first),
        }
        return end | ({"tool_parse_error": True} if reader.num_errors else {})


def _to_ns(seconds: float) -> int:
    """At least 1: clients divide by durations."""
    return max(1, round(1e9 * seconds))


def _encode_failure(error: Exception) -> bytes:
    return encode_ollama_error(as_api_error(error)) + b"\n"


async def create_ollama_chat(serving: Serving, request: body.OllamaChatRequest, caller: Caller) -> Response:
    """Answer a conversation for Ollama's clients. Without messages: the model is loaded."""
    return await _answer(serving, request, caller, _read_chat(serving, request))


def _read_chat(serving: Serving, request: body.OllamaChatRequest) -> Conversation | None:
    messages = _make_messages(request.messages or [], serving.options.limits.max_messages)
    return _make_conversation(request, "messages", messages, request.tools or ()) if messages else None


async def create_ollama_generation(
    serving: Serving, request: body.OllamaGenerateRequest, caller: Caller
) -> Response:
    """Answer a prompt for Ollama's clients, as a user's message or raw. Without one: the model is loaded."""
    return await _answer(serving, request, caller, _read_prompt(serving, request))


def _read_prompt(serving: Serving, request: body.OllamaGenerateRequest) -> Conversation | str | None:
    prompt, system = request.prompt, request.system
    if request.raw and system:
        raise FieldError("system", system, "none with raw=true, whose prompt is the whole")
    if not prompt or request.raw or not (system or serving.tokenizer.has_chat_template):
        return prompt or None
    texts = {"system": system, "user": prompt}
    messages = [ChatMessage(role=role, content=text) for role, text in texts.items() if text]
    return _make_conversation(request, "prompt", messages)


async def _answer(
    serving: Serving, request: body.GenerationFields, caller: Caller, source: Conversation | str | None
) -> Response:
    """The answer to a conversation, or what goes on from a text."""
    answer = _Answer(serving, request)
    if request.think and not serving.is_thinking:
        raise FieldError("think", request.think, "false: this model does not think")
    if source is None:
        if str(request.keep_alive).rstrip("hmsnu") in ("0", "0.0"):
            allowed = "more than 0: a model that is served stays loaded until its server ends"
            raise FieldError("keep_alive", request.keep_alive, allowed)
        return answer.make_loaded()
    request.stream = request.stream is not False
    params = _make_params(serving, request)
    serving.check_room(params, caller)
    if isinstance(source, str):
        reader = AnswerReader(None)
        prepared = await prepare_params(
            serving, params, caller, _find_format(request.format), logprobs_name="top_logprobs"
        )
        (prompt,) = await tokenize_prompts(serving, [source], None, caller)
    else:
        prompt, prepared, reader = await prepare_conversation(serving, caller, params, source)
    del source  # the conversation is held by nobody while the answer is generated
    outputs = parse_outputs(serving, serving.generate(answer.id, prompt, prepared, caller, request), reader)
    if request.stream:
        return serving.stream(answer.stream(outputs, reader), answer.id, _encode_failure, NDJSON)
    return respond(await answer.complete(outputs, reader), answer.id)


async def create_ollama_embeddings(
    serving: Serving, request: body.OllamaEmbedRequest, caller: Caller
) -> Response:
    """Embed a text or texts for Ollama's clients."""
    began = time.monotonic()
    texts = [request.input] if isinstance(request.input, str) and request.input else request.input or []
    request.dimensions = request.dimensions or None
    vectors, num_tokens = await _embed(serving, caller, request, "input", list(texts))
    head = msgspec.json.encode({"model": request.model})[:-1]
    durations = b'"total_duration":%d,"load_duration":0,"prompt_eval_count":%d'
    counts = durations % (_to_ns(time.monotonic() - began), num_tokens)
    return JsonResponse(b'%b,"embeddings":%b,%b}' % (head, vectors, counts))


async def create_ollama_embedding(
    serving: Serving, request: body.OllamaEmbeddingsRequest, caller: Caller
) -> Response:
    """Embed one text, as Ollama's older clients ask."""
    texts = [request.prompt] if request.prompt else []
    vectors, _ = await _embed(serving, caller, request, "prompt", texts)
    return JsonResponse(b'{"embedding":%b}' % (vectors[1:-1] or b"[]"))


async def _embed(
    serving: Serving, caller: Caller, request: Any, field: str, texts: list[str]
) -> tuple[bytes, int]:
    """The JSON list of the texts' vectors, of length 1, and how many tokens the texts have."""
    if not texts:
        return b"[]", 0
    param_fields: dict[str, tuple[str, Any]] = {"use_activation": ("normalize", True)}
    if getattr(request, "truncate", None) is not False:
        param_fields["truncate_prompt_tokens"] = "truncate", -1
    params = pooling.make_params(serving, request, "embed", **param_fields)
    prompt = pooling.find_prompt(serving.model_texts, None, None)
    value = texts[0] if field == "prompt" else texts
    inputs = pooling.Inputs(*pooling.read_texts(field, value, serving.options.limits.max_inputs), prompt)
    made = await pooling.ask(serving, caller, pooling.VectorRequest(make_id("embd"), inputs, params, request))
    vectors, write = made.data, pooling.write_floats
    json = await pooling.write_beside(vectors, "float", lambda: pooling.join_list(map(write, vectors)))
    return json, made.num_tokens


_REFUSED: Refused = {
    "suffix": ("none: filling in the middle is not supported", is_off),
    "template": ("none: the template is the model's own", is_off),
    "context": ("none: /api/chat takes the messages that were before", is_off),
    "images": ("none: only text is supported", is_off),
}
ROUTES = [
    PostRoute("/api/chat", body.OllamaChatRequest, create_ollama_chat, task="generate"),
    PostRoute("/api/generate", body.OllamaGenerateRequest, create_ollama_generation, "generate", _REFUSED),
    PostRoute("/api/embed", body.OllamaEmbedRequest, create_ollama_embeddings, task="embed"),
    PostRoute("/api/embeddings", body.OllamaEmbeddingsRequest, create_ollama_embedding, task="embed"),
    *MODEL_ROUTES,
]
