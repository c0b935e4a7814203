"""Fields of other engines and clients that requests do not have: which are taken, what is said of others.

Only a body with a field that its Struct does not know is read by these tables, so other requests pay nothing.
A row takes the values that ask for nothing; a value with exactly the meaning of a field of ours becomes that
field; of any other value its hint says what there is instead. What is taken and dropped is small.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, cast

import msgspec

from ....ipc.params.absent_arguments import AbsentArgument, read_rows
from ..errors import FieldError

_MAX_DROPPED_BYTES = 4096  # of a value that is taken and says nothing of the answer
DROPPED = object()  # what a row makes of a value that asks for nothing


class OtherField(NamedTuple):
    """`read` makes the value of our field `becomes` of another's, DROPPED of what asks for nothing.

    It makes None of a value that is refused, of which `hint` says what there is instead, and Several of what
    several fields of ours say. unless: fields of the request that bring the value to bear, with what leaves
    them off; with another it is refused. beside: fields of ours that say the same, so with one it is dropped.
    """

    hint: str
    read: Callable[[Any], Any]
    becomes: str = ""
    unless: Mapping[str, Any] = {}
    beside: Collection[str] = ()


class Several(dict[str, Any]):
    """What a value becomes, by the paths of our fields."""


def _off(row: AbsentArgument) -> OtherField:
    """Taken if it asks for nothing, or is empty."""
    return OtherField(
        row.reason, lambda value: DROPPED if row.is_off(value) or value in ("", [], {}) else None
    )


def _same(name: str, *off_values: Any) -> OtherField:
    """Another name of our field `name`, whose own check knows its values."""
    off = _off(AbsentArgument("", off_values)).read
    return OtherField(f"it is {name} here", lambda value: off(value) or value, name)


def _read_small(value: Any) -> Any:
    return DROPPED if len(msgspec.json.encode(value)) <= _MAX_DROPPED_BYTES else None


_SMALL = OtherField("a small value, which says nothing of the answer", _read_small)


_ENABLED = "chat_template_kwargs.enable_thinking"
_BUDGET = "thinking_token_budget"


def _read_reasoning(value: Any) -> Any:
    """OpenRouter's, and that of clients that send both APIs of OpenAI the same: there are no summaries."""
    if not isinstance(value, dict):
        return None
    made = Several()
    for name, item in cast(dict[str, Any], value).items():
        match name, item:
            case ("effort", str()):
                made["reasoning_effort"] = item
            case ("enabled", bool()):
                made |= {_ENABLED: True} if item else {"reasoning_effort": "none"}
            case ("max_tokens", int()) if not isinstance(item, bool):
                made[_BUDGET] = item
            case ("exclude", True):
                made["include_reasoning"] = False
            case ("exclude", None | False) | ("summary" | "generate_summary", _):
                pass
            case _:
                return None
    return made or DROPPED


def _read_thinking(value: Any) -> Any:
    """Anthropic's, as DeepSeek, GLM and Kimi have it in chats."""
    match value:
        case {"type": "disabled"} if len(value) == 1:
            return Several(reasoning_effort="none")
        case {"type": "enabled" | "adaptive", **rest}:
            budget = rest.pop("budget_tokens", None)
            if rest.pop("clear_thinking", None) not in (None, False) or rest:
                return None
            return Several({_ENABLED: True} if budget is None else {_ENABLED: True, _BUDGET: budget})
        case _:
            return None


def _read_usage(value: Any) -> Any:
    """OpenRouter's."""
    return True if value == {"include": True} else DROPPED if value in ({}, {"include": False}) else None


def _join_thoughts(value: Any) -> Any:
    """A message's thoughts as OpenRouter and LiteLLM list them; those that another server has encrypted are
    left out, as in /v1/responses.
    """
    if not isinstance(value, list):
        return None
    texts: list[str] = []
    for part in cast(list[Any], value):
        match part:
            case {"type": "reasoning.text", "text": str(text)} | {"type": "thinking", "thinking": str(text)}:
                texts.append(text)
            case {"type": "reasoning.summary" | "reasoning.encrypted" | "redacted_thinking"}:
                pass
            case _:
                return None
    return "".join(texts) or DROPPED


def _read_table(table: Mapping[str, str]) -> dict[str, OtherField]:
    return {name: _off(row) for name, row in read_rows(table).items()}


