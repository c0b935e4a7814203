"""How the engines of a server come and go: OnlyEngine, whose end is the server's, and Attachments, to several
daemons, each of which comes and goes without the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from ....ipc.errors import ConfigError, QuireError, UnknownDaemonError
from ...async_llm import AsyncLLM
from ...client.engine_connection import PhaseCallback
from ..options import HTTP_CLIENT_KIND
from ..serving import Serving
from .daemon_model import DaemonModel
from .served_models import ServedModel
from .server_parts import ServerParts

_RETRY_S = 1.0  # between looks for a daemon that is away
_FIRST_TRY_S = 10.0  # for each to come; the server then begins without those that have not
_logger = logging.getLogger("quire.serve")


class OnlyEngine:
    """As Attachments, for one Serving that is there from the beginning."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    @property
    def dead_error(self) -> Exception | None:
        """Why it has ended."""
        return self._serving.llm.dead_error

    async def start(self, on_phase: PhaseCallback | None = None) -> None:
        """Until requests may enter. Raises as AsyncLLM.start."""
        await self._serving.llm.start(on_phase)
        self._serving.open()
        self._serving.start_text()

    async def wait_until_dead(self) -> None:
        """Until it is gone for good."""
        await self._serving.llm.wait_until_dead()

    def shutdown(self) -> None:
        """Leave it, or end it if it is this process's own."""
        self._serving.llm.shutdown()


class Attachments:
    """Attaches to each daemon, and again whenever one that has ended is back. `models`: in their order."""

    dead_error: Exception | None = None  # a server over several daemons outlives each of them

    def __init__(self, daemons: Sequence[DaemonModel], parts: ServerParts) -> None:
        self.models = [ServedModel(known=known) for known in daemons]
        self._parts = parts
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self, _on_phase: PhaseCallback | None = None) -> None:
        """Until all have come or been found away, for a bounded time."""
        tried = [asyncio.Event() for _ in self.models]
        self._keepers = [
            asyncio.create_task(self._keep(model, event))
            for model, event in zip(self.models, tried, strict=True)
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_TRY_S):
                for event in tried:
                    await event.wait()

    async def wait_until_dead(self) -> None:
        """Never returns: whoever waits is cancelled."""
        await asyncio.Event().wait()

    def shutdown(self) -> None:
        """Leave them all."""
        for keeper in self._keepers:
            keeper.cancel()
        for model in self.models:
            if model.is_here:
                model.serving.llm.shutdown()

    async def _keep(self, model: ServedModel, tried: asyncio.Event) -> None:
        """Have the model served whenever its daemon is there."""
        while True:
            llm = AsyncLLM(attach=model.daemon, client_kind=HTTP_CLIENT_KIND)
            try:
                await llm.start()
                self._check_names(model, (llm.facts.served_model_name, *llm.facts.served_model_aliases))
                model.arrive(Serving(llm, self._parts))
                _logger.info("daemon %s: %r is served", model.daemon, model.name)
                tried.set()
                await llm.wait_until_dead()
                because = str(llm.dead_error)
            except UnknownDaemonError:  # what it ended of has been said
                because = model.away_because or f"no daemon {model.daemon!r} is running"
            except QuireError as error:
                because = str(error)
            except Exception as error:  # the other engines are served on, whatever it is
                _logger.error("daemon %s cannot be attached to", model.daemon, exc_info=error)
                because = f"it cannot be attached to: {type(error).__name__}"
            finally:
                llm.shutdown()
            if because != model.away_because:
                _logger.warning("daemon %s: %r is away: %s", model.daemon, model.name, because)
            model.leave(because)
            tried.set()
            await asyncio.sleep(_RETRY_S)

    def _check_names(self, model: ServedModel, names: Sequence[str]) -> None:
        """A daemon that has come back with another model may not take another daemon's name."""
        for other in self.models:
            taken = set(other.names) & set(names) if other is not model else set[str]()
            if taken:
                name = min(taken)
                raise ConfigError(
                    "served_model_name", name, f"another name than that of daemon {other.daemon}"
                )
