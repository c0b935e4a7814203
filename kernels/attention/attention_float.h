// Attention over float32 caches: every score and every weighted sum is one chain of multiply-adds in order.
#pragma once

#include "attention/attention_order.h"

namespace quire::attention {

class FloatAttention {
  public:
    static constexpr bool kUsesTiles = false;
    static constexpr int kKeys = 64;      // keys of a tile; a multiple of every kColumns
    static constexpr int kRows = 18;      // rows computed together; a multiple of every kMaxRows
    static constexpr int kTaskRows = 96;  // rows that share one reading of K and V

    static int padded(int head_size) { return round_up(head_size, kLanes); }

    // Kv heads that a task of so many rows each may have.
    static int most_heads(const Step<float>& step, int rows) {
        return can_read_in_place(step, rows) ? std::max(1, kRows / rows) : 1;
    }

    static size_t memory_size(const Step<float>& step, int rows) {
        return size_t(kKeys) * (step.head_size + padded(step.value_size) + kRows + 2) + size_t(rows) * step.head_size;
    }

    FloatAttention(const Step<float>& step, float* memory) : step_(step), padded_(padded(step.value_size)) {
        key_ = memory;                                       // [D, kKeys]
        value_ = key_ + size_t(kKeys) * step.head_size;      // [kKeys, padded]
        scores_ = value_ + size_t(kKeys) * padded_;          // [kRows, kKeys]
        scales_ = {scores_ + kKeys * kRows, scores_ + kKeys * (kRows + 1)};
        query_ = scores_ + size_t(kKeys) * (kRows + 2);      // [rows, D]
    }

    void stage_queries(const Task& task) {
        const int size = task.heads * step_.head_size;
        const size_t head = size_t(task.kv_head) * step_.group();
        for (int t = 0; t < task.tokens; ++t)
            std::memcpy(query_ + size_t(t) * size,
                        step_.query + (task.first + t) * step_.query_stride + head * step_.head_size,
                        size * sizeof(float));
    }

    // Goes to keys [start, end). Many rows, or sizes that are no multiple of a vector, use a copy in scratch; few
    // rows read the blocks in place, since a copy would cost more than it saves. Sums are the same chains in both,
    // so bits are equal.
    void open(const Task& task, int start, int end) {
        count_ = end - start;
        heads_ = task.heads / step_.group();
        is_direct_ = can_read_in_place(step_, task.tokens * step_.group());
        if (!is_direct_) return stage_keys(task, start, end);
        for (int key = start, i = 0; key < end; key += kLanes, ++i) {
            const Place<float> from = find_keys(step_, task, key, end);
            keys_[i] = from.k;
            values_[i] = from.v;
        }
        const size_t head_size = size_t(step_.block_size) * step_.head_size;
        order_.open(keys_, values_, count_, heads_, head_size, step_.block_size);
    }

    void expect(const Task& task, int start) {
        if (step_.format != kModelType) return;
        order_.expect(task, start, [&](int key, int end) { return find_keys(step_, task, key, end).k; });
    }

    // Scores of `count` rows from `first` on.
    void score(int first, int count, int, int) {
        const int D = step_.head_size;
        const float* query = query_ + size_t(first) * D;
        std::fill_n(scores_, count * kKeys, 0.0f);
        if (!is_direct_) return multiply_rows(count, kKeys, query, D, key_, kKeys, scores_, kKeys, D);
        const int rows = count / heads_;
        for (int group = 0; group < order_.groups; group += kVectors)
            for (int head = 0, row = 0; head < heads_; ++head, row += rows) {
                const float* starts[kVectors];
                const int vectors = std::min(kVectors, order_.groups - group);
                for (int i = 0; i < vectors; ++i) starts[i] = keys_[group + i] + head * order_.head_stride;
                Lines<float> ahead[kVectors];
                order_.find_after(true, group, head, ahead);
                multiply_head(rows, vectors, query + size_t(row) * D, D, starts, step_.block_size,
                              scores_ + row * kKeys + group * kLanes, kKeys, D, [&](int) {
                    for (Lines<float>& lines : ahead) lines.fetch();
                });
            }
    }

    void weigh(int row, Seen seen, float* largest, float* weight, float* value) {
        float* scores = scores_ + row * kKeys;
        if (seen.first >= seen.last) return (void)std::fill_n(scores, kKeys, 0.0f);
        seen.from = 0, seen.to = kKeys;
        const auto weigh_by = [&](const auto& scales) {
            scales.scale_scores(scores, 0, kKeys);
            weigh_row(scores, seen, step_.scale, step_.soft_cap, largest, weight, value, padded_, scales);
        };
        if (step_.format == kModelType) return weigh_by(NoScales());
        weigh_by(scales_);
    }

