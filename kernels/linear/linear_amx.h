// Products of rows with packed panels in AMX tiles: sums are chains of tdpbf16ps over 32 steps of K, in order.
//
// A row's sums do not depend on the rows of its tile, so one row and two thousand get the same bits.
// The intrinsics do not tell the compiler which memory they read: order() before a first load does.
#pragma once

#include "linear/amx.h"
#include "linear/linear_layout.h"

#include <algorithm>

namespace quire {

#if defined(QUIRE_HAS_AMX)

// As the engines of linear_vector.h.
struct TileEngine {
    typedef bf16 Input;
    typedef bf16 Weight;
    static constexpr int kGroup = 1;
    static constexpr int kLeading = kPanelColumns;
    static constexpr int kTileRows = 16;
    // With so many pairs of row tiles a block takes long enough to prefetch the next block's weights meanwhile: 1.05
    // times as fast at 64 rows, 1.2 times at 1024 rows of K 3072.
    static constexpr int kMinPrefetchPairs = 2;
    // With fewer, weights are prefetched so many steps before they are read (with one row tile, one step). The
    // processor's own prefetch does not keep up, because reads pause while products are computed: 1.08 times as fast
    // with one row, 1.13 with 24 or 32.
    static constexpr int kStepsAhead = 2;
    static constexpr int kFewRows = 4 * kTileRows;
    static constexpr int kBlockSteps = 8;

    // A thread's tiles: 0 to 3 sums, 4 and 5 rows, 6 and 7 columns. Fewer than 16 rows are one short tile.
    struct Scope {
        const AmxTiles tiles;
        explicit Scope(int rows) : tiles(true, std::min(rows, kTileRows)) {}
    };

    // The last tile of rows ends with the last row and so may repeat some of the tile before.
    static int find_start(int tile, int rows) { return std::max(0, std::min(tile * kTileRows, rows - kTileRows)); }

    // Where the sums of a row are: each tile has its own 16 rows of sums.
    static int find_slot(int row, int rows) {
        const int tile = row / kTileRows;
        return tile * kTileRows + row - find_start(tile, rows);
    }

    static void order() { asm volatile("" : : : "memory"); }

    static void add_products() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }

    static void add_second_products() {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }

    // One or two tiles of rows, from a and a2 on. Beside each step it fetches `count` numbers, from `next` on.
    template <int Tiles>
    static void multiply_tiles(const bf16* a, const bf16* a2, size_t lda, const bf16* panel, int steps,
                               float* sums, const bf16* next, int count) {
        const size_t stride = lda * sizeof(bf16), ld = kLeading * sizeof(float);
        float* sums2 = sums + kTileRows * kLeading;
        order();
        _tile_loadd(0, sums, ld);
        _tile_loadd(1, sums + kTileColumns, ld);
        if (Tiles == 2) _tile_loadd(2, sums2, ld);
        if (Tiles == 2) _tile_loadd(3, sums2 + kTileColumns, ld);
        for (int step = 0; step < steps; ++step) {
            const bf16* b = panel + step * kStepSize;
            fetch(next + size_t(step) * count, count);
            _tile_loadd(4, a + step * kTileDepth, stride);
            _tile_loadd(6, b, 64);
            if (Tiles == 2) _tile_loadd(5, a2 + step * kTileDepth, stride);
            _tile_loadd(7, b + kStepSize / 2, 64);
            add_products();
            if (Tiles == 2) add_second_products();
        }
        _tile_stored(0, sums, ld);
        _tile_stored(1, sums + kTileColumns, ld);
        if (Tiles == 2) _tile_stored(2, sums2, ld);
        if (Tiles == 2) _tile_stored(3, sums2 + kTileColumns, ld);
    }

    // sums[32, 32] = the rows from a and a2 on, 16 each, times a panel. Calls beside(step) with each step, for work
    // that the processor does while it multiplies. Weights pass the first-level cache by, which the rows, the sums and
    // they would overflow: 1.35 times as fast with K = 384.
    template <class Beside>
    static void multiply_pair(const bf16* a, const bf16* a2, size_t lda, const bf16* panel, int steps, float* sums,
                              const Beside& beside) {
        const size_t stride = lda * sizeof(bf16), ld = kLeading * sizeof(float);
        float* sums2 = sums + kTileRows * kLeading;
        order();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int step = 0; step < steps; ++step) {
            const bf16* b = panel + step * kStepSize;
            _tile_loadd(4, a + step * kTileDepth, stride);
            _tile_stream_loadd(6, b, 64);
            _tile_loadd(5, a2 + step * kTileDepth, stride);
            _tile_stream_loadd(7, b + kStepSize / 2, 64);
            add_products();
            add_second_products();
            beside(step);
        }
        _tile_stored(0, sums, ld);
        _tile_stored(1, sums + kTileColumns, ld);
        _tile_stored(2, sums2, ld);
        _tile_stored(3, sums2 + kTileColumns, ld);
        order();
    }

    static void multiply(const bf16* a, size_t lda, int rows, const bf16* const* panels, int, int steps,
                         float* sums, const bf16* next) {
        const int tiles = (rows + kTileRows - 1) / kTileRows, pairs = tiles / 2;
        const bool is_long = pairs >= kMinPrefetchPairs;
        const int few = next ? kStepSize : 0, count = is_long ? round_up((few + pairs - 1) / pairs, kTileDepth) : few;
        const bf16* from = is_long ? next : panels[0] + kStepsAhead * kStepSize;
        int tile = 0;
        for (; tile + 2 <= tiles; tile += 2, from += size_t(count) * steps)
            multiply_tiles<2>(a + find_start(tile, rows) * lda, a + find_start(tile + 1, rows) * lda, lda, panels[0],
                              steps, sums + tile * kTileRows * kLeading, from, count);
        if (tile < tiles)
            multiply_tiles<1>(a + find_start(tile, rows) * lda, nullptr, lda, panels[0], steps,
                              sums + tile * kTileRows * kLeading, panels[0] + kStepSize, few);
    }
};

#endif

}  // namespace quire
