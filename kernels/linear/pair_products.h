// Products of pairs of bfloat16 numbers that are neighbours in the depth, by vectors: a sum is one chain over pairs in
// order, whatever is computed beside it.
#pragma once

#include "linear/tile.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace quire::attention {

// Widens both of a pair and adds their products one after the other: right on every processor.
struct WidenedPairs {
    using Left = float;

    static Vec add_product(Vec sum, const float* left, UintVec pairs) {
        sum += left[0] * (Vec)(pairs << 16);
        return sum + left[1] * (Vec)(pairs & 0xffff0000u);
    }
};

#if defined(__AVX512BF16__)
// The processor's product of pairs; weights are rounded to bfloat16.
struct DottedPairs {
    using Left = bf16;

    static Vec add_product(Vec sum, const bf16* left, UintVec pairs) {
        int32_t pair;
        std::memcpy(&pair, left, sizeof pair);
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
    }
};
#endif

// c[Rows, Vectors * kLanes] += a[Rows, 2 pairs] b[pairs, Vectors * kLanes, 2]; ldb: pairs between two of b's rows.
// Without Adds, c = a b, whatever was in c.
// fetch(k) is called before row k of b is read: it may ask for what comes next.
template <typename Pairs, int Rows, int Vectors, bool Adds = true, typename Fetch = NoFetch>
inline void multiply_pairs(const typename Pairs::Left* a, size_t lda, const bf16* const* b, size_t ldb, float* c,
                           size_t ldc, int pairs, const Fetch& fetch = {}) {
    Vec sums[Rows][Vectors];
    const bf16* starts[Vectors];
    for (int v = 0; v < Vectors; ++v) starts[v] = b[v];
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) sums[r][v] = Adds ? load(c + r * ldc + v * kLanes) : Vec{};
    for (int k = 0; k < pairs; ++k) {
        fetch(k);
        for (int v = 0; v < Vectors; ++v) {
            UintVec column;
            std::memcpy(&column, starts[v] + k * 2 * ldb, sizeof column);
            for (int r = 0; r < Rows; ++r) sums[r][v] = Pairs::add_product(sums[r][v], a + r * lda + 2 * k, column);
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) store(c + r * ldc + v * kLanes, sums[r][v]);
}

// The same of any number of rows, at most kMaxRows of them together; fetches while the first are multiplied.
template <typename Pairs, int Vectors, bool Adds = true, typename Fetch = NoFetch>
inline void multiply_pair_rows(int rows, const typename Pairs::Left* a, size_t lda, const bf16* const* b,
                               size_t ldb, float* c, size_t ldc, int pairs, const Fetch& fetch = {}) {
    const int parts = (rows + kMaxRows - 1) / kMaxRows;
    for (int part = 0; part < parts; ++part) {
        const int first = rows * part / parts, count = rows * (part + 1) / parts - first;
        const auto *left = a + first * lda;
        float* sums = c + first * ldc;
        with_constant<kMaxRows>(count, [&](auto together) {
            if (part == 0)
                multiply_pairs<Pairs, together, Vectors, Adds>(left, lda, b, ldb, sums, ldc, pairs, fetch);
            else
                multiply_pairs<Pairs, together, Vectors, Adds>(left, lda, b, ldb, sums, ldc, pairs);
        });
    }
}

}  // namespace quire::attention
