// The rule is in likeliest.py. One pass over a row: what is not above the least of the `count` largest so far is
// dropped by a comparison of vectors; the rest is collected, and cut to `count` whenever twice as many are there.
#include <algorithm>
#include <functional>

#include "linear/tile.h"
#include "program/thread_pool.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 16;
constexpr int kBlock = 8 * kLanes;

// The bits of floats, made to order like integers; -0 as 0, its equal.
IntVec order(Vec values) {
    const IntVec bits = (IntVec)(values + Vec{});
    return bits ^ ((bits >> 31) & INT32_MAX);
}

// A row's largest values so far: an ordered value above the complement of its id, so that of equals the first wins.
struct Largest {
    int64_t* keys;  // room for 2 * count + kLanes
    int count, size = 0;
    int32_t least = INT32_MIN;  // once `count` are there, only values above it can be among the largest
    bool is_full = false;

    bool can_skip(const float* block) const {
        if (count == 0) return true;
        if (!is_full) return false;
        IntVec is_above{};
        for (int i = 0; i < kBlock; i += kLanes) is_above |= order(load(block + i)) > least;
        int32_t any = 0;
        for (int i = 0; i < kLanes; ++i) any |= is_above[i];
        return any == 0;
    }

    void add(IntVec values, int start, int num_values) {
        for (int i = 0; i < num_values; ++i) {
            if (is_full && values[i] <= least) continue;
            keys[size++] = int64_t(values[i]) * (int64_t(1) << 32) | (UINT32_MAX - uint32_t(start + i));
        }
        if (size >= 2 * count) cut();
    }

    void cut() {
        std::nth_element(keys, keys + count - 1, keys + size, std::greater<>());
        least = int32_t(keys[count - 1] >> 32);
        size = count;
        is_full = true;
    }

    void write(int64_t* ids) {
        std::partial_sort(keys, keys + count, keys + size, std::greater<>());
        for (int i = 0; i < count; ++i) ids[i] = UINT32_MAX - uint32_t(keys[i]);
    }
};

}  // namespace

// logits [S, V], token_ids [S]; ids [S, count] and ranks [S] are written. `count` is at most V and may be 0.
extern "C" void quire_likeliest(const float* logits, int rows, int size, const int64_t* token_ids, int count,
                                int64_t* ids, int32_t* ranks) {
    parallel_for(rows, int64_t(rows) * size > kMinParallelSize, [&](int r) {
        const float* row = logits + size_t(r) * size;
        const Vec chosen = splat(row[token_ids[r]]);
        float* memory = thread_memory(2 * (2 * size_t(count) + kLanes));
        Largest largest{reinterpret_cast<int64_t*>(memory), count};
        IntVec above{};
        int start = 0;
        for (; start + kBlock <= size; start += kBlock) {
            const float* block = row + start;
            for (int i = 0; i < kBlock; i += kLanes) above -= load(block + i) > chosen;
            if (largest.can_skip(block)) continue;
            for (int i = 0; i < kBlock; i += kLanes) largest.add(order(load(block + i)), start + i, kLanes);
        }
        for (; start < size; start += kLanes) {
            const int num_values = std::min(kLanes, size - start);
            Vec values = splat(-INFINITY);  // past the row: never above the token
            std::memcpy(&values, row + start, num_values * sizeof(float));
            above -= values > chosen;
            if (count) largest.add(order(values), start, num_values);
        }
        ranks[r] = 1;
        for (int i = 0; i < kLanes; ++i) ranks[r] += above[i];
        if (count) largest.write(ids + size_t(r) * count);
    });
}
