"""Who gives way when a process is full: by standing, by what a client has, by age."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from quire.frontend.http.connections.admission import ByteShares, ClientTurns, ConnectionTable
from quire.frontend.http.errors import ApiError


def test_unproven_connections_go_first_then_idle_ones_and_busy_ones_never() -> None:
    table: ConnectionTable[str] = ConnectionTable(3)
    for name in ("busy", "idle", "silent"):
        assert table.add(name, "here") is None
    table.note_busy("busy", "key")
    table.note_busy("idle", "key")
    table.note_idle("idle")
    assert table.add("a", "here") == "silent"
    table.note_busy("a", "key")
    assert table.add("b", "here") == "idle"
    table.note_busy("b", "key")
    assert table.add("c", "here") == "c"  # is not taken in
    table.demote("a")
    assert table.add("c", "here") == "a"


def test_of_idle_connections_the_longest_idle_of_the_largest_client_goes() -> None:
    table: ConnectionTable[str] = ConnectionTable(5)
    for name, client in (("a1", "a"), ("b1", "b"), ("b2", "b"), ("b3", "b"), ("a2", "a")):
        table.add(name, client)
    table.renew("b1")
    assert [table.add(f"c{number}", "c") for number in range(3)] == ["b2", "a1", "b3"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "busy", "idle", "renew", "demote", "remove"]),
            st.integers(0, 9),
            st.sampled_from("abc"),
        )
    )
)
def test_the_table_never_holds_more_than_it_may_and_forgets_what_left(
    events: list[tuple[str, int, str]],
) -> None:
    table: ConnectionTable[int] = ConnectionTable(4)
    known: set[int] = set()
    for event, number, client in events:
        if event == "add" and number not in known:
            victim = table.add(number, client)
            known = (known | {number}) - {victim}
        elif event == "busy" and number in known:
            table.note_busy(number, client)
        elif event in ("idle", "renew", "demote"):
            getattr(table, event if event != "idle" else "note_idle")(number)
        elif event == "remove":
            table.remove(number)
            known.discard(number)
        assert len(table) == len(known) <= 4
    for number in known:
        table.remove(number)
    assert not table._places
    assert not table._num_of
    assert not any(table._idle)


@dataclass(eq=False)
class Holder:
    """A connection that gives way by letting go of all that it holds."""

    client_name: str
    shares: ByteShares
    is_ending: bool = False
    error: str = ""

    def give_way(self, error: ApiError) -> None:
        self.error, self.is_ending = str(error), True
        self.shares.hold(self, 0)

    def close_now(self) -> None:
        raise AssertionError("it may answer")


def test_past_the_bound_the_client_that_holds_most_gives_way() -> None:
    shares = ByteShares("bodies", "max_x", 100)
    a1, b1, a2, a3 = (Holder(name, shares) for name in "abaa")
    for holder, num_bytes in ((a1, 40), (b1, 30), (a2, 30), (b1, 35)):
        shares.hold(holder, num_bytes)
    shares.make_room(b1)
    assert [one.is_ending for one in (a1, b1, a2)] == [False, False, True]  # the youngest of the largest
    assert a2.error == "bodies: 105 bytes under way, 70 of them yours, expected at most 100 (max_x)"
    shares.hold(a3, 30)
    shares.make_room(a3)
    assert (a3.is_ending, a1.is_ending) == (True, False)  # who asks, when it is the largest's
    shares.hold(a1, 0)
    shares.hold(b1, 0)
    assert shares.num_bytes == 0


async def test_requests_of_a_crowd_are_begun_a_few_in_a_pass_and_others_in_their_turn() -> None:
    turns, begun, num_in_pass = ClientTurns(2), list[str](), list[int]()

    def begin(client: str) -> bool:
        begun.append(client)
        return client != "gone"

    for client in ["crowd"] * 50 + ["gone"] * 20 + ["alone"]:
        turns.add(client, functools.partial(begin, client))
    while len(begun) < 71:
        num_before = len(begun) - begun.count("gone")
        await asyncio.sleep(0)
        num_in_pass.append(len(begun) - begun.count("gone") - num_before)
    assert 0 < max(num_in_pass) <= 4
    assert begun.index("alone") < 10, "the crowd was there first, and has one turn of each round"
    assert begun.count("crowd") == 50
    turns.add("late", functools.partial(begin, "late"))
    await asyncio.sleep(0)
    assert begun[-1] == "late"