_REPEAT = "repetition_penalty, which counts the prompt and all of the answer"
_PENALTIES = {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}
_OF_PENALTIES = _SMALL._replace(hint=_REPEAT, unless=_PENALTIES)
_BOOL = "true or false, as chat_template_kwargs.enable_thinking"
# Names of one meaning: of TGI, SGLang, Cohere, Mistral, llama.cpp, DashScope, and of vLLM before.
_SAME = {
    "max_tokens": "max_new_tokens max_output_tokens n_predict num_predict",
    "thinking_token_budget": "thinking_budget",
    "min_tokens": "min_new_tokens",
    "stop": "stop_sequences",
    "seed": "random_seed",
    "n": "num_return_sequences",
    "request_id": "rid",
    "structured_outputs.json": "guided_json json_schema",
    "structured_outputs.regex": "guided_regex regex",
    "structured_outputs.choice": "guided_choice choice",
    "structured_outputs.grammar": "guided_grammar grammar ebnf",
    "structured_outputs.whitespace_pattern": "guided_whitespace_pattern",
    "structured_outputs.structural_tag": "structural_tag",
}
# What only another field brings to bear, and what says nothing of the answer.
_DROPPED = (
    "mirostat_tau mirostat_eta dynatemp_exponent dynatemp_low dynatemp_high smoothing_curve xtc_threshold "
    "dry_base "
    "dry_allowed_length dry_penalty_last_n dry_sequence_breakers n_keep n_discard id_slot slot_id keep_alive "
    "use_cache provider providerOptions route drop_params caching tags id chat_id trace_id "
    "guided_decoding_backend cache_control ttl "
    "litellm_metadata litellm_session_id litellm_trace_id litellm_call_id num_retries cache no-log "
    "allowed_openai_params additional_drop_params custom_llm_provider fallbacks stream_timeout api_version"
)
_OFF = {
    "Quire samples by temperature, top_k, top_p and min_p": "typical_p=1 typical=1 tfs_z=1 top_a=0 "
    "top_n_sigma=-1,0 "
    "mirostat=0 dynatemp_range=0 xtc_probability=0 samplers sampler_priority sampler_order min_keep=0 "
    "penalty_alpha=0 epsilon_cutoff=0 eta_cutoff=0 smoothing_factor=0 dynamic_temperature=false "
    "temperature_last=false",
    _REPEAT: "repeat_penalty=1 encoder_repetition_penalty=1 repetition_penalty_range=0",
    "repetition_penalty, or repetition_detection": "dry_multiplier=0 no_repeat_ngram_size=0",
    "guidance is not supported": "guidance_scale=1 negative_prompt",
    "use_beam_search=true with n": "num_beams=1",
    "temperature=0 takes the likeliest token": "do_sample=true",
    "skip_reading_prefix_cache=true": "cache_prompt=true",
    "logprobs": "n_probs=0 details=false post_sampling_probs=false",
    "prompt_logprobs": "decoder_input_details=false",
    "timeout_s": "t_max_predict_ms=0,-1 t_max_prompt_ms=0,-1 timeout request_timeout",
    "return_token_ids": "return_tokens=false",
    "/metrics has times": "timings_per_token=false return_progress=false perf_metrics_in_response=false",
    "an answer comes whole, or as stream=true has it": "response_fields n_indent=0",
    "thoughts are in reasoning_content, unless include_reasoning=false": 'reasoning_format="auto",'
    '"deepseek","parsed" '
    "reasoning_in_content=false separate_reasoning=true stream_reasoning=true",
    "the server's --tool-call-parser": "parse_tool_calls=true",
    "the server's --max-model-len": "num_ctx ctx_len n_ctx truncation_length",
    "the server's": "prompt_lookup_num_tokens=0 draft_model",
    "what is in it stands beside the other fields": "options extra_body params parameters",
    "/v1/completions takes a prompt as it is": "raw=false",
    "reasoning_effort, or chat_template_kwargs": "think thinking_forced_open=false",
    "answers are not moderated": "moderation safety_model guardrails",
    "web search is not supported": 'search_parameters={"mode":"off"} enable_search=false web_search=false '
    'citation_options="disabled" include_domains exclude_domains',
    "an answer is in choices": 'incremental_output=true result_format="message" raw_output=false '
    "deferred=false",
    "truncate_prompt_tokens, which cuts the prompt's beginning": "context_management",
    "calls are not checked": "disable_tool_validation=false",
    "chat_template_kwargs": "variables",
    "response_format": "format",
    "structured_outputs": "guided_decoding",
    "structured_outputs.grammar": "grammar_string",
    "a message with the role system": "system safe_prompt=false",
    "the whole conversation is in messages": "context session_params conversation_id thread_id "
    "parent_message_id",
    "logit_bias, or bad_words": "custom_token_bans",
    "ignore_eos": "ban_eos_token=false",
    "echo": "return_full_text=false",
    "watermarks are not supported": "watermark=false",
    "without max_tokens an answer may fill the context": "auto_max_new_tokens=false",
    "include_stop_str_in_output": "no_stop_trim=false",
    "stop, which has texts": "stop_regex",
    "Quire has no LoRA adapters yet": "lora_path lora lora_request adapter_id",
    "/pooling, of a model with runner='pooling'": "return_hidden_states=false return_multivector=false",
    "vllm_xargs, with the server's --logits-processors": "custom_logit_processor logits_processors "
    "custom_params",
    "prompt, which takes token ids": "input_ids",
    "cache_salt": "extra_key",
    "only text is supported": "images image_data audio_data video_data files vl_high_resolution_images=false",
    "model: /v1/models has this server's": "models",
    "truncate_prompt_tokens": 'transforms prompt_truncate_len context_length_exceeded_behavior="error"',
    "there are none": "plugins nvext",
    "the client's own, no part of a body": "extra_headers extra_query max_retries=0",
    "tools": "features background_tasks tool_ids tool_servers",
    "texts are embedded each for itself": "late_chunking=false",
    "encoding_format": 'embedding_type="float"',
    "use_activation": "normalized=true",
}
REQUEST_FIELDS: dict[str, OtherField] = {
    **{name: _same(ours) for ours, names in _SAME.items() for name in names.split()},
    "guided_json_object": _same("structured_outputs.json_object", False),
    "enable_thinking": OtherField(
        _BOOL,
        lambda value: value if isinstance(value, bool) else None,
        "chat_template_kwargs.enable_thinking",
    ),
    "thinking": OtherField("reasoning_effort, or chat_template_kwargs", _read_thinking, "reasoning_effort"),
    "reasoning": OtherField("reasoning_effort", _read_reasoning, "reasoning_effort"),
    "usage": OtherField("stream_options.include_usage", _read_usage, "stream_options.include_usage"),
    **dict.fromkeys(("repeat_last_n", "penalize_nl"), _OF_PENALTIES),
    **dict.fromkeys(_DROPPED.split(), _SMALL),
    **_read_table(_OFF),
}
# Of a message: what clients add to what they were answered, or to what they keep of it.
_DROPPED_OF_MESSAGES = (
    "id created created_at createdAt timestamp index model weight finish_reason stop_reason usage timings "
    "metadata copilot_cache_control"
)
_OFF_OF_MESSAGES = {
    "continue_final_message=true": "prefix=false partial=false",
    "only text is supported": "images files attachments experimental_attachments",
    "reasoning": "thinking tool_plan",
    "content": "citations parts is_error=false logprobs",
    "name": "tool_name",
    "the type of a part stands in content": 'type="text","message"',
}
_THOUGHTS = OtherField("reasoning", _join_thoughts, "reasoning", beside=("reasoning", "reasoning_content"))
MESSAGE_FIELDS = {
    **dict.fromkeys(_DROPPED_OF_MESSAGES.split(), _SMALL),
    **_read_table(_OFF_OF_MESSAGES),
    **dict.fromkeys(("thinking_blocks", "reasoning_details"), _THOUGHTS),
}
PART_FIELDS = {
    **dict.fromkeys(("id", "index", "prompt_cache_breakpoint"), _SMALL),
    **_read_table({"text": "citations"}),
}
# Of OpenAI's Responses: calls by programs and tools that are looked up are not supported. And what stands
# elsewhere in the other of OpenAI's APIs.
_OFF_OF_TOOLS = {
    "it stands within function, as chats have it": "name description",
    "what is in it stands beside type, as /v1/responses has it": "function",
    "calls are the model's own": 'allowed_callers=["direct"]',
    "tools are offered at once": "defer_loading=false",
}
TOOL_FIELDS = {"output_schema": _SMALL} | _read_table(_OFF_OF_TOOLS)
ITEM_FIELDS = _read_table({"calls are the model's own": 'caller={"type":"direct"}'})


