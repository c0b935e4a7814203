// Products of rows with packed panels in AMX tiles: sums are chains of tdpbf16ps over 32 steps of K, in order, or
// of tdpbssd over 64, which are exact.
//
// A row's sums do not depend on the rows of its tile, so one row and two thousand get the same bits.
// The intrinsics do not tell the compiler which memory they read: order() before a first load does.
#pragma once

#include "amx.h"
#include "linear_layout.h"

#include <algorithm>
#include <type_traits>

namespace quire {

#if defined(QUIRE_HAS_AMX)

// As the engines of linear_vector.h. Number: bf16, or int8_t with sums of int32.
template <class Number>
struct TileEngine {
    typedef Number Input;
    typedef std::conditional_t<std::is_same_v<Number, bf16>, float, int32_t> Sum;
    static constexpr int kGroup = 1;
    static constexpr int kLeading = kPanelColumns;
    static constexpr int kTileRows = 16;
    static constexpr int kDepth = 64 / sizeof(Number);  // numbers of a tile's row, and of a cache line
    static constexpr int kPanelStep = kPanelColumns * kDepth;
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
        if constexpr (std::is_same_v<Number, bf16>) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        } else {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
        }
    }

    static void add_second_products() {
        if constexpr (std::is_same_v<Number, bf16>) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else {
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }

    // One or two tiles of rows, from a and a2 on. Beside each step it fetches `count` numbers, from `next` on.
    template <int Tiles>
    static void multiply_tiles(const Number* a, const Number* a2, size_t lda, const Number* panel, int steps,
                               Sum* sums, const Number* next, int count) {
        const size_t stride = lda * sizeof(Number), ld = kLeading * sizeof(Sum);
        Sum* sums2 = sums + kTileRows * kLeading;
        order();
        _tile_loadd(0, sums, ld);
        _tile_loadd(1, sums + kTileColumns, ld);
        if (Tiles == 2) _tile_loadd(2, sums2, ld);
        if (Tiles == 2) _tile_loadd(3, sums2 + kTileColumns, ld);
        for (int step = 0; step < steps; ++step) {
            const Number* b = panel + step * kPanelStep;
            fetch(next + size_t(step) * count, count);
            _tile_loadd(4, a + step * kDepth, stride);
            _tile_loadd(6, b, 64);
            if (Tiles == 2) _tile_loadd(5, a2 + step * kDepth, stride);
            _tile_loadd(7, b + kPanelStep / 2, 64);
            add_products();
            if (Tiles == 2) add_second_products();
        }
        _tile_stored(0, sums, ld);
        _tile_stored(1, sums + kTileColumns, ld);
        if (Tiles == 2) _tile_stored(2, sums2, ld);
        if (Tiles == 2) _tile_stored(3, sums2 + kTileColumns, ld);
    }

    // sums[32, 32] = the rows from a and a2 on, 16 each, times a panel. Calls beside(step) with each step, for work
    // that the processor does while it multiplies.
    template <class Beside>
    static void multiply_pair(const Number* a, const Number* a2, size_t lda, const Number* panel, int steps, Sum* sums,
                              const Beside& beside) {
        const size_t stride = lda * sizeof(Number), ld = kLeading * sizeof(Sum);
        Sum* sums2 = sums + kTileRows * kLeading;
        order();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int step = 0; step < steps; ++step) {
            const Number* b = panel + step * kPanelStep;
            _tile_loadd(4, a + step * kDepth, stride);
            _tile_stream_loadd(6, b, 64);
            _tile_loadd(5, a2 + step * kDepth, stride);
            _tile_stream_loadd(7, b + kPanelStep / 2, 64);
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

    static void multiply(const Number* a, size_t lda, int rows, const Number* const* panels, int, int steps,
                         Sum* sums, const Number* next) {
        const int tiles = (rows + kTileRows - 1) / kTileRows, pairs = tiles / 2;
        const bool is_long = pairs >= kMinPrefetchPairs;
        const int count = is_long ? round_up((kPanelStep + pairs - 1) / pairs, kDepth) : kPanelStep;
        const Number* from = is_long ? next : panels[0] + kStepsAhead * kPanelStep;
        int tile = 0;
        for (; tile + 2 <= tiles; tile += 2, from += size_t(count) * steps)
            multiply_tiles<2>(a + find_start(tile, rows) * lda, a + find_start(tile + 1, rows) * lda, lda, panels[0],
                              steps, sums + tile * kTileRows * kLeading, from, count);
        if (tile < tiles)
            multiply_tiles<1>(a + find_start(tile, rows) * lda, nullptr, lda, panels[0], steps,
                              sums + tile * kTileRows * kLeading, panels[0] + kPanelStep, kPanelStep);
    }
};

#endif

}  // namespace quire
