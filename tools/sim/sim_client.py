"""SimClient: a frontend with the real ClientProtocol, EngineConnection and OutputProcessor in it.

Its engines are EngineLinks, as of real clients. It adds the order in which it looks: `sync`
reads what has arrived before it looks at the connection, `async` learns of either first.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, cast

from ...frontend.client.engine_links import EngineLinks
from ...frontend.requests.input_processor import EngineInput
from ...frontend.requests.output_processor import OutputProcessor, Sink
from ...frontend.requests.vectors.state import PoolingInput
from ...ipc.errors import QuireError
from .fake_worker import find_user_id
from .network import Timeline
from .sim_link import SimEngine, SimLink
from .violation import Violation

_LONGEST_LAG_S = 0.01


class SimClient:
    """A client of one engine or several."""

    def __init__(
        self,
        identity: bytes,
        kind: Literal["sync", "async"],
        engines: Sequence[SimEngine],
        timeline: Timeline,
        rng: random.Random,
    ) -> None:
        """`engines`: as far as they are found when it attaches."""
        self.identity = identity
        self.stopped_until = 0.0
        self.is_dead = False
        self._kind = kind
        self._timeline = timeline
        self._rng = rng
        self._processor = OutputProcessor(None, lambda: timeline.now)
        self._before_attach: list[Callable[[], None]] = []
        self._ended: set[str] = set()  # what the engine has yet to end for nobody
        self._is_attached = False
        self._links = EngineLinks(
            engines, lambda engine: SimLink(self, identity, cast(SimEngine, engine), timeline, rng), 0
        )

    @property
    def num_unfinished(self) -> int:
        """Requests that its user still waits for."""
        return self._processor.num_unfinished

    @property
    def num_resumable(self) -> int:
        """Requests in the ledgers whose answers somebody waits for."""
        return sum(name not in self._ended for link in self._links for name in link.protocol.ledger.ids)

    @property
    def num_owed(self) -> int:
        """Requests that an engine has yet to end: of a search those of its beams."""
        return len(self._processor.find_engine_ids(self._processor.request_ids))

    def check(self) -> None:
        """Raise Violation if a request is in two ledgers, or where the router does not know it."""
        if self._links.group is None:
            return
        places = Counter(request_id for link in self._links for request_id in link.protocol.ledger.ids)
        for link in self._links:
            for request_id in link.protocol.ledger.ids:
                known = self._links.group.router.find(request_id)
                if known != link.index or places[request_id] > 1:
                    raise Violation(f"{request_id} is in {places[request_id]} ledgers, and placed at {known}")

    # -- what its user does

    def add(self, make: Callable[[], EngineInput | PoolingInput], sink: Sink) -> None:
        """Add a request, once an engine was ready for the first time."""

        def add_now() -> None:
            request = make()
            self._processor.add_request(request, sink)
            self._links.target.add_requests([request.sequences[0]], self._timeline.now)
            self._send_waiting()

        if not self._is_attached:
            self._before_attach.append(add_now)
        else:
            self._when_awake(add_now)

    def abort(self, name: str) -> None:
        """Abort a request; nothing happens if it has ended."""

        def abort_now() -> None:
            if ids := self._processor.abort_requests([name]):
                self._ended.update(ids)
                self._links.target.abort_requests(ids)
                self._send_waiting()

        self._when_awake(abort_now)

    def abort_named(self, name: str) -> None:
        """Abort a request of any client by its name; lost while the engine cannot be reached."""

        def abort_now() -> None:
            self._links.target.abort_named([name], "")
            self._send_waiting()

        self._when_awake(abort_now)

    # -- faults

    def crash(self) -> None:
        """Its process ends."""
        self.is_dead = True
        for link in self._links:
            link.lose()

    def lose_connection(self, index: int) -> None:
        """Its connection to an engine ends, if there is one."""
        for link in self._links:
            if link.index == index:
                link.lose()

    # -- what it does by itself

    def _when_awake(self, action: Callable[[], None]) -> None:
        def act() -> None:
            if not self.is_dead:
                action()

        if self.stopped_until > self._timeline.now:
            self._timeline.call_at(self.stopped_until, act)
        else:
            act()

    def wake(self, link: SimLink) -> None:
        """Let it look at a link after a while."""
        lag_s = self._rng.uniform(0.0, _LONGEST_LAG_S) * self._rng.choice([1.0, 1.0, 1.0, 10.0])
        at = max(self.stopped_until, self._timeline.now + lag_s)
        self._timeline.call_at(at, lambda: self._pump(link))

    def _pump(self, link: SimLink) -> None:
        """Take what has arrived and notice what has become of the connection."""
        if self.is_dead or link.is_gone:
            return
        if self.stopped_until > self._timeline.now:
            self._timeline.call_at(self.stopped_until, lambda: self._pump(link))
            return
        now = self._timeline.now
        if self._kind == "async" and self._rng.random() < 0.5:
            link.connection.follow_connection(now)
        while not link.is_gone and (frames := link.connection.receive(now)) is not None:
            self._take(link, frames)
        link.connection.follow_connection(now)
        link.connection.send_waiting(now)
        self._links.lose_if_ended(link, now)
        self._settle()

    def _take(self, link: SimLink, frames: list[bytes]) -> None:
        try:
            outputs = self._links.take(link, frames, self._timeline.now)
        except QuireError as error:
            raise Violation(f"the client's user gets a {type(error).__name__}: {error}") from None
        followup = self._processor.process_outputs(outputs)
        if gaps := [name for name in followup.ids_to_abort if find_user_id(name) == name]:
            raise Violation(f"{gaps} came with a gap")
        if followup.ids_to_abort:
            self._ended.update(followup.ids_to_abort)
            self._links.target.abort_requests(followup.ids_to_abort)
        if followup.requests:
            self._links.target.add_requests(followup.requests, self._timeline.now)
        self._send_waiting()
        if self._links.are_ready:
            self._links.form_group()
            self._is_attached = True
            actions, self._before_attach = self._before_attach, []
            for action in actions:
                action()

    def _settle(self) -> None:
        if self._links.group is not None and self._links.group.settle(self._timeline.now):
            self._send_waiting()
        self.check()

    def _send_waiting(self) -> None:
        for link in list(self._links):
            link.connection.send_waiting(self._timeline.now)
