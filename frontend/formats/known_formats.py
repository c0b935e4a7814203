"""The formats that are known, by name. A new one is an entry here and a transcript in its test.

Sources: the models' chat templates, and for harmony github.com/openai/harmony docs/format.md.
"""

# ruff: noqa: RUF001 - DeepSeek writes its tokens with full-width bars

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ...ipc.errors import ConfigError, ModelError
from ...ipc.protocol.messages import EngineFacts
from ...ipc.spec.config import ModelConfig
from .output_format import CallFormat, ChannelFormat, OutputFormat, ThinkingFormat
from .response_template import read_response_template

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer


THINK = ThinkingFormat("<think>\n", "\n</think>\n\n")
_COHERE_THINK = ThinkingFormat("<|START_THINKING|>", "<|END_THINKING|>")
_MISTRAL_THINK = ThinkingFormat("[THINK]", "[/THINK]")

_HERMES = CallFormat("<tool_call>\n", "", "\n</tool_call>", separator="\n", name_key="name")
_LONGCAT = replace(_HERMES, open="<longcat_tool_call>\n", close="\n</longcat_tool_call>")
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
_SEED_OSS = replace(
    _QWEN3_CODER,
    open="<seed:tool_call>\n<function=",
    close="</function>\n</seed:tool_call>",
    value_open=">",
    parameter_close="</parameter>\n",
)
_MINIMAX_M2 = CallFormat(
    '<invoke name="',
    '">\n',
    "</invoke>\n",
    section_open="<minimax:tool_call>\n",
    section_close="</minimax:tool_call>",
    form="xml",
    parameter_open='<parameter name="',
    value_open='">',
    parameter_close="</parameter>\n",
)
_LLAMA3 = CallFormat(
    name_key="name", arguments_key="parameters", separator="; ", lead="<|python_tag|>", is_bare=True
)
_MISTRAL_LIST = CallFormat(section_open="[TOOL_CALLS] [", separator=", ", section_close="]", name_key="name")
_GRANITE = replace(_MISTRAL_LIST, section_open="<|tool_call|>[")
_HUNYUAN = replace(_MISTRAL_LIST, section_open="<tool_calls>[", section_close="]</tool_calls>")
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
_KIMI_K2 = CallFormat(
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    section_open="<|tool_calls_section_begin|>",
    section_close="<|tool_calls_section_end|>",
    is_numbered=True,
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
_GLM47 = replace(
    _GLM, name_close="", separator="", value_open="</arg_key><arg_value>", parameter_close="</arg_value>"
)
_FUNCTION_GEMMA = CallFormat(
    "<start_function_call>call:", "", "<end_function_call>", form="braces", quote="<escape>"
)
_GEMMA4 = CallFormat("<|tool_call>call:", "", "<tool_call|>", form="braces", quote='<|"|>')
_PYTHONIC = CallFormat(
    "", "(", ")", section_open="[", separator=", ", section_close="]", form="python", is_bare=True
)
_LLAMA4 = replace(_PYTHONIC, lead="<|python_start|>")
_LFM2 = replace(
    _PYTHONIC, section_open="<|tool_call_start|>[", section_close="]<|tool_call_end|>", is_bare=False
)
_OLMO3 = replace(
    _PYTHONIC,
    section_open="<function_calls>",
    section_close="</function_calls>",
    separator="\n",
    is_bare=False,
)
_INTERNLM = CallFormat(
    "<|action_start|><|plugin|>\n",
    "",
    "<|action_end|>\n",
    name_key="name",
    arguments_key="parameters",
    is_parallel=False,
)
_GRANITE_20B = replace(_HERMES, open="<function_call> ", close="")
_GIGACHAT3 = replace(_HERMES, open="<|function_call|>", close="", is_parallel=False)
_NEMOTRON_V2 = replace(_MISTRAL_LIST, section_open="<TOOLCALL>[", section_close="]</TOOLCALL>")
_FUNCTOOLS = replace(_MISTRAL_LIST, section_open="functools[")
_PHI4_MINI = replace(_GRANITE, section_close="]<|/tool_call|>")
_XLAM = replace(_MISTRAL_LIST, section_open="[", is_bare=True)
_COHERE = CallFormat(
    section_open="<|START_ACTION|>[\n    ",
    separator=",\n    ",
    section_close="\n]<|END_ACTION|>",
    name_key="tool_name",
    arguments_key="parameters",
    number_key="tool_call_id",
)
_APERTUS = CallFormat(
    '{"', '": ', "}", section_open="<|tools_prefix|>[", separator=", ", section_close="]<|tools_suffix|>"
)
_FUNCTIONARY = CallFormat("<function=", ">", "</function>")
_MINICPM5 = replace(
    _QWEN3_CODER,
    open='<function name="',
    name_close='">',
    close="</function>",
    parameter_open='<param name="',
    value_open='">',
    parameter_close="</param>",
)
_DEEPSEEK_V32 = replace(
    _MINIMAX_M2,
    open='<｜DSML｜invoke name="',
    close="</｜DSML｜invoke>\n",
    section_open="<｜DSML｜function_calls>\n",
    section_close="</｜DSML｜function_calls>",
    lead="<｜DSML｜tool_calls>",
    parameter_open='<｜DSML｜parameter name="',
    value_open='" string="true">',
    json_value_open='" string="false">',
    parameter_close="</｜DSML｜parameter>\n",
)
_DEEPSEEK_V4 = replace(
    _DEEPSEEK_V32,
    section_open="<｜DSML｜tool_calls>\n",
    section_close="</｜DSML｜tool_calls>",
    lead="<｜DSML｜function_calls>",
)
_STEP3 = replace(
    _MINIMAX_M2,
    open='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
    close="</steptml:invoke><｜tool_call_end｜>\n",
    section_open="<｜tool_calls_begin｜>\n",
    section_close="<｜tool_calls_end｜>",
    parameter_open='<steptml:parameter name="',
    parameter_close="</steptml:parameter>\n",
)
_HY_V3 = replace(
    _GLM, name_close="<tool_sep>\n", section_open="<tool_calls>\n", section_close="\n</tool_calls>"
)
_SOLAR_OPEN2 = replace(
    _GLM,
    open="<|tool_call:start|>",
    close="<|tool_call:end|>",
    parameter_open="<|tool_arg:start|>",
    value_open="<|tool_arg:value|>",
    parameter_close="<|tool_arg:end|>\n",
)
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
        OutputFormat("longcat", THINK, _LONGCAT),
        OutputFormat("llama3_json", None, _LLAMA3),
        OutputFormat("mistral_list", _MISTRAL_THINK, _MISTRAL_LIST),
        OutputFormat("mistral", _MISTRAL_THINK, _MISTRAL),
        OutputFormat("deepseek_v3", THINK, _DEEPSEEK_V3),
        OutputFormat("deepseek_v31", THINK, _DEEPSEEK_V31),
        OutputFormat("kimi_k2", THINK, _KIMI_K2),
        OutputFormat("glm45", ThinkingFormat("<think>", "</think>\n"), _GLM),
        OutputFormat("glm47", ThinkingFormat("<think>", "</think>"), _GLM47),
        OutputFormat("seed_oss", ThinkingFormat("<seed:think>", "</seed:think>"), _SEED_OSS),
        OutputFormat("minimax_m2", THINK, _MINIMAX_M2),
        OutputFormat("granite", None, _GRANITE),
        OutputFormat("hunyuan_a13b", ThinkingFormat("<think>\n", "\n</think>\n"), _HUNYUAN),
        OutputFormat("lfm2", None, _LFM2),
        OutputFormat("olmo3", THINK, _OLMO3),
        OutputFormat("internlm", None, _INTERNLM),
        OutputFormat("granite-20b-fc", None, _GRANITE_20B),
        OutputFormat("gigachat3", None, _GIGACHAT3),
        OutputFormat("nemotron_v2", THINK, _NEMOTRON_V2),
        OutputFormat("phi4_mini", None, _PHI4_MINI),
        OutputFormat("phi4_mini_json", None, _FUNCTOOLS),
        OutputFormat("xlam", None, _XLAM),
        OutputFormat("cohere_command3", _COHERE_THINK, _COHERE),
        OutputFormat("apertus", ThinkingFormat("<|inner_prefix|>", "<|inner_suffix|>"), _APERTUS),
        OutputFormat("functionary_v31", None, _FUNCTIONARY),
        OutputFormat("minicpm5", THINK, _MINICPM5),
        OutputFormat("deepseek_v32", THINK, _DEEPSEEK_V32),
        OutputFormat("deepseek_v4", THINK, _DEEPSEEK_V4),
        OutputFormat("step3", THINK, _STEP3),
        OutputFormat("hy_v3", THINK, _HY_V3),
        OutputFormat("solar_open2", None, _SOLAR_OPEN2),
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


# Which format a model writes, by the user's word, the checkpoint's description or its chat template.

_log = logging.getLogger(__name__)

# vLLM's names of parsers that read one of our formats; our own names are allowed beside them.
TOOL_CALL_PARSERS = {name: name for name in FORMATS} | {
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "mimo": "qwen3_coder",
    "llama4_json": "llama3_json",
    "jamba": "hunyuan_a13b",
    "ernie45": "hermes",
    "step3p5": "qwen3_coder",
    "openai": "harmony",
    "granite4": "hermes",
    "poolside_v1": "glm45",
    "cohere_command4": "cohere_command3",
}
_THINKING = {
    "granite": ThinkingFormat("Here is my thought process:", "Here is my response:"),
    "cohere_command4": _COHERE_THINK,
} | {name: known.thinking for name, known in FORMATS.items() if known.thinking and not known.channels}
REASONING_PARSERS = _THINKING | dict.fromkeys(
    (
        "deepseek_r1",
        "deepseek_v3",
        "qwen3",
        "ernie45",
        "mimo",
        "nemotron_v3",
        "olmo3",
        "step3p5",
        "poolside_v1",
    ),
    THINK,
)
_HARMONY_REASONING = ("openai_gptoss", "harmony")

# The first whose texts are all in a chat template is the one of its calls.
_CALL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>", "<|start|>"), "harmony"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>",), "gemma4"),
    (("｜DSML｜", "function_calls>"), "deepseek_v32"),
    (("｜DSML｜",), "deepseek_v4"),
    (("<steptml:invoke",), "step3"),
    (("<tool_sep>", "<arg_key>"), "hy_v3"),
    (("<|tool_call:start|>",), "solar_open2"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|action_start|>",), "internlm"),
    (("<|function_call|>",), "gigachat3"),
    (("<TOOLCALL>",), "nemotron_v2"),
    (("<param name=",), "minicpm5"),
    (("functools[",), "phi4_mini_json"),
    (("<|/tool|>",), "phi4_mini"),
    (("<function_calls>",), "olmo3"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("</arg_key><arg_value>",), "glm47"),
    (("<arg_key>",), "glm45"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<function=",), "functionary_v31"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral"),
    (("[TOOL_CALLS]",), "mistral_list"),
    (("<longcat_tool_call>",), "longcat"),
    (("<tool_call>",), "hermes"),
    (("<|tool_call|>",), "granite"),
    (("<tool_calls>",), "hunyuan_a13b"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
)
_THINKING_SIGNS: tuple[tuple[str, str], ...] = (
    ("<|channel>thought", "gemma4"),
    ("<|START_THINKING|>", "cohere_command3"),
    ("<|inner_prefix|>", "apertus"),
    ("[THINK]", "mistral"),
    ("<seed:think>", "seed_oss"),
    ("</think>", "deepseek_r1"),
)


def choose_output_format(
    tokenizer: Tokenizer, tool_call_parser: str | None = None, reasoning_parser: str | None = None
) -> OutputFormat | None:
    """The format of a model's outputs, bound to its tokenizer; None if it has neither thoughts nor calls.

    The arguments override the format of calls and that of thoughts; "none" means that there are none. Raises
    ConfigError for an unknown name, or if the two cannot be had together.
    """
    check_parsers(tool_call_parser, reasoning_parser)
    described = _find_format(tokenizer, "hf" in (tool_call_parser, reasoning_parser))
    chosen = _override_calls(described, tool_call_parser)
    chosen = _override_thinking(chosen, reasoning_parser)
    return chosen.bind(tokenizer) if chosen.calls or chosen.thinking else None


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise ConfigError for a name that is not known; whether two fit together is seen with the model."""
    _check_parser("tool_call_parser", tool_call_parser, [*TOOL_CALL_PARSERS, "none", "hf"])
    reasoning_parsers = [*REASONING_PARSERS, *_HARMONY_REASONING, "none", "hf"]
    _check_parser("reasoning_parser", reasoning_parser, reasoning_parsers)


def _check_parser(field: str, name: str | None, allowed: list[str]) -> None:
    if name is not None and name not in allowed:
        raise ConfigError(field, name, f"one of {', '.join(sorted(allowed))}")


def _find_format(tokenizer: Tokenizer, must_describe: bool) -> OutputFormat:
    """What a checkpoint itself says. must_describe: it has to have a response_template that can be read."""
    if tokenizer.response_template is not None or must_describe:
        try:
            return read_response_template(tokenizer.response_template, tokenizer.eos_token)
        except ModelError as error:
            if must_describe:
                raise
            _log.warning("%s; the format of outputs is guessed from the chat template", error)
    return find_by_template(tokenizer.template_source)


def find_by_template(template: str) -> OutputFormat:
    """The format whose markers a chat template writes; one without calls and thoughts if there are none."""
    name = next((name for signs, name in _CALL_SIGNS if all(sign in template for sign in signs)), None)
    calls = FORMATS[name] if name else OutputFormat("none")
    if calls.channels is not None:
        return calls
    sign = next((name for sign, name in _THINKING_SIGNS if sign in template), None)
    thinking = REASONING_PARSERS[sign] if sign else None
    # A format's own thoughts are those of its family, to the white space.
    if calls.thinking and thinking and calls.thinking.open.strip() == thinking.open.strip():
        return calls
    return replace(calls, thinking=thinking)


def _override_calls(described: OutputFormat, name: str | None) -> OutputFormat:
    if name is None or name == "hf":
        return described
    if name == "none":
        return described if described.channels else replace(described, name="none", calls=None)
    calls = FORMATS[TOOL_CALL_PARSERS[name]]
    if calls.name == "mistral" and described.name == "mistral_list":
        calls = FORMATS["mistral_list"]  # one name for both in vLLM; the template tells them apart
    if calls.channels or described.channels:
        return calls if calls.channels else replace(calls, thinking=None)
    return replace(calls, thinking=described.thinking)


def _override_thinking(chosen: OutputFormat, name: str | None) -> OutputFormat:
    is_harmony = name in _HARMONY_REASONING
    if name is None or name == "hf" or (is_harmony and chosen.channels):
        return chosen
    if is_harmony and chosen.calls is None:
        return FORMATS["harmony"]
    if is_harmony or chosen.channels:
        raise ConfigError("reasoning_parser", name, f"one that fits calls in the format {chosen.name}")
    return replace(chosen, thinking=None if name == "none" else REASONING_PARSERS[name])


def summarize(output_format: OutputFormat | None, chosen: EngineFacts | ModelConfig) -> str:
    """Such as 'calls: hermes; thoughts: none (from the chat template)'. `chosen`: by the operator."""
    source = "from the chat template"
    if chosen.tool_call_parser or chosen.reasoning_parser:
        source = "as chosen by --tool-call-parser or --reasoning-parser"
    elif output_format is not None and output_format.name == "response_template":
        source = "from tokenizer_config.json"
    described = "calls: none; thoughts: none" if output_format is None else output_format.describe()
    return f"{described} ({source})"
