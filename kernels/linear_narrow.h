// Weights of 4 and 8 bits: their packed layout, and how a kernel gets the numbers that they stand for.
//
// Panels and steps are those of linear_layout.h: 32 columns by 32 k, in two tiles of 16 columns. In a tile of 8 bits
// [16 pairs][2][8 columns][2 k] bytes lie in the order of bfloat16 weights, 8 columns at a time. In one of 4 bits
// [4][8 columns][2 k] words of 32 bits hold 4 pairs of k, from the lowest bits on: a pair's first 8 columns in the
// lower half of a byte, the other 8 in the upper one. Scales and offsets are [panels][groups][32].
// What comes out is code * scale - offset, or codebook[code] * scale - offset, rounded once (to float32, then to
// bfloat16): a layer has the bits of a plain one over those numbers.
#pragma once

#include "linear.h"
#include "linear_layout.h"

#include <algorithm>
#include <climits>

namespace quire {

constexpr int kHalfDepth = 16;          // k of half a step; a group has a multiple of them
constexpr int kHalfPairs = kHalfDepth / 2;
constexpr int kNarrowPrefetch = 4096;   // bytes: reading pauses while a block is multiplied

inline bool is_narrow_format(int format) { return format >= QUIRE_LINEAR_INT4; }

// Bytes of a tile's half step.
constexpr int half_bytes(int format) { return kTileColumns * kHalfDepth / (format == QUIRE_LINEAR_INT4 ? 2 : 1); }

constexpr int step_bytes(int format) { return 4 * half_bytes(format); }

// Offset of a symmetric integer weight, in scales.
constexpr float find_middle(int format) { return format == QUIRE_LINEAR_INT4 ? 8.0f : 128.0f; }

// What 4-bit codes stand for where there is no codebook.
alignas(64) constexpr float kWholeNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Goes through the half steps of a panel and says where a group begins.
struct GroupWalk {
    int unit, groups, group, left;

    GroupWalk(const QuireLinear& layer, int step)
        : unit(layer.group_size ? layer.group_size / kHalfDepth : INT_MAX),
          groups(layer.group_size ? (layer.num_in + layer.group_size - 1) / layer.group_size : 1),
          group(2 * step / unit),
          left(unit - 2 * step % unit) {}

    // Where the numbers of the present group begin among those of all panels; past K those of the last one.
    size_t find(int panel) const { return (size_t(panel) * groups + std::min(group, groups - 1)) * kPanelColumns; }

    // Whether the next half step is in another group.
    bool advance() {
        if (--left > 0) return false;
        ++group;
        left = unit;
        return true;
    }
};

#if defined(__AVX512BF16__)

// 16 numbers from `at` on as two vectors, each number twice: the columns of a pair of k.
inline void load_twice(const QuireLinear& layer, size_t at, __m512 (&scales)[2], __m512 (&offsets)[2]) {
    __m512 scale;
    if (layer.has_bf16_scales) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const bf16*>(layer.scales) + at));
        scale = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
    } else {
        scale = _mm512_loadu_ps(static_cast<const float*>(layer.scales) + at);
    }
    __m512 offset = _mm512_setzero_ps();
    if (layer.offsets)
        offset = _mm512_loadu_ps(layer.offsets + at);
    else if (layer.format != QUIRE_LINEAR_FP8 && !layer.codebook)
        offset = _mm512_mul_ps(scale, _mm512_set1_ps(find_middle(layer.format)));
    if (layer.format == QUIRE_LINEAR_FP8) scale = _mm512_mul_ps(scale, _mm512_set1_ps(256.0f));
    const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    scales[0] = _mm512_permutexvar_ps(first, scale);
    scales[1] = _mm512_permutexvar_ps(second, scale);
    offsets[0] = _mm512_permutexvar_ps(first, offset);
    offsets[1] = _mm512_permutexvar_ps(second, offset);
}

// A pair of k of 8 and 8 columns, where a panel of 32 columns has it.
inline void put_pair(__m512 low, __m512 high, int pair, bf16* tile) {
    _mm512_store_si512(tile + pair * 2 * kTileColumns, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

inline void put_pair(__m512 low, __m512 high, int pair, float* tile) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    float* row = tile + size_t(2 * pair) * kPanelColumns;
    _mm512_store_ps(row, _mm512_permutex2var_ps(low, even, high));
    _mm512_store_ps(row + kPanelColumns, _mm512_permutex2var_ps(low, odd, high));
}

// e4m3 numbers as float32 / 256: a half float with the same bits has an exponent that is less by 8.
inline void load_fp8(const uint8_t* from, __m512& low, __m512& high) {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(wide, 8), _mm512_set1_epi16(short(0x8000)));
    const __m512i size = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(0x3F80));
    const __m512i half = _mm512_or_si512(sign, size);
    low = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
    high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
}

