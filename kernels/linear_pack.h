// Writing the packed layouts of linear_layout.h, by all threads.
#pragma once

#include "linear.h"
#include "linear_layout.h"
#include "linear_narrow.h"
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

// A step of a panel in the packed order: columns side by side, a pair of each at a time.
inline void pack_step(const bf16 (&square)[kPanelColumns][kTileDepth], bf16* packed) {
    constexpr int kPairs = kTileDepth / 2;
    uint32_t words[kPanelColumns][kPairs], turned[2][kPairs][kTileColumns];
    std::memcpy(words, square, sizeof words);
    for (int tile = 0; tile < 2; ++tile)
        for (int pair = 0; pair < kPairs; ++pair)
            for (int n = 0; n < kTileColumns; ++n) turned[tile][pair][n] = words[tile * kTileColumns + n][pair];
    std::memcpy(packed, turned, sizeof turned);
}

// The same of narrow codes; of 4 bits a square has 4 steps, two numbers to a byte.
inline void pack_codes(const uint8_t (&square)[kPanelColumns][2 * kTileDepth], uint8_t* packed) {
    for (int n = 0; n < kPanelColumns; ++n)
        for (int k = 0; k < kTileDepth; ++k) {
            uint32_t word = 0;
            for (int step = 0; step < kStepsPerWord; ++step)
                word |= uint32_t(square[n][step * kTileDepth / 2 + k / 2] >> k % 2 * 4 & 15) << step * 4;
            packed[n * 64 + 2 * k] = uint8_t(word);
            packed[n * 64 + 2 * k + 1] = uint8_t(word >> 8);
        }
}

inline void pack_codes(const uint8_t (&square)[kPanelColumns][kTileDepth], uint8_t* packed) {
    std::memcpy(packed, square, sizeof square);
}

template <int Width, class T, class Pack>
void pack_panels(const T* weight, int N, int K, T* packed, const Pack& pack) {
    const int steps = (K + Width - 1) / Width, panels = count_panels(N);
    parallel_for(panels, true, [&](int panel) {
        for (int step = 0; step < steps; ++step) {
            T square[kPanelColumns][Width];
            copy_step(weight, N, K, panel, step, square);
            pack(square, packed + (size_t(panel) * steps + step) * kPanelColumns * Width);
        }
    });
}

inline void pack_narrow(int format, const uint8_t* weight, int N, int K, uint8_t* packed) {
    const auto pack = [](const auto& square, uint8_t* to) { pack_codes(square, to); };
    if (format == QUIRE_LINEAR_INT4) return pack_panels<2 * kTileDepth>(weight, N, (K + 1) / 2, packed, pack);
    pack_panels<kTileDepth>(weight, N, K, packed, pack);
}

inline void pack_bf16(const bf16* weight, int N, int K, bf16* packed) {
    pack_panels<kTileDepth>(weight, N, K, packed, [](const auto& square, bf16* to) { pack_step(square, to); });
}

}  // namespace quire
