"""EngineGroup: the engines of one client as one. Pure: a driver has the connections, and tells the time.

Every request is in one engine's ledger. As long as an engine is there that takes new requests, one that is
lost (or its worker is) or draining keeps none: they are added elsewhere with the tokens they have, at once.
Only a request that two engines were lost with in a row stays where it is, and runs alone when that engine is
back (blame.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from ...ipc.protocol.client_protocol import ClientProtocol
from ...ipc.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FrontendCounts,
    UtilityMethod,
)
from ...ipc.protocol.request_ledger import LedgerEntry
from .engine_router import EngineRouter

# While requests come: so long at most, shorter with few engines. Several frontends know of each other's
# requests by digests alone.
DIGEST_INTERVAL_S = 1.0
_DIGEST_SHARE_S = 0.1  # an engine
MAX_ASKED = 3  # engines, whether they have room for a request

_log = logging.getLogger(__name__)


class RequestTarget(Protocol):
    """Where requests go: the only engine's ClientProtocol, or a group. Those say what each method does."""

    def add_requests(self, requests: Sequence[EngineCoreRequest], now: float) -> None: ...
    def abort_requests(self, request_ids: list[str]) -> None: ...
    def abort_named(self, names: Sequence[str], tenant: str) -> None: ...
    def send(self, message: FrontendCounts) -> None: ...


class _Member:
    def __init__(self, protocol: ClientProtocol) -> None:
        self.protocol = protocol
        self.is_draining = False
        self.was_able = False  # when `settle` looked last
        self.digest_call: int | None = None

    @property
    def is_able(self) -> bool:
        """Whether its requests get on: it is reached, and has a worker."""
        return self.protocol.is_open and self.protocol.has_worker

    @property
    def takes_new(self) -> bool:
        return self.is_able and not self.is_draining


