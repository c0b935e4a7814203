// Small matrix products for encoder_attention.cpp: c[rows, columns] = a[rows, units] b[units, columns], whose columns
// are queries. A unit is a dword: a float32, or a pair of bfloat16 that are neighbours in the depth. a is staged as
// the engine's Left numbers, its rows `lda` numbers apart; rows of b and c are kPanel dwords apart.
//
// A number of c is one chain over the units in order, whatever is computed beside it; units of zeros change nothing.
// A product calls prepare(begin, end) before it reads units [begin, end) of b, in order, and done(begin, end) when it
// has written rows [begin, end) of c: what vectors compute there runs beside the tiles.
#pragma once

#include "linear/amx.h"
#include "attention/attention_step.h"
#include "linear/pair_products.h"

namespace quire::attention {

constexpr int kPanel = 2 * kLanes;  // queries computed together
constexpr int kKeyStep = 32;        // keys are staged by so many, with zeros past the last

struct NoScope {
    explicit NoScope() {}
};

struct FloatEngine {
    typedef float Number, Left;
    typedef NoScope Scope;

    template <class Prepare, class Done>
    static void multiply(int rows, int vectors, const float* a, size_t lda, const float* b, float* c, int units,
                         const Prepare& prepare, const Done& done) {
        prepare(0, units);
        for (int r = 0; r < rows; r += kMaxRows) {
            const int count = std::min(kMaxRows, rows - r);
            float* sums = c + size_t(r) * kPanel;
            std::fill_n(sums, count * kPanel, 0.0f);
            quire::multiply(count, vectors * kLanes, a + r * lda, lda, b, kPanel, sums, kPanel, units);
        }
        done(0, rows);
    }
};

// By vectors; Pairs says how a product of pairs is added.
template <typename Pairs>
struct PairsEngine {
    typedef bf16 Number;
    typedef typename Pairs::Left Left;
    typedef NoScope Scope;

    template <class Prepare, class Done>
    static void multiply(int rows, int vectors, const Left* a, size_t lda, const float* b, float* c, int units,
                         const Prepare& prepare, const Done& done) {
        prepare(0, units);
        const bf16* pairs = reinterpret_cast<const bf16*>(b);
        const bf16* starts[] = {pairs, pairs + 2 * kLanes};
        with_constant<2>(vectors, [&](auto wide) {
            multiply_pair_rows<Pairs, wide, false>(rows, a, lda, starts, kPanel, c, kPanel, units);
        });
        done(0, rows);
    }
};

#if defined(QUIRE_HAS_AMX)

// In tiles. Units are a multiple of 16; a and c have rows up to a multiple of 16.
struct TilesEngine {
    typedef bf16 Number, Left;
    typedef AmxTiles Scope;

    // Units are prepared and rows are done a block of tiles early and late, while the tiles between are computed.
    template <class Prepare, class Done>
    static void multiply(int rows, int vectors, const bf16* a, size_t lda, const float* b, float* c, int units,
                         const Prepare& prepare, const Done& done) {
        constexpr int kRows = 2 * kLanes;
        prepare(0, kLanes);
        for (int r = 0; r < rows; r += kRows) {
            const auto prepare_next = [&](int unit) {
                if (r == 0 && unit < units) prepare(unit, unit + kLanes);
            };
            with_constant<2>(rows - r > kLanes ? 2 : 1, [&](auto tall) {
                with_constant<2>(vectors, [&](auto wide) {
                    multiply_tiles<tall, wide>(a + r * lda, lda, b, c + size_t(r) * kPanel, units, prepare_next);
                });
            });
            if (r > 0) done(r - kRows, r);
        }
        done((rows - 1) / kRows * kRows, rows);
    }

