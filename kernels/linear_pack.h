// Writing the packed layouts of linear_layout.h, by all threads.
#pragma once

#include "linear_layout.h"
#include "thread_pool.h"

#include <algorithm>

namespace quire {

// The [32, Depth] weights of a panel from `step` * Depth on as [n][k], zeros where W ends.
template <class T, int Depth>
void copy_step(const T* weight, int N, int K, int panel, int step, T (&square)[kPanelColumns][Depth]) {
    const int columns = std::min(kPanelColumns, N - panel * kPanelColumns);
    const int depth = std::min(Depth, K - step * Depth);
    const T* start = weight + size_t(panel) * kPanelColumns * K + size_t(step) * Depth;
    if (columns == kPanelColumns && depth == Depth) {
        for (int n = 0; n < kPanelColumns; ++n) std::memcpy(square[n], start + size_t(n) * K, sizeof square[n]);
        return;
    }
    std::memset(square, 0, sizeof square);
    for (int n = 0; n < columns; ++n) std::memcpy(square[n], start + size_t(n) * K, depth * sizeof(T));
}

// A step of a panel in the packed order: columns side by side, 4 bytes of each at a time.
template <class T, int Depth>
void pack_step(const T (&square)[kPanelColumns][Depth], T* packed) {
    constexpr int kWords = Depth * sizeof(T) / sizeof(uint32_t);
    uint32_t words[kPanelColumns][kWords], turned[2][kWords][kTileColumns];
    std::memcpy(words, square, sizeof words);
    for (int tile = 0; tile < 2; ++tile)
        for (int word = 0; word < kWords; ++word)
            for (int n = 0; n < kTileColumns; ++n) turned[tile][word][n] = words[tile * kTileColumns + n][word];
    std::memcpy(packed, turned, sizeof turned);
}

template <class T>
void pack_panels(const T* weight, int N, int K, T* packed) {
    constexpr int kDepth = sizeof(T) == 1 ? kInt8Depth : kTileDepth;
    const int steps = (K + kDepth - 1) / kDepth, panels = count_panels(N);
    parallel_for(panels, true, [&](int panel) {
        for (int step = 0; step < steps; ++step) {
            T square[kPanelColumns][kDepth];
            copy_step(weight, N, K, panel, step, square);
            pack_step(square, packed + (size_t(panel) * steps + step) * kPanelColumns * kDepth);
        }
    });
}

// The scale of a row: its largest magnitude is 127; 1 for a row of zeros.
template <class T>
float find_scale(const T* row, int K) {
    Vec largest{};
    int k = 0;
    for (; k + kLanes <= K; k += kLanes) {
        const Vec value = load(row + k), size = value < 0.0f ? -value : value;
        largest = size > largest ? size : largest;
    }
    float result = max(largest);
    for (; k < K; ++k) result = std::max(result, std::fabs(widen(row[k])));
    return result > 0.0f ? result / 127.0f : 1.0f;
}

// As linear_int8.quantize_int8, then packed: q = W / scale, rounded to nearest, ties to even.
template <class T>
void quantize_panels(const T* weight, int N, int K, int8_t* packed, float* scales) {
    const int steps = (K + kInt8Depth - 1) / kInt8Depth, panels = count_panels(N);
    parallel_for(panels, true, [&](int panel) {
        float scale[kPanelColumns];
        std::fill_n(scale, kPanelColumns, 1.0f);
        for (int n = 0; n < std::min(kPanelColumns, N - panel * kPanelColumns); ++n) {
            const int row = panel * kPanelColumns + n;
            scales[row] = scale[n] = find_scale(weight + size_t(row) * K, K);
        }
        for (int step = 0; step < steps; ++step) {
            T square[kPanelColumns][kInt8Depth];
            int8_t quantized[kPanelColumns][kInt8Depth];
            copy_step(weight, N, K, panel, step, square);
            for (int n = 0; n < kPanelColumns; ++n)
                for (int k = 0; k < kInt8Depth; ++k) {
                    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
                    const float q = (widen(square[n][k]) / scale[n] + shift) - shift;
                    quantized[n][k] = int8_t(std::min(127.0f, std::max(-127.0f, q)));
                }
            pack_step(quantized, packed + (size_t(panel) * steps + step) * kPanelColumns * kInt8Depth);
        }
    });
}

}  // namespace quire
