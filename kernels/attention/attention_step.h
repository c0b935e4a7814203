// What every variant of paged attention shares: a step's pointers, tasks, running sums, finding keys.
// K of a block lies [D, block_size], V [block_size, D]; in bfloat16 neighbours are paired, K [D / 2, block_size, 2]
// and V [block_size / 2, D, 2], as processors with bfloat16 products read them. Where values are the first numbers of
// the keys (a latent, paged_attention.py) there is no V: what multiplies it makes it of K in scratch, tile by tile.
// Legend: T tokens, R requests, H query heads, G kv heads, D head size, E value size.
#pragma once

#include "attention/narrow_cache.h"
#include "linear/tile.h"

#include <algorithm>
#include <limits>

namespace quire::attention {

constexpr int kSplit = 1024;  // keys of a split; a multiple of every variant's kKeys
constexpr float kNone = -std::numeric_limits<float>::infinity();

template <typename T>
struct Step {
    const T* query;
    size_t query_stride;  // elements between tokens
    T* out;               // [T, H, E]
    const T* k_cache;
    const T* v_cache;  // null: values are the first E numbers of keys
    const int32_t* block_tables;
    size_t table_stride;
    const int32_t* query_starts;
    const int32_t* seq_lens;
    int num_requests, num_heads, num_kv_heads, head_size, block_size, window;
    float scale;
    float soft_cap;  // 0: none
    const float* sinks;  // [H], or null
    int value_size;      // D where there is a v_cache
    KVFormat format = kModelType;  // another: the caches are bytes as in narrow_cache.h

    bool has_values() const { return v_cache != nullptr; }
    int group() const { return num_heads / num_kv_heads; }
};

// Some tokens of one request and the query heads of a kv head, or, of one token, of several. Row r is token r / heads,
// head r % heads.
struct Task {
    int request, first, tokens, kv_head;
    int heads;     // query heads
    int position;  // of the first token in its sequence
    int seen_end;  // the first key that none of the tokens sees

    int rows() const { return tokens * heads; }
};

// What is known of a set of rows after some keys: the largest score, the sum of weights, the weighted sum.
// Rows are rounded up to kRowStep: variants that compute so many at once write past the last.
struct Sums {
    static constexpr int kRowStep = 32;
    float *largest, *weight, *value;

    static size_t size(int rows, int padded) { return size_t(round_up(rows, kRowStep)) * (padded + 2); }

    Sums(float* memory, int rows)
        : largest(memory),
          weight(memory + round_up(rows, kRowStep)),
          value(memory + 2 * round_up(rows, kRowStep)) {}

