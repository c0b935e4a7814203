// Writing the packed layouts of linear_layout.h, by all threads.
#pragma once

#include "linear_layout.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>

namespace quire {

// Read by 2 threads, 600 MB in pages of 2 MB came at 29 GB/s, in pages of 4 KB at 22 (2.7 GHz Xeon).
inline void prefer_huge_pages(void* memory, size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, start = (uintptr_t(memory) + page - 1) / page * page;
    const uintptr_t end = (uintptr_t(memory) + size) / page * page;
    if (end > start) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#endif
}

// The [32, 32] weights of a panel's step as [n][k], zeros where W ends.
template <class T>
void copy_step(const T* weight, int N, int K, int panel, int step, T (&square)[kPanelColumns][kTileDepth]) {
    const int columns = std::min(kPanelColumns, N - panel * kPanelColumns);
    const int depth = std::min(kTileDepth, K - step * kTileDepth);
    for (int n = 0; n < kPanelColumns; ++n) {
        const T* row = weight + size_t(panel * kPanelColumns + n) * K + step * kTileDepth;
        const int count = n < columns ? depth : 0;
        std::copy_n(row, count, square[n]);
        std::fill(square[n] + count, square[n] + kTileDepth, T{});
    }
}

inline void pack_bf16(const bf16* weight, int N, int K, bf16* packed) {
    const int steps = count_steps(K), panels = count_panels(N);
#pragma omp parallel for schedule(static)
    for (int panel = 0; panel < panels; ++panel)
        for (int step = 0; step < steps; ++step) {
            alignas(64) bf16 square[kPanelColumns][kTileDepth];
            copy_step(weight, N, K, panel, step, square);
            bf16* to = packed + (size_t(panel) * steps + step) * kStepSize;
            for (int tile = 0; tile < 2; ++tile)
                for (int pair = 0; pair < kTileDepth / 2; ++pair, to += 2 * kTileColumns)
                    for (int n = 0; n < kTileColumns; ++n)
                        std::memcpy(to + 2 * n, square[tile * kTileColumns + n] + 2 * pair, 2 * sizeof(bf16));
        }
}

inline void pack_int8(const int8_t* weight, int N, int K, uint8_t* packed) {
    const int steps = count_steps(K), panels = count_panels(N);
#pragma omp parallel for schedule(static)
    for (int panel = 0; panel < panels; ++panel)
        for (int step = 0; step < steps; ++step) {
            int8_t square[kPanelColumns][kTileDepth];
            copy_step(weight, N, K, panel, step, square);
            uint8_t* to = packed + (size_t(panel) * steps + step) * kStepSize;
            for (int i = 0; i < kStepSize; ++i) {
                // Position i, read from its highest digit: tile, two pairs, lane of 4 columns, pair, column, k.
                const int n = i / kTileSize * kTileColumns + i / 16 % 4 * 4 + i / 2 % 4;
                const int k = i % kTileSize / 64 * 4 + i / 8 % 2 * 2 + i % 2;
                const int q = square[n][k];
                to[i] = uint8_t(q < 0 ? 0x80 | -q : q);
            }
        }
}

}  // namespace quire
