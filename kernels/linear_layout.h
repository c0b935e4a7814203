// The layout of packed weights that are narrower than float32, and how they become the kernels' operand.
//
// W [N, K] is cut into panels of 32 columns of y, a panel into tiles of 32 steps of K (zeros past N and K):
// [ceil(N / 32)][ceil(K / 32)][2][16][16][2], that is 16 columns, 16 pairs of k, column, k of the pair. 1 KB,
// a tile of AMX, and in each 64 bytes an operand of vdpbf16ps. One thread reads its panels as one stream.
//
// int8 has twice as many steps of K in a tile: [ceil(N / 32)][ceil(K / 64)][2][16][16][4], that is 16 columns, 16
// fours of k, column, k of the four; each 64 bytes are a row of AMX's tile. Every such number is a bfloat16 without
// rounding, which is how the variants without integer tiles multiply it.
#pragma once

#include "tile.h"

#if defined(__AVX512VBMI__)
#include <immintrin.h>
#endif

namespace quire {

constexpr int kTileColumns = 16;
constexpr int kPanelColumns = 2 * kTileColumns;
constexpr int kTileDepth = 32;
constexpr int kTileSize = kTileColumns * kTileDepth;  // numbers in a tile
constexpr int kStepSize = 2 * kTileSize;              // numbers of a panel for 32 steps of K

constexpr int kInt8Depth = 2 * kTileDepth;

inline int count_panels(int N) { return (N + kPanelColumns - 1) / kPanelColumns; }

// Steps of kTileDepth that a panel has; an even number if its weights are int8.
inline int count_steps(int K, bool is_int8 = false) {
    return is_int8 ? (K + kInt8Depth - 1) / kInt8Depth * 2 : (K + kTileDepth - 1) / kTileDepth;
}

// Bytes. Reading pauses while a block is multiplied, so the processor's own prefetch does not suffice.
constexpr int kInt8Prefetch = 4096;

// 64 numbers [16 columns][4 k] as bfloat16 [2 pairs][16 columns][2 k].
#if defined(__AVX512VBMI__)
struct Int8Tables {
    alignas(64) uint8_t low[128], high[128];  // bytes of the bfloat16 of each magnitude
    Int8Tables() {
        for (int i = 0; i < 128; ++i) {
            const bf16 number = narrow<bf16>(float(i));
            low[i] = uint8_t(number);
            high[i] = uint8_t(number >> 8);
        }
    }
};

inline void expand_row(const int8_t* from, bf16* to) {
    static const Int8Tables tables;
    const __m512i low0 = _mm512_load_si512(tables.low), low1 = _mm512_load_si512(tables.low + 64);
    const __m512i high0 = _mm512_load_si512(tables.high), high1 = _mm512_load_si512(tables.high + 64);
    // In each 4 columns the first pairs of k, then the second ones.
    const __m512i by_pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m512i q = _mm512_shuffle_epi8(_mm512_loadu_si512(from), by_pairs), size = _mm512_abs_epi8(q);
    const __m512i low = _mm512_permutex2var_epi8(low0, size, low1);
    const __m512i unsigned_high = _mm512_permutex2var_epi8(high0, size, high1);
    const __m512i high = _mm512_ternarylogic_epi32(unsigned_high, q, _mm512_set1_epi8(char(0x80)), 0xF8);  // | (q & 0x80)
    _mm512_store_si512(to, _mm512_unpacklo_epi8(low, high));
    _mm512_store_si512(to + 32, _mm512_unpackhi_epi8(low, high));
}
#else
inline void expand_row(const int8_t* from, bf16* to) {
    for (int k = 0; k < 4; ++k)
        for (int n = 0; n < kTileColumns; ++n)
            to[k / 2 * kTileDepth + n * 2 + k % 2] = narrow<bf16>(float(from[n * 4 + k]));
}
#endif

// Packed int8 numbers of `steps` steps, an even number, as bfloat16 in the layout of bfloat16 weights.
inline void expand_int8(const int8_t* from, bf16* to, int steps) {
    constexpr int kRow = 4 * kTileColumns, kRowsPerStep = kTileSize / kRow;
    for (int step = 0; step < steps; step += 2)
        for (int tile = 0; tile < 2; ++tile)
            for (int row = 0; row < 2 * kRowsPerStep; ++row, from += kRow) {
                __builtin_prefetch(from + kInt8Prefetch);
                const int part = row / kRowsPerStep;
                expand_row(from, to + (step + part) * kStepSize + tile * kTileSize + row % kRowsPerStep * kRow);
            }
}

}  // namespace quire