    void clear(int rows, int padded) {
        std::fill_n(largest, rows, kNone);
        std::fill_n(weight, rows, 0.0f);
        std::fill_n(value, size_t(rows) * padded, 0.0f);
    }
};

inline float shrink_factor(float from, float to) { return from == kNone ? 0.0f : exp(splat(from - to))[0]; }

inline void scale_row(float* row, int size, float factor) {
    for (int i = 0; i < size; i += kLanes) store(row + i, load(row + i) * factor);
}

// total <- total and part, where part's keys come after total's.
inline void merge(int rows, int padded, Sums& total, const Sums& part) {
    for (int r = 0; r < rows; ++r) {
        if (part.largest[r] == kNone) continue;
        const float largest = std::max(total.largest[r], part.largest[r]);
        const float keep = shrink_factor(total.largest[r], largest);
        const float take = shrink_factor(part.largest[r], largest);
        total.largest[r] = largest;
        total.weight[r] = total.weight[r] * keep + part.weight[r] * take;
        float *sum = total.value + size_t(r) * padded, *more = part.value + size_t(r) * padded;
        for (int i = 0; i < padded; i += kLanes) store(sum + i, load(sum + i) * keep + load(more + i) * take);
    }
}

// Where K and V (null where there is none) of a run of keys within one block begin; with pairs, the run begins at an
// even key.
template <typename T>
struct Place {
    const T *k, *v;
    int count;
};

template <typename T>
Place<T> find_keys(const Step<T>& step, const Task& task, int key, int end) {
    const int D = step.head_size, size = step.block_size, offset = key % size;
    const int block = step.block_tables[task.request * step.table_stride + key / size];
    const size_t base = (size_t(block) * step.num_kv_heads + task.kv_head) * size * D;
    const int paired = sizeof(T) == sizeof(bf16) ? 2 : 1;
    return {step.k_cache + base + paired * offset, step.has_values() ? step.v_cache + base + size_t(offset) * D : nullptr,
            std::min(size - offset, end - key)};
}

// Where codes of a run of keys within one block begin, and their scales.
struct CodePlace {
    const uint8_t *k, *v;
    const float *k_scales, *v_scales;
    int count;
};

template <typename T>
CodePlace find_codes(const Step<T>& step, const Task& task, int key, int end) {
    const int D = step.head_size, size = step.block_size, offset = key % size;
    const int block = step.block_tables[task.request * step.table_stride + key / size];
    const size_t start = (size_t(block) * step.num_kv_heads + task.kv_head) * narrow_size(size, D);
    const uint8_t* k = reinterpret_cast<const uint8_t*>(step.k_cache) + start;
    const uint8_t* v = step.has_values() ? reinterpret_cast<const uint8_t*>(step.v_cache) + start : k;
    const int paired = sizeof(T) == sizeof(bf16) ? 2 : 1, scales = size * D + offset * kScaleBytes;
    return {k + paired * offset, v + size_t(offset) * D, reinterpret_cast<const float*>(k + scales),
            reinterpret_cast<const float*>(v + scales), std::min(size - offset, end - key)};
}

// The scales of a tile's keys and of its values, which multiply scores and weights; 0 past the last key.
struct TileScales {
    float *keys, *values;

    void take(const CodePlace& from, int key) {
        std::memcpy(keys + key, from.k_scales, from.count * sizeof(float));
        std::memcpy(values + key, from.v_scales, from.count * sizeof(float));
    }

    void clear(int first, int last) {
        std::fill(keys + first, keys + last, 0.0f);
        std::fill(values + first, values + last, 0.0f);
    }

    void scale_scores(float* scores, int first, int last) const {
        for (int j = first; j < last; j += kLanes) store(scores + j, load(scores + j) * load(keys + j));
    }

    // What a masked key has may be anything.
    Vec operator()(int key, Vec weights) const { return weights > 0.0f ? weights * load(values + key) : Vec{}; }
};

struct NoScales {
    void scale_scores(float*, int, int) const {}
    Vec operator()(int, Vec weights) const { return weights; }
};

// The keys of a tile that one row sees, [first, last), among the columns [from, to) that hold scores.
struct Seen {
    int first, last, from, to;
};

// A row's scores become weights in place, those of unseen keys 0; its sums so far shrink to the new largest. `scales`
// are of the values that weights multiply.
template <typename Scales>
inline void weigh_row(float* scores, Seen seen, float scale, float soft_cap, float* largest, float* weight,
                      float* value, int padded, const Scales& scales) {
    IntVec lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    Vec high = splat(kNone);
    for (int j = seen.from; j < seen.to; j += kLanes) {
        const IntVec index = lane + j;
        const IntVec is_seen = (index >= seen.first) & (index < seen.last);
        Vec score = load(scores + j) * scale;
        if (soft_cap > 0.0f) score = cap_score(score, soft_cap);
        score = is_seen ? score : splat(kNone);
        high = high > score ? high : score;
        store(scores + j, score);
    }
    const float before = *largest, now = std::max(before, max(high));
    Vec total = Vec{};
    for (int j = seen.from; j < seen.to; j += kLanes) {
        Vec weights = exp(load(scores + j) - now);
        total += weights;
        store(scores + j, scales(j, weights));
    }
    if (before != now) {
        const float factor = shrink_factor(before, now);
        *weight *= factor;
        scale_row(value, padded, factor);
    }
    *largest = now;
    *weight += sum(total);
}

}  // namespace quire::attention
