// Attention over bfloat16 caches by vectors, on any processor and on those with vdpbf16ps. A score and a weighted sum
// are one chain over pairs in order. Legend: D head size.
#pragma once

#include "attention/attention_order.h"
#include "attention/attention_pairs.h"
#include "linear/pair_products.h"

namespace quire::attention {

// Many rows use a copy of V; few rows, a decode step's, read it in place. Sums are the same chains in both, so bits are
// equal.
template <typename Pairs>
class VectorAttention : public PairedTile<typename Pairs::Left> {
    using Tile = PairedTile<typename Pairs::Left>;

  protected:
    using Tile::kGroup, Tile::kStep;
    static constexpr int kWide = std::max(kStep, kVectors * kLanes);  // keys or elements of D computed together
    static constexpr int kAhead = kWide / kGroup;  // groups of one head that are fetched ahead
    static constexpr int kFewRows = 16;

  private:
    static constexpr int kPerGroup = kGroup / kLanes;  // vectors of a group
    using Order = ReadOrder<bf16, kGroup, kAhead>;
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
        const size_t head_size = size_t(this->step_.block_size) * this->step_.head_size;
        order_.open(this->keys_, values_, this->count_, heads_, head_size, 2 * this->step_.block_size);
        if (this->count_ % 2) copy_last_pairs();
    }

    void expect(const Task& task, int start) {
        if (this->step_.format != kModelType) return;
        order_.expect(task, start, [&](int key, int end) { return find_keys(this->step_, task, key, end).k; });
    }

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
        return step.format == kModelType && step.has_values() && step.block_size % kGroup == 0 && step.head_size % kStep == 0 && rows <= kFewRows;
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
            order_.find_after(true, j / kGroup, head, ahead);
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

    // Pairs of rows of V that lie one after the other.
    struct Run {
        const bf16* v;
        int pairs;
    };

    void add_in_place(int count, int from, int to, float* value) {
        const int last = std::min(to, this->count_), rows = count / heads_;
        for (int group = from / kGroup; group * kGroup < last; group += kAhead)
            for (int head = 0; head < heads_; ++head) {
                Run runs[kAhead + 1];
                int num_runs = 0;
                for (int key = group * kGroup; key < last && num_runs < kAhead; key += kGroup)
                    runs[num_runs++] = {value_of(key, head), std::min(kGroupPairs, (last - key + 1) / 2)};
                if (last == this->count_ && last % 2 && (group + kAhead) * kGroup >= last) {
                    --runs[num_runs - 1].pairs;
                    runs[num_runs++] = {last_pair(head), 1};
                }
                Lines<bf16> ahead[kAhead];
                order_.find_after(false, group, head, ahead);
                add_head(rows, this->weights_ + size_t(head) * rows * kKeys + group * kGroup, runs, num_runs, ahead,
                         value + size_t(head) * rows * this->padded_);
            }
    }

    // value += weights V
    void add_head(int rows, const typename Pairs::Left* weights, const Run* runs, int num_runs, Lines<bf16>* ahead,
                  float* value) {
        const int parts = (rows + kMaxRows - 1) / kMaxRows;
        for (int part = 0; part < parts; ++part) {
            const int first = rows * part / parts, count = rows * (part + 1) / parts - first;
            with_constant<kMaxRows>(count, [&](auto together) {
                const auto* left = weights + first * kKeys;
                float* sums = value + size_t(first) * this->padded_;
                int d = 0;
                for (; d + kWide <= this->step_.head_size; d += kWide)
                    add_columns<together, kWide / kLanes>(left, runs, num_runs, d, part == 0, ahead, sums + d);
                if (d < this->step_.head_size)
                    add_columns<together, kStep / kLanes>(left, runs, num_runs, d, part == 0, ahead, sums + d);
            });
        }
    }

    template <int Rows, int Vectors>
    void add_columns(const typename Pairs::Left* weights, const Run* runs, int num_runs, int d, bool fetches,
                     Lines<bf16>* ahead, float* value) {
        Vec sums[Rows][Vectors];
        for (int r = 0; r < Rows; ++r)
            for (int i = 0; i < Vectors; ++i) sums[r][i] = load(value + size_t(r) * this->padded_ + i * kLanes);
        for (const Run* run = runs; run < runs + num_runs; ++run) {
            const bf16* v = run->v + 2 * d;
            Lines<bf16>& lines = ahead[(run - runs) % kAhead];
            for (int k = 0; k < run->pairs; ++k, v += 2 * this->step_.head_size, weights += 2) {
                if (fetches)
                    for (int i = 0; i < Vectors / kPerGroup; ++i) lines.fetch();
                for (int i = 0; i < Vectors; ++i) {
                    UintVec column;
                    std::memcpy(&column, v + 2 * i * kLanes, sizeof column);
                    for (int r = 0; r < Rows; ++r)
                        sums[r][i] = Pairs::add_product(sums[r][i], weights + r * kKeys, column);
                }
            }
        }
        for (int r = 0; r < Rows; ++r)
            for (int i = 0; i < Vectors; ++i) store(value + size_t(r) * this->padded_ + i * kLanes, sums[r][i]);
    }

    const bf16* value_of(int key, int head) const { return values_[key / kGroup] + head * order_.head_stride; }

    bf16* last_pair(int head) { return this->value_ + size_t(head) * 2 * this->step_.head_size; }

    // The last key's neighbour has not been written: it becomes 0.
    void copy_last_pairs() {
        const int D = this->step_.head_size, last = this->count_ - 1;
        for (int head = 0; head < heads_; ++head) {
            const bf16* from = value_of(last, head) + size_t(last % kGroup) * D;
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
