// The formula is in layer_norm.py. A row's mean and variance are sums over fixed lanes, whatever rows are beside it.
// Legend: T tokens, D hidden size.
#include "layer_norm.h"

#include "rms_norm.h"
#include "thread_pool.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 16;

// The mean of term(x) over a row; term takes a vector, of one number where the row ends.
template <typename T, typename Term>
float mean_of(const T* x, int size, const Term& term) {
    Vec total{};
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) total += term(load(x + i));
    float rest = sum(total);
    for (; i < size; ++i) rest += term(splat(widen(x[i])))[0];
    return rest / float(size);
}

template <typename T>
void norm_row(const T* x, const T* weight, const T* bias, T* y, int size, float eps) {
    const float mean = mean_of(x, size, [](Vec value) { return value; });
    const float variance = mean_of(x, size, [&](Vec value) { return (value - mean) * (value - mean); });
    const float factor = 1.0f / std::sqrt(variance + eps);
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const Vec scaled = (load(x + i) - mean) * factor * load(weight + i);
        store(y + i, bias ? scaled + load(bias + i) : scaled);
    }
    for (; i < size; ++i) {
        const float scaled = (widen(x[i]) - mean) * factor * widen(weight[i]);
        y[i] = narrow<T>(bias ? scaled + widen(bias[i]) : scaled);
    }
}

template <typename T>
void norm_rows(const T* x, T* residual, const T* weight, const T* bias, T* y, int rows, int size, float eps) {
    parallel_runs(rows, int64_t(rows) * size > kMinParallelSize, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const T* row = x + r * size;
            if (residual) {
                T* total = residual + r * size;
                add_row(row, total, size);
                row = total;
            }
            norm_row(row, weight, bias, y + r * size, size, eps);
        }
    });
}

}  // namespace

extern "C" void quire_layer_norm(int is_bf16, const void* x, void* residual, const void* weight, const void* bias,
                                 void* y, int rows, int size, float eps) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        norm_rows(static_cast<const T*>(x), static_cast<T*>(residual), static_cast<const T*>(weight),
                  static_cast<const T*>(bias), static_cast<T*>(y), rows, size, eps);
    });
}
