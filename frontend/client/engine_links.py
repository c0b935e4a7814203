"""EngineLinks: the engines of one client, each with its socket and protocol: one, or a group of them.

The client and the simulator's drive this, each with its own way to wait. With one engine there is neither
group nor router.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import zmq

from ...ipc.errors import EngineDeadError, QuireError
from ...ipc.protocol.client_protocol import ClientProtocol
from ...ipc.protocol.messages import EngineCoreOutput, EngineFacts, EngineRoster, RosterEntry
from .engine_connection import EngineConnection, EngineSocket, PhaseCallback, close_connection
from .engine_group import EngineGroup, RequestTarget
from .engines import Engine, EngineProcess

GATHER_S = 1.0  # for the others of a group, once one of its engines is there
SEARCH_INTERVAL_S = 1.0  # while none is there: those that are known may all have been removed

_log = logging.getLogger(__name__)


class Link(Protocol):
    """One engine, and what is said to it. The simulator has one of its own."""

    engine: Engine
    is_gone: bool  # for good; its socket is closed, or will be
    connection: EngineConnection
    protocol: ClientProtocol

    @property
    def index(self) -> int:
        """Its number in its group."""
        ...

    def close(self) -> None:
        """Leave the engine, or end it if it is private. Idempotent."""
        ...


L = TypeVar("L", bound=Link)


class EngineLink(Link):
    """The link of a client with sockets."""

    def __init__(self, engine: Engine, client_kind: str, weight: float) -> None:
        """Raises ConfigError for a weight that the engine would not take."""
        self.engine = engine
        self.is_gone = False
        self.socket = EngineSocket(engine.address, engine.keys, engine.handshakes)
        engine.on_silence(self.socket.reconnect)
        try:
            self.connection = EngineConnection(engine, self.socket, client_kind, weight)
        except BaseException:
            self.socket.close(0)
            raise
        self.protocol = self.connection.protocol

    @property
    def index(self) -> int:
        return self.engine.index

    def close(self) -> None:
        close_connection(self.engine, self.socket)


class EngineLinks(Generic[L]):
    """`target` takes requests: the protocol of the only engine, or the `group` of several.

    `on_added` is told of links that a roster has brought, `on_lost` of those that have ended for good while
    others go on, before they are closed.
    """

    target: RequestTarget

    def __init__(self, engines: Sequence[Engine], make_link: Callable[[Engine], L], place: int) -> None:
        """Takes the engines over: they end if this raises ConfigError, as `make_link` may. Clients of
        different `place` begin with different engines.
        """
        self._make_link = make_link
        self._place = place
        self._roster: EngineRoster | None = None
        self._away: set[int] = set()  # as the roster says
        self._links: list[L] = []
        self._searched_at = 0.0
        self.shown_facts: EngineFacts | None = None  # the client's: of the first, at the start of any
        self.on_added: Callable[[L], None] = lambda _: None
        self.on_lost: Callable[[L], None] = lambda _: None
        self.group: EngineGroup | None = None
        try:
            for engine in engines:
                self._links.append(make_link(engine))
        except BaseException:
            for engine in engines:
                engine.stop()
            self.close()
            raise
        self.target = self._links[0].protocol

    def take(
        self, link: L, frames: list[bytes], now: float, on_phase: PhaseCallback | None = None
    ) -> list[EngineCoreOutput]:
        """Take one message of an engine in; the outputs to deliver. The group is to `settle` then.

        Raises as EngineConnection.take when nobody is left.
        """
        was_open = link.protocol.is_open
        try:
            outputs = link.connection.take(frames, now, on_phase)
        except QuireError as error:
            link.protocol.end(str(error))
            if not self.lose_if_ended(link, now):
                raise
            return []
        finally:
            facts = link.protocol.facts
            if facts is not None and not was_open and (link is self.first or self.group is None):
                self.shown_facts = facts
        if self.group is not None:
            outputs = self.group.take_outputs(outputs, now)
        if (roster := self._take_new_roster(link)) is not None:
            self._follow(roster, now)
        return outputs

    def __iter__(self) -> Iterator[L]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)

    @property
    def first(self) -> L:
        """The one whose facts are the client's."""
        return self._links[0]

    @property
    def facts(self) -> dict[int, EngineFacts]:
        """What each engine that is there says of itself, by its number."""
        opened = [link for link in self._links if link.protocol.is_open]
        return {link.index: link.protocol.facts for link in opened if link.protocol.facts is not None}

    @property
    def are_ready(self) -> bool:
        """Whether the client is ready: all engines that it has started are open, or one of a daemon's."""
        opened = [link.protocol.is_open for link in self._links]
        return all(opened) if self.first.engine.is_own else any(opened)

    @property
    def are_gathered(self) -> bool:
        """Whether every engine is open, but for those that the roster says are away."""
        return all(link.protocol.is_open or link.index in self._away for link in self._links)

    @property
    def are_open(self) -> bool:
        """Whether an engine is there."""
        return any(link.protocol.is_open for link in self._links)

    @property
    def have_ended(self) -> bool:
        """Whether none is left."""
        return all(link.protocol.end_reason is not None for link in self._links)

    def find(self, index: int | None) -> L:
        """The engine of this number; None: one that is there, if there is any. Raises EngineDeadError if it
        is gone.
        """
        for link in self._links:
            if link.index == index or (index is None and link.protocol.is_open):
                return link
        if index is None:
            return self.first
        raise EngineDeadError(f"engine {index} is gone")

    def check(self) -> None:
        """Raise EngineDeadError when no engine is left, or in a fork of the process that they belong to."""
        self.first.engine.check_owner()
        for link in self._links:
            if link.protocol.end_reason is not None and (not self._can_lose(link) or self.have_ended):
                link.protocol.check()

    def end(self, reason: str) -> None:
        """Nothing more is expected of any."""
        for link in self._links:
            link.protocol.end(reason)

    def form_group(self) -> None:
        """Once there are several engines, and they are ready: `target` becomes a group of them."""
        facts = next(iter(self.facts.values()), self.shown_facts)
        if self.group is None and len(self._links) > 1 and facts is not None:
            block_size = facts.block_size if facts.num_gpu_blocks else 0
            self.group = self.target = EngineGroup(
                block_size, self._place % len(self._links), facts.num_gpu_blocks or None
            )
            for link in self._links:
                self.group.add_engine(link.index, link.protocol)
            self._note_draining()

    def _can_lose(self, link: L) -> bool:
        """Whether others go on if this one has ended for good. At the start each of its own must come."""
        has_started = self.group is not None or not link.engine.is_own
        return has_started and len(self._links) > 1 and link in self._links

    def lose_if_ended(self, link: L, now: float) -> bool:
        """Let go of it if it has ended for good and others go on; whether it was so."""
        if link.protocol.end_reason is None or not self._can_lose(link):
            return False
        self._lose(link, now)
        return True

    def _lose(self, link: L, now: float) -> None:
        """It has ended for good: what it had goes on elsewhere."""
        self._links.remove(link)
        link.is_gone = True
        link.protocol.connection_lost(now)
        is_removed = link.protocol.end_reason is None and link.protocol.refusal is None
        level = logging.INFO if is_removed else logging.ERROR
        link.protocol.end(f"engine {link.index} was removed")
        _log.log(level, "%s; engines that go on: %d", link.protocol.end_reason, len(self._links))
        if self.group is not None:
            self.group.remove_engine(link.index, now)
        else:
            self.target = self.first.protocol
        self.shown_facts = self.first.protocol.facts or self.shown_facts
        self.on_lost(link)
        link.close()

    def _take_new_roster(self, link: L) -> EngineRoster | None:
        """The roster that this engine has told, if it is newer than all before."""
        roster = link.protocol.roster
        if roster is None or (self._roster is not None and roster.version <= self._roster.version):
            return None
        self._roster = roster
        self._away = {entry.index for entry in roster.engines if entry.is_away}
        return roster

    @property
    def next_search_at(self) -> float | None:
        """When `search` is due, None while an engine is there, or if there can be no others."""
        if self.first.engine.is_own or self.are_open:
            return None
        return self._searched_at + SEARCH_INTERVAL_S

    def search(self, now: float) -> None:
        """If it is due, connect to engines that no roster has told of. One of them tells who there is."""
        due_at = self.next_search_at
        if due_at is not None and now >= due_at:
            self._searched_at = now
            self._connect(self.first.engine.find_siblings())

    def _follow(self, roster: EngineRoster, now: float) -> None:
        """Connect to engines that are new in a roster, and lose those that are not in it any more."""
        self._connect(roster.engines)
        listed = {entry.index for entry in roster.engines}
        for link in list(self._links):
            if link.index not in listed and self._can_lose(link):
                self._lose(link, now)

    def _connect(self, entries: Iterable[RosterEntry]) -> None:
        """To those that are not known."""
        known = {link.index for link in self._links}
        added: list[L] = []
        for entry in entries:
            if entry.index not in known:
                try:
                    engine = self.first.engine.make_sibling(entry)
                    added.append(self._make_link(engine))
                except (QuireError, OSError, zmq.ZMQError) as error:
                    _log.error("engine %d of the group cannot be reached: %s", entry.index, error)
        self._links += added
        self.form_group()
        if self.group is not None:
            for link in added:
                if not self.group.has_engine(link.index):
                    self.group.add_engine(link.index, link.protocol)
            self._note_draining()
        for link in added:
            self.on_added(link)

    def _note_draining(self) -> None:
        """Have the group know of whom the roster says so."""
        entries = [] if self._roster is None else self._roster.engines
        for entry in entries:
            if self.group is not None and self.group.has_engine(entry.index):
                self.group.set_draining(entry.index, entry.is_draining)

    def close(self) -> None:
        """Leave all engines; private ones end, all at the same time. Idempotent."""
        for link in self._links:
            if isinstance(link.engine, EngineProcess):
                link.engine.ask_to_end()
        for link in self._links:
            link.close()


def connect_links(engines: Sequence[Engine], client_kind: str, weight: float) -> EngineLinks[EngineLink]:
    """As EngineLinks, with sockets."""
    return EngineLinks(engines, lambda engine: EngineLink(engine, client_kind, weight), os.getpid())
