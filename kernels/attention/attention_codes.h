// Attention over caches in 8 bits by vectors, where a processor widens codes by looking them up. Few rows, a decode
// step's, widen them in registers; many share a copy. Sums are the same chains in both, so bits are equal.
// Legend: D head size.
#pragma once

#include "attention/attention_vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

namespace quire::attention {

// Scales of each 16 keys of a tile in the cache, and of their values; a kv head's are `offset` numbers on.
struct PlacedScales {
    const float *const *keys, *const *values;
    size_t offset;

    void scale_scores(float* scores, int first, int last) const {
        for (int j = first; j < last; j += 16) store(scores + j, load(scores + j) * load(keys[j / 16] + offset));
    }

    // What a masked key has may be anything.
    Vec operator()(int key, Vec weights) const {
        return weights > 0.0f ? weights * load(values[key / 16] + offset) : Vec{};
    }
};

class CodeAttention : public VectorAttention<DottedPairs> {
    using Base = VectorAttention<DottedPairs>;
    using Order = ReadOrder<uint8_t, kGroup, kAhead>;

  public:
    static int most_heads(const Step<bf16>& step, int rows) {
        return can_read_in_place(step, rows) ? std::max(1, kRows / rows) : 1;
    }

    CodeAttention(const Step<bf16>& step, float* memory) : Base(step, memory), widen_(find_widener(step.format)) {}

    void open(const Task& task, int start, int end) {
        is_in_place_ = can_read_in_place(step_, task.tokens * step_.group());
        if (!is_in_place_) return Base::open(task, start, end);
        count_ = end - start;
        heads_ = task.heads / step_.group();
        rows_ = task.rows() / heads_;
        const int groups = round_up(count_, kStep) / kGroup;
        for (int group = 0, key = start; group < groups; ++group, key += kGroup) {
            // Past the last key any others will do: their scores are masked.
            const CodePlace from = find_codes(step_, task, key < end ? key : start, end);
            keys_[group] = from.k, values_[group] = from.v;
            key_scales_[group] = from.k_scales, value_scales_[group] = from.v_scales;
        }
        order_.open(keys_, values_, count_, heads_, narrow_size(kGroup, step_.head_size), kLine);
    }

    void expect(const Task& task, int start) {
        order_.expect(task, start, [&](int key, int end) { return find_codes(step_, task, key, end).k; });
    }

    void score(int first, int count, int from, int to) {
        if (!is_in_place_) return Base::score(first, count, from, to);
        for (int j = from / kStep * kStep; j < to; j += kWide)
            if (j + kWide <= round_up(to, kStep))
                score_codes<kWide / kLanes>(first, j);
            else
                score_codes<kStep / kLanes>(first, j);
    }

    void weigh(int row, Seen seen, float* largest, float* weight, float* value) {
        if (!is_in_place_) return Base::weigh(row, seen, largest, weight, value);
        const size_t offset = row / rows_ * order_.head_stride / sizeof(float);
        weigh_by(PlacedScales{key_scales_, value_scales_, offset}, row, seen, largest, weight, value);
    }

    void add_values(int count, int from, int to, float* value) {
        if (!is_in_place_) return Base::add_values(count, from, to, value);
        const int last = std::min(to, count_);
        for (int group = from / kStep * kStep / kGroup; group * kGroup < last; group += kAhead)
            for (int head = 0; head < heads_; ++head) {
                Lines<uint8_t> ahead[kAhead];
                order_.find_after(false, group, head, ahead);
                each_part([&](auto rows, int row, bool is_first) {
                    const size_t first = size_t(head) * rows_ + row;
                    const Part part{weights_ + first * kKeys + group * kGroup, value + first * padded_, group, head, last};
                    int d = 0;
                    for (; d + kWide <= step_.head_size; d += kWide)
                        add_codes<rows, kWide / kLanes>(part, d, is_first ? ahead : nullptr);
                    if (d < step_.head_size) add_codes<rows, kStep / kLanes>(part, d, is_first ? ahead : nullptr);
                });
            }
    }

  private:
    static constexpr int kLine = 64;

    // Rows of one head, which begin with these weights and sums.
    struct Part {
        const bf16* weights;
        float* value;
        int group, head, last;
    };

