// Each rank sums the squares of what it has of a row, the sums are added in the order of ranks, and each rank scales
// its numbers: one float a row travels.
#include "norm/shared_norm.h"

#include "norm/rms_norm.h"
#include "group/shared_group.h"
#include "program/thread_pool.h"
#include "linear/tile.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 16;

template <typename T>
int norm_rows(const QuireSharedNorm& norm, T* x, int rows, int stride, float* squares) {
    const bool is_large = int64_t(rows) * norm.size > kMinParallelSize;
    parallel_runs(rows, is_large, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) squares[r] = norm.counts ? sum_squares(x + r * stride, norm.size) : 0.0f;
    });
    if (const int status = quire_all_reduce(norm.group, squares, rows, 0)) return status;
    parallel_runs(rows, is_large, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const float factor = find_norm_factor(squares[r], norm.total_size, norm.eps);
            T* row = x + r * stride;
            scale_row(row, static_cast<const T*>(norm.weight), row, norm.size, factor, norm.weight_offset,
                      norm.rounds_normed);
        }
    });
    return QUIRE_GROUP_OK;
}

}  // namespace

extern "C" int quire_shared_norm(int is_bf16, const QuireSharedNorm* norm, void* x, int rows, int stride,
                                 float* squares) {
    return is_bf16 ? norm_rows(*norm, static_cast<bf16*>(x), rows, stride, squares)
                   : norm_rows(*norm, static_cast<float*>(x), rows, stride, squares);
}
