"""One line for a person: how a model's thoughts and tool calls are read."""

from __future__ import annotations

from ...ipc.config import ModelConfig
from ...ipc.messages import EngineFacts
from .output_format import OutputFormat


def summarize(output_format: OutputFormat | None, chosen: EngineFacts | ModelConfig) -> str:
    """Such as 'tool calls and thoughts: hermes (from the chat template)'. `chosen`: by the operator."""
    source = "from the chat template"
    if chosen.tool_call_parser or chosen.reasoning_parser:
        source = "as chosen by --tool-call-parser or --reasoning-parser"
    elif output_format is not None and output_format.name == "response_template":
        source = "from tokenizer_config.json"
    if output_format is None:
        return f"tool calls and thoughts: not told from text ({source})"
    calls, thinking = output_format.calls, output_format.thinking
    if calls is None and thinking is not None:
        return f"thoughts: {thinking.open.strip()} ({source})"
    found = "tool calls and thoughts" if thinking is not None else "tool calls"
    return f"{found}: {output_format.name} ({source})"
