"""Which layers share a list of blocks, and where a model stays in one group."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from fakes import make_config
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from quire.ipc.spec.kv_groups import assign_kv_groups, find_places
from quire.ipc.spec.model_spec import AttentionSpec, KVCacheDtype, LatentSpec, ModelSpec

BLOCK_SIZE, MAX_MODEL_LEN = 16, 4096  # 256 blocks, of a window of 1024 tokens 65
LATENT = LatentSpec(rank=24, nope_size=8, rope_size=8, value_size=8)
WHOLE = (None,)


@dataclass(frozen=True)
class L:
    """A layer: its window, heads of keys, their size, and the layer whose keys it reads."""

    window: int | None = None
    heads: int = 2
    size: int = 16
    kv_layer: int | None = None
    latent: LatentSpec | None = None
    is_causal: bool = True

    def to_spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_heads=4,
            num_kv_heads=self.heads,
            head_size=self.size,
            window=self.window,
            kv_layer=self.kv_layer,
            latent=self.latent,
            is_causal=self.is_causal,
        )


W, F = L(1024), L()
LARGE, LARGE_W = L(None, 1, 64), L(1024, 1, 64)
NARROW, WIDE = L(512), L(2048)
LATENT_F, LATENT_W = (L(window, 1, 32, latent=LATENT) for window in (None, 1024))


def make_spec(layers: list[L]) -> ModelSpec:
    spec = make_config().model.spec
    first = spec.layers[0]
    return replace(spec, layers=tuple(replace(first, attention=layer.to_spec()) for layer in layers))


# Layers, the groups' windows, the layers' groups; without groups all are 0.
CASES: dict[str, tuple[list[L], tuple[int | None, ...], list[int]]] = {
    "uniform": ([F] * 4, WHOLE, []),
    "uniform, of unlike bytes": ([F, LARGE] * 2, WHOLE, []),
    "one window": ([W] * 4, (1024,), []),
    "one window, of unlike bytes": ([W, LARGE_W] * 2, (1024,), []),
    "a window that frees less than a tenth": ([L(3680)] * 4, WHOLE, []),
    "a window that frees a tenth": ([L(3584)] * 4, (3584,), []),
    "windows of the longest request": ([L(MAX_MODEL_LEN), F] * 2, WHOLE, []),
    "windows beyond the longest request": ([L(131_072), W] * 2, (None, 1024), [0, 1, 0, 1]),
    "alternating": ([W, F] * 3, (None, 1024), [1, 0] * 3),
    "alternating, less than a tenth": ([L(3600), F] * 3, WHOLE, []),
    "five to one": ([W, W, W, W, W, F], (None, *[1024] * 5), [1, 2, 3, 4, 5, 0]),
    # A group for each place would be twelve; the layers of a kind take turns.
    "five to one, twice": (
        [W, W, W, W, W, F] * 2,
        (None, *[1024] * 5),
        [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0],
    ),
    # Three in groups of two leave a place empty, which is dearer than a group more.
    "three to two": ([W, W, W, F, F], (None, None, *[1024] * 3), [2, 3, 4, 0, 1]),
    "three windows": ([NARROW, F, WIDE], (None, 512, 2048), [1, 0, 2]),
    "too many windows": ([L(16 * count) for count in range(1, 10)], WHOLE, []),
    # Two of the smaller ones, of 32 numbers, share a place of 64.
    "unlike bytes": ([W, W, W, LARGE], (None, 1024, 1024), [1, 2, 1, 0]),
    "unlike bytes, all in one place": ([W, W, LARGE], (None, 1024), [1, 1, 0]),
    "sizes whose least common multiple is far": ([L(1024, 1, 34), L(None, 1, 62)] * 2, WHOLE, []),
    "layers that read others' keys": (
        [W, F, L(1024, kv_layer=0), L(kv_layer=1)],
        (None, 1024),
        [1, 0, 1, 0],
    ),
    "keys of a window that are read whole": ([W, L(kv_layer=0), W], (None, 1024), [0, 0, 1]),
    "keys of a window that are read through a wider one": (
        [NARROW, L(2048, kv_layer=0), F],
        (None, 2048),
        [1, 1, 0],
    ),
    "latents": ([LATENT_F] * 3, WHOLE, []),
    "latents of one window": ([LATENT_W] * 3, (1024,), []),
    "latents of several windows": ([LATENT_F, LATENT_W] * 2, WHOLE, []),
    "an encoder": ([L(1024, is_causal=False)] * 2, WHOLE, []),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_are_dealt_out_by_windows_and_bytes(name: str) -> None:
    layers, windows, groups = CASES[name]
    spec = assign_kv_groups(make_spec(layers), BLOCK_SIZE, MAX_MODEL_LEN)
    assert spec.kv_windows == windows
    assert [layer.attention.kv_group for layer in spec.layers] == (groups or [0] * len(layers))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_scales_count_where_a_cache_has_8_bits(kv_dtype: KVCacheDtype) -> None:
    """Of 34 and 62 numbers none divides, of 40 and 68 bytes neither; 2 x 16 and 2 x 16 are alike."""
    for layers, windows in (([W, F] * 2, (None, 1024)), ([W, W, W, LARGE], WHOLE)):
        assert assign_kv_groups(make_spec(layers), BLOCK_SIZE, MAX_MODEL_LEN, kv_dtype).kv_windows == windows
    like = [L(1024, 2, 28), L(None, 1, 60)]  # 64 bytes each
    assert assign_kv_groups(make_spec(like), BLOCK_SIZE, MAX_MODEL_LEN, kv_dtype).kv_windows == (None, 1024)


any_layer = st.builds(
    L,
    window=st.sampled_from([None, 1, 100, 512, 1024, 3000, 5000]),
    heads=st.sampled_from([1, 2]),
    size=st.sampled_from([16, 32, 48]),
)


@given(
    layers=st.lists(any_layer, min_size=1, max_size=24),
    block_size=st.sampled_from([8, 16, 128]),
    max_model_len=st.sampled_from([64, 1000, 4096]),
    kv_dtype=st.sampled_from(["auto", "int8"]),
)
def test_a_group_keeps_what_its_layers_see_and_holds_them_all(
    layers: list[L], block_size: int, max_model_len: int, kv_dtype: KVCacheDtype
) -> None:
    spec = assign_kv_groups(make_spec(layers), block_size, max_model_len, kv_dtype)
    assert 1 <= len(spec.kv_windows) <= 8
    held: dict[int, list[int]] = {group: [] for group in range(len(spec.kv_windows))}
    for layer, given_layer in zip(spec.layers, layers, strict=True):
        kept, window = spec.kv_windows[layer.attention.kv_group], given_layer.window
        assert kept is None or (window is not None and kept >= window)
        scales = 0 if kv_dtype == "auto" else 4 * given_layer.heads
        held[layer.attention.kv_group].append(given_layer.heads * given_layer.size + scales)
    assert all(held.values()), "a group without layers"
    if len(spec.kv_windows) > 1:
        places = find_places(spec, kv_dtype)
        for group, sizes in held.items():
            assert len(set(sizes)) == 1, "layers of a group lie in like parts of a place"
            assert places.shares[group] * sizes[0] == places.size
            assert len(sizes) <= places.count * places.shares[group]
