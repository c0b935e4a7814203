// Products of rows with packed panels in AMX tiles: sums are chains of tdpbf16ps over 32 steps of K, in order.
//
// A row's sums do not depend on the rows of its tile, so one row and two thousand get the same bits.
// The intrinsics do not tell the compiler which memory they read: order() before a first load does.
#pragma once

#include "amx.h"
#include "linear_layout.h"

#include <algorithm>

namespace quire {

#if defined(QUIRE_HAS_AMX)

// As the engines of linear_vector.h.
struct TileEngine {
    typedef bf16 Input;
    static constexpr int kGroup = 1;
    static constexpr int kLeading = kPanelColumns;
    static constexpr int kTileRows = 16;
    static constexpr int kLineSize = 32;  // numbers of a cache line
    // Pairs of row tiles from which a block takes long enough to fetch the next one's weights beside it: 1.05
    // times as fast at 64 rows, 1.2 times at 1024 rows of K 3072.
    static constexpr int kMinPrefetchPairs = 2;
    static constexpr int kFewRows = 2 * kTileRows;
    static constexpr int kBlockSteps = 8;

    // A thread's tiles: 0 to 3 sums, 4 and 5 rows, 6 and 7 columns. Fewer than 16 rows are one short tile.
    class Scope {
      public:
        explicit Scope(int rows) {
            struct alignas(64) {
                uint8_t palette = 1, start_row = 0, reserved[14] = {};
                uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
                uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
            } config;
            std::fill_n(config.rows, 6, uint8_t(std::min(rows, kTileRows)));
            asm volatile("" : : "r"(&config) : "memory");
            _tile_loadconfig(&config);
        }
        ~Scope() { _tile_release(); }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;
    };

    // The last tile of rows ends with the last row and so may repeat some of the tile before.
    static int find_start(int tile, int rows) { return std::max(0, std::min(tile * kTileRows, rows - kTileRows)); }

    // Where the sums of a row are: each tile has its own 16 rows of sums.
    static int find_slot(int row, int rows) {
        const int tile = row / kTileRows;
        return tile * kTileRows + row - find_start(tile, rows);
    }

    static void order() { asm volatile("" : : : "memory"); }

    static void multiply_one(const bf16* a, size_t lda, const bf16* panel, int steps, float* sums) {
        const size_t stride = lda * sizeof(bf16), ld = kLeading * sizeof(float);
        order();
        _tile_loadd(0, sums, ld);
        _tile_loadd(1, sums + kTileColumns, ld);
        for (int step = 0; step < steps; ++step) {
            const bf16* b = panel + step * kStepSize;
            _tile_loadd(4, a + step * kTileDepth, stride);
            _tile_loadd(6, b, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + kTileSize, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, sums, ld);
        _tile_stored(1, sums + kTileColumns, ld);
    }

    static void multiply_two(const bf16* a, const bf16* a2, size_t lda, const bf16* panel, int steps, float* sums,
                             const bf16* next, int lines) {
        const size_t stride = lda * sizeof(bf16), ld = kLeading * sizeof(float);
        float* sums2 = sums + kTileRows * kLeading;
        order();
        _tile_loadd(0, sums, ld);
        _tile_loadd(1, sums + kTileColumns, ld);
        _tile_loadd(2, sums2, ld);
        _tile_loadd(3, sums2 + kTileColumns, ld);
        for (int step = 0; step < steps; ++step) {
            const bf16* b = panel + step * kStepSize;
            for (int i = 0; i < lines; ++i, next += kLineSize) __builtin_prefetch(next);
            _tile_loadd(4, a + step * kTileDepth, stride);
            _tile_loadd(6, b, 64);
            _tile_loadd(5, a2 + step * kTileDepth, stride);
            _tile_loadd(7, b + kTileSize, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums, ld);
        _tile_stored(1, sums + kTileColumns, ld);
        _tile_stored(2, sums2, ld);
        _tile_stored(3, sums2 + kTileColumns, ld);
    }

    static void multiply(const bf16* a, size_t lda, int rows, const bf16* const* panels, int, int steps,
                         float* sums, const bf16* next) {
        const int tiles = (rows + kTileRows - 1) / kTileRows;
        const int pairs = tiles / 2, is_long = next && pairs >= kMinPrefetchPairs;
        const int lines = is_long ? (kStepSize / kLineSize + pairs - 1) / pairs : 0;  // a step of a pair
        int tile = 0;
        for (; tile + 2 <= tiles; tile += 2, next += lines * steps * kLineSize)
            multiply_two(a + find_start(tile, rows) * lda, a + find_start(tile + 1, rows) * lda, lda, panels[0],
                         steps, sums + tile * kTileRows * kLeading, next, lines);
        if (tile < tiles)
            multiply_one(a + find_start(tile, rows) * lda, lda, panels[0], steps,
                         sums + tile * kTileRows * kLeading);
    }
};

#endif

}  // namespace quire
