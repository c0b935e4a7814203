// The formula is in product.py. Computed in float32, rounded once.
#include "linear/product.h"

#include "linear/activation.h"
#include "program/thread_pool.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 15;

struct Sigmoid {
    static Vec apply(Vec a) { return 1.0f / (1.0f + exp(-a)); }
};

template <typename Act, typename T>
void multiply_row(T* x, const T* y, int size) {
    T tail[2][kLanes] = {};
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) store(x + i, load(x + i) * Act::apply(load(y + i)));
    if (i == size) return;
    std::memcpy(tail[0], x + i, (size - i) * sizeof(T));
    std::memcpy(tail[1], y + i, (size - i) * sizeof(T));
    store(tail[0], load(tail[0]) * Act::apply(load(tail[1])));
    std::memcpy(x + i, tail[0], (size - i) * sizeof(T));
}

template <typename Act>
void multiply_rows(int is_bf16, void* x, int rows, int size, const void* y, int64_t stride) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        parallel_runs(rows, int64_t(rows) * size > kMinParallelSize, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; ++r)
                multiply_row<Act>(static_cast<T*>(x) + r * size, static_cast<const T*>(y) + r * stride, size);
        });
    });
}

}  // namespace

extern "C" void quire_product(int is_bf16, int gate, void* x, int rows, int size, const void* y, int64_t stride) {
    switch (gate) {
        case QUIRE_SIGMOID_GATE: return multiply_rows<Sigmoid>(is_bf16, x, rows, size, y, stride);
        case QUIRE_SILU_GATE: return multiply_rows<Silu>(is_bf16, x, rows, size, y, stride);
        default: return multiply_rows<NoActivation>(is_bf16, x, rows, size, y, stride);
    }
}
