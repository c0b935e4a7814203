// The rule is in logprobs.py. A row is read in chunks that stay in a core's first cache. Of each chunk first the
// maximum, what is above the row's token, and what may be among the likeliest tokens: what is not above the least of
// the `count` largest so far is dropped by a comparison of vectors; the rest is collected, and cut to `count` whenever
// twice as many are there. Then its sum of exp(x - maximum), in float32 within 128 logits and in float64 over these.
// A row is one thread's, so its bits depend on the row alone.
#include <algorithm>
#include <cmath>
#include <functional>

#include "linear/tile.h"
#include "program/thread_pool.h"
#include "sampling/exp_below.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 16;
constexpr int kBlock = 128;
constexpr int kChunk = 32 * kBlock;

// The bits of floats, made to order like integers; -0 as 0, its equal.
IntVec order(Vec values) {
    const IntVec bits = (IntVec)(values + Vec{});
    return bits ^ ((bits >> 31) & INT32_MAX);
}

// A bit for each lane above `least`.
uint32_t find_above(Vec values, float least) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)values, _mm512_set1_ps(least), _CMP_GT_OQ);
#else
    const IntVec is_above = values > least;
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= uint32_t(is_above[i] & 1) << i;
    return bits;
#endif
}

bool has_above(const float* block, float least) {
    IntVec is_above{};
    for (int i = 0; i < kBlock; i += kLanes) is_above |= load(block + i) > least;
    return find_above((Vec)(is_above & 1), 0.0f) != 0;
}

// A row's largest values so far: an ordered value above the complement of its id, so that of equals the first wins.
struct Largest {
    int64_t* keys;  // room for 2 * count + kLanes
    int count, size = 0;
    float least = -INFINITY;  // once `count` are there, only values above it can be among the largest
    bool is_full = false;

    void add(Vec values, int start, int num_values) {
        const uint32_t all = (1u << num_values) - 1;
        uint32_t lanes = is_full ? find_above(values, least) & all : all;
        const IntVec ordered = order(values);
        for (; lanes; lanes &= lanes - 1) {
            const int i = __builtin_ctz(lanes);
            keys[size++] = int64_t(ordered[i]) * (int64_t(1) << 32) | (UINT32_MAX - uint32_t(start + i));
        }
        if (size >= 2 * count) cut();
    }

    void cut() {
        std::nth_element(keys, keys + count - 1, keys + size, std::greater<>());
        const int32_t ordered = int32_t(keys[count - 1] >> 32), bits = ordered ^ ((ordered >> 31) & INT32_MAX);
        std::memcpy(&least, &bits, sizeof least);
        size = count;
        is_full = true;
    }

    void write(int32_t* ids) {
        std::partial_sort(keys, keys + count, keys + size, std::greater<>());
        for (int i = 0; i < count; ++i) ids[i] = int32_t(UINT32_MAX - uint32_t(keys[i]));
    }
};

// The sum of exp(x - top) of what is added.
struct ExpSum {
    double top = -INFINITY, total = 0.0;  // top: the largest x so far

    // `count` is a multiple of kBlock, `most` the largest of the values.
    void add(const float* values, int count, float most) {
        if (most == -INFINITY) return;
        double sum = 0.0;
        for (int start = 0; start < count; start += kBlock) {
            Vec sums{};
            for (int i = start; i < start + kBlock; i += kLanes) sums += exp_below(load(values + i) - most);
            sum += double(quire::sum(sums));
        }
        if (most > top) {
            total *= std::exp(top - most);
            top = most;
        } else {
            sum *= std::exp(most - top);
        }
        total += sum;
    }
};

// ids [1 + count], logprobs [1 + count] and the rank of a row: see quire_logprobs.
void score_row(const float* row, int size, int token, const int64_t* others, int count, int32_t* ids,
               float* logprobs, int32_t* rank) {
    const float chosen = row[token];
    const int num_largest = others ? 0 : count;
    float* memory = thread_memory(2 * (2 * size_t(num_largest) + kLanes));
    Largest largest{reinterpret_cast<int64_t*>(memory), num_largest};
    ExpSum exp_sum;
    IntVec above{};
    float rest[kChunk];
    for (int start = 0; start < size; start += kChunk) {
        const int num_values = std::min(kChunk, size - start), padded = round_up(num_values, kBlock);
        const float* chunk = row + start;
        if (num_values < padded) {  // past the row: never above anything, and nothing in the sum
            std::copy_n(chunk, num_values, rest);
            std::fill(rest + num_values, rest + padded, -INFINITY);
            chunk = rest;
        }
        Vec most = splat(-INFINITY);
        for (int block = 0; block < padded; block += kBlock) {
            const float* values = chunk + block;
            for (int i = 0; i < kBlock; i += kLanes) {
                const Vec x = load(values + i);
                above -= x > chosen;
                most = x > most ? x : most;
            }
            if (num_largest == 0 || (largest.is_full && !has_above(values, largest.least))) continue;
            for (int i = 0; i < kBlock && block + i < num_values; i += kLanes)
                largest.add(load(values + i), start + block + i, std::min(kLanes, num_values - block - i));
        }
        exp_sum.add(chunk, padded, max(most));
    }
    *rank = 1;
    for (int i = 0; i < kLanes; ++i) *rank += above[i];
    ids[0] = token;
    if (others)
        for (int i = 0; i < count; ++i) ids[1 + i] = int32_t(others[i]);
    else if (count)
        largest.write(ids + 1);
    const double log_sum = std::log(exp_sum.total);
    for (int i = 0; i <= count; ++i) logprobs[i] = float((double(row[ids[i]]) - exp_sum.top) - log_sum);
}

}  // namespace

// Each of `rows` points to [V] logits. token_ids [S]; others: [S, count], or null for the likeliest; ids and logprobs
// [S, 1 + count] and ranks [S] are written. `count` is at most V and may be 0.
extern "C" void quire_logprobs(const float* const* rows, int num_rows, int size, const int64_t* token_ids,
                               const int64_t* others, int count, int32_t* ids, float* logprobs, int32_t* ranks) {
    parallel_for(num_rows, int64_t(num_rows) * size > kMinParallelSize, [&](int r) {
        const size_t place = size_t(r) * (1 + size_t(count));
        score_row(rows[r], size, int(token_ids[r]), others ? others + size_t(r) * count : nullptr, count, ids + place,
                  logprobs + place, ranks + r);
    });
}
