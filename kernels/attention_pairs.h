// Attention over bfloat16 caches, whose neighbours are paired: what all its variants share, and the two that
// compute with vectors. Scores and sums are float32. Legend: D head size.
#pragma once

#include "attention_step.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace quire::attention {

// Widens both of a pair and adds their products one after the other: right on every processor.
struct WidenedPairs {
    using Left = float;

    static Vec add_product(Vec sum, const float* left, UintVec pairs) {
        sum += left[0] * (Vec)(pairs << 16);
        return sum + left[1] * (Vec)(pairs & 0xffff0000u);
    }
};

#if defined(__AVX512BF16__)
// The processor's product of pairs; weights are rounded to bfloat16.
struct DottedPairs {
    using Left = bf16;

    static Vec add_product(Vec sum, const bf16* left, UintVec pairs) {
        int32_t pair;
        std::memcpy(&pair, left, sizeof pair);
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
    }
};

// 2^x to 3e-6 relative, far below a weight's rounding; 1 at 0, 0 below -150.
inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);  // a NaN stays
    const __m512 power = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, power);
    __m512 series = _mm512_set1_ps(9.58285e-3f);  // least largest error over [-0.5, 0.5]
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(5.590642e-2f));
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(2.4024099e-1f));
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(6.9312419e-1f));
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(series, power);
}

// As weigh_row, with weights rounded to bfloat16; `from` and `to` are multiples of 32. Overwrites scores.
inline void weigh_row(float* scores, bf16* weights, Seen seen, float scale, float soft_cap, float* largest,
                      float* weight, float* value, int padded) {
    if (soft_cap > 0.0f) {
        for (int j = seen.from; j < seen.to; j += kLanes)
            store(scores + j, cap_score(load(scores + j) * scale, soft_cap));
        scale = 1.0f;
    }
    std::fill(scores + seen.from, scores + seen.first, kNone);
    std::fill(scores + seen.last, scores + seen.to, kNone);
    __m512 high = _mm512_set1_ps(kNone);
    for (int j = seen.from; j < seen.to; j += 16) high = _mm512_max_ps(_mm512_loadu_ps(scores + j), high);
    const float before = *largest, now = std::max(before, _mm512_reduce_max_ps(high) * scale), log2e = 1.44269504f;
    const __m512 factor = _mm512_set1_ps(scale * log2e), offset = _mm512_set1_ps(now * log2e);
    __m512 total = _mm512_setzero_ps();
    for (int j = seen.from; j < seen.to; j += 32) {
        const __m512 low = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + j), factor, offset));
        const __m512 high = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + j + 16), factor, offset));
        total = _mm512_add_ps(_mm512_add_ps(total, low), high);
        _mm512_storeu_si512(weights + j, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    if (before != now) {
        const float shrunk = shrink_factor(before, now);
        *weight *= shrunk;
        scale_row(value, padded, shrunk);
    }
    *largest = now;
    *weight += _mm512_reduce_add_ps(total);
}
#endif

// A tile of keys and a block of rows, for any variant whose left factors are `Left`.
template <typename Left>
class PairedTile {
  public:
    static constexpr int kKeys = 256;     // keys of a tile
    static constexpr int kRows = 32;      // rows computed together
    static constexpr int kTaskRows = 256;  // rows that share one reading of K and V
    static constexpr int kStep = 32;      // keys are computed by so many
    static constexpr int kGroup = 16;     // keys or elements of D whose pairs lie side by side

    static int padded(int head_size) { return round_up(head_size, 2 * kGroup); }

    static size_t memory_size(const Step<bf16>& step, int rows) {
        const size_t queries = size_t(round_up(rows, kRows)) * step.head_size * sizeof(Left) / sizeof(float);
        return size_t(kKeys) * (step.head_size / 2 + padded(step.head_size) / 2 + 2 * kRows) + queries;
    }

    PairedTile(const Step<bf16>& step, float* memory) : step_(step), padded_(padded(step.head_size)) {
        key_ = reinterpret_cast<bf16*>(memory);             // [kKeys / 16, D / 2, 16, 2]
        value_ = key_ + size_t(kKeys) * step.head_size;      // [padded / 16, kKeys / 2, 16, 2]
        scores_ = memory + size_t(kKeys) * (step.head_size + padded_) / 2;  // [kRows, kKeys]
        // Weights of one type with the scores replace them.
        weights_ = reinterpret_cast<Left*>(sizeof(Left) == sizeof(float) ? scores_ : scores_ + kRows * kKeys);
        query_ = reinterpret_cast<Left*>(scores_ + 2 * kRows * kKeys);  // [rows, D]
    }

