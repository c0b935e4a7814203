// Attention over bfloat16 caches by vectors, on any processor and on those with vdpbf16ps. A score and a weighted sum
// are one chain over pairs in order. Legend: D head size.
#pragma once

#include "attention_order.h"
#include "attention_pairs.h"
#include "pair_products.h"

namespace quire::attention {

// Many rows use a copy of V; few rows, a decode step's, read it in place. Sums are the same chains in both, so bits are
// equal.
template <typename Pairs>
class VectorAttention : public PairedTile<typename Pairs::Left> {
    using Tile = PairedTile<typename Pairs::Left>;
    using Tile::kGroup, Tile::kStep;
    static constexpr int kPerGroup = kGroup / kLanes;  // vectors of a group
    static constexpr int kWide = std::max(kStep, kVectors * kLanes);  // keys or elements of D computed together
    static constexpr int kAhead = kWide / kGroup;  // groups of one head that are fetched ahead
    using Order = ReadOrder<bf16, kGroup, kAhead>;
    static constexpr int kFewRows = 16;
    static constexpr int kGroupPairs = kGroup / 2;

  public:
    static constexpr bool kUsesTiles = false;
    using Tile::kKeys, Tile::Tile;

    static int most_heads(const Step<bf16>& step, int rows) {
        return can_read_in_place(step, rows) ? Tile::kRows / rows : 1;
    }

    void open(const Task& task, int start, int end) {
        const int group = this->step_.group();
        is_in_place_ = can_read_in_place(this->step_, task.tokens * group);
        heads_ = task.heads / group;
        if (!is_in_place_) return Tile::open(task, start, end);
        this->take_keys(task, start, end,
                        [&](const Place<bf16>& from, int key) { values_[(key - start) / kGroup] = from.v; });
        order_.open(this->step_, this->keys_, values_, this->count_, heads_);
        if (this->count_ % 2) copy_last_pairs();
    }

    void expect(const Task& task, int start) { order_.expect(this->step_, task, start); }

    // Scores of `count` rows from `first` on with the keys [from, to) of the tile.
    void score(int first, int count, int from, int to) {
        int j = from / kStep * kStep;
        for (; j + kWide <= round_up(to, kStep); j += kWide) score_keys<kWide / kLanes>(first, count, j);
        if (j < to) score_keys<kStep / kLanes>(first, count, j);
    }

    // value[count, padded] += weights V, over the keys [from, to).
    void add_values(int count, int from, int to, float* value) {
        from = from / kStep * kStep;
        if (is_in_place_) return add_in_place(count, from, to, value);
        to = round_up(to, kStep);
        int d = 0;
        for (; d + kWide <= this->padded_; d += kWide)
            add_copied<kWide / kLanes>(count, from, to, d, value);
        if (d < this->padded_) add_copied<kStep / kLanes>(count, from, to, d, value);
    }

  private:
    static bool can_read_in_place(const Step<bf16>& step, int rows) {
        return step.block_size % kGroup == 0 && step.head_size % kStep == 0 && rows <= kFewRows;
    }

    // Of the keys from j on.
    template <int Vectors>
    void score_keys(int first, int count, int j) {
        const int D = this->step_.head_size, rows = count / heads_;
        for (int head = 0; head < heads_; ++head) {
            const bf16* starts[Vectors];
            const size_t start = head * order_.head_stride;
            for (int i = 0; i < Vectors; ++i)
                starts[i] = this->keys_[j / kGroup + i / kPerGroup] + start + i % kPerGroup * 2 * kLanes;
            float* scores = this->scores_ + size_t(head) * rows * kKeys + j;
            const auto* query = this->query_ + size_t(first + head * rows) * D;
            const auto multiply = [&](const auto& fetch) {
                multiply_pair_rows<Pairs, Vectors, false>(rows, query, D, starts, this->key_stride_, scores, kKeys,
                                                          D / 2, fetch);
            };
            if (!is_in_place_) return multiply(NoFetch());
            Lines<bf16> ahead[kAhead];
            order_.find_after(j / kGroup, head, ahead);
            multiply([&](int) {
                for (int i = 0; i < Vectors / kPerGroup; ++i) ahead[i].fetch();
            });
        }
    }

    template <int Vectors>
    void add_copied(int count, int from, int to, int d, float* value) {
        const bf16* starts[Vectors];
        for (int i = 0; i < Vectors; ++i)
            starts[i] = this->value_tile(d + i / kPerGroup * kGroup, from) + i % kPerGroup * 2 * kLanes;
        multiply_pair_rows<Pairs, Vectors>(count, this->weights_ + from, kKeys, starts, kGroup, value + d,
                                           this->padded_, (to - from) / 2);
    }

    void add_in_place(int count, int from, int to, float* value) {
        const int last = std::min(to, this->count_), rows = count / heads_;
        typename Order::Values at{from / kGroup, 0}, ahead = at;
        for (int i = 0; i < kAhead; ++i) ahead = order_.after(ahead);
        for (; at.group * kGroup < last; at = order_.after(at), ahead = order_.after(ahead)) {
            const int key = at.group * kGroup, pairs = std::min(kGroupPairs, (last - key + 1) / 2);
            const bool is_cut = last == this->count_ && last % 2 && key + kGroup >= last;
            const auto* weights = this->weights_ + size_t(at.head) * rows * kKeys;
            float* sums = value + size_t(at.head) * rows * this->padded_;
            Lines<bf16> next = order_.lines_of(ahead);
            add_pairs(rows, weights + key, pairs - is_cut, order_.start_of(at), next, sums);
            if (is_cut) add_pairs(rows, weights + last - 1, 1, last_pair(at.head), next, sums);
        }
    }

    // value += weights times `pairs` rows of V.
    void add_pairs(int rows, const typename Pairs::Left* weights, int pairs, const bf16* v, Lines<bf16>& ahead,
                   float* value) {
        const int D = this->step_.head_size;
        int d = 0;
        for (; d + kWide <= D; d += kWide) add_columns<kWide / kLanes>(rows, weights, pairs, v, d, ahead, value);
        if (d < D) add_columns<kStep / kLanes>(rows, weights, pairs, v, d, ahead, value);
    }

    template <int Vectors>
    void add_columns(int rows, const typename Pairs::Left* weights, int pairs, const bf16* v, int d,
                     Lines<bf16>& ahead, float* value) {
        const int D = this->step_.head_size;
        const bf16* starts[Vectors];
        for (int i = 0; i < Vectors; ++i) starts[i] = v + 2 * (d + i * kLanes);
        multiply_pair_rows<Pairs, Vectors>(rows, weights, kKeys, starts, D, value + d, this->padded_, pairs, [&](int) {
            for (int i = 0; i < Vectors / kPerGroup; ++i) ahead.fetch();
        });
    }

    bf16* last_pair(int head) { return this->value_ + size_t(head) * 2 * this->step_.head_size; }

    // The last key's neighbour has not been written: it becomes 0.
    void copy_last_pairs() {
        const int D = this->step_.head_size, last = this->count_ - 1;
        for (int head = 0; head < heads_; ++head) {
            const bf16* from = order_.start_of({last / kGroup, head}) + size_t(last % kGroup) * D;
            bf16* to = last_pair(head);
            for (int d = 0; d < 2 * D; d += 2) to[d] = from[d], to[d + 1] = 0;
        }
    }

    bool is_in_place_ = false;
    int heads_ = 1;                       // kv heads of the task
    const bf16* values_[kKeys / kGroup];  // V of each 16 keys
    Order order_;
};

}  // namespace quire::attention
