"""The roster of a group: from the supervisor to a core, and from the core to its clients."""

from __future__ import annotations

import msgspec
import pytest
from fakes import FakeEngine, make_config
from quire.core.clients.client_registry import ClientRegistry, GroupRoster
from quire.core.stats.engine_facts import StartupClock, make_engine_facts
from quire.ipc.errors import ProtocolError
from quire.ipc.protocol.messages import (
    PROTOCOL_VERSION,
    EngineRoster,
    Hello,
    Refusal,
    RosterEntry,
    StartupProgress,
    Welcome,
    WorkerStatus,
)
from quire.ipc.protocol.step import WorkerReady

ALONE = EngineRoster([RosterEntry(1, "core1.sock")])
PAIR = EngineRoster([RosterEntry(0, "core.sock", is_draining=True), RosterEntry(1, "core1.sock")])
OWNER = b"the supervisor's socket"


class Group:
    """A core's registry in a group, and what its clients were sent."""

    def __init__(self, group: GroupRoster | None) -> None:
        self.sent: list[tuple[bytes, msgspec.Struct]] = []
        self.registry = ClientRegistry("epoch", 0.0, self._send, group=group)

    def _send(self, identity: bytes, message: msgspec.Struct) -> bool:
        self.sent.append((identity, message))
        return True

    def open(self) -> None:
        config = make_config()
        facts = make_engine_facts(config, WorkerReady(8, "fake", []), {}, StartupClock("start", 0.0))
        self.registry.open(FakeEngine(config, 8).core, facts)

    def take(self, identity: bytes, message: msgspec.Struct) -> list[tuple[bytes, msgspec.Struct]]:
        """What is sent because of a message."""
        self.sent.clear()
        self.registry.take(identity, message)
        self.registry.deliver()
        return list(self.sent)


def hello() -> Hello:
    return Hello(PROTOCOL_VERSION, "test", 1)


def test_a_client_is_welcomed_with_the_roster_and_told_of_every_change() -> None:
    group = Group(GroupRoster(1, ALONE, OWNER))
    group.open()
    group.take(OWNER, hello())
    [(_, welcome)] = group.take(b"c", hello())
    assert isinstance(welcome, Welcome)
    assert (welcome.engine_index, welcome.roster) == (1, ALONE)
    assert group.take(OWNER, PAIR) == [(b"c", PAIR)]
    assert group.take(OWNER, PAIR) == [], "it has not changed"
    [(_, later)] = group.take(b"d", hello())
    assert isinstance(later, Welcome)
    assert later.roster == PAIR


def test_who_waits_for_the_start_is_told_at_once_and_with_its_welcome() -> None:
    group = Group(GroupRoster(1, ALONE, OWNER))
    assert group.take(b"c", hello()) == [(b"c", StartupProgress("", 1, ALONE))]
    assert group.take(OWNER, PAIR) == [(b"c", StartupProgress("", 1, PAIR))]
    group.sent.clear()
    group.open()
    group.registry.deliver()
    [(identity, welcome)] = group.sent
    assert isinstance(welcome, Welcome)
    assert (identity, welcome.roster) == (b"c", PAIR)


def test_a_start_that_failed_is_told_to_who_waits_and_to_who_comes_and_the_supervisor_is_waited_for() -> None:
    group = Group(GroupRoster(1, ALONE, OWNER))
    group.take(b"c", msgspec.structs.replace(hello(), number=7))
    assert not group.registry.has_owner
    group.sent.clear()
    group.registry.refuse("no luck", "EngineStartError")
    group.registry.deliver()
    assert group.sent == [(b"c", Refusal("no luck", number=7))]
    assert group.take(OWNER, hello()) == [(OWNER, Refusal("no luck", number=0))]
    assert group.registry.has_owner


@pytest.mark.parametrize("group", [None, GroupRoster(1, ALONE, OWNER)])
def test_a_roster_is_taken_from_the_supervisors_socket_only(group: GroupRoster | None) -> None:
    core = Group(group)
    core.open()
    core.take(b"", Hello(PROTOCOL_VERSION, "supervisor", 1))
    with pytest.raises(ProtocolError, match="from the supervisor only"):
        core.take(b"", PAIR)
    [(_, welcome)] = core.take(b"c", hello())
    assert isinstance(welcome, Welcome)
    assert welcome.roster == (group and ALONE)


def test_clients_are_told_when_the_worker_is_lost_and_when_there_is_another() -> None:
    group = Group(None)
    group.open()
    group.take(b"c", hello())
    for has_worker in (False, True):
        group.sent.clear()
        group.registry.note_worker(has_worker)
        group.registry.note_worker(has_worker)
        group.registry.deliver()
        assert group.sent == [(b"c", WorkerStatus(has_worker))]
        [(_, welcome)] = group.take(b"d", hello())
        assert isinstance(welcome, Welcome)
        assert welcome.has_worker == has_worker
        group.registry.forget(b"d")
