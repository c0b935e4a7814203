"""The formats that are known (known_formats.json). A new one is an entry there and a transcript in its test.

Sources: the models' chat templates, and for harmony github.com/openai/harmony docs/format.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...ipc.decoding import decode_json
from ...ipc.errors import ConfigError, ModelError
from ...ipc.protocol.messages import EngineFacts
from ...ipc.spec.config import ModelConfig
from .output_format import CallFormat, ChannelFormat, OutputFormat, ThinkingFormat
from .response_template import read_response_template

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer


THINK = ThinkingFormat("<think>\n", "\n</think>\n\n")


class _KnownFormat(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of known_formats.json, which are in the order in which chat templates are searched for signs.

    signs: a template that has all texts of one of these lists is for this format. parsers: vLLM's names of
    parsers that read it.
    """

    calls: CallFormat
    thinking: tuple[str, str] | None = None
    channels: ChannelFormat | None = None
    signs: Sequence[Sequence[str]] = ()
    parsers: Sequence[str] = ()


_KNOWN = decode_json(Path(__file__).with_suffix(".json").read_bytes(), dict[str, _KnownFormat])
FORMATS = {
    name: OutputFormat(
        name, ThinkingFormat(*known.thinking) if known.thinking else None, known.calls, known.channels
    )
    for name, known in _KNOWN.items()
}


# Which format a model writes, by the user's word, the checkpoint's description or its chat template.

_log = logging.getLogger(__name__)

# Our own names are allowed beside vLLM's.
TOOL_CALL_PARSERS = {alias: name for name, known in _KNOWN.items() for alias in (name, *known.parsers)}
_THINKING = {
    "granite": ThinkingFormat("Here is my thought process:", "Here is my response:"),
    "cohere_command4": FORMATS["cohere_command3"].thinking,
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
    with_signs = ((name, signs) for name, known in _KNOWN.items() for signs in known.signs)
    name = next((name for name, signs in with_signs if all(sign in template for sign in signs)), None)
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
