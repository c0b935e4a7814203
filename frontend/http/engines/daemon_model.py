"""DaemonModel: what a server over several daemons knows of each while its engine is away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from ....ipc.daemon.daemon_state import read_state
from ....ipc.daemon.run_dir import find_daemon, find_named
from ....ipc.errors import ConfigError
from ....ipc.network.tcp_address import is_tcp
from ....ipc.protocol.messages import EngineFacts
from ...client.remote_daemon import Attachment
from ...llm_engine import LLMEngine


class DaemonModel(msgspec.Struct, frozen=True):
    """A daemon, and what its engine served when it was last looked at. Fit to send."""

    daemon: Attachment
    # As in EngineFacts. All but the name are not known of one that starts.
    served_model_name: str
    max_model_len: int | None = None
    tasks: tuple[str, ...] = ("generate",)
    embedding_size: int = 0
    formats: str = ""
    model: str = ""
    weight_file: str = ""
    served_model_aliases: tuple[str, ...] = ()

    @classmethod
    def of(cls, daemon: Attachment, facts: EngineFacts) -> Self:
        """What its engine says that it serves."""
        shared = {name: getattr(facts, name) for name in cls.__struct_fields__ if name != "daemon"}
        return cls(daemon, **shared)

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it."""
        return (self.served_model_name, *self.served_model_aliases)


def find_starting_model(daemon: Attachment) -> DaemonModel | None:
    """What is known of a daemon on this machine whose engine has yet to start; None of any other."""
    if not isinstance(daemon, str) or is_tcp(daemon):
        return None
    find_daemon(daemon)
    state = read_state(find_named(daemon))
    return DaemonModel(daemon, state.model) if state is not None and state.state == "starting" else None


def load_daemon_model(daemon: Attachment, on_phase: Callable[[str], None] | None = None) -> DaemonModel:
    """What a daemon serves, when its engine is ready. Raises DaemonError if none of this name runs."""
    with LLMEngine.attach(daemon, client_kind="serve", on_phase=on_phase, has_tokenizer=False) as engine:
        return DaemonModel.of(daemon, engine.facts)


def load_daemon_models(
    daemons: Sequence[Attachment], on_phase: Callable[[str], None] | None = None
) -> tuple[DaemonModel, ...]:
    """Each one's, in this order; one that starts is not waited for.

    ConfigError when a request could not tell two of them apart, DaemonError for a name that none has.
    """
    models: list[DaemonModel] = []
    for daemon in daemons:
        if any(other.daemon == daemon for other in models):
            raise ConfigError("attach", daemon, "each daemon once")
        model = find_starting_model(daemon) or load_daemon_model(daemon, on_phase)
        for other in models:
            for name in set(model.names) & set(other.names):
                allowed = f"daemons whose models have names of their own (--served-model-name): both {name!r}"
                raise ConfigError("attach", f"{other.daemon}, {daemon}", allowed)
        models.append(model)
    return tuple(models)