  private:
    // Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns.
    template <int Tall, int Wide, class Prepare>
    static void multiply_tiles(const bf16* a, size_t lda, const float* b, float* c, int units,
                               const Prepare& prepare_next) {
        constexpr size_t kStride = kPanel * sizeof(float);
        const size_t left_stride = lda * sizeof(bf16);
        _tile_zero(0);
        if (Wide == 2) _tile_zero(1);
        if (Tall == 2) _tile_zero(2);
        if (Tall == 2 && Wide == 2) _tile_zero(3);
        for (int unit = 0; unit < units; unit += kLanes) {
            prepare_next(unit + kLanes);
            asm volatile("" : : : "memory");  // the intrinsics do not name what they read
            _tile_loadd(4, a + 2 * unit, left_stride);
            _tile_loadd(6, b + size_t(unit) * kPanel, kStride);
            _tile_dpbf16ps(0, 4, 6);
            if (Wide == 2) _tile_loadd(7, b + size_t(unit) * kPanel + kLanes, kStride);
            if (Wide == 2) _tile_dpbf16ps(1, 4, 7);
            if (Tall == 1) continue;
            _tile_loadd(5, a + kLanes * lda + 2 * unit, left_stride);
            _tile_dpbf16ps(2, 5, 6);
            if (Wide == 2) _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c, kStride);
        if (Wide == 2) _tile_stored(1, c + kLanes, kStride);
        if (Tall == 2) _tile_stored(2, c + kLanes * kPanel, kStride);
        if (Tall == 2 && Wide == 2) _tile_stored(3, c + kLanes * kPanel + kLanes, kStride);
        asm volatile("" : : : "memory");
    }
};

#endif

#if defined(__AVX512F__)
// Exchanges squares of Width x Width dwords across the diagonal of squares twice as wide.
template <int Width>
inline void turn_squares(__m512i (&block)[kLanes]) {
    alignas(64) int32_t low[kLanes], high[kLanes];  // of two rows together, numbered from 0 to 31
    for (int i = 0; i < kLanes; ++i) {
        low[i] = i & Width ? kLanes + i - Width : i;
        high[i] = i & Width ? kLanes + i : i + Width;
    }
    const __m512i from_low = _mm512_load_si512(low), from_high = _mm512_load_si512(high);
    for (int i = 0; i < kLanes; ++i) {
        if (i & Width) continue;
        const __m512i a = block[i], b = block[i + Width];
        block[i] = _mm512_permutex2var_epi32(a, from_low, b);
        block[i + Width] = _mm512_permutex2var_epi32(a, from_high, b);
    }
}

// to[j, i] = from[i, j], dwords [kLanes, kLanes]; strides are in bytes.
inline void turn(const char* from, size_t from_stride, char* to, size_t to_stride) {
    __m512i block[kLanes];
    for (int i = 0; i < kLanes; ++i) block[i] = _mm512_loadu_si512(from + i * from_stride);
    turn_squares<1>(block);
    turn_squares<2>(block);
    turn_squares<4>(block);
    turn_squares<8>(block);
    for (int i = 0; i < kLanes; ++i) _mm512_storeu_si512(to + i * to_stride, block[i]);
}
#else
inline void turn(const char* from, size_t from_stride, char* to, size_t to_stride) {
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < kLanes; ++j) std::memcpy(to + j * to_stride + 4 * i, from + i * from_stride + 4 * j, 4);
}
#endif

// to[j, i] = from[i, j] for i < rows and j < columns: dwords, of which rows of `from` and `to` are so many apart. With
// `pads`, rows of `to` get zeros up to a multiple of kLanes.
inline void transpose(const void* from, size_t from_stride, int rows, int columns, void* to, size_t to_stride,
                      bool pads) {
    constexpr size_t kRow = 4 * kLanes;
    for (int i = 0; i < rows; i += kLanes)
        for (int j = 0; j < columns; j += kLanes) {
            const char* source = static_cast<const char*>(from) + 4 * (i * from_stride + j);
            char* target = static_cast<char*>(to) + 4 * (j * to_stride + i);
            const int height = std::min(kLanes, rows - i), width = std::min(kLanes, columns - j);
            if (height == kLanes && width == kLanes) {
                turn(source, 4 * from_stride, target, 4 * to_stride);
                continue;
            }
            alignas(64) char block[kLanes * kRow] = {}, turned[kLanes * kRow];
            for (int r = 0; r < height; ++r) std::memcpy(block + r * kRow, source + 4 * r * from_stride, 4 * width);
            turn(block, kRow, turned, kRow);
            for (int r = 0; r < width; ++r)
                std::memcpy(target + 4 * r * to_stride, turned + r * kRow, pads ? kRow : 4 * height);
        }
}

// to = pairs of low and high.
inline void store_pairs(float* to, Vec low, Vec high) {
#if defined(__AVX512BF16__)
    IntVec order;  // dword i: words i and 16 + i
    for (int i = 0; i < kLanes; ++i) order[i] = i | (kLanes + i) << 16;
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16((__m512i)order, rounded));
#else
    bf16 first[kLanes], second[kLanes];
    store(first, low);
    store(second, high);
    interleave(first, second, reinterpret_cast<bf16*>(to), kLanes);
#endif
}

// exp(x / kRoughScale) for x <= 0, to be rounded to bfloat16: exactly 1 at 0, exactly 0 far below. A NaN stays.
#if defined(__AVX512BF16__)
constexpr float kRoughScale = 1.44269504f;  // log2(e)

// 2^(whole part) (1 + P(rest)), P fitted over [0, 1] with P(1) = 1, off by 1.03e-4 of it.
inline Vec rough_power(Vec x) {
    constexpr int kFromFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const Vec rest = (Vec)_mm512_reduce_ps((__m512)x, kFromFloor);
    Vec series = rest * 0.07826797f + 0.22630768f;
    series = series * rest + 0.69542435f;
    series = series * rest + 1.0f;
    return (Vec)_mm512_scalef_ps((__m512)series, (__m512)x);
}
#else
constexpr float kRoughScale = 1.0f;

inline Vec rough_power(Vec x) { return exp(x); }
#endif

}  // namespace quire::attention
