// y = act(x W^T + bias) in float32, with W as panels [ceil(N / 32)][K][32] with zeros past N.
//
// A number of y is one chain of fused multiply-adds over K, in order, from its bias, and stays in a register all the
// way. Tiles of rows, which stay in the first-level cache, pass a part of the panels that stays in the second-level
// one. 2,048 rows, K = 384: 1.3 times as fast as sums that go through y every 256 steps of K, panel by panel.
#pragma once

#include "linear/activation.h"
#include "program/thread_pool.h"

#include <algorithm>

namespace quire {

struct FloatLayer {
    const float* x;       // [m, K]
    const float* packed;  // panels
    const float* bias;    // [N] or null
    float* y;             // [m, N]
    int m, K, N;
    int activation;  // a QuireActivation
};

constexpr int kFloatColumns = 32;  // of a panel
#if defined(__AVX512F__)
constexpr int kTallRows = 12, kTallVectors = 2;  // 12 x 2 sums, 2 vectors of W and a broadcast: 27 of 32 registers
#else
constexpr int kTallRows = 6, kTallVectors = 2;   // 15 of 16 registers: with AVX2 1.6 times as fast as 3 x 4 sums
#endif
constexpr int kFloatPartSize = 256 * 1024;       // numbers of a part's panels: 1 MB
constexpr int kFloatTasksPerThread = 8;
constexpr double kMinParallelFloatWork = 400e3;  // multiply-adds below which a second thread costs more than it brings

inline int count_float_panels(int N) { return (N + kFloatColumns - 1) / kFloatColumns; }

// Up to kLanes numbers, with zeros past them.
inline Vec load_few(const float* from, int count) {
    if (count >= kLanes) return load(from);
    float numbers[kLanes] = {};
    std::copy_n(from, count, numbers);
    return load(numbers);
}

inline void store_few(float* to, Vec value, int count) {
    if (count >= kLanes) return store(to, value);
    float numbers[kLanes];
    store(numbers, value);
    std::copy_n(numbers, count, to);
}

// Rows [first, first + Rows) of as many vectors of columns from `column` on.
template <int Rows, int Vectors, class Act>
void compute_floats(const FloatLayer& layer, int first, int column) {
    constexpr int kShared = 3;  // rows with a pointer in common: one for each is more than there are registers
    const size_t K = layer.K, N = layer.N;
    const float *a[(Rows + kShared - 1) / kShared], *b[Vectors];
    Vec sums[Rows][Vectors];
    for (int r = 0; r < Rows; r += kShared) a[r / kShared] = layer.x + (first + r) * K;
    for (int v = 0; v < Vectors; ++v) {
        const int at = column + v * kLanes;
        b[v] = layer.packed + size_t(at / kFloatColumns) * K * kFloatColumns + at % kFloatColumns;
        const Vec start = layer.bias ? load_few(layer.bias + at, layer.N - at) : Vec{};
        for (int r = 0; r < Rows; ++r) sums[r][v] = start;
    }
    for (size_t k = 0; k < K; ++k) {
        Vec columns[Vectors];
        for (int v = 0; v < Vectors; ++v) columns[v] = load(b[v] + k * kFloatColumns);
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < Vectors; ++v) sums[r][v] += a[r / kShared][r % kShared * K + k] * columns[v];
    }
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) {
            const int at = column + v * kLanes;
            store_few(layer.y + (first + r) * N + at, Act::apply(sums[r][v]), layer.N - at);
        }
}

// Rows [first, last), at most MaxRows, of columns [begin, end), `MaxVectors` vectors at a time.
template <int MaxRows, int MaxVectors, class Act>
void compute_float_tile(const FloatLayer& layer, int first, int last, int begin, int end) {
    for (int column = begin; column < end; column += MaxVectors * kLanes) {
        const int vectors = std::min(MaxVectors, (end - column + kLanes - 1) / kLanes);
        with_constant<MaxVectors>(vectors, [&](auto wide) {
            with_constant<MaxRows>(last - first,
                                   [&](auto rows) { compute_floats<rows, wide, Act>(layer, first, column); });
        });
    }
}

inline void compute_all_floats(const FloatLayer& layer) {
    const int panels = count_float_panels(layer.N), tiles = (layer.m + kTallRows - 1) / kTallRows;
    const int most = std::max(1, kFloatPartSize / (kFloatColumns * layer.K));
    const int by_threads = kFloatTasksPerThread * num_threads() / tiles;
    const int pairs = (panels + 1) / 2;  // few rows are computed with two panels at a time
    const int parts = std::min(pairs, std::max((panels + most - 1) / most, by_threads));
    const bool is_parallel = double(layer.m) * layer.K * layer.N > kMinParallelFloatWork;
    with_activation(layer.activation, [&](auto act) {
        typedef decltype(act) Act;
        parallel_for(parts * tiles, is_parallel, [&](int task) {
            const int part = task / tiles, tile = task % tiles;
            const int first = int(int64_t(layer.m) * tile / tiles), last = int(int64_t(layer.m) * (tile + 1) / tiles);
            const int begin = pairs * part / parts * 2 * kFloatColumns;
            const int end = std::min(layer.N, pairs * (part + 1) / parts * 2 * kFloatColumns);
            if (last - first <= kMaxRows)
                compute_float_tile<kMaxRows, kVectors, Act>(layer, first, last, begin, end);
            else
                compute_float_tile<kTallRows, kTallVectors, Act>(layer, first, last, begin, end);
        });
    });
}

inline void pack_floats(const float* weight, int N, int K, float* packed) {
    parallel_for(count_float_panels(N), true, [&](int panel) {
        for (int k = 0; k < K; ++k)
            for (int i = 0; i < kFloatColumns; ++i) {
                const int n = panel * kFloatColumns + i;
                packed[(size_t(panel) * K + k) * kFloatColumns + i] = n < N ? weight[size_t(n) * K + k] : 0.0f;
            }
    });
}

}  // namespace quire
