// y = act(x W^T + bias) over packed panels, by any engine: what is computed by whom and in which order.
//
// A task is a group of panels for a chunk of rows. K is taken in blocks whose weights stay in a cache while all
// rows of the chunk use them; sums wait in memory between blocks, so a block's size changes no bit. Narrow weights
// become an engine's numbers a block at a time, the next one before the present one is multiplied. PairEngine leaves
// narrow weights to linear_pairs.h.
#pragma once

#include "linear/activation.h"
#include "linear/linear_layout.h"
#include "linear/linear_columns.h"
#include "program/thread_pool.h"

#include <algorithm>
#include <type_traits>

namespace quire {

constexpr int kChunkRows = 256;  // rows that share one reading of a panel
constexpr int kFewNarrowSteps = 2;  // of a block for few rows, so that expanding and multiplying overlap
// Multiply-adds below which a second thread costs more than it brings.
constexpr double kMinParallelWork = 400e3;

template <class Y>
struct PackedLayer {
    const Y* x;  // [m, K]
    int m, K;
    const void* packed;
    int N;
    const QuireLinear* narrow;  // null if the weights are not
    const Y* bias;              // [N] or null
    Y* y;                       // [m, N]
    int activation;             // a QuireActivation
};

// y = Act(sums + bias), rounded once.
template <class Act, class Y>
void finish_row(Y* y, const float* sums, const Y* bias, int count) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        Vec value = load(sums + i);
        if (bias) value += load(bias + i);
        store(y + i, Act::apply(value));
    }
    for (; i < count; ++i) {
        float value = sums[i];
        if (bias) value += widen(bias[i]);
        y[i] = narrow<Y>(Act::apply(splat(value))[0]);
    }
}

// A row of x as an engine takes it, with zeros past K.
template <class To, class From>
void copy_row(To* to, const From* from, int count, int padded) {
    if constexpr (std::is_same_v<To, From>)
        std::copy_n(from, count, to);
    else
        copy_floats(to, from, count);
    std::fill(to + count, to + padded, To{});
}

// y of rows [first, last), at most `width` columns from `column` on; their sums lie `leading` apart.
template <class Y, class Slot>
void finish_rows(const PackedLayer<Y>& layer, const float* sums, int leading, int first, int last, int column,
                 int width, const Slot& find_slot) {
    const int columns = std::min(width, layer.N - column);
    with_activation<Y>(layer.activation, [&](auto act) {
        for (int r = 0; r < last - first; ++r)
            finish_row<decltype(act)>(layer.y + size_t(first + r) * layer.N + column, sums + find_slot(r) * leading,
                                      layer.bias ? layer.bias + column : nullptr, columns);
    });
}

// The weights of a group's panels for some steps of K: where they lie, or as numbers in a buffer.
template <class Engine, bool is_narrow, class Y>
class GroupWeights {
  public:
    typedef typename Engine::Weight Weight;

    GroupWeights(const PackedLayer<Y>& layer, int group)
        : layer_(layer),
          first_(group * Engine::kGroup),
          count_(std::min(Engine::kGroup, count_panels(layer.N) - first_)),
          steps_(count_steps(layer.K)) {}

    int num_panels() const { return count_; }

    // Steps [step, step + count); the pointers are good until the call after the next.
    void take(int step, int count, const Weight* (&panels)[Engine::kGroup]) {
        for (int i = 0; i < count_; ++i) {
            if constexpr (is_narrow) {
                Weight* to = numbers_[turn_] + i * kBlockSize;
                expand_narrow(*layer_.narrow, first_ + i, step, count, to);
                panels[i] = to;
            } else {
                panels[i] = static_cast<const Weight*>(layer_.packed) + (size_t(first_ + i) * steps_ + step) * kStepSize;
            }
        }
        turn_ = !turn_;
    }

  private:
    static constexpr int kBlockSize = Engine::kBlockSteps * kStepSize;

    const PackedLayer<Y>& layer_;
    const int first_, count_, steps_;
    bool turn_ = false;
    alignas(64) Weight numbers_[2][is_narrow ? Engine::kGroup * kBlockSize : 1];
};

// One panel group's columns for rows [first, last).
template <class Engine, bool is_narrow, class Y>
void compute_group(const PackedLayer<Y>& layer, const typename Engine::Input* x, size_t lda, int group, int first,
                   int last) {
    alignas(64) float sums[(kChunkRows + 16) * Engine::kLeading];
    GroupWeights<Engine, is_narrow, Y> weights(layer, group);
    const typename Engine::Weight *panels[Engine::kGroup] = {}, *next[Engine::kGroup] = {};
    const int steps = count_steps(layer.K), rows = last - first, num_panels = weights.num_panels();
    std::fill_n(sums, (Engine::find_slot(rows - 1, rows) + 1) * Engine::kLeading, 0.0f);
    const int few = is_narrow ? kFewNarrowSteps : steps, block = rows <= Engine::kFewRows ? few : Engine::kBlockSteps;
    weights.take(0, std::min(block, steps), next);
    for (int step = 0; step < steps; step += block) {
        const int count = std::min(block, steps - step), after = step + count;
        std::copy_n(next, Engine::kGroup, panels);
        if (after < steps) weights.take(after, std::min(block, steps - after), next);
        // After the last block of K come the next group's panels.
        const size_t skipped = after < steps ? 0 : size_t(num_panels - 1) * steps * kStepSize;
        Engine::multiply(x + size_t(first) * lda + step * kTileDepth, lda, rows, panels, num_panels, count, sums,
                         is_narrow ? nullptr : panels[0] + count * kStepSize + skipped);
    }
    finish_rows(layer, sums, Engine::kLeading, first, last, group * Engine::kGroup * kPanelColumns,
                num_panels * kPanelColumns, [&](int row) { return Engine::find_slot(row, rows); });
}

// body(x, numbers between its rows, whether threads are worth it) for x as Input, with zeros past K.
template <class Input, class Y, class Body>
void with_padded_rows(const PackedLayer<Y>& layer, const Body& body) {
    const int m = layer.m, K = layer.K, padded = count_steps(K) * kTileDepth;
    const bool is_parallel = double(m) * K * layer.N > kMinParallelWork;
    if (std::is_same_v<Input, Y> && K == padded)
        return body(reinterpret_cast<const Input*>(layer.x), size_t(K), is_parallel);
    const Floats copy = allocate(size_t(m) * padded);
    Input* to = reinterpret_cast<Input*>(copy.get());
    parallel_runs(m, is_parallel, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) copy_row(to + r * padded, layer.x + r * K, K, padded);
    });
    body(to, size_t(padded), is_parallel);
}

template <class Engine, bool is_narrow, class Y>
void compute_packed(const PackedLayer<Y>& layer) {
    typedef typename Engine::Input Input;
    const int m = layer.m, groups = (count_panels(layer.N) + Engine::kGroup - 1) / Engine::kGroup;
    const int chunks = (m + kChunkRows - 1) / kChunkRows;
    with_padded_rows<Input>(layer, [&](const Input* x, size_t lda, bool is_parallel) {
        parallel_for(groups * chunks, is_parallel, [&](int task) {
            const typename Engine::Scope scope(m);
            const int group = task % groups, chunk = task / groups;
            compute_group<Engine, is_narrow>(layer, x, lda, group, int(int64_t(m) * chunk / chunks),
                                             int(int64_t(m) * (chunk + 1) / chunks));
        });
    });
}

}  // namespace quire
