// Attention over bfloat16 caches by vectors, on any processor and on those with vdpbf16ps. A score and a weighted sum
// are one chain over pairs in order. Legend: D head size.
#pragma once

#include "attention_pairs.h"
#include "pair_products.h"

namespace quire::attention {

// Many rows use a copy of V; few rows, a decode step's, read it in place, and fetch ahead: V of a tile while its keys
// are multiplied, the keys of the next tile while V is. Sums are the same chains in both, so bits are equal.
template <typename Pairs>
class VectorAttention : public PairedTile<typename Pairs::Left> {
    using Tile = PairedTile<typename Pairs::Left>;
    using Tile::kGroup, Tile::kStep;
    static constexpr int kPerGroup = kGroup / kLanes;  // vectors of a group
    static constexpr int kWide = std::max(kStep, kVectors * kLanes);  // keys or elements of D computed together
    static constexpr int kFewRows = 16;
    static constexpr int kGroupPairs = kGroup / 2;

  public:
    static constexpr bool kUsesTiles = false;
    using Tile::kKeys, Tile::Tile;

    void open(const Task& task, int start, int end) {
        is_in_place_ = this->has_groups() && this->step_.head_size % kStep == 0 &&
                       task.tokens * this->step_.group() <= kFewRows;
        if (!is_in_place_) return Tile::open(task, start, end);
        this->take_keys(task, start, end,
                        [&](const Place<bf16>& from, int key) { values_[(key - start) / kGroup] = from.v; });
        values_[(this->count_ - 1) / kGroup + 1] = values_[0];  // fetched with a group past the last
        if (this->count_ % 2) copy_last_pair();
    }

    void expect(const Task& task, int start) {
        const int end = std::min(task.seen_end, start + kKeys);
        num_next_ = 0;
        for (int key = start; key < end; key += kGroup) next_[num_next_++] = find_keys(this->step_, task, key, end).k;
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
    // Of the keys from j on.
    template <int Vectors>
    void score_keys(int first, int count, int j) {
        const int D = this->step_.head_size;
        const bf16 *starts[Vectors], *ahead[Vectors / kPerGroup];
        for (int i = 0; i < Vectors; ++i)
            starts[i] = this->keys_[j / kGroup + i / kPerGroup] + i % kPerGroup * 2 * kLanes;
        float* scores = this->scores_ + j;
        for (int r = 0; r < count; ++r) std::fill_n(scores + r * kKeys, Vectors * kLanes, 0.0f);
        const auto multiply = [&](const auto& fetch) {
            multiply_pair_rows<Pairs, Vectors>(count, this->query_ + size_t(first) * D, D, starts, this->key_stride_,
                                               scores, kKeys, D / 2, fetch);
        };
        if (!is_in_place_) return multiply(NoFetch());
        for (int i = 0; i < Vectors / kPerGroup; ++i) ahead[i] = values_[j / kGroup + i];
        multiply([&](int k) {
            for (const bf16* group : ahead) __builtin_prefetch(group + k * 2 * kGroup);
        });
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
        const int last = std::min(to, this->count_);
        for (int key = from; key < last; key += kGroup) {
            const int group = key / kGroup, pairs = std::min(kGroupPairs, (last - key + 1) / 2);
            const bool is_cut = last == this->count_ && last % 2 && key + kGroup >= last;
            const bf16* ahead = group < num_next_ ? next_[group] : this->keys_[0];
            add_pairs(count, key, pairs - is_cut, values_[group], ahead, value);
            if (is_cut) add_pairs(count, last - 1, 1, this->value_, ahead, value);
        }
    }

    // value += weights of the keys from `key` on times `pairs` rows of V.
    void add_pairs(int count, int key, int pairs, const bf16* v, const bf16* ahead, float* value) {
        const int D = this->step_.head_size;
        int d = 0;
        for (; d + kWide <= D; d += kWide) add_columns<kWide / kLanes>(count, key, pairs, v, d, ahead, value);
        if (d < D) add_columns<kStep / kLanes>(count, key, pairs, v, d, ahead, value);
    }

    template <int Vectors>
    void add_columns(int count, int key, int pairs, const bf16* v, int d, const bf16* ahead, float* value) {
        const int D = this->step_.head_size;
        const bf16* starts[Vectors];
        for (int i = 0; i < Vectors; ++i) starts[i] = v + 2 * (d + i * kLanes);
        multiply_pair_rows<Pairs, Vectors>(
            count, this->weights_ + key, kKeys, starts, D, value + d, this->padded_, pairs, [&](int k) {
                const bf16* from = ahead + size_t(k * D + d) / kGroup * 2 * this->key_stride_;
                for (int i = 0; i < Vectors / kPerGroup; ++i) __builtin_prefetch(from + i * 2 * this->key_stride_);
            });
    }

    // The last key's neighbour has not been written: it becomes 0.
    void copy_last_pair() {
        const int D = this->step_.head_size, last = this->count_ - 1;
        const bf16* from = values_[last / kGroup] + size_t(last % kGroup) * D;
        for (int d = 0; d < 2 * D; d += 2) this->value_[d] = from[d], this->value_[d + 1] = 0;
    }

    bool is_in_place_ = false;
    const bf16 *values_[kKeys / kGroup + 1], *next_[kKeys / kGroup];  // of each 16 keys: V, and K of the next tile
    int num_next_ = 0;
};

}  // namespace quire::attention
