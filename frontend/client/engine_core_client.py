"""EngineCoreClient: a frontend's tie to its engines, used from one event loop.

A client knows requests and outputs, not what they mean: text, parents and deltas are the processors' work.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from ...ipc.protocol.messages import EngineCoreOutput, EngineCoreRequest, EngineFacts
from .utility_calls import UtilityCalls


class EngineCoreClient(UtilityCalls):
    """What every client offers. `facts` hold from the moment that it is ready."""

    facts: EngineFacts
    startup: list[tuple[str, float]]  # (phase, seconds) from the client's construction to ready

    @property
    def engines(self) -> dict[int, EngineFacts]:
        """What each engine that is there says of itself, by its number; one alone is 0."""
        return {0: self.facts}

    @abstractmethod
    def check_usable(self) -> None:
        """Raise EngineDeadError when the engine has ended, or in a fork of the process that it belongs to."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """As `add_requests` of one."""
        self.add_requests([request])

    @abstractmethod
    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Hand requests to the engine, many in one message. Raises EngineDeadError if there is none.

        Each is taken on or refused, and answered, on its own.
        """

    def add_requests_soon(self, requests: Sequence[EngineCoreRequest]) -> None:
        """As `add_requests`, perhaps together with others. One that cannot be sent ends with an error, as an
        output.
        """
        self.add_requests(requests)

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests; each live one still gets its final output."""

    @abstractmethod
    def abort_named(self, names: Sequence[str], tenant: str) -> None:
        """End requests of any client of the engine, by a name that they came with or the id that live views
        show; '': of every tenant.

        Those that it does not find it ignores. While the engine is being restarted nothing happens.
        """

    @abstractmethod
    async def get_outputs(self) -> list[EngineCoreOutput]:
        """Wait for outputs; called by one task only, without which no utility call is answered.

        Raises EngineDeadError with the cause when the engine has ended; so does every call that still waits.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the engine; a private one ends with its processes within 2 s. Idempotent; safe at exit."""