class EngineGroup:
    """ClientProtocols by the number of their engine. `settle` after anything has happened to one of them."""

    def __init__(self, block_size: int, start: int = 0, num_blocks: int | None = None) -> None:
        """As EngineRouter."""
        self.router = EngineRouter(block_size, start=start, num_blocks=num_blocks)
        self._members: dict[int, _Member] = {}
        self._is_settled = True
        self._next_digest_at = 0.0

    def add_engine(self, index: int, protocol: ClientProtocol) -> None:
        """There is one more, with the requests that are in its ledger."""
        member = self._members[index] = _Member(protocol)
        self.router.add_engine(index)
        for request_id in protocol.ledger.ids:
            self.router.place_at(request_id, index)
        self.router.set_takes_new(index, member.takes_new)
        self._note_number()

    def has_engine(self, index: int) -> bool:
        """Whether there is one of this number."""
        return index in self._members

    def remove_engine(self, index: int, now: float) -> None:
        """It is gone for good: its requests go on elsewhere. It must not be the last."""
        entries = self._members.pop(index).protocol.ledger.release(is_lost=True)
        self._note_number()
        for entry in entries:
            self.router.remove(entry.request.request_id)
        self.router.remove_engine(index)  # first: where no other takes new requests it would be chosen again
        self._place_again(entries, now)

    def _note_number(self) -> None:
        for member in self._members.values():
            member.protocol.has_others = len(self._members) > 1

    def set_draining(self, index: int, is_draining: bool) -> None:
        """A draining engine gets no new requests, and those that it has are moved."""
        member = self._members[index]
        if member.is_draining != is_draining:
            member.is_draining = is_draining
            self.router.set_takes_new(index, member.takes_new)
            self._is_settled = False

    # What the client wants, as ClientProtocol has it.

    def add_requests(self, requests: Sequence[EngineCoreRequest], now: float) -> None:
        """Hand each to the engine that is best for it."""
        if now >= self._next_digest_at:
            if now >= self._next_digest_at + DIGEST_INTERVAL_S:  # nobody has asked for a while
                self.router.forget_others()
            self._next_digest_at = now + self._digest_interval_s
            self._ask_digests(self._members.values())
        batches: dict[int, list[EngineCoreRequest]] = {}
        for request in requests:
            batches.setdefault(self.router.place(request), []).append(request)
        for index, batch in batches.items():
            self._members[index].protocol.add_requests(batch, now)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Ask the engines to end requests."""
        for index, ids in self._find_places(request_ids).items():
            self._members[index].protocol.abort_requests(ids)

    def abort_named(self, names: Sequence[str], tenant: str) -> None:
        """Ask each engine that is there to end requests of any client."""
        for member in self._members.values():
            member.protocol.abort_named(names, tenant)

    def send(self, message: FrontendCounts) -> None:
        """Tell one engine what was counted here: readers add up what they say."""
        for member in self._members.values():
            if member.protocol.is_open:
                member.protocol.send(message)
                return

    # What the engines say, and what becomes of them.

    def take_outputs(self, outputs: Iterable[EngineCoreOutput], now: float) -> list[EngineCoreOutput]:
        """The outputs to deliver, of those that one engine has sent and its ledger has let through. A request
        that it had no room for is added elsewhere instead, so `settle` has something to send.
        """
        kept: list[EngineCoreOutput] = []
        for output in outputs:
            if output.error_code is ErrorCode.OVERLOADED and self._ask_another(output.request_id, now):
                continue
            kept.append(output)
            if output.finish_reason is not None:
                self.router.remove(output.request_id)
            else:
                self.router.note_output(output.request_id)
        return kept

    def settle(self, now: float) -> bool:
        """Take digests in, move requests of lost and draining engines; True if something is to be sent."""
        for index, member in self._members.items():
            protocol = member.protocol
            if member.is_able != member.was_able:
                self._note_change(index, member, now)
            if member.digest_call is not None and (result := protocol.answers.get(member.digest_call)):
                protocol.end_call(member.digest_call)
                member.digest_call = None
                if result.digest is not None:
                    self.router.take_digest(index, result.digest)
        if not self._is_settled and any(member.takes_new for member in self._members.values()):
            self._is_settled = True
            self._move_all(now)
        return any(member.protocol.outbox for member in self._members.values())

    def _note_change(self, index: int, member: _Member, now: float) -> None:
        """An engine computes again, or does not any more."""
        member.was_able = member.is_able
        self.router.set_takes_new(index, member.takes_new)
        self._is_settled = False
        if member.was_able:
            self.router.add_engine(index)
            self._ask_digests([member])
            self._next_digest_at = now + self._digest_interval_s

    @property
    def _digest_interval_s(self) -> float:
        return min(DIGEST_INTERVAL_S, _DIGEST_SHARE_S * len(self._members))

    def _ask_digests(self, members: Iterable[_Member]) -> None:
        for member in members:
            if member.protocol.is_open and member.digest_call is None:
                member.digest_call = member.protocol.start_call(UtilityMethod.DIGEST)

    def _move_all(self, now: float) -> None:
        for index, member in self._members.items():
            protocol = member.protocol
            if member.takes_new or not protocol.ledger:
                continue
            if protocol.is_open and not protocol.has_worker and protocol.ledger.has_suspects:
                continue  # the engine is testing them one by one; a new Hello would begin that anew
            if member.is_able:  # it drains: no request is suspected of a loss
                entries = protocol.ledger.release(is_lost=False)
            else:
                entries = protocol.ledger.release(is_lost=True, with_suspects=False)
            if entries and protocol.is_open:
                if not protocol.has_worker:
                    protocol.ledger.note_loss()  # of those that stay
                protocol.connection_made(now)  # Hello again: it drops all without an answer
            if entries:
                _log.info("%d requests of engine %d go on elsewhere", len(entries), index)
                self._place_again(entries, now)

    def _ask_another(self, request_id: str, now: float) -> bool:
        """Whether a request goes to another engine than the one that has just refused it for want of room."""
        index = self.router.find(request_id)
        entry = None if index is None else self._members[index].protocol.ledger.refused.pop(request_id, None)
        if index is None or entry is None or entry.is_aborted:
            return False
        entry.refused_by += (index,)
        if len(entry.refused_by) >= MAX_ASKED or not any(
            member.takes_new for number, member in self._members.items() if number not in entry.refused_by
        ):
            return False
        entry.is_sent = False  # no engine has taken it on, so the next one may refuse it too
        self._place_again([entry], now)
        return True

    def _place_again(self, entries: list[LedgerEntry], now: float) -> None:
        batches: dict[int, list[LedgerEntry]] = {}
        for entry in entries:
            self.router.remove(entry.request.request_id)
            batches.setdefault(self.router.place(entry.request, entry.refused_by), []).append(entry)
        for index, batch in batches.items():
            protocol = self._members[index].protocol
            for message in protocol.ledger.adopt(batch, now, protocol.is_open):
                protocol.send(message)

    def _find_places(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        places: dict[int, list[str]] = {}
        for request_id in request_ids:
            index = self.router.find(request_id)
            if index is not None:
                places.setdefault(index, []).append(request_id)
        return places
