// y = x W^T + bias of a few rows and narrow weights in AMX tiles. The weights are the left factor, in which the
// numbers of a column of y lie side by side, as they are read: nothing is turned. While a step's tiles are multiplied,
// the next one's are looked up. Products and the order of their additions are those of compute_packed.
#pragma once

#include "linear/linear_amx.h"
#include "linear/linear_packed.h"
#include "program/thread_pool.h"

namespace quire {

#if defined(QUIRE_HAS_AMX)

constexpr int kMostFewRows = 32;  // two tiles
constexpr int kFewTiles = 4;      // of sums

inline bool has_few_rows(const PackedLayer<bf16>& layer) { return layer.narrow && layer.m <= kMostFewRows; }

// x [m, K] as a right factor: [tiles][K / 2][columns][2], for up to 16 rows one tile of m columns, else two of 16.
struct FewRows {
    int m, tiles, columns, steps;
    Floats memory;

    explicit FewRows(const PackedLayer<bf16>& layer, int steps)
        : m(layer.m), tiles(layer.m > 16 ? 2 : 1), columns(tiles > 1 ? 16 : layer.m), steps(steps) {
        const size_t pairs = size_t(steps) * kTileDepth / 2, size = pairs * columns * tiles;
        memory = allocate(size);
        uint32_t* to = reinterpret_cast<uint32_t*>(memory.get());
        if (m < tiles * columns || layer.K < steps * kTileDepth) std::fill_n(to, size, 0);
        for (int r = 0; r < m; ++r) {
            const bf16* row = layer.x + size_t(r) * layer.K;
            uint32_t* column = to + r / columns * pairs * columns + r % columns;
            for (int k = 0; k + 1 < layer.K; k += 2) std::memcpy(column + size_t(k / 2) * columns, row + k, 4);
            if (layer.K % 2) std::memcpy(column + size_t(layer.K / 2) * columns, row + layer.K - 1, 2);
        }
    }

    // A step of a tile; its rows are `columns` words apart.
    const void* at(int tile, int step) const {
        const size_t pairs = size_t(tile) * steps * kTileDepth / 2 + size_t(step) * kTileDepth / 2;
        return reinterpret_cast<const uint32_t*>(memory.get()) + pairs * columns;
    }
};

// Sums of `count` tiles of 16 outputs, two for each of two tiles of rows; tiles 0 to 3.
template <int count, int columns>
struct FewSums {
    static void clear() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    static void add(int tile, const bf16* numbers) {
        if constexpr (columns == 1) {
            switch (tile) {
                case 0: _tile_loadd(4, numbers, 64); _tile_dpbf16ps(0, 4, 6); break;
                case 1: _tile_loadd(5, numbers, 64); _tile_dpbf16ps(1, 5, 6); break;
                case 2: _tile_loadd(4, numbers, 64); _tile_dpbf16ps(2, 4, 6); break;
                default: _tile_loadd(5, numbers, 64); _tile_dpbf16ps(3, 5, 6);
            }
        } else if (tile == 0) {
            _tile_loadd(4, numbers, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        } else {
            _tile_loadd(5, numbers, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    static void store(float (&sums)[kFewTiles][16 * 16]) {
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        if (count * columns == 4) _tile_stored(2, sums[2], 64);
        if (count * columns == 4) _tile_stored(3, sums[3], 64);
    }
};

// Sums [tile][rows of x] of `count` tiles of outputs from a panel on; a tile is [16 outputs][16 rows].
template <int format, int count, int columns>
void multiply_few(const QuireLinear& layer, const FewRows& x, int panel, float (&sums)[kFewTiles][16 * 16]) {
    typedef FewSums<count, columns> Sums;
    alignas(64) bf16 numbers[2][count][kTileSize];
    PanelReader<format> readers[] = {{layer, panel, count / 2 - 1}, {layer, panel + count / 2 - 1, count / 2 - 1}};
    const auto seek = [&](int step) {
        for (int i = 0; i < count / 2; ++i) readers[i].seek(step);
    };
    const auto read = [&](int tile, bf16* to) {
        readers[tile / 2].read(tile % 2, [&](int n, __m512i row) { _mm512_store_si512(to + n * kTileDepth, row); });
    };
    seek(0);
    for (int tile = 0; tile < count; ++tile) read(tile, numbers[0][tile]);
    Sums::clear();
    const int stride = 4 * x.columns;
    for (int step = 0; step < x.steps; ++step) {
        const bool is_last = step + 1 == x.steps;
        if (!is_last) seek(step + 1);
        TileEngine::order();
        _tile_loadd(6, x.at(0, step), stride);
        if (columns > 1) _tile_loadd(7, x.at(1, step), stride);
        for (int tile = 0; tile < count; ++tile) {
            if (!is_last) read(tile, numbers[(step + 1) % 2][tile]);
            TileEngine::order();
            Sums::add(tile, numbers[step % 2][tile]);
        }
    }
    Sums::store(sums);
    TileEngine::order();
}

// y of `count` tiles of outputs from a panel on.
template <class Act, int format, int count, int columns>
void compute_few_panels(const PackedLayer<bf16>& layer, const FewRows& x, int panel) {
    alignas(64) float sums[kFewTiles][16 * 16];
    multiply_few<format, count, columns>(*layer.narrow, x, panel, sums);
    alignas(64) float rows[16 * columns][count * 16];
    for (int tile = 0; tile < count * columns; ++tile) {
        const int first = tile / columns * 16, start = tile % columns * 16;
        if (x.m == 1) {
            for (int n = 0; n < 16; ++n) rows[0][first + n] = sums[tile][n * 16];
            continue;
        }
        __m512i square[16];
        for (int n = 0; n < 16; ++n) square[n] = _mm512_load_si512(sums[tile] + n * 16);
        transpose(square);
        for (int r = 0; r < std::min(16, x.m - start); ++r) _mm512_store_si512(rows[start + r] + first, square[r]);
    }
    const int column = panel * kPanelColumns, width = std::min(count * 16, layer.N - column);
    for (int r = 0; r < x.m; ++r)
        finish_row<Act>(layer.y + size_t(r) * layer.N + column, rows[r], layer.bias ? layer.bias + column : nullptr, width);
}

template <int format>
void compute_few_of(const PackedLayer<bf16>& layer) {
    const int panels = count_panels(layer.N);
    const bool is_parallel = double(layer.m) * layer.K * layer.N > kMinParallelWork;
    const FewRows x(layer, count_steps(layer.K));
    const int each = x.tiles > 1 ? 1 : 2;  // panels of a task
    with_activation<bf16>(layer.activation, [&](auto act) {
        typedef decltype(act) Act;
        parallel_for((panels + each - 1) / each, is_parallel, [&](int task) {
            const AmxTiles tiles(true, 16, x.columns);
            const int panel = task * each;
            if (x.tiles > 1) return compute_few_panels<Act, format, 2, 2>(layer, x, panel);
            panel + 1 < panels ? compute_few_panels<Act, format, 4, 1>(layer, x, panel)
                               : compute_few_panels<Act, format, 2, 1>(layer, x, panel);
        });
    });
}

inline void compute_few(const PackedLayer<bf16>& layer) {
    switch (layer.narrow->format) {
        case QUIRE_LINEAR_INT4: return compute_few_of<QUIRE_LINEAR_INT4>(layer);
        case QUIRE_LINEAR_INT8: return compute_few_of<QUIRE_LINEAR_INT8>(layer);
        default: return compute_few_of<QUIRE_LINEAR_FP8>(layer);
    }
}

#endif

}  // namespace quire
