// Takes the hidden states that a step has computed into the rows' pools; the formula is in pool_rows.py. A number of
// a pool is one chain of additions over positions, so neither chunks nor the rows beside it change a bit.
#include <cstddef>
#include <cstring>

#include "program/thread_pool.h"
#include "linear/tile.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 17;

// In the order of pool_rows.POOLS.
enum Pool { kCls = 0, kLast, kMean, kMax, kWeightedMean, kMeanSqrtLen };

template <typename T>
void add_token(const T* x, float* pool, int size, float weight) {
    for (int i = 0; i < size; ++i) pool[i] += weight * widen(x[i]);
}

// NaN stays: it is the greatest of all.
template <typename T>
void take_greater(const T* x, float* pool, int size) {
    for (int i = 0; i < size; ++i) {
        const float value = widen(x[i]);
        pool[i] = pool[i] >= value || pool[i] != pool[i] ? pool[i] : value;
    }
}

template <typename T>
void copy_token(const T* x, float* pool, int size) {
    for (int i = 0; i < size; ++i) pool[i] = widen(x[i]);
}

// `count` tokens from position `first` on.
template <typename T>
void pool_row(const T* hidden, int64_t first, int64_t count, int kind, float* pool, int size) {
    if (kind == kLast) return copy_token(hidden + (count - 1) * size, pool, size);
    int64_t t = 0;
    if (first == 0) {
        copy_token(hidden, pool, size);  // as the first of a sum too: its weight is 1
        t = 1;
    }
    if (kind == kCls) return;
    for (; t < count; ++t) {
        if (kind == kMax)
            take_greater(hidden + t * size, pool, size);
        else
            add_token(hidden + t * size, pool, size, kind == kWeightedMean ? float(first + t + 1) : 1.0f);
    }
}

}  // namespace

// pools [N, num_pools, size]: of row rows[r], whose tokens lie in hidden [T, size] from starts[r] to starts[r + 1].
extern "C" void quire_pool_rows(int is_bf16, const void* hidden, int size, int num_rows, const int64_t* rows,
                                const int64_t* starts, const int64_t* firsts, int num_pools, const int32_t* kinds,
                                float* pools) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        const T* states = static_cast<const T*>(hidden);
        const bool is_worth = num_rows && (starts[num_rows] - starts[0]) * size > kMinParallelSize;
        parallel_for(num_rows * num_pools, is_worth, [&](int task) {
            const int r = task / num_pools, pool = task % num_pools;
            pool_row(states + size_t(starts[r]) * size, firsts[r], starts[r + 1] - starts[r], kinds[pool],
                     pools + (size_t(rows[r]) * num_pools + pool) * size, size);
        });
    });
}
