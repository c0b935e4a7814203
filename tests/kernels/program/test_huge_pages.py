"""Memory in huge pages: pieces of a region are zeros of their own."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from quire.kernels.program.huge_pages import allocate_huge


@pytest.mark.parametrize("size", [1, 4097, 3 << 20, 16 << 20, (16 << 20) + 1])
def test_memory_is_zeros_of_the_size_asked_for(size: int) -> None:
    memory = allocate_huge(size)
    assert memory.numel() == size
    assert memory.data_ptr() % 4096 == 0
    assert not memory.any()
    memory.fill_(1)
    assert not allocate_huge(size).any()


def test_small_pieces_lie_side_by_side_so_that_huge_pages_cover_them() -> None:
    pieces = [allocate_huge(512 << 10) for _ in range(8)]
    starts = [piece.data_ptr() for piece in pieces]
    steps = [after - before for before, after in pairwise(starts)]
    assert steps.count(512 << 10) >= len(steps) - 1  # a region may end between two of them


def test_threads_get_pieces_that_do_not_overlap() -> None:
    with ThreadPoolExecutor(8) as threads:
        pieces = list(threads.map(lambda _: allocate_huge(5 << 20), range(40)))
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert all(int(piece.min()) == int(piece.max()) == number for number, piece in enumerate(pieces))


def test_a_large_piece_starts_at_a_huge_page() -> None:
    assert allocate_huge(32 << 20).data_ptr() % (2 << 20) == 0
