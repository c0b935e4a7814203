"""EndWatch: which requests of a core must have ended: by aborts that it has taken, and by timeouts."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...core.engine.engine_core import EngineCore
from ...core.scheduling.request import Request
from ...ipc.protocol.messages import AbortRequests, EngineCoreOutput, EngineCoreRequest


class EndWatch:
    """Of one life of a core, which calls `note` before and `check` after it takes what was sent."""

    def __init__(self) -> None:
        # Of live ones: by timeout_s or an abort, and by queue_timeout_s.
        self._due_at: dict[str, tuple[float, float]] = {}
        self._named_at: dict[str, float] = {}  # when requests of this name were last aborted
        self._ended: set[tuple[bytes, str]] = set()  # (client, request), as the client was told

    def note(self, core: EngineCore, client: bytes, message: object, now: float) -> None:
        """The core is about to take this message of a client."""
        live = _find_live(core)
        match message:
            case EngineCoreRequest(request_id=request_id, options=options) if request_id not in live:
                timeout_s = math.inf if options.timeout_s is None else options.timeout_s
                queue_timeout_s = options.queue_timeout_s
                if queue_timeout_s is None or message.output_token_ids:
                    queue_timeout_s = math.inf
                self._due_at[request_id] = now + timeout_s, now + queue_timeout_s
                if message.output_token_ids and self._was_named(message):
                    self._due_at[request_id] = now, now
                self._ended.discard((client, request_id))
            case AbortRequests(request_ids=request_ids, names=names):
                self._named_at.update(dict.fromkeys(names, now))
                for name, request in live.items():
                    is_named = name in names or not set(names).isdisjoint(request.options.names)
                    if is_named or (name in request_ids and request.client == client):
                        self._due_at[name] = now, now
            case _:
                pass

    def _was_named(self, request: EngineCoreRequest) -> bool:
        """Whether it was aborted on its way here, which is remembered of those that have begun."""
        names = (request.request_id, *request.options.names)
        return any(request.arrival_time <= self._named_at.get(name, -math.inf) for name in names)

    def find_overdue(self, core: EngineCore | None, now: float, late_s: float = 0.0) -> list[str]:
        """The requests that are live though they should have ended so long ago, and why."""
        if core is None:
            return []
        live = _find_live(core)
        self._due_at = {name: due_at for name, due_at in self._due_at.items() if name in live}
        before = now - late_s
        overdue: list[str] = []
        for name, (end_at, begin_at) in self._due_at.items():
            if end_at <= before:
                overdue.append(f"{name} is live {now - end_at:.3f} s after its timeout, or its abort")
            elif begin_at <= before and not live[name].has_begun:
                overdue.append(f"{name} has waited {now - begin_at:.3f} s longer than its queue_timeout_s")
        return overdue

    def find_late(self, client: bytes, outputs: list[EngineCoreOutput]) -> list[str]:
        """Of outputs that a client is sent those of requests that have ended before."""
        late: list[str] = []
        for output in outputs:
            if (client, output.request_id) in self._ended:
                late.append(f"{output.request_id} has {output.new_token_ids} after its end")
            if output.finish_reason is not None:
                self._ended.add((client, output.request_id))
        return late


def _find_live(core: EngineCore) -> Mapping[str, Request]:
    return core._requests  # pyright: ignore[reportPrivateUsage]
