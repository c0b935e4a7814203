"""RequestNames: live requests by what their users call them, for aborts that come through another client."""

from __future__ import annotations

from collections.abc import Iterable

from ..scheduling.request import Request


class RequestNames:
    """Names need not be unique; a request without names costs nothing here."""

    def __init__(self) -> None:
        self._requests: dict[str, set[Request]] = {}

    def add(self, request: Request) -> None:
        """A request has come."""
        for name in request.options.names:
            self._requests.setdefault(name, set()).add(request)

    def remove(self, request: Request) -> None:
        """A request has ended."""
        for name in request.options.names:
            named = self._requests.get(name, set())
            named.discard(request)
            if not named:
                self._requests.pop(name, None)

    def find(self, names: Iterable[str]) -> set[Request]:
        """Live requests with one of the names."""
        return {request for name in names for request in self._requests.get(name, ())}
