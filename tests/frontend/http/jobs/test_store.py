"""What is kept of responses: for how long, for whom, and who gives way when it is too much."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from quire.frontend.http.jobs.event_log import EventLog
from quire.frontend.http.jobs.store import Record, ResponseStore

RECORD_BYTES = Record("", "", (), 0).num_bytes


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_store(num_records: int = 4, size: int = 100) -> tuple[ResponseStore, Clock]:
    """A store with room for so many records of this size."""
    clock = Clock()
    return ResponseStore(num_records * (RECORD_BYTES + size), 60.0, clock), clock


def make_record(owner: str = "a", size: int = 100) -> Record:
    return Record(owner, owner, (b"x" * size,), 1)


def test_a_response_is_found_by_its_owner_until_it_is_removed() -> None:
    store, _ = make_store()
    store.add("one", make_record())
    store.finish("one", b"response", b"output", 2)
    record = store.find("one", "a")
    assert record is not None
    assert (record.items, record.num_items, record.response) == ((b"x" * 100, b"output"), 3, b"response")
    assert store.find("one", "b") is None
    assert not store.remove("one", "b")
    assert store.remove("one", "a")
    assert store.find("one", "a") is None
    assert not store.remove("one", "a")
    assert store.num_bytes == 0


def test_what_nobody_uses_is_forgotten_after_its_time_and_what_is_used_stays_as_long_again() -> None:
    store, clock = make_store()
    for name in ("one", "two"):
        store.add(name, make_record())
        store.finish(name, b"r", b"", 0)
    clock.now += 40
    assert store.find("one", "a") is not None
    clock.now += 30
    assert store.find("two", "a") is None
    assert store.drop_expired() == clock.now + 30
    clock.now += 30
    assert store.drop_expired() is None
    assert (len(store), store.num_bytes) == (0, 0)


def test_what_runs_longer_than_responses_are_kept_is_kept_from_its_end_on() -> None:
    store, clock = make_store()
    dropped: list[str] = []
    store._tell_dropped = dropped.append
    store.add("runs", make_record())
    for _ in range(3):
        clock.now += 61
        assert store.drop_expired() == clock.now + 60
    store.finish("runs", b"r", b"", 0)
    clock.now += 59
    assert dropped == []
    assert store.find("runs", "a") is not None
    clock.now += 60
    assert store.drop_expired() is None
    assert dropped == ["runs"]


def test_who_has_most_gives_way_with_what_it_used_least_lately() -> None:
    store, _ = make_store(4)
    for name in ("a1", "a2", "a3"):
        store.add(name, make_record("a"))
    store.add("b1", make_record("b"))
    assert store.find("a1", "a") is not None
    store.add("b2", make_record("b"))
    assert store.find("a2", "a") is None
    assert all(store.find(name, name[0]) for name in ("a1", "a3", "b1", "b2"))


def test_what_still_runs_gives_way_last_and_is_told_when_it_does() -> None:
    store, _ = make_store(3)
    dropped: list[str] = []
    store._tell_dropped = dropped.append
    store.add("runs", make_record())
    for name in ("one", "two", "three"):
        store.add(name, make_record())
        store.finish(name, b"r", b"", 0)
    assert "runs" in store
    assert dropped[0] == "one"
    record = store.find("runs", "a")
    assert record is not None
    record.log = EventLog()
    for number in range(200):
        record.log.add([{"type": "x", "sequence_number": number}])
    store.grow("runs")
    assert dropped[-1] == "runs"
    store.grow("runs")
    assert store.num_bytes == sum(record.num_bytes for record in store._records.values())


def test_what_is_larger_than_all_or_too_large_in_its_end_is_not_kept() -> None:
    store, _ = make_store(2)
    store.add("large", make_record(size=5000))
    store.add("grows", make_record())
    store.finish("grows", b"x" * 5000, b"", 1)
    store.finish("never", b"x", b"", 1)
    assert (len(store), store.num_bytes) == (0, 0)
    off = ResponseStore(0, 60.0, Clock())
    off.add("one", make_record())
    assert off.find("one", "a") is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "finish", "find", "remove", "wait"]),
            st.integers(0, 9),
            st.sampled_from("abc"),
            st.integers(0, 600),
        ),
        max_size=60,
    )
)
def test_bytes_are_counted_right_and_bounded_and_a_small_owner_loses_nothing(
    steps: list[tuple[str, int, str, int]],
) -> None:
    store, clock = make_store(6)
    bound = 6 * (RECORD_BYTES + 100)
    for what, number, owner, size in steps:
        name = f"{owner}{number}"
        before = {one: record.num_bytes for one, record in store._records.items()}
        living = [one for one, record in store._records.items() if record.expires_at > clock.now]
        match what:
            case "add" if name not in before:
                store.add(name, make_record(owner, size))
            case "finish" if name in before and not store._records[name].response:
                store.finish(name, b"x" * size, b"", 0)
            case "find":
                store.find(name, owner)
            case "remove":
                store.remove(name, owner)
            case "wait":
                clock.now += size / 20
            case _:
                continue
        after = {one: record.num_bytes for one, record in store._records.items()}
        assert store.num_bytes == sum(after.values()) <= bound
        if what in ("add", "finish"):
            lost = {one[0] for one in living if one not in after} - {owner}
            num_owners = len({one[0] for one in living} | {owner})
            for victim in lost:
                held = sum(before[one] for one in living if one[0] == victim)
                assert held * num_owners > bound