inline __m512 load_int8(const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// Half a step of a tile.
template <int format, class To>
inline void expand_half(const uint8_t* from, __m512 table, const __m512 (&scales)[2], const __m512 (&offsets)[2], To* to) {
    for (int pair = 0; pair < kHalfPairs; ++pair) {
        __m512 low, high;
        if constexpr (format == QUIRE_LINEAR_INT4) {
            const __m512i words = _mm512_loadu_si512(from + pair / 4 * 64);
            low = _mm512_permutexvar_ps(_mm512_srli_epi32(words, pair % 4 * 8), table);
            high = _mm512_permutexvar_ps(_mm512_srli_epi32(words, pair % 4 * 8 + 4), table);
        } else if constexpr (format == QUIRE_LINEAR_INT8) {
            low = load_int8(from + pair * 32);
            high = load_int8(from + pair * 32 + 16);
        } else {
            load_fp8(from + pair * 32, low, high);
        }
        put_pair(_mm512_fmsub_ps(low, scales[0], offsets[0]), _mm512_fmsub_ps(high, scales[1], offsets[1]), pair, to);
    }
}

template <int format, class To>
void expand_panel(const QuireLinear& layer, int panel, int step, int count, To* to) {
    constexpr int kHalf = half_bytes(format);
    const uint8_t* from = static_cast<const uint8_t*>(layer.packed) +
                          (size_t(panel) * count_steps(layer.num_in) + step) * step_bytes(format);
    const __m512 table = _mm512_loadu_ps(layer.codebook ? layer.codebook : kWholeNumbers);
    constexpr int kTile = std::is_same_v<To, float> ? kTileColumns : kTileSize;  // from a tile to the one beside it
    GroupWalk walk(layer, step);
    __m512 scales[2][2], offsets[2][2];
    const auto load_group = [&] {
        const size_t at = walk.find(panel);
        load_twice(layer, at, scales[0], offsets[0]);
        load_twice(layer, at + kTileColumns, scales[1], offsets[1]);
    };
    load_group();
    for (int half = 0; half < 2 * count; ++half) {
        To* start = to + half / 2 * kStepSize + half % 2 * (kStepSize / (std::is_same_v<To, float> ? 2 : 4));
        const uint8_t* codes = from + half / 2 * step_bytes(format) + half % 2 * kHalf;
        for (int line = 0; line < kHalf; line += 64) {
            __builtin_prefetch(codes + line + kNarrowPrefetch);
            __builtin_prefetch(codes + line + 2 * kHalf + kNarrowPrefetch);
        }
        expand_half<format>(codes, table, scales[0], offsets[0], start);
        expand_half<format>(codes + 2 * kHalf, table, scales[1], offsets[1], start + kTile);
        if (walk.advance() && half + 1 < 2 * count) load_group();
    }
}

#else

inline float decode_fp8(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent ? std::ldexp(float(8 + fraction), exponent - 10) : std::ldexp(float(fraction), -9);
    return code & 128 ? -size : size;
}

// The number of a column of 16 and a k of a half step.
template <int format>
inline float decode(const uint8_t* half, const float* codebook, int column, int k) {
    const int pair = k / 2, lane = column % 8 * 2 + k % 2;
    if (format == QUIRE_LINEAR_INT4) return codebook[half[pair / 4 * 64 + lane * 4 + pair % 4] >> column / 8 * 4 & 15];
    const uint8_t code = half[pair * 32 + column / 8 * 16 + lane];
    return format == QUIRE_LINEAR_INT8 ? float(code) : decode_fp8(code);
}

template <int format, class To>
void expand_panel(const QuireLinear& layer, int panel, int step, int count, To* to) {
    constexpr bool is_float = std::is_same_v<To, float>;
    const uint8_t* from = static_cast<const uint8_t*>(layer.packed) +
                          (size_t(panel) * count_steps(layer.num_in) + step) * step_bytes(format);
    const float* table = layer.codebook ? layer.codebook : kWholeNumbers;
    const bool has_middle = format != QUIRE_LINEAR_FP8 && !layer.codebook;
    GroupWalk walk(layer, step);
    for (int half = 0; half < 2 * count; ++half, walk.advance())
        for (int n = 0; n < kPanelColumns; ++n) {
            const size_t at = walk.find(panel) + n;
            const int tile = n / kTileColumns, column = n % kTileColumns;
            const float scale = layer.has_bf16_scales ? widen(static_cast<const bf16*>(layer.scales)[at])
                                                      : static_cast<const float*>(layer.scales)[at];
            const float offset = layer.offsets ? layer.offsets[at] : has_middle ? scale * find_middle(format) : 0.0f;
            const uint8_t* codes =
                from + half / 2 * step_bytes(format) + (2 * tile + half % 2) * half_bytes(format);
            for (int i = 0; i < kHalfDepth; ++i) {
                const float value = std::fma(decode<format>(codes, table, column, i), scale, -offset);
                const int k = half % 2 * kHalfDepth + i;
                const size_t place = is_float ? k * kPanelColumns + n
                                              : tile * kTileSize + k / 2 * 2 * kTileColumns + column * 2 + k % 2;
                to[half / 2 * kStepSize + place] = narrow<To>(value);
            }
        }
}

#endif

// `count` steps of a panel as bfloat16 in the layout of bfloat16 weights, or as float [k][32]; `to` aligned to 64.
template <class To>
void expand_narrow(const QuireLinear& layer, int panel, int step, int count, To* to) {
    switch (layer.format) {
        case QUIRE_LINEAR_INT4: return expand_panel<QUIRE_LINEAR_INT4>(layer, panel, step, count, to);
        case QUIRE_LINEAR_INT8: return expand_panel<QUIRE_LINEAR_INT8>(layer, panel, step, count, to);
        default: return expand_panel<QUIRE_LINEAR_FP8>(layer, panel, step, count, to);
    }
}

}  // namespace quire
