// y[T, F] = silu(x[:, :F]) * x[:, F:], silu(a) = a / (1 + exp(-a)). Legend: T tokens, F width of the layer.
#include "tile.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 15;

inline Vec silu(Vec a) { return a / (1.0f + exp(-a)); }

// The gate is rounded to T before it multiplies, as two separate operations would do.
template <typename T>
void gate_row(const T* gate, const T* up, T* y, int size) {
    T gated[kLanes], tail[kLanes] = {};
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        store(gated, silu(load(gate + i)));
        store(y + i, load(gated) * load(up + i));
    }
    for (int j = i; j < size; ++j) tail[j - i] = gate[j];
    store(gated, silu(load(tail)));
    for (; i < size; ++i) y[i] = narrow<T>(widen(gated[i % kLanes]) * widen(up[i]));
}

template <typename T>
void gate_rows(const T* x, T* y, int rows, int size) {
#pragma omp parallel for schedule(static) if (int64_t(rows) * size > kMinParallelSize)
    for (int r = 0; r < rows; ++r) {
        const T* row = x + size_t(r) * 2 * size;
        gate_row(row, row + size, y + size_t(r) * size, size);
    }
}

}  // namespace

extern "C" void quire_silu_and_multiply(int is_bf16, const void* x, void* y, int rows, int size) {
    if (is_bf16)
        gate_rows(static_cast<const bf16*>(x), static_cast<bf16*>(y), rows, size);
    else
        gate_rows(static_cast<const float*>(x), static_cast<float*>(y), rows, size);
}