    static bool can_read_in_place(const Step<bf16>& step, int rows) {
        return step.has_values() && step.block_size == kGroup && step.head_size % kStep == 0 && rows <= kFewRows;
    }

    // body(how many rows of a head, the first of them, whether that is 0)
    template <typename Body>
    void each_part(const Body& body) const {
        const int parts = (rows_ + kMaxRows - 1) / kMaxRows;
        for (int part = 0; part < parts; ++part) {
            const int first = rows_ * part / parts;
            with_constant<kMaxRows>(rows_ * (part + 1) / parts - first,
                                    [&](auto rows) { body(rows, first, part == 0); });
        }
    }

    // Of the keys from j on.
    template <int Vectors>
    void score_codes(int first, int j) {
        for (int head = 0; head < heads_; ++head) {
            Lines<uint8_t> ahead[kAhead];
            order_.find_after(true, j / kGroup, head, ahead);
            each_part([&](auto rows, int row, bool is_first) {
                row += head * rows_;
                multiply_codes<rows, Vectors>(query_ + size_t(first + row) * step_.head_size, j / kGroup, head,
                                              scores_ + size_t(row) * kKeys + j, is_first ? ahead : nullptr);
            });
            for (int i = 0; i < Vectors; ++i) {  // scales lie behind the last line of each
                ahead[i].fetch();
                fetch(value_scales_[j / kGroup + i] + head * order_.head_stride / sizeof(float), 1);
            }
        }
    }

    template <int Rows, int Vectors>
    void multiply_codes(const bf16* query, int group, int head, float* scores, Lines<uint8_t>* ahead) const {
        Vec sums[Rows][Vectors] = {};
        const int D = step_.head_size;
        for (int d = 0; d < D; d += 4)
            for (int i = 0; i < Vectors; ++i) {
                if (ahead) ahead[i].fetch();
                UintVec pairs, after;
                widen_(keys_[group + i] + head * order_.head_stride + d * kGroup, pairs, after);
                for (int r = 0; r < Rows; ++r) {
                    sums[r][i] = DottedPairs::add_product(sums[r][i], query + size_t(r) * D + d, pairs);
                    sums[r][i] = DottedPairs::add_product(sums[r][i], query + size_t(r) * D + d + 2, after);
                }
            }
        for (int r = 0; r < Rows; ++r)
            for (int i = 0; i < Vectors; ++i) store(scores + r * kKeys + i * kLanes, sums[r][i]);
    }

    // value[Rows, d...] += weights V, over kAhead groups of keys.
    template <int Rows, int Vectors>
    void add_codes(const Part& part, int d, Lines<uint8_t>* ahead) const {
        Vec sums[Rows][Vectors];
        float* value = part.value + d;
        for (int r = 0; r < Rows; ++r)
            for (int i = 0; i < Vectors; ++i) sums[r][i] = load(value + size_t(r) * padded_ + i * kLanes);
        for (int at = 0; at < kAhead && (part.group + at) * kGroup < part.last; ++at) {
            const uint8_t* v = values_[part.group + at] + part.head * order_.head_stride + 2 * d;
            const bf16* weights = part.weights + at * kGroup;
            const int keys = std::min(kGroup, part.last - (part.group + at) * kGroup);
            for (int key = 0; key < keys; key += 2, v += 2 * step_.head_size)
                for (int i = 0; i < Vectors; i += 2) {
                    if (ahead) ahead[at].fetch();
                    UintVec low, high;
                    widen_(v + 2 * i * kLanes, low, high);
                    for (int r = 0; r < Rows; ++r) {
                        sums[r][i] = DottedPairs::add_product(sums[r][i], weights + r * kKeys + key, low);
                        sums[r][i + 1] = DottedPairs::add_product(sums[r][i + 1], weights + r * kKeys + key, high);
                    }
                }
        }
        for (int r = 0; r < Rows; ++r)
            for (int i = 0; i < Vectors; ++i) store(value + size_t(r) * padded_ + i * kLanes, sums[r][i]);
    }

    const PairWidener& widen_;
    bool is_in_place_ = false;
    int heads_ = 1, rows_ = 1;  // kv heads of the task, and rows of each
    const uint8_t *keys_[kKeys / kGroup], *values_[kKeys / kGroup];
    const float *key_scales_[kKeys / kGroup], *value_scales_[kKeys / kGroup];
    Order order_;
};

}  // namespace quire::attention

#endif
