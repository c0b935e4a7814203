"""DaemonModel: what a server over several daemons knows of each while its engine is away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from ....ipc.errors import ConfigError
from ....ipc.messages import EngineFacts
from ...client.engine_core_client import attach_sync_client
from ...client.remote_daemon import Attachment


class DaemonModel(msgspec.Struct, frozen=True):
    """A daemon, and what its engine served when it was last looked at. Fit to send."""

    daemon: Attachment
    model: str
    max_model_len: int
    tasks: tuple[str, ...] = ("generate",)
    embedding_size: int = 0
    root: str = ""  # where its engine found it

    @classmethod
    def of(cls, daemon: Attachment, facts: EngineFacts) -> Self:
        """What its engine says that it serves."""
        name, root = facts.served_model_name, facts.model
        return cls(daemon, name, facts.max_model_len, facts.tasks, facts.embedding_size, root)


def load_daemon_model(daemon: Attachment, on_phase: Callable[[str], None] | None = None) -> DaemonModel:
    """What a daemon serves, when its engine is ready. Raises DaemonError if none of this name runs."""
    with contextlib.closing(attach_sync_client(daemon, "serve", on_phase=on_phase)) as client:
        return DaemonModel.of(daemon, client.facts)


def load_daemon_models(
    daemons: Sequence[Attachment], on_phase: Callable[[str], None] | None = None
) -> tuple[DaemonModel, ...]:
    """Each one's, in this order. ConfigError when a request could not tell two of them apart."""
    found: dict[str, DaemonModel] = {}
    for daemon in daemons:
        one = load_daemon_model(daemon, on_phase)
        other = found.setdefault(one.model, one)
        if other.daemon == daemon and other is not one:
            raise ConfigError("attach", daemon, "each daemon once")
        if other is not one:
            allowed = (
                f"daemons whose models have names of their own (--served-model-name): both {one.model!r}"
            )
            raise ConfigError("attach", f"{other.daemon}, {daemon}", allowed)
    return tuple(found.values())
