// y = (x q^T) scales + bias with int8 q in AMX tiles, by whole numbers: nothing is made wide, and sums are exact.
//
// A row of x is a power of two times whole numbers of 23 bits, each 65536 a + 256 b + c with a, b and c of a signed
// byte; a, b and c are three rows of a tile. What x loses is at most 2^-23 of the row's largest magnitude, and
// nothing of a bfloat16 above 2^-14 of it. A row with a NaN or an infinity gives NaN.
#pragma once

#include "linear_amx.h"
#include "linear_packed.h"

#if defined(QUIRE_HAS_AMX)

#include <cmath>

namespace quire {

constexpr int kPlanes = 3;
constexpr int kWholeBits = 22;      // |whole| <= 2^22, so that a is at most 64
constexpr int kLeastExponent = -100;  // of a row's largest magnitude: 2^(22 + 100) is a float
constexpr int kMaxIntegerK = INT32_MAX / (127 * 128);  // a sum of more could leave 32 bits
constexpr int kIntegerRows = 80;    // of x that share one reading of a panel

// The largest magnitude of [count] numbers, NaN if one is not finite.
inline float find_magnitude(const float* x, int count) {
    Vec largest{}, zero{};
    for (int i = 0; i < count; i += kLanes) {
        const Vec value = load(x + i), size = value < 0.0f ? -value : value;
        largest = size > largest ? size : largest;
        zero += value * 0.0f;
    }
    return max(largest) + sum(zero);
}

// The low byte of each, as a number; the rest is left in `whole`.
inline __m512i take_byte(__m512i& whole) {
    const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
    whole = _mm512_srai_epi32(_mm512_sub_epi32(whole, low), 8);
    return low;
}

// A row of x [K] as rows a, b and c [padded], zeros past K; returns the power of two, or NaN.
template <class Y>
float split_row(const Y* x, int K, int padded, int8_t* rows) {
    float* wide = thread_memory(padded);
    copy_row(wide, x, K, padded);
    const float largest = find_magnitude(wide, padded);
    int exponent = 0;
    if (std::isfinite(largest)) std::frexp(largest, &exponent);
    exponent = std::max(exponent, kLeastExponent);
    const __m512 factor = _mm512_set1_ps(std::isfinite(largest) ? std::ldexp(1.0f, kWholeBits - exponent) : 0.0f);
    for (int i = 0; i < padded; i += kLanes) {
        __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)load(wide + i), factor));
        for (int plane = kPlanes - 1; plane >= 0; --plane)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(rows + size_t(plane) * padded + i),
                             _mm512_cvtepi32_epi8(take_byte(whole)));
    }
    return std::isfinite(largest) ? std::ldexp(1.0f, exponent - kWholeBits) : largest;
}

// sums = factor (65536 a + 256 b + c)
inline void join_sums(const int32_t* a, const int32_t* b, const int32_t* c, float factor, float* sums) {
    for (int i = 0; i < kPanelColumns; i += kLanes) {
        const __m512 high = _mm512_cvtepi32_ps(_mm512_loadu_si512(a + i));
        const __m512 middle = _mm512_cvtepi32_ps(_mm512_loadu_si512(b + i));
        const __m512 low = _mm512_cvtepi32_ps(_mm512_loadu_si512(c + i));
        const __m512 upper = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), middle);
        const __m512 whole = _mm512_fmadd_ps(upper, _mm512_set1_ps(256.0f), low);
        _mm512_storeu_ps(sums + i, _mm512_mul_ps(whole, _mm512_set1_ps(factor)));
    }
}

// One panel's columns for rows [first, last) of x, which are split: rows of `padded` bytes and their factors.
template <class Y>
void compute_panel(const PackedLayer<Y>& layer, const int8_t* split, const float* factors, int padded, int panel,
                   int first, int last) {
    typedef TileEngine<int8_t> Engine;
    alignas(64) int32_t sums[(kPlanes * kIntegerRows + 16) * kPanelColumns];
    const int rows = kPlanes * (last - first), steps = padded / kInt8Depth;
    const int8_t* a = split + size_t(first) * kPlanes * padded;
    const int8_t* weights = static_cast<const int8_t*>(layer.packed) + size_t(panel) * steps * Engine::kPanelStep;
    std::fill_n(sums, (Engine::find_slot(rows - 1, rows) + 1) * kPanelColumns, 0);
    const int block = rows <= Engine::kFewRows ? steps : Engine::kBlockSteps;
    for (int step = 0; step < steps; step += block) {
        const int count = std::min(block, steps - step);
        const int8_t* start = weights + size_t(step) * Engine::kPanelStep;
        Engine::multiply(a + step * kInt8Depth, padded, rows, &start, 1, count, sums, start + count * Engine::kPanelStep);
    }
    const int column = panel * kPanelColumns, columns = std::min(kPanelColumns, layer.N - column);
    for (int r = 0; r < last - first; ++r) {
        const int32_t* planes[kPlanes];
        for (int i = 0; i < kPlanes; ++i) planes[i] = sums + Engine::find_slot(kPlanes * r + i, rows) * kPanelColumns;
        float joined[kPanelColumns];
        join_sums(planes[0], planes[1], planes[2], factors[first + r], joined);
        with_activation<Y>(layer.activation, [&](auto act) {
            finish_row<decltype(act)>(layer.y + size_t(first + r) * layer.N + column, joined, layer.scales + column,
                                      layer.bias ? layer.bias + column : nullptr, columns);
        });
    }
}

template <class Y>
void compute_integers(const PackedLayer<Y>& layer) {
    const int m = layer.m, padded = count_steps(layer.K, true) * kTileDepth;
    const size_t split_bytes = size_t(m) * kPlanes * padded;  // a multiple of 64
    const Floats memory = allocate(split_bytes / sizeof(float) + m);
    int8_t* split = reinterpret_cast<int8_t*>(memory.get());
    float* factors = memory.get() + split_bytes / sizeof(float);
    const bool is_parallel = double(m) * layer.K * layer.N > kMinParallelWork;
    parallel_runs(m, is_parallel && m > 1, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r)
            factors[r] = split_row(layer.x + r * layer.K, layer.K, padded, split + r * kPlanes * padded);
    });
    const int panels = count_panels(layer.N), chunks = (m + kIntegerRows - 1) / kIntegerRows;
    parallel_for(panels * chunks, is_parallel, [&](int task) {
        const typename TileEngine<int8_t>::Scope scope(kPlanes * m);
        const int chunk = task / panels;
        compute_panel(layer, split, factors, padded, task % panels, int(int64_t(m) * chunk / chunks),
                      int(int64_t(m) * (chunk + 1) / chunks));
    });
}

}  // namespace quire

#endif
