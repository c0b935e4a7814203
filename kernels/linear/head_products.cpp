// Each head's rows are brought together, multiplied by the kernels of linear.cpp, and put in their places: what is
// copied is a hundredth of what is multiplied. A single row lies together already.
#include "linear/head_products.h"

#include "linear/tile.h"
#include "program/thread_pool.h"

#include <algorithm>
#include <vector>

namespace {

using namespace quire;

constexpr double kMinParallelWork = 400e3;  // multiply-adds, as linear_packed.h
constexpr int kRows = 64;                   // of a task: a head's weights stay in a core's cache meanwhile

template <typename T>
struct Rows {
    T* first;
    int64_t stride;
    int step;

    T* at(int row, int head) const { return first + row * stride + size_t(head) * step; }
};

template <typename T>
void multiply_rows(const QuireLinear& layer, int head, int first, int count, const Rows<const T>& x, const Rows<T>& y) {
    constexpr bool is_bf16 = std::is_same_v<T, bf16>;
    if (count == 1) return multiply(layer, is_bf16, x.at(first, head), 1, y.at(first, head));
    thread_local std::vector<T> memory;
    const int K = layer.num_in, N = layer.num_out;
    memory.resize(size_t(kRows) * (K + N));
    T *from = memory.data(), *to = from + size_t(kRows) * K;
    for (int r = 0; r < count; ++r) std::copy_n(x.at(first + r, head), K, from + size_t(r) * K);
    multiply(layer, is_bf16, from, count, to);
    for (int r = 0; r < count; ++r) std::copy_n(to + size_t(r) * N, N, y.at(first + r, head));
}

}  // namespace

extern "C" void quire_multiply_heads(const QuireLinear* layers, int num_heads, int is_bf16, const void* x,
                                     int64_t x_stride, int x_step, int rows, void* y, int64_t y_stride, int y_step) {
    const int parts = (rows + kRows - 1) / kRows;
    const bool is_worth = double(rows) * num_heads * layers->num_in * layers->num_out > kMinParallelWork;
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        const Rows<const T> from{static_cast<const T*>(x), x_stride, x_step};
        const Rows<T> to{static_cast<T*>(y), y_stride, y_step};
        parallel_for(num_heads * parts, is_worth, [&](int task) {
            const int head = task / parts, first = task % parts * kRows;
            multiply_rows(layers[head], head, first, std::min(kRows, rows - first), from, to);
        });
    });
}