def take_other_fields(
    fields: dict[str, Any], known: Collection[str], rows: Mapping[str, OtherField], place: str = ""
) -> None:
    """Take out of `fields` what rows take, and put what becomes a field of ours in its place.

    known: names that the object has. Raises FieldError for another value beside the field that it would
    become; what rows do not take stays.
    """
    for name in [name for name in fields if name not in known and name in rows]:
        row, value = rows[name], fields[name]
        is_used = any(fields.get(other) not in (None, off) for other, off in row.unless.items())
        made = None if value is None or is_used else row.read(value)
        if value is None or made is DROPPED or any(fields.get(other) for other in row.beside):
            del fields[name]
        elif made is not None and row.becomes.partition(".")[0] in known:
            del fields[name]
            for path, part in made.items() if isinstance(made, Several) else ((row.becomes, made),):
                _put(fields, path, part, f"{place}.{name}" if place else name, value)


def _put(fields: dict[str, Any], path: str, made: Any, name: str, value: Any) -> None:
    field, _, key = path.partition(".")
    if field == "stream_options" and not fields.get("stream"):
        return  # a whole answer has its usage
    inner = fields if not key else fields.get(field)
    if inner is None:
        inner = fields[field] = {}
    key = key or field
    if not isinstance(inner, dict):
        return  # which is refused for what it is
    inner = cast(dict[str, Any], inner)
    if inner.get(key, made) not in (None, made):
        raise FieldError(name, value, f"the same as {path}, or nothing beside it", "unsupported_field")
    inner[key] = made
