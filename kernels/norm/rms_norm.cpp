// y = norm(x) * weight, or residual += x and y = norm(residual) * weight; the formula is in rms_norm.py.
// A row is reduced in lanes and then across them, whatever the number of rows. Legend: T rows, D row length.
#include "norm/rms_norm.h"
#include "program/thread_pool.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 16;

template <typename T>
void norm_rows(const T* x, T* residual, const T* weight, T* y, int rows, int size, int stride, float eps,
               float weight_offset, bool rounds_normed) {
    parallel_runs(rows, int64_t(rows) * size > kMinParallelSize, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const T* row = x + size_t(r) * stride;
            if (residual) {
                T* total = residual + size_t(r) * stride;
                add_row(row, total, size);
                row = total;
            }
            norm_row(row, weight, y + size_t(r) * stride, size, eps, weight_offset, rounds_normed);
        }
    });
}

}  // namespace

extern "C" void quire_rms_norm(int is_bf16, const void* x, void* residual, const void* weight, void* y, int rows,
                               int size, int stride, float eps, float weight_offset, int rounds_normed) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        norm_rows(static_cast<const T*>(x), static_cast<T*>(residual), static_cast<const T*>(weight),
                  static_cast<T*>(y), rows, size, stride, eps, weight_offset, rounds_normed);
    });
}