    void stage_queries(const Task& task) {
        const int size = step_.group() * step_.head_size;
        for (int t = 0; t < task.tokens; ++t) {
            const bf16* from = step_.query + (task.first + t) * step_.query_stride + size_t(task.kv_head) * size;
            if constexpr (sizeof(Left) == sizeof(bf16))
                std::memcpy(query_ + size_t(t) * size, from, size * sizeof(bf16));
            else
                copy_floats(query_ + size_t(t) * size, from, size);
        }
    }

    // Goes to keys [start, end). K is read from the blocks where 16 keys lie side by side there, else copied; V is
    // copied, with zeros past the end up to a multiple of kStep. The processor's own prefetch ends with a block, so
    // the next block's values and the beginning of this one's keys are prefetched here: decode of 32 x 180, 32 x 512
    // and 64 x 2048 tokens is 1.13, 1.2 and 1.2 times as fast with it.
    void open(const Task& task, int start, int end) {
        const bool is_direct = step_.block_size % kGroup == 0;
        key_stride_ = is_direct ? step_.block_size : kGroup;
        count_ = end - start;
        for (int key = start; key < end;) {
            const Place<bf16> from = find_keys(step_, task, key, std::min(end, (key / kGroup + 1) * kGroup));
            const int group = (key - start) / kGroup, next = key + from.count;
            if (next < end) fetch(find_keys(step_, task, next, end).v, from.count * step_.head_size);
            fetch(from.k, kFetchedKeys);
            keys_[group] = is_direct ? from.k : key_ + size_t(group) * kGroup * step_.head_size;
            if (!is_direct) copy_key(from, key - start);
            copy_value(from, key - start);
            key = next;
        }
        const int rounded = round_up(count_, kStep);
        // A group past the last key: its scores are masked, so any keys that can be read will do.
        if (rounded - count_ >= kGroup) keys_[rounded / kGroup - 1] = keys_[0];
        clear_values();
    }

    void weigh(int row, Seen seen, float* largest, float* weight, float* value) {
        Left* weights = weights_ + row * kKeys;
        seen.from = seen.from / kStep * kStep;
        seen.to = round_up(seen.to, kStep);
        if (seen.first >= seen.last)
            std::fill(weights + seen.from, weights + seen.to, Left(0));
        else if constexpr (sizeof(Left) == sizeof(float))
            weigh_row(weights, seen, step_.scale, step_.soft_cap, largest, weight, value, padded_);
        else
            weigh_row(scores_ + row * kKeys, weights, seen, step_.scale, step_.soft_cap, largest, weight, value,
                      padded_);
    }

  protected:
    const bf16* value_tile(int element, int key) const {
        return value_ + (size_t(element) / kGroup * kKeys + key) * kGroup;
    }

    const Step<bf16>& step_;
    const int padded_;
    bf16 *key_, *value_;
    float* scores_;
    Left *weights_, *query_;
    const bf16* keys_[kKeys / kGroup];  // of each 16 keys
    size_t key_stride_ = kGroup;        // pairs between two of D's pairs
    int count_ = 0;                     // keys of the tile

  private:
    static constexpr int kFetchedKeys = 256;  // numbers

    void copy_key(const Place<bf16>& from, int key) {
        bf16* to = key_ + size_t(key) / kGroup * kGroup * step_.head_size + 2 * (key % kGroup);
        for (int d = 0; d < step_.head_size / 2; ++d)
            std::memcpy(to + d * 2 * kGroup, from.k + size_t(d) * 2 * step_.block_size, 2 * from.count * sizeof(bf16));
    }

    void copy_value(const Place<bf16>& from, int key) {
        const int D = step_.head_size;
        for (int j = 0; j < from.count; j += 2) {
            const bf16* row = from.v + size_t(j) * D;
            bf16* to = value_ + size_t(key + j) * kGroup;
            int d = 0;
            for (; d + kGroup <= D; d += kGroup, to += kGroup * kKeys)
                std::memcpy(to, row + 2 * d, 2 * kGroup * sizeof(bf16));
            if (d < D) std::memcpy(to, row + 2 * d, 2 * (D - d) * sizeof(bf16));
        }
    }

