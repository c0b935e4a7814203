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

// Bytes. Reading pauses while a block is multiplied, so the processor's own prefetch does not suffice.
constexpr int kInt8Prefetch = 4096;

// `count` packed int8 numbers, a multiple of 64, as bfloat16 in the layout of bfloat16 weights.
#if defined(__AVX512VBMI__)
struct Int8Tables {
    alignas(64) uint8_t low[128], high[128];
    Int8Tables() {
        for (int i = 0; i < 128; ++i) {
            const bf16 number = narrow<bf16>(float(i));
            low[i] = uint8_t(number);
            high[i] = uint8_t(number >> 8);
        }
    }
};

inline void expand_int8(const uint8_t* from, bf16* to, int count) {
    static const Int8Tables tables;
    const __m512i low0 = _mm512_load_si512(tables.low), low1 = _mm512_load_si512(tables.low + 64);
    const __m512i high0 = _mm512_load_si512(tables.high), high1 = _mm512_load_si512(tables.high + 64);
    const __m512i sign = _mm512_set1_epi8(char(0x80));
    for (int i = 0; i < count; i += 64) {
        __builtin_prefetch(from + i + kInt8Prefetch);
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
    typedef uint16_t Pairs __attribute__((vector_size(16)));
    typedef uint32_t Words __attribute__((vector_size(32)));
    typedef int32_t Integers __attribute__((vector_size(32)));
    typedef float Numbers __attribute__((vector_size(32)));
    for (int i = 0; i < count; i += 16) {  // 4 columns of two pairs of k; the pairs are 32 apart in `to`
        Pairs pairs;
        std::memcpy(&pairs, from + i, sizeof pairs);
        const Words q = __builtin_convertvector(pairs, Words);
        const Words first = (Words)__builtin_convertvector((Integers)(q & 0x7fu), Numbers);
        const Words second = (Words)__builtin_convertvector((Integers)(q >> 8 & 0x7fu), Numbers);
        const Words result = first >> 16 | (q & 0x80u) << 8 | second | (q & 0x8000u) << 16;
        bf16* place = to + i / 64 * 64 + i % 64 / 2;
        std::memcpy(place, &result, sizeof result / 2);
        std::memcpy(place + 32, reinterpret_cast<const char*>(&result) + sizeof result / 2, sizeof result / 2);
    }
}
#endif

}  // namespace quire
