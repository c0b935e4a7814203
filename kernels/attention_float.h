// Attention over float32 caches: every score and every weighted sum is one chain of multiply-adds in order.
#pragma once

#include "attention_step.h"

namespace quire::attention {

class FloatAttention {
  public:
    static constexpr bool kUsesTiles = false;
    static constexpr int kKeys = 64;      // keys of a tile; a multiple of every kColumns
    static constexpr int kRows = kMaxRows;  // rows computed together
    static constexpr int kTaskRows = 96;  // rows that share one reading of K and V

    static int padded(int head_size) { return round_up(head_size, kLanes); }

    // Kv heads that a task of so many rows each may have.
    static int most_heads(const Step<float>&, int) { return 1; }

    static size_t memory_size(const Step<float>& step, int rows) {
        return size_t(kKeys) * (step.head_size + padded(step.head_size) + kRows) + size_t(rows) * step.head_size;
    }

    FloatAttention(const Step<float>& step, float* memory) : step_(step), padded_(padded(step.head_size)) {
        key_ = memory;                                       // [D, kKeys]
        value_ = key_ + size_t(kKeys) * step.head_size;      // [kKeys, padded]
        scores_ = value_ + size_t(kKeys) * padded_;          // [kRows, kKeys]
        query_ = scores_ + size_t(kKeys) * kRows;            // [rows, D]
    }

    void stage_queries(const Task& task) {
        const int size = step_.group() * step_.head_size;
        for (int t = 0; t < task.tokens; ++t)
            std::memcpy(query_ + size_t(t) * size,
                        step_.query + (task.first + t) * step_.query_stride + size_t(task.kv_head) * size,
                        size * sizeof(float));
    }

    // Goes to keys [start, end). Many rows, or sizes that are no multiple of a vector, use a copy in scratch; few
    // rows read the blocks in place, since a copy would cost more than it saves. Sums are the same chains in both,
    // so bits are equal.
    void open(const Task& task, int start, int end) {
        const bool is_even = step_.head_size % kLanes == 0 && step_.block_size % kLanes == 0;
        count_ = end - start;
        is_direct_ = is_even && task.tokens * step_.group() <= kMaxDirectRows;
        if (!is_direct_) return stage_keys(task, start, end);
        for (int key = start, i = 0; key < end; key += kLanes, ++i) {
            const Place<float> from = find_keys(step_, task, key, end);
            keys_[i] = from.k;
            values_[i] = from.v;
        }
    }

    void expect(const Task&, int) {}

    // Scores of `count` rows from `first` on.
    void score(int first, int count, int, int) {
        const int D = step_.head_size;
        const float* query = query_ + size_t(first) * D;
        std::fill_n(scores_, count * kKeys, 0.0f);
        if (!is_direct_) return multiply(count, kKeys, query, D, key_, kKeys, scores_, kKeys, D);
        const int vectors = (count_ + kLanes - 1) / kLanes;
        for (int i = 0; i < vectors; i += kVectors)
            multiply_vectors(count, std::min(kVectors, vectors - i), query, D, keys_ + i, step_.block_size,
                             scores_ + i * kLanes, kKeys, D);
    }

    void weigh(int row, Seen seen, float* largest, float* weight, float* value) {
        float* scores = scores_ + row * kKeys;
        if (seen.first >= seen.last) return (void)std::fill_n(scores, kKeys, 0.0f);
        seen.from = 0, seen.to = kKeys;
        weigh_row(scores, seen, step_.scale, step_.soft_cap, largest, weight, value, padded_);
    }

    // value[count, padded] += weights V
    void add_values(int count, int, int, float* value) {
        if (!is_direct_)
            return multiply(count, padded_, scores_, kKeys, value_, padded_, value, padded_, count_);
        for (int done = 0; done < count_; done += kLanes)
            multiply(count, padded_, scores_ + done, kKeys, values_[done / kLanes], padded_, value, padded_,
                     std::min(kLanes, count_ - done));
    }

  private:
    static constexpr int kMaxDirectRows = 2 * kMaxRows;  // more rows than this are worth a copy of the keys

    void stage_keys(const Task& task, int start, int end) {
        const int D = step_.head_size;
        for (int key = start; key < end;) {
            const Place<float> from = find_keys(step_, task, key, end);
            for (int d = 0; d < D; ++d)
                std::memcpy(key_ + d * kKeys + key - start, from.k + size_t(d) * step_.block_size,
                            from.count * sizeof(float));
            for (int j = 0; j < from.count; ++j)
                std::memcpy(value_ + (key - start + j) * padded_, from.v + size_t(j) * D, D * sizeof(float));
            key += from.count;
        }
    }

    const Step<float>& step_;
    const int padded_;
    float *key_, *value_, *scores_, *query_;
    const float *keys_[kKeys / kLanes], *values_[kKeys / kLanes];  // of each vector of keys, if direct
    int count_ = 0;
    bool is_direct_ = false;
};

}  // namespace quire::attention
