"""OnlyEngine: the life of the engine of a server that has one, and ends with it."""

from __future__ import annotations

from ...client.engine_connection import PhaseCallback
from ..serving import Serving


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