    // V of the keys from count_ on up to a multiple of kStep; an odd count's last key shares its pair with one.
    void clear_values() {
        const int paired = round_up(count_, 2), rounded = round_up(count_, kStep);
        for (int d = 0; d < padded_; d += kGroup) {
            bf16* rest = value_ + (size_t(d) / kGroup * kKeys + paired) * kGroup;
            if (paired > count_)
                for (int i = 1; i < 2 * kGroup; i += 2) rest[i - 2 * kGroup] = 0;
            std::fill_n(rest, size_t(rounded - paired) * kGroup, bf16(0));
        }
    }
};

// c[Rows, Vectors * kLanes] += a[Rows, 2 pairs] b[pairs, Vectors * kLanes, 2]; ldb: pairs between two of b's rows.
template <typename Pairs, int Rows, int Vectors>
inline void multiply_pairs(const typename Pairs::Left* a, size_t lda, const bf16* const* b, size_t ldb, float* c,
                           size_t ldc, int pairs) {
    Vec sums[Rows][Vectors];
    const bf16* starts[Vectors];
    for (int v = 0; v < Vectors; ++v) starts[v] = b[v];
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) sums[r][v] = load(c + r * ldc + v * kLanes);
    for (int k = 0; k < pairs; ++k)
        for (int v = 0; v < Vectors; ++v) {
            UintVec column;
            std::memcpy(&column, starts[v] + k * 2 * ldb, sizeof column);
            for (int r = 0; r < Rows; ++r) sums[r][v] = Pairs::add_product(sums[r][v], a + r * lda + 2 * k, column);
        }
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) store(c + r * ldc + v * kLanes, sums[r][v]);
}

template <typename Pairs, int Vectors>
inline void multiply_pair_rows(int rows, const typename Pairs::Left* a, size_t lda, const bf16* const* b,
                               size_t ldb, float* c, size_t ldc, int pairs) {
    with_constant<kMaxRows>(
        rows, [&](auto count) { multiply_pairs<Pairs, count, Vectors>(a, lda, b, ldb, c, ldc, pairs); });
}

template <typename Pairs>
class VectorAttention : public PairedTile<typename Pairs::Left> {
    using Tile = PairedTile<typename Pairs::Left>;
    static constexpr int kColumns = Tile::kStep;  // keys or elements of D computed together
    static constexpr int kParts = kColumns / kLanes, kPerGroup = Tile::kGroup / kLanes;

  public:
    static constexpr bool kUsesTiles = false;
    using Tile::Tile;

    // Scores of `count` rows from `first` on with the keys [from, to) of the tile.
    void score(int first, int count, int from, int to) {
        const int D = this->step_.head_size;
        for (int j = from / kColumns * kColumns; j < to; j += kColumns) {
            const bf16* starts[kParts];
            for (int i = 0; i < kParts; ++i)
                starts[i] = this->keys_[j / Tile::kGroup + i / kPerGroup] + i % kPerGroup * 2 * kLanes;
            for (int r = 0; r < count; r += kMaxRows) {
                const int rows = std::min(kMaxRows, count - r);
                float* scores = this->scores_ + r * Tile::kKeys + j;
                for (int i = 0; i < rows; ++i) std::fill_n(scores + i * Tile::kKeys, kColumns, 0.0f);
                multiply_pair_rows<Pairs, kParts>(rows, this->query_ + size_t(first + r) * D, D, starts,
                                                  this->key_stride_, scores, Tile::kKeys, D / 2);
            }
        }
    }

    // value[count, padded] += weights V, over the keys [from, to).
    void add_values(int count, int from, int to, float* value) {
        from = from / Tile::kStep * Tile::kStep;
        to = round_up(to, Tile::kStep);
        for (int d = 0; d < this->padded_; d += kColumns) {
            const bf16* starts[kParts];
            for (int i = 0; i < kParts; ++i)
                starts[i] = this->value_tile(d + i / kPerGroup * Tile::kGroup, from) + i % kPerGroup * 2 * kLanes;
            for (int r = 0; r < count; r += kMaxRows)
                multiply_pair_rows<Pairs, kParts>(std::min(kMaxRows, count - r),
                                                  this->weights_ + r * Tile::kKeys + from, Tile::kKeys, starts,
                                                  Tile::kGroup, value + size_t(r) * this->padded_ + d,
                                                  this->padded_, (to - from) / 2);
        }
    }
};

}  // namespace quire::attention
