"""The engine of one command: its own, or a running daemon's."""

from __future__ import annotations

from ..client.remote_daemon import Attachment
from ..engine_args import EngineArgs
from ..llm_engine import LLMEngine
from .progress import PhaseLine


def start_engine(engine_args: EngineArgs | None, attach: Attachment | None) -> LLMEngine:
    """Start an engine, or attach to the daemon `attach` where `engine_args` is None.

    Raises ConfigError or ModelError before anything is started, EngineStartError if it fails, DaemonError
    when no such daemon runs.
    """
    if engine_args is None:
        assert attach is not None
        return LLMEngine.attach(attach, client_kind="cli")
    with PhaseLine(f"loading {engine_args.model}") as line:
        return LLMEngine.from_engine_args(engine_args, line.show)
