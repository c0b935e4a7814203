"""One line for a person: how a model's thoughts and tool calls are read."""

from __future__ import annotations

from ...ipc.config import ModelConfig
from ...ipc.messages import EngineFacts
from .output_format import OutputFormat


def summarize(output_format: OutputFormat | None, chosen: EngineFacts | ModelConfig) -> str:
    """Such as 'calls: hermes; thoughts: none (from the chat template)'. `chosen`: by the operator."""
    source = "from the chat template"
    if chosen.tool_call_parser or chosen.reasoning_parser:
        source = "as chosen by --tool-call-parser or --reasoning-parser"
    elif output_format is not None and output_format.name == "response_template":
        source = "from tokenizer_config.json"
    described = "calls: none; thoughts: none" if output_format is None else output_format.describe()
    return f"{described} ({source})"
