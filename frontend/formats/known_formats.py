"""The formats that are known, by name. A new one is an entry here and a transcript in its test.

Sources: the models' chat templates, and for harmony github.com/openai/harmony docs/format.md.
"""
# ruff: noqa: RUF001 - DeepSeek writes its tokens with full-width bars

from __future__ import annotations

from dataclasses import replace

from .output_format import CallFormat, ChannelFormat, OutputFormat, ThinkingFormat

THINK = ThinkingFormat("<think>\n", "\n</think>\n\n")
_MISTRAL_THINK = ThinkingFormat("[THINK]", "[/THINK]")

_HERMES = CallFormat("<tool_call>\n", "", "\n</tool_call>", separator="\n", name_key="name")
_QWEN3_CODER = CallFormat(
    "<tool_call>\n<function=",
    ">\n",
    "</function>\n</tool_call>",
    separator="\n",
    form="xml",
    parameter_open="<parameter=",
    value_open=">\n",
    parameter_close="\n</parameter>\n",
)
_LLAMA3 = CallFormat(
    name_key="name", arguments_key="parameters", separator="; ", lead="<|python_tag|>", is_bare=True
)
_MISTRAL_LIST = CallFormat(section_open="[TOOL_CALLS] [", separator=", ", section_close="]", name_key="name")
_MISTRAL = CallFormat("[TOOL_CALLS]", "[ARGS]", call_id_open="[CALL_ID]")
_DEEPSEEK_V3 = CallFormat(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    section_open="<｜tool▁calls▁begin｜>",
    separator="\n",
    section_close="<｜tool▁calls▁end｜>",
)
_DEEPSEEK_V31 = CallFormat(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    section_open="<｜tool▁calls▁begin｜>",
    section_close="<｜tool▁calls▁end｜>",
)
_GLM = CallFormat(
    "<tool_call>",
    "\n",
    "</tool_call>",
    separator="\n",
    form="xml",
    parameter_open="<arg_key>",
    value_open="</arg_key>\n<arg_value>",
    parameter_close="</arg_value>\n",
)
_FUNCTION_GEMMA = CallFormat(
    "<start_function_call>call:", "", "<end_function_call>", form="braces", quote="<escape>"
)
_GEMMA4 = CallFormat("<|tool_call>call:", "", "<tool_call|>", form="braces", quote='<|"|>')
_PYTHONIC = CallFormat(
    "", "(", ")", section_open="[", separator=", ", section_close="]", form="python", is_bare=True
)
_LLAMA4 = replace(_PYTHONIC, lead="<|python_start|>")
_HARMONY = CallFormat(
    "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>", is_parallel=False
)
_HARMONY_CHANNELS = ChannelFormat(
    start="<|start|>assistant",
    channel="<|channel|>",
    body="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    recipient="to=functions.",
    thinking=("analysis",),
    final="final",
)

FORMATS: dict[str, OutputFormat] = {
    output_format.name: output_format
    for output_format in (
        OutputFormat("hermes", THINK, _HERMES),
        OutputFormat("qwen3_coder", THINK, _QWEN3_CODER),
        OutputFormat("llama3_json", None, _LLAMA3),
        OutputFormat("mistral_list", _MISTRAL_THINK, _MISTRAL_LIST),
        OutputFormat("mistral", _MISTRAL_THINK, _MISTRAL),
        OutputFormat("deepseek_v3", THINK, _DEEPSEEK_V3),
        OutputFormat("deepseek_v31", THINK, _DEEPSEEK_V31),
        OutputFormat("glm45", ThinkingFormat("<think>", "</think>\n"), _GLM),
        OutputFormat("functiongemma", None, _FUNCTION_GEMMA),
        OutputFormat("gemma4", ThinkingFormat("<|channel>thought\n", "<channel|>"), _GEMMA4),
        OutputFormat("pythonic", None, _PYTHONIC),
        OutputFormat("llama4_pythonic", None, _LLAMA4),
        OutputFormat(
            "harmony",
            ThinkingFormat("<|channel|>analysis<|message|>", "<|end|>"),
            _HARMONY,
            _HARMONY_CHANNELS,
        ),
    )
}
