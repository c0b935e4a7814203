"""How a frontend starts an engine, and reads what lies beside the weights: tokenizer, sampling defaults."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..ipc.files.file_identity import check_served
from ..ipc.protocol.messages import EngineFacts
from ..ipc.spec.config import EngineConfig
from .client.async_engine_core_client import AsyncMPClient, make_async_client
from .client.engine_connection import PhaseCallback
from .client.engine_core_client import EngineCoreClient
from .client.inproc_client import InprocClient
from .models.hf_config import read_default_sampling
from .models.model_files import read_json
from .text.tokenizer import Tokenizer, load_tokenizer


async def start_engine(
    config: EngineConfig, on_phase: PhaseCallback | None = None
) -> tuple[AsyncMPClient, Tokenizer | None]:
    """A private engine; the tokenizer is read while it starts in its own processes.

    `on_phase` is told each start-up phase as it begins. Raises ConfigError, ModelError, EngineStartError.
    """
    loop, reader = asyncio.get_running_loop(), ThreadPoolExecutor(max_workers=1)
    model = config.model
    try:
        loading = loop.run_in_executor(reader, load_named_tokenizer, model.tokenizer, model.chat_template)
        client = await make_async_client(config, on_phase)
        try:
            return client, await loading
        except BaseException:
            client.close()
            raise
    finally:
        reader.shutdown(wait=False)


async def start_engine_here(
    config: EngineConfig, on_phase: PhaseCallback | None = None
) -> tuple[EngineCoreClient, Tokenizer | None]:
    """As `start_engine`, of a caller that may have core and worker in its own process: "uni"."""
    if config.parallel.executor_backend != "uni":
        return await start_engine(config, on_phase)
    tokenizer = load_named_tokenizer(config.model.tokenizer, config.model.chat_template)
    return InprocClient(config, on_phase), tokenizer


def load_named_tokenizer(folder: str, chat_template: str | None) -> Tokenizer | None:
    """The tokenizer that a config or an engine's facts name, None when that is ''."""
    return load_tokenizer(folder, chat_template) if folder else None


def load_served_tokenizer(facts: EngineFacts) -> Tokenizer | None:
    """That of an engine that runs, if its files are still those that it was started with.

    Raises FilesChangedError.
    """
    check_served(facts.noted, facts.model, facts.tokenizer)
    tokenizer = load_named_tokenizer(facts.tokenizer, facts.chat_template)
    check_served(facts.noted, facts.model, facts.tokenizer)  # they may have been replaced meanwhile
    return tokenizer


def read_served_sampling(facts: EngineFacts) -> dict[str, Any]:
    """What the model recommends in its generation_config.json, if the engine is to use it."""
    if facts.generation_config != "auto":
        return {}
    return read_default_sampling(read_json(Path(facts.model) / "generation_config.json"))
