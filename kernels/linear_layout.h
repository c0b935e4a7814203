// The layout of packed weights that are narrower than float32, and how they become the kernels' operand.
//
// W [N, K] is cut into panels of 32 columns of y, a panel into tiles of 32 steps of K (zeros past N and K):
// [ceil(N / 32)][ceil(K / 32)][2][16][16][2], that is 16 columns, 16 pairs of k, column, k of the pair. 1 KB,
// a tile of AMX, and in each 64 bytes an operand of vdpbf16ps. One thread reads its panels as one stream.
//
// int8 keeps this order but for one thing: in each 64 bytes lie two pairs of k, [4][2][4][2]: 4 columns,
// pair, column of the 4, k. A byte is sign and magnitude. Every such number is a bfloat16 without rounding.
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

inline int count_panels(int N) { return (N + kPanelColumns - 1) / kPanelColumns; }
inline int count_steps(int K) { return (K + kTileDepth - 1) / kTileDepth; }

// One int8 of the packed form as bfloat16, for any compiler to vectorize.
inline bf16 widen_int8(uint8_t q) { return bf16((q & 0x80) << 8 | narrow<bf16>(float(q & 0x7f))); }

// `count` packed int8 numbers, a multiple of 64, as bfloat16 in the layout of bfloat16 weights.
#if defined(__AVX512VBMI__)
struct Int8Tables {
    alignas(64) uint8_t low[128], high[128];
    Int8Tables() {
        for (int i = 0; i < 128; ++i) {
            low[i] = uint8_t(widen_int8(uint8_t(i)));
            high[i] = uint8_t(widen_int8(uint8_t(i)) >> 8);
        }
    }
};

inline void expand_int8(const uint8_t* from, bf16* to, int count) {
    static const Int8Tables tables;
    const __m512i low0 = _mm512_load_si512(tables.low), low1 = _mm512_load_si512(tables.low + 64);
    const __m512i high0 = _mm512_load_si512(tables.high), high1 = _mm512_load_si512(tables.high + 64);
    const __m512i sign = _mm512_set1_epi8(char(0x80));
    for (int i = 0; i < count; i += 64) {
        const __m512i q = _mm512_loadu_si512(from + i);
        const __m512i low = _mm512_permutex2var_epi8(low0, q, low1);
        const __m512i magnitude = _mm512_permutex2var_epi8(high0, q, high1);
        const __m512i high = _mm512_ternarylogic_epi32(magnitude, q, sign, 0xF8);  // magnitude | (q & sign)
        _mm512_store_si512(to + i, _mm512_unpacklo_epi8(low, high));
        _mm512_store_si512(to + i + 32, _mm512_unpackhi_epi8(low, high));
    }
}
#else
inline void expand_int8(const uint8_t* from, bf16* to, int count) {
    for (int i = 0; i < count; i += 64)
        for (int lane = 0; lane < 4; ++lane)
            for (int j = 0; j < 8; ++j) {
                to[i + lane * 8 + j] = widen_int8(from[i + lane * 16 + j]);
                to[i + 32 + lane * 8 + j] = widen_int8(from[i + lane * 16 + 8 + j]);
            }
}
#endif

}  // namespace quire
