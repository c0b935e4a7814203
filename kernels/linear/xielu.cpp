// The formula is in xielu.py. Computed in float32, rounded once.
#include "linear/xielu.h"

#include "linear/tile.h"
#include "program/thread_pool.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 15;

Vec apply(Vec x, const QuireXielu& numbers) {
    const Vec low = x < numbers.eps ? x : splat(numbers.eps);
    const Vec curve = x > 0.0f ? x * x * numbers.alpha_p : (exp(low) - 1.0f - x) * numbers.alpha_n;
    return curve + x * numbers.beta;
}

template <typename T>
void apply_run(T* x, int64_t count, const QuireXielu& numbers) {
    T tail[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(x + i, apply(load(x + i), numbers));
    for (int64_t j = i; j < count; ++j) tail[j - i] = x[j];
    store(tail, apply(load(tail), numbers));
    for (; i < count; ++i) x[i] = tail[i % kLanes];
}

}  // namespace

extern "C" void quire_xielu(int is_bf16, void* x, int64_t count, const QuireXielu* numbers) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        const int64_t blocks = (count + kLanes - 1) / kLanes;
        parallel_runs(blocks, count > kMinParallelSize, [&](int64_t first, int64_t last) {
            const int64_t end = last * kLanes < count ? last * kLanes : count;
            apply_run(static_cast<T*>(x) + first * kLanes, end - first * kLanes, *numbers);
        });
    });
}
