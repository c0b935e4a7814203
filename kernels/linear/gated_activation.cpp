// The formulas are in gated_activation.py. Legend: T tokens, F width of the layer.
#include "linear/gated_activation.h"

#include "linear/activation.h"
#include "program/thread_pool.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 15;

template <typename Act>
Vec lift(Vec up) {
    if constexpr (std::is_same_v<Act, ClampedSwiglu>) return Act::lift(up);
    return up;
}

// The gate is rounded to T before it multiplies, as two separate operations would do.
template <typename Act, typename T>
void gate_row(const T* gate, const T* up, T* y, int size) {
    T gated[kLanes], tail[kLanes] = {};
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        store(gated, Act::apply(load(gate + i)));
        store(y + i, load(gated) * lift<Act>(load(up + i)));
    }
    for (int j = i; j < size; ++j) tail[j - i] = gate[j];
    store(gated, Act::apply(load(tail)));
    for (; i < size; ++i) y[i] = narrow<T>(widen(gated[i % kLanes]) * lift<Act>(splat(widen(up[i])))[0]);
}

template <typename Act, typename T>
void gate_rows(const T* x, T* y, int rows, int size) {
    parallel_runs(rows, int64_t(rows) * size > kMinParallelSize, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const T* row = x + size_t(r) * 2 * size;
            gate_row<Act>(row, row + size, y + size_t(r) * size, size);
        }
    });
}

template <typename Act>
void gate(int is_bf16, const void* x, void* y, int rows, int size) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        gate_rows<Act>(static_cast<const T*>(x), static_cast<T*>(y), rows, size);
    });
}

}  // namespace

extern "C" void quire_gated_activation(int is_bf16, int activation, const void* x, void* y, int rows, int size) {
    with_activation(activation, [&](auto act) { gate<decltype(act)>(is_bf16, x, y, rows, size); });
}