    // value[count, padded] += weights V
    void add_values(int count, int, int, float* value) {
        if (!is_direct_)
            return multiply_rows(count, padded_, scores_, kKeys, value_, padded_, value, padded_, count_);
        const int rows = count / heads_, D = step_.head_size;
        for (int group = 0; group < order_.groups; group += kVectors)
            for (int head = 0, row = 0; head < heads_; ++head, row += rows) {
                Lines<float> ahead[kVectors];
                order_.find_after(false, group, head, ahead);
                for (int at = group; at < std::min(group + kVectors, order_.groups); ++at) {
                    const int key = at * kLanes;
                    Lines<float> lines = ahead[at - group];
                    for (int d = 0; d < D; d += kColumns) {
                        const float* starts[kVectors];
                        const int vectors = std::min(kVectors, (D - d) / kLanes);
                        for (int i = 0; i < vectors; ++i)
                            starts[i] = values_[at] + head * order_.head_stride + d + i * kLanes;
                        multiply_head(rows, vectors, scores_ + row * kKeys + key, kKeys, starts, D,
                                      value + size_t(row) * padded_ + d, padded_, std::min(kLanes, count_ - key),
                                      [&](int) {
                            for (int i = 0; i < vectors; ++i) lines.fetch();
                        });
                    }
                }
            }
    }

  private:
    using Order = ReadOrder<float, kLanes, kVectors>;
    static constexpr int kMaxDirectRows = 2 * kMaxRows;  // more rows than this are worth a copy of the keys

    static bool can_read_in_place(const Step<float>& step, int rows) {
        return step.format == kModelType && step.has_values() && step.head_size % kLanes == 0 && step.block_size % kLanes == 0 &&
               rows <= kMaxDirectRows;
    }

    // c[rows, columns] += a[rows, depth] b[depth, columns], columns a multiple of kLanes.
    static void multiply_rows(int rows, int columns, const float* a, size_t lda, const float* b, size_t ldb, float* c,
                              size_t ldc, int depth) {
        for (; rows > 0; rows -= kMaxRows, a += kMaxRows * lda, c += kMaxRows * ldc)
            multiply(std::min(kMaxRows, rows), columns, a, lda, b, ldb, c, ldc, depth);
    }

    // The same with columns that begin where `b` says; fetches while the first rows are multiplied.
    template <typename Fetch>
    static void multiply_head(int rows, int vectors, const float* a, size_t lda, const float* const* b, size_t ldb,
                              float* c, size_t ldc, int depth, const Fetch& fetch) {
        multiply_vectors(std::min(kMaxRows, rows), vectors, a, lda, b, ldb, c, ldc, depth, fetch);
        if (rows > kMaxRows)
            multiply_vectors(rows - kMaxRows, vectors, a + kMaxRows * lda, lda, b, ldb, c + kMaxRows * ldc, ldc, depth);
    }

    void stage_keys(const Task& task, int start, int end) {
        if (step_.format != kModelType)
            stage_codes(task, start, end);
        else
            stage_numbers(task, start, end);
        if (!step_.has_values())
            for (int j = 0; j < count_; ++j)
                for (int d = 0; d < step_.value_size; ++d) value_[size_t(j) * padded_ + d] = key_[d * kKeys + j];
    }

    void stage_numbers(const Task& task, int start, int end) {
        const int D = step_.head_size;
        for (int key = start; key < end;) {
            const Place<float> from = find_keys(step_, task, key, end);
            for (int d = 0; d < D; ++d)
                std::memcpy(key_ + d * kKeys + key - start, from.k + size_t(d) * step_.block_size,
                            from.count * sizeof(float));
            for (int j = 0; step_.has_values() && j < from.count; ++j)
                std::memcpy(value_ + (key - start + j) * padded_, from.v + size_t(j) * D, D * sizeof(float));
            key += from.count;
        }
    }

    void stage_codes(const Task& task, int start, int end) {
        const int D = step_.head_size;
        for (int key = start; key < end;) {
            const CodePlace from = find_codes(step_, task, key, end);
            for (int d = 0; d < D; ++d)
                widen_codes(from.k + size_t(d) * step_.block_size, from.count, step_.format,
                            key_ + d * kKeys + key - start);
            for (int j = 0; step_.has_values() && j < from.count; ++j)
                widen_codes(from.v + size_t(j) * D, D, step_.format, value_ + (key - start + j) * padded_);
            scales_.take(from, key - start);
            key += from.count;
        }
        scales_.clear(count_, kKeys);
    }

    const Step<float>& step_;
    const int padded_;
    float *key_, *value_, *scores_, *query_;
    TileScales scales_;
    const float *keys_[kKeys / kLanes], *values_[kKeys / kLanes];  // of each vector of keys, if direct
    int count_ = 0, heads_ = 1;
    bool is_direct_ = false;
    Order order_;
};

}  // namespace quire::attention
