"""vLLM's arguments for what Quire does not have: the values that leave it off are taken and dropped.

So a script runs unchanged, and another value is refused with what Quire lacks, or has instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from ..errors import InputError, did_you_mean

NO_LORA = "Quire has no LoRA adapters yet"
NO_MEDIA = "Quire reads only text"


class AbsentArgument(NamedTuple):
    """What there is to say of it; and which values, beside None, ask for nothing."""

    reason: str
    off: tuple[Any, ...] = ()

    def is_off(self, value: Any) -> bool:
        """Whether a value asks for nothing. True is not taken for 1."""
        return value is None or any(
            value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off
        )

    def describe_allowed(self) -> str:
        """What follows 'expected' in an error."""
        shown = [off for off in self.off if off not in ("", [], {})][:3] or [None]
        return f"{' or '.join(map(repr, shown))}: {self.reason}"


def read_rows(table: Mapping[str, str]) -> dict[str, AbsentArgument]:
    """Of reason -> names, each with the values that leave it off: name=JSON,JSON."""
    rows: dict[str, AbsentArgument] = {}
    for reason, words in table.items():
        for word in words.split():
            name, _, values = word.partition("=")
            rows[name] = AbsentArgument(reason, tuple(msgspec.json.decode(f"[{values}]")))
    return rows


# Of LLM.generate, chat, beam_search, encode and so on, AsyncLLM's calls and LLMEngine.add_request.
CALL_ARGUMENTS = read_rows(
    {
        NO_LORA: "lora_request",
        NO_MEDIA: "mm_processor_kwargs={}",
        "Quire has no prompt adapters": "prompt_adapter_request",
        "the chat template says how contents are written": 'chat_template_content_format="auto"',
        "truncate_prompt_tokens cuts a prompt, truncation_side says where": "tokenization_kwargs={}",
        "it is SamplingParams(structured_outputs=...)": "guided_options_request={}",
        "a prompt may be a text or token ids": "prompt_token_ids prompt_text",
        "quire serve follows traces of its requests": "trace_headers={}",
        "Quire chooses the engine of a request": "data_parallel_rank",
        "max_num_seqs bounds what runs at a time": "concurrency_limit",
        "Quire starts by itself, in processes of its own": "start_engine_loop=true "
        "stat_loggers usage_context enable_multiprocessing=true,false",
        "Quire finds in the prompt whether thoughts have ended": "reasoning_ended",
    }
)

# Of SamplingParams and PoolingParams.
PARAMS_FIELDS = read_rows(
    {
        "an engine has logits_processors": "logits_processors=[]",
        "LLM.beam_search": "use_beam_search=false length_penalty=1 early_stopping=false",
        "a prompt is text or token ids": "prompt_embeds",
        "Quire copies what it keeps": "skip_clone=false,true",
        "logprobs are a list of dicts": "flat_logprobs=false",
        "quire serve takes it in requests": "thinking_token_budget",
        "Quire does not have it": "output_text_buffer_length=0 routed_experts_prompt_start "
        "requires_token_ids=false step_tag_id returned_token_ids late_interaction_params",
        "it is SamplingParams(extra_args=...)": "extra_kwargs={}",
    }
)


def drop_absent(
    values: Mapping[str, Any],
    rows: Mapping[str, AbsentArgument] = CALL_ARGUMENTS,
    error: type[InputError] = InputError,
) -> dict[str, Any]:
    """The values of arguments that are no rows. Raises `error` for a row's value that asks for something."""
    for name, value in values.items():
        if name in rows and not rows[name].is_off(value):
            raise error(name, value, rows[name].describe_allowed())
    return {name: value for name, value in values.items() if name not in rows}


def check_absent(values: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise InputError for a call's argument that is none of `known`, unless it asks for nothing."""
    for name, value in drop_absent(values).items():
        raise InputError(name, value, f"no such argument{did_you_mean(name, known)}")
