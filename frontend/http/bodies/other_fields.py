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

    It makes None of a value that is refused, of which `hint` says what there is instead. unless: fields of
    the request that bring the value to bear, with what leaves them off; with another it is refused.
    """

    hint: str
    read: Callable[[Any], Any]
    becomes: str = ""
    unless: Mapping[str, Any] = {}


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


def _read_reasoning(value: Any) -> Any:
    """OpenRouter's."""
    match value:
        case {"effort": str(effort), **rest} if rest in ({}, {"exclude": False}):
            return effort
        case _:
            return DROPPED if value in ({}, {"exclude": False}) else None


def _read_table(table: Mapping[str, str]) -> dict[str, OtherField]:
    return {name: _off(row) for name, row in read_rows(table).items()}


_REPEAT = "repetition_penalty, which counts the prompt and all of the answer"
_PENALTIES = {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}
_OF_PENALTIES = _SMALL._replace(hint=_REPEAT, unless=_PENALTIES)
_BOOL = "true or false, as chat_template_kwargs.enable_thinking"
# Names of one meaning: of TGI, SGLang, Cohere, Mistral, llama.cpp, DashScope, and of vLLM before.
_SAME = {
    "max_tokens": "max_new_tokens",
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
    "use_cache provider route drop_params caching tags chat_id trace_id guided_decoding_backend"
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
    "timeout_s": "t_max_predict_ms=0,-1 t_max_prompt_ms=0,-1 timeout",
    "return_token_ids": "return_tokens=false",
    "/metrics has times": "timings_per_token=false return_progress=false",
    "an answer comes whole, or as stream=true has it": "response_fields n_indent=0",
    "thoughts are in reasoning_content, unless include_reasoning=false": 'reasoning_format="auto","deepseek" '
    "reasoning_in_content=false separate_reasoning=true stream_reasoning=true",
    "the server's --tool-call-parser": "parse_tool_calls=true",
    "the server's --max-model-len": "num_ctx ctx_len n_ctx truncation_length",
    "the server's": "prompt_lookup_num_tokens=0",
    "what is in it stands beside the other fields": "options extra_body params parameters",
    "/v1/completions takes a prompt as it is": "raw=false",
    "reasoning_effort, or chat_template_kwargs": "think thinking_forced_open=false",
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
    "only text is supported": "images image_data audio_data video_data files",
    "model: /v1/models has this server's": "models",
    "truncate_prompt_tokens": 'transforms prompt_truncate_len context_length_exceeded_behavior="error"',
    "there are none": "plugins",
    "stream_options.include_usage": 'usage={"include":false}',
    "the client's own, no part of a body": "extra_headers extra_query max_retries=0",
    "tools": "features background_tasks tool_ids tool_servers",
    "texts are embedded each for itself": "late_chunking=false",
    "encoding_format": 'embedding_type="float"',
    "use_activation": "normalized=true",
}
REQUEST_FIELDS: dict[str, OtherField] = {
    **{name: _same(ours) for ours, names in _SAME.items() for name in names.split()},
    **dict.fromkeys(("n_predict", "num_predict"), _same("max_tokens", -1)),
    "guided_json_object": _same("structured_outputs.json_object", False),
    "enable_thinking": OtherField(
        _BOOL,
        lambda value: value if isinstance(value, bool) else None,
        "chat_template_kwargs.enable_thinking",
    ),
    "thinking": OtherField(
        "reasoning_effort, or chat_template_kwargs",
        lambda value: "none" if value == {"type": "disabled"} else None,
        "reasoning_effort",
    ),
    "reasoning": OtherField("reasoning_effort", _read_reasoning, "reasoning_effort"),
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
    "reasoning": "thinking thinking_blocks reasoning_details tool_plan",
    "content": "citations parts is_error=false logprobs",
    "name": "tool_name",
    "the type of a part stands in content": 'type="text","message"',
}
MESSAGE_FIELDS = dict.fromkeys(_DROPPED_OF_MESSAGES.split(), _SMALL) | _read_table(_OFF_OF_MESSAGES)
PART_FIELDS = dict.fromkeys(("id", "index"), _SMALL) | _read_table({"text": "citations"})


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
        if value is None or made is DROPPED:
            del fields[name]
        elif made is not None and row.becomes.partition(".")[0] in known:
            del fields[name]
            _put(fields, row.becomes, made, f"{place}.{name}" if place else name, value)


def _put(fields: dict[str, Any], path: str, made: Any, name: str, value: Any) -> None:
    field, _, key = path.partition(".")
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
