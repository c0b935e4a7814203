"""Which tile of attention is the fastest on this GPU: stages, keys, and keys of a block of the cache."""

from __future__ import annotations

import re
from itertools import product

from ...kernels.attention.paged_attention_triton import TileShape
from ..bench.ceilings import measure_copy_rate, measure_matrix_rate
from .kernels import AttentionCase, bench_attention
from .rows import Row, Say

_COPY_BYTES = 1 << 30
# Each with the rows and warps of the tile that is served on a card with much shared memory.
_CASES = (
    (AttentionCase("decode 64 x 4096, 16/8 heads", 64, 4096, 1, 16, 8), 16, 4),
    (AttentionCase("prefill 1 x 8192, 32/8 heads", 1, 8192, 8192, 32, 8), 128, 8),
)
_STAGES, _KEYS, _BLOCK_SIZES = (3, 5), (64, 128), (16, 64)
_PERCENT = re.compile(r"(\d+)%")


def sweep_attention(say: Say, device: str = "cuda", scale: int = 1) -> None:
    """Every choice for decodes and prompts; one that does not fit the card says so. The best come last."""
    rates = measure_copy_rate(device, _COPY_BYTES // scale), measure_matrix_rate(device, "bfloat16")
    for case, rows, num_warps in _CASES:
        found: list[tuple[int, str]] = []
        for block_size in _BLOCK_SIZES:
            row = bench_attention(case, device, scale, rates, block_size)
            found.append((_read_percent(row), f"as served, blocks of {block_size}"))
            say(Row(f"{case.name}, {found[-1][1]}", row.value))
        for stages, keys, block_size in product(_STAGES, _KEYS, _BLOCK_SIZES):
            name = f"{stages} stages, tiles of {keys}, blocks of {block_size}"
            tile = TileShape(rows, keys, num_warps, stages)
            try:
                row = bench_attention(case, device, scale, rates, block_size, tile)
            except Exception as error:  # Triton's, of a tile that is too large: another card has room for it
                if "out of resource" not in str(error):
                    raise
                say(Row(f"{case.name}, {name}", f"does not fit: {str(error)[:80]}"))
                continue
            found.append((_read_percent(row), name))
            say(Row(f"{case.name}, {name}", row.value))
        best, name = max(found)
        say(Row(f"{case.name}, best", f"{best}%: {name}; as served {found[0][0]}%"))


def _read_percent(row: Row) -> int:
    match = _PERCENT.match(row.value)
    assert match is not None, row
    return int(match[1])
