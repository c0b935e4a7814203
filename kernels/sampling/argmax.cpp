// Each row's most likely token: the lowest index of its maximum, or of its first NaN. See argmax.py.
#include "sampling/argmax.h"

#include <algorithm>
#include <cmath>

#include "program/thread_pool.h"
#include "linear/tile.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 17;
constexpr int kBlock = 16 * kLanes;

}  // namespace

// Each lane notes the block in which its own maximum came first, so that only one block is searched for the place.
int64_t quire::find_largest(const float* row, int64_t size) {
    Vec largest = splat(-INFINITY);
    IntVec first = IntVec{}, has_nan = IntVec{};
    const int64_t blocks = size / kBlock;
    for (int64_t block = 0; block < blocks; ++block) {
        const float* start = row + block * kBlock;
        Vec high = load(start);
        has_nan |= high != high;
        for (int j = kLanes; j < kBlock; j += kLanes) {
            const Vec x = load(start + j);
            has_nan |= x != x;
            high = x > high ? x : high;
        }
        first = high > largest ? IntVec{} + int32_t(block) : first;
        largest = high > largest ? high : largest;
    }
    float most = max(largest);
    int64_t found = size;
    bool is_nan = false;
    for (int lane = 0; lane < kLanes; ++lane) {
        is_nan |= has_nan[lane] != 0;
        if (largest[lane] == most) found = std::min(found, first[lane] * int64_t(kBlock));
    }
    for (int64_t i = blocks * kBlock; i < size; ++i) {
        is_nan |= row[i] != row[i];
        if (row[i] > most) most = row[found = i];
    }
    if (is_nan) return std::find_if(row, row + size, [](float x) { return x != x; }) - row;
    return std::find(row + found, row + size, most) - row;
}

extern "C" void quire_argmax(const float* rows, int num_rows, int64_t size, int64_t* index, bool* is_bad) {
    parallel_for(num_rows, num_rows * size > kMinParallelSize, [&](int r) {
        const float* row = rows + r * size;
        index[r] = find_largest(row, size);
        is_bad[r] = !std::isfinite(row[index[r]]);
    });
}
