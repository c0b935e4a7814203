// x = cap * tanh(x / cap) in place; the formula of a score in attention is the same.
#include "sampling/soft_cap.h"

#include "program/thread_pool.h"
#include "linear/tile.h"

namespace {

constexpr int64_t kMinParallelSize = 1 << 15;

}  // namespace

extern "C" void quire_soft_cap(float* x, int64_t count, float cap) {
    using namespace quire;
    parallel_runs(count, count > kMinParallelSize, [&](int64_t first, int64_t last) {
        int64_t i = first;
        for (; i + kLanes <= last; i += kLanes) store(x + i, cap_score(load(x + i), cap));
        float tail[kLanes] = {};
        std::memcpy(tail, x + i, (last - i) * sizeof(float));
        store(tail, cap_score(load(tail), cap));
        std::memcpy(x + i, tail, (last - i) * sizeof(float));
    });
}
