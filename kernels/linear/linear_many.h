// y = x W^T + bias of many rows in AMX tiles: prompts, and an encoder's layers.
//
// 32 rows of x pass a part of the panels that stays in the second-level cache. Sums stay in tiles over all of K, then
// are finished while the next panel is multiplied. The additions and their order are those of compute_packed, which
// is as fast with fewer rows. 1,024 rows of 384 x 1,152: 1.6 times as fast; of 1,024 x 3,072: 1.5 times.
#pragma once

#include "linear/linear_amx.h"
#include "linear/linear_packed.h"
#include "program/thread_pool.h"

namespace quire {

#if defined(QUIRE_HAS_AMX)

constexpr int kPairRows = 2 * TileEngine::kTileRows;
constexpr int kMaxSteps = 128;
constexpr int kShortSteps = 16;        // of K; 32 rows of x then stay in the first-level cache
constexpr int kPartSize = 640 * 1024;  // numbers of a part's panels
constexpr int kTasksPerThread = 4;

inline bool has_many_rows(const PackedLayer<bf16>& layer) {
    const int steps = count_steps(layer.K), few = steps <= kShortSteps ? TileEngine::kFewRows : kChunkRows - 1;
    return layer.m > few && steps <= kMaxSteps && layer.K % kTileDepth == 0 && layer.N % kPanelColumns == 0;
}

// Sums [rows, 32] of the panel that begins at `column`, and where they go.
template <class Act>
struct PanelSums {
    const PackedLayer<bf16>& layer;
    const float* sums;
    int first, rows, column;

    bf16* row(int r) const { return layer.y + size_t(first + r) * layer.N + column; }

    // y's lines are fetched while the panel's own sums are computed: gelu's layer is 1.15 times as fast.
    void fetch(int from, int to) const {
        for (int r = from; r < to; ++r) __builtin_prefetch(row(r), 1);
    }

    // As finish_row, a line of y at a time. Adding -0 changes no number.
    void finish(int from, int to) const {
        const Vec none = splat(-0.0f);
        const Vec low = layer.bias ? load(layer.bias + column) : none;
        const Vec high = layer.bias ? load(layer.bias + column + kLanes) : none;
        for (int r = from; r < to; ++r) {
            const int slot = r < kPairRows / 2 ? r : r + kPairRows - rows;  // find_slot of two tiles
            const float* sum = sums + slot * kPanelColumns;
            const __m512 left = (__m512)Act::apply(load(sum) + low);
            const __m512 right = (__m512)Act::apply(load(sum + kLanes) + high);
            _mm512_storeu_si512(row(r), (__m512i)_mm512_cvtne2ps_pbh(right, left));
        }
    }
};

// Panels [begin, end), whose weights are `packed`, for rows [first, last), 17 to 32 of them.
template <class Act>
void compute_part(const PackedLayer<bf16>& layer, const bf16* packed, int begin, int end, int first, int last) {
    typedef TileEngine Engine;
    alignas(64) float sums[2][kPairRows * kPanelColumns];
    const int steps = count_steps(layer.K), rows = last - first;
    const bf16* a = layer.x + size_t(first) * layer.K;
    const bf16* a2 = a + size_t(Engine::find_start(1, rows)) * layer.K;
    const auto at = [&](int panel) {
        return PanelSums<Act>{layer, sums[panel % 2], first, rows, panel * kPanelColumns};
    };
    for (int panel = begin; panel < end; ++panel) {
        const bf16* weights = packed + size_t(panel - begin) * steps * kStepSize;
        Engine::multiply_pair(a, a2, layer.K, weights, steps, sums[panel % 2], [&](int step) {
            const int from = rows * step / steps, to = rows * (step + 1) / steps;
            at(panel).fetch(from, to);
            if (panel > begin) at(panel - 1).finish(from, to);
        });
    }
    at(end - 1).finish(0, rows);
}

// Narrow weights of panels [begin, end) as numbers, in memory of this thread.
inline const bf16* expand_part(const PackedLayer<bf16>& layer, int begin, int end) {
    const int steps = count_steps(layer.K);
    const size_t size = size_t(steps) * kStepSize;
    bf16* numbers = reinterpret_cast<bf16*>(thread_memory((end - begin) * size / 2));
    for (int panel = begin; panel < end; ++panel)
        expand_narrow(*layer.narrow, panel, 0, steps, numbers + (panel - begin) * size);
    return numbers;
}

// Plain weights: a task is a part for a pair of row tiles. Narrow ones: a part for all rows, so that it is expanded once.
inline void compute_many(const PackedLayer<bf16>& layer) {
    const int panels = count_panels(layer.N), steps = count_steps(layer.K), most = kPartSize / (steps * kStepSize);
    const int pairs = (layer.m + kPairRows - 1) / kPairRows, pairs_per_task = layer.narrow ? pairs : 1;
    const int tasks = pairs / pairs_per_task, by_threads = kTasksPerThread * num_threads() / tasks;
    const int parts = std::min(panels, std::max((panels + most - 1) / most, by_threads));
    const bool is_parallel = double(layer.m) * layer.K * layer.N > kMinParallelWork;
    with_activation<bf16>(layer.activation, [&](auto act) {
        parallel_for(parts * tasks, is_parallel, [&](int task) {
            const TileEngine::Scope scope(layer.m);
            const int part = task / tasks, begin = panels * part / parts, end = panels * (part + 1) / parts;
            const bf16* packed = layer.narrow ? expand_part(layer, begin, end)
                                              : static_cast<const bf16*>(layer.packed) + size_t(begin) * steps * kStepSize;
            for (int i = 0, pair = task % tasks * pairs_per_task; i < pairs_per_task; ++i, ++pair)
                compute_part<decltype(act)>(layer, packed, begin, end, int(int64_t(layer.m) * pair / pairs),
                                            int(int64_t(layer.m) * (pair + 1) / pairs));
        });
    });
}

#endif

}  // namespace quire
