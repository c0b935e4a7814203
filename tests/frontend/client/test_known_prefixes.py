"""What a client believes that engines have cached: what it sent them, within bounds, and what they say."""

from __future__ import annotations

from quire.frontend.client.engine_router import KnownPrefixes

DEPTHS = [1, 2, 3, 4]
A, B, C = ([letter * 10 + depth for depth in DEPTHS] for letter in (1, 2, 3))


def make_known(num_engines: int = 2, max_names: int = 100, num_blocks: int | None = None) -> KnownPrefixes:
    known = KnownPrefixes(max_names, num_blocks)
    for index in range(num_engines):
        known.add_engine(index)
    return known


def test_the_longest_beginning_of_each_engine_is_found() -> None:
    known = make_known(3)
    known.note_prompt(0, DEPTHS, A)
    known.note_prompt(2, DEPTHS[:2], A[:2])
    assert known.find_depths(DEPTHS, A) == {0: 4, 2: 2}
    assert known.find_depths(DEPTHS, B) == known.find_depths([], []) == {}


def test_an_engine_has_no_more_than_its_cache_holds_and_gives_ends_up_first() -> None:
    known = make_known(num_blocks=10)
    for names in (A, B, A, C):
        known.note_prompt(0, DEPTHS, names)
    assert [known.find_depths(DEPTHS, names) for names in (A, B, C)] == [{0: 4}, {0: 2}, {0: 4}]
    known.note_prompt(0, [1, 9], [41, 49])  # one of its names stands for eight blocks
    assert [known.find_depths(DEPTHS, names) for names in (A, B, C)] == [{}, {}, {0: 1}]


def test_names_are_bounded_whoever_told_them() -> None:
    known = make_known(max_names=8)
    for names in (A, B, C):
        known.note_prompt(0, DEPTHS, names)
    known.take_digest(1, range(100, 200), [])
    assert len(known) == 8
    assert known.find_depths([1, 2], [195, 199]) == {1: 2}


def test_a_digest_takes_back_what_it_does_not_name() -> None:
    known = make_known()
    for names in (A, B, C):
        known.note_prompt(0, DEPTHS, names)
        known.note_prompt(1, DEPTHS, names)
    known.take_digest(0, [A[0], A[3], B[0], 77], [C[0], C[3]])
    # A name in between is there if the longest of its prompt is; C is on its way.
    assert [known.find_depths(DEPTHS, names)[0] for names in (A, B, C)] == [4, 1, 4]
    assert [known.find_depths(DEPTHS, names)[1] for names in (A, B, C)] == [4, 4, 4]
    assert known.find_depths([1], [77]) == {0: 1}
    known.take_digest(0, [], None)  # of an engine that has more than it tells
    assert known.find_depths(DEPTHS, A)[0] == 4


def test_an_engine_that_is_back_or_gone_has_nothing() -> None:
    known = make_known()
    for index in range(2):
        known.note_prompt(index, DEPTHS, A)
    known.add_engine(0)
    assert known.find_depths(DEPTHS, A) == {1: 4}
    known.remove_engine(1)
    known.remove_engine(7)
    assert known.find_depths(DEPTHS, A) == {}
    assert len(known) == 0
    known.add_engine(5)
    known.note_prompt(5, DEPTHS, A)
    assert known.find_depths(DEPTHS, A) == {5: 4}
