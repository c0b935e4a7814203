// y = (x W^T) scale + bias over packed panels, by any engine: what is computed by whom and in which order.
//
// A task is a group of panels for a chunk of rows. K is taken in blocks whose weights stay in a cache while all
// rows of the chunk use them; sums wait in memory between blocks, so a block's size changes no bit.
#pragma once

#include "activation.h"
#include "linear_layout.h"
#include "thread_pool.h"

#include <algorithm>
#include <type_traits>

namespace quire {

constexpr int kChunkRows = 256;  // rows that share one reading of a panel
// Of int8 weights for few rows: expanding them overlaps with reading the next, 1.3 times as fast as 8 steps.
constexpr int kFewInt8Steps = 2;
// Multiply-adds below which a second thread costs more than it brings.
constexpr double kMinParallelWork = 400e3;

template <class Y>
struct PackedLayer {
    const Y* x;  // [m, K]
    int m, K;
    const void* packed;
    int N;
    const float* scales;  // [N] if the weights are int8, else null
    const Y* bias;        // [N] or null
    Y* y;                 // [m, N]
    int activation;       // a QuireActivation
};

// y = Act((sums scales) + bias), rounded once.
template <class Act, class Y>
void finish_row(Y* y, const float* sums, const float* scales, const Y* bias, int count) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        Vec value = load(sums + i);
        if (scales) value *= load(scales + i);
        if (bias) value += load(bias + i);
        store(y + i, Act::apply(value));
    }
    for (; i < count; ++i) {
        float value = sums[i];
        if (scales) value *= scales[i];
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

// One panel group's columns for rows [first, last).
template <class Engine, bool is_int8, class Y>
void compute_group(const PackedLayer<Y>& layer, const typename Engine::Input* x, size_t lda, int group, int first,
                   int last) {
    constexpr int kExpanded = Engine::kBlockSteps * kStepSize;
    alignas(64) float sums[(kChunkRows + 16) * Engine::kLeading];
    alignas(64) bf16 expanded[is_int8 ? Engine::kGroup * kExpanded : 1];
    const int steps = count_steps(layer.K, is_int8), rows = last - first, panel = group * Engine::kGroup;
    const int num_panels = std::min(Engine::kGroup, count_panels(layer.N) - panel);
    std::fill_n(sums, (Engine::find_slot(rows - 1, rows) + 1) * Engine::kLeading, 0.0f);
    const int few = is_int8 ? kFewInt8Steps : steps, block = rows <= Engine::kFewRows ? few : Engine::kBlockSteps;
    for (int step = 0; step < steps; step += block) {
        const int count = std::min(block, steps - step);
        const bf16* panels[Engine::kGroup] = {};
        for (int i = 0; i < num_panels; ++i) {
            const size_t start = (size_t(panel + i) * steps + step) * kStepSize;
            if constexpr (is_int8) {
                expand_int8(static_cast<const int8_t*>(layer.packed) + start, expanded + i * kExpanded, count);
                panels[i] = expanded + i * kExpanded;
            } else {
                panels[i] = static_cast<const bf16*>(layer.packed) + start;
            }
        }
        const bf16* next = is_int8 ? nullptr : panels[0] + count * kStepSize;
        Engine::multiply(x + size_t(first) * lda + step * kTileDepth, lda, rows, panels, num_panels, count, sums,
                         next);
    }
    const int column = panel * kPanelColumns, columns = std::min(num_panels * kPanelColumns, layer.N - column);
    with_activation<Y>(layer.activation, [&](auto act) {
        for (int r = 0; r < rows; ++r)
            finish_row<decltype(act)>(layer.y + size_t(first + r) * layer.N + column,
                                      sums + Engine::find_slot(r, rows) * Engine::kLeading,
                                      layer.scales ? layer.scales + column : nullptr,
                                      layer.bias ? layer.bias + column : nullptr, columns);
    });
}

template <class Engine, bool is_int8, class Y>
void compute_packed(const PackedLayer<Y>& layer) {
    typedef typename Engine::Input Input;
    const int m = layer.m, K = layer.K, padded = count_steps(K, is_int8) * kTileDepth;
    const int groups = (count_panels(layer.N) + Engine::kGroup - 1) / Engine::kGroup;
    const int chunks = (m + kChunkRows - 1) / kChunkRows;
    const bool is_copied = !std::is_same_v<Input, Y> || K != padded;
    Floats copy = is_copied ? allocate(size_t(m) * padded) : nullptr;
    const bool is_parallel = double(m) * K * layer.N > kMinParallelWork;
    const Input* x = reinterpret_cast<const Input*>(layer.x);
    if (is_copied) {
        Input* to = reinterpret_cast<Input*>(copy.get());
        parallel_runs(m, is_parallel, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; ++r) copy_row(to + r * padded, layer.x + r * K, K, padded);
        });
        x = to;
    }
    parallel_for(groups * chunks, is_parallel, [&](int task) {
        const typename Engine::Scope scope(m);
        const int group = task % groups, chunk = task / groups;
        compute_group<Engine, is_int8>(layer, x, is_copied ? padded : K, group, int(int64_t(m) * chunk / chunks),
                                       int(int64_t(m) * (chunk + 1) / chunks));
    });
}

}  // namespace quire
