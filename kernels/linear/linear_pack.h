// Writing the packed layouts, by all threads: linear_layout.h, linear_narrow.h, linear_columns.h.
#pragma once

#include "linear/linear.h"
#include "linear/linear_layout.h"
#include "linear/linear_columns.h"
#include "linear/linear_narrow.h"
#include "program/thread_pool.h"

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

// A step of narrow codes as pairs; of 4 bits a square has two numbers to a byte. `turned`: to be xored.
inline void pack_pairs(const uint8_t (&square)[kPanelColumns][kTileDepth / 2], uint8_t* packed, uint8_t) {
    for (int quad = 0; quad < kTileDepth / kQuadDepth; ++quad)
        for (int n = 0; n < kPanelColumns; ++n) {
            uint32_t bytes, words = 0;
            std::memcpy(&bytes, square[n] + quad * kQuadDepth / 2, sizeof bytes);
            for (int i = 0; i < kQuadDepth; ++i) words |= (bytes >> i * 4 & 15) << (i % 2 * 16 + i / 2 * 4);
            const int half = quad / 2, tile = n / kTileColumns;
            std::memcpy(packed + (((half * 2 + tile) * 2 + quad % 2) * kTileColumns + n % kTileColumns) * 4, &words, 4);
        }
}

inline void pack_pairs(const uint8_t (&square)[kPanelColumns][kTileDepth], uint8_t* packed, uint8_t turned) {
    for (int half = 0; half < 2; ++half)
        for (int n = 0; n < kPanelColumns; ++n) {
            const int tile = half * 2 + n / kTileColumns;
            uint8_t* to = packed + tile * kTileColumns * kHalfDepth + n % kTileColumns * 2;
            for (int k = 0; k < kHalfDepth; ++k)
                to[k / 2 * 2 * kTileColumns + k % 2] = square[n][half * kHalfDepth + k] ^ turned;
        }
}

// A block of them by columns; of 4 bits a square has 4 steps.
inline void pack_columns(const uint8_t (&square)[kPanelColumns][2 * kTileDepth], uint8_t* packed) {
    for (int n = 0; n < kPanelColumns; ++n)
        for (int k = 0; k < kTileDepth; ++k) {
            uint32_t word = 0;
            for (int step = 0; step < kStepsPerWord; ++step)
                word |= uint32_t(square[n][step * kTileDepth / 2 + k / 2] >> k % 2 * 4 & 15) << step * 4;
            packed[n * 64 + 2 * k] = uint8_t(word);
            packed[n * 64 + 2 * k + 1] = uint8_t(word >> 8);
        }
}

inline void pack_columns(const uint8_t (&square)[kPanelColumns][kTileDepth], uint8_t* packed) {
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

inline void pack_narrow(int variant, int format, const uint8_t* weight, int N, int K, uint8_t* packed) {
    const bool is_int4 = format == QUIRE_LINEAR_INT4;
    if (variant == QUIRE_LINEAR_TILE) {
        const auto pack = [](const auto& square, uint8_t* to) { pack_columns(square, to); };
        return is_int4 ? pack_panels<2 * kTileDepth>(weight, N, (K + 1) / 2, packed, pack)
                       : pack_panels<kTileDepth>(weight, N, K, packed, pack);
    }
    const uint8_t turned = format == QUIRE_LINEAR_INT8 ? kTurnedBit : 0;
    const auto pack = [=](const auto& square, uint8_t* to) { pack_pairs(square, to, turned); };
    is_int4 ? pack_panels<kTileDepth / 2>(weight, N, (K + 1) / 2, packed, pack)
            : pack_panels<kTileDepth>(weight, N, K, packed, pack);
}

inline void pack_bf16(const bf16* weight, int N, int K, bf16* packed) {
    pack_panels<kTileDepth>(weight, N, K, packed, [](const auto& square, bf16* to) { pack_step(square, to); });
}

}  // namespace quire
