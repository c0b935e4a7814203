// Attention over bfloat16 caches by AMX: left factors are tiles of queries or weights [16, 32], right ones tiles
// of paired keys or values [16, 16, 2], sums [16, 16]. A sum is one chain of tile products in the order of D or of
// keys, the same for one row as for many.
#pragma once

#include "linear/amx.h"
#include "attention/attention_pairs.h"

#if defined(QUIRE_HAS_AMX)

namespace quire::attention {

// Sizes of heads and values are multiples of 32. Tiles 0-3 are sums, 4 and 5 left factors, 6 and 7 right ones.
class AmxAttention : public PairedTile<bf16> {
  public:
    static constexpr bool kUsesTiles = true;
    using PairedTile::PairedTile;

    // Scores of `count` rows from `first` on with the keys [from, to) of the tile.
    void score(int first, int count, int from, int to) const {
        const int D = step_.head_size;
        const bf16* query = query_ + size_t(first) * D;
        for (int j = from / kStep * kStep; j < to; j += kStep) {
            const bf16 *low = keys_[j / kGroup], *high = keys_[j / kGroup + 1];
            if (count > kGroup)
                score_tiles<2>(query, D, low, high, scores_ + j);
            else
                score_tiles<1>(query, D, low, high, scores_ + j);
        }
    }

    // value[count, E] += weights V, over the keys [from, to).
    void add_values(int count, int from, int to, float* value) const {
        for (int d = 0; d < step_.value_size; d += kStep)
            if (count > kGroup)
                add_tiles<2>(from / kStep * kStep, to, d, value + d);
            else
                add_tiles<1>(from / kStep * kStep, to, d, value + d);
    }

  private:
    template <int Tiles>
    void score_tiles(const bf16* query, int D, const bf16* low, const bf16* high, float* scores) const {
        const size_t left_bytes = D * sizeof(bf16), right_bytes = 2 * key_stride_ * sizeof(bf16);
        zero<Tiles>();
        for (int d = 0; d < D; d += kStep) {
            _tile_loadd(4, query + d, left_bytes);
            if (Tiles == 2) _tile_loadd(5, query + size_t(kGroup) * D + d, left_bytes);
            _tile_loadd(6, low + d * key_stride_, right_bytes);
            _tile_loadd(7, high + d * key_stride_, right_bytes);
            multiply<Tiles>();
        }
        store<Tiles>(scores, kKeys);
    }

    template <int Tiles>
    void add_tiles(int from, int to, int d, float* value) const {
        const size_t left_bytes = kKeys * sizeof(bf16), right_bytes = 2 * kGroup * sizeof(bf16);
        load<Tiles>(value, step_.value_size);
        for (int k = from; k < to; k += kStep) {
            _tile_loadd(4, weights_ + k, left_bytes);
            if (Tiles == 2) _tile_loadd(5, weights_ + kGroup * kKeys + k, left_bytes);
            _tile_loadd(6, value_tile(d, k), right_bytes);
            _tile_loadd(7, value_tile(d + kGroup, k), right_bytes);
            multiply<Tiles>();
        }
        store<Tiles>(value, step_.value_size);
    }

    template <int Tiles>
    static void zero() {
        _tile_zero(0);
        _tile_zero(1);
        if (Tiles == 1) return;
        _tile_zero(2);
        _tile_zero(3);
    }

    template <int Tiles>
    static void multiply() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (Tiles == 1) return;
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }

    template <int Tiles>
    static void load(const float* sums, size_t stride) {
        const size_t bytes = stride * sizeof(float);
        _tile_loadd(0, sums, bytes);
        _tile_loadd(1, sums + kGroup, bytes);
        if (Tiles == 1) return;
        _tile_loadd(2, sums + kGroup * stride, bytes);
        _tile_loadd(3, sums + kGroup * stride + kGroup, bytes);
    }

    template <int Tiles>
    static void store(float* sums, size_t stride) {
        const size_t bytes = stride * sizeof(float);
        _tile_stored(0, sums, bytes);
        _tile_stored(1, sums + kGroup, bytes);
        if (Tiles == 1) return;
        _tile_stored(2, sums + kGroup * stride, bytes);
        _tile_stored(3, sums + kGroup * stride + kGroup, bytes);
    }
};

}  // namespace quire::attention

#endif
