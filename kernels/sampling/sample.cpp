// The rule is in sample.py. A row is read once for its largest logit and once for its weights, whose sums over
// blocks of 128 find the noise's quantile; with top-k or top-p the weights and the largest of each block are kept, and
// a threshold is selected among the few that a bound leaves. Blocks of which a row's mask allows nothing are not read.
// Legend: S rows, V vocabulary.
#include "sampling/argmax.h"
#include "program/thread_pool.h"
#include "linear/tile.h"
#include "sampling/exp_below.h"
#include "sampling/token_bitmask.h"

#include <algorithm>
#include <limits>

namespace {

using namespace quire;

constexpr int kBlock = 128;
constexpr int64_t kMinParallelSize = 1 << 16;
constexpr int kSample = 8192;  // weights that are looked at to find about where the threshold of top-p is

// How many of `values` are `least` or more; `count` is a multiple of kLanes.
double count_from(const float* values, int count, float least) {
    IntVec found{};
    for (int i = 0; i < count; i += kLanes) found -= load(values + i) >= least;
    double total = 0.0;
    for (int i = 0; i < kLanes; ++i) total += found[i];
    return total;
}

// Their sum, in float32 within blocks.
double sum_from(const float* values, int count, float least) {
    double total = 0.0;
    for (int start = 0; start < count; start += kBlock) {
        Vec sums{};
        for (int i = start; i < std::min(start + kBlock, count); i += kLanes) {
            const Vec weights = load(values + i);
            sums += weights >= least ? weights : Vec{};
        }
        total += double(quire::sum(sums));
    }
    return total;
}

// Positive floats stand in the order of their bits.
uint32_t to_bits(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return bits;
}

float from_bits(uint32_t bits) {
    float weight;
    std::memcpy(&weight, &bits, sizeof weight);
    return weight;
}

float next_above(float weight) { return from_bits(to_bits(weight) + 1); }

// The largest weight from which on there are `target` of `values`; 0 if all together are fewer. Bit by bit: weights are
// at most 1.
float select_count(const float* values, int count, double target) {
    uint32_t found = 0;
    for (uint32_t bit = 1u << 29; bit > 0; bit >>= 1)
        if (count_from(values, count, from_bits(found | bit)) >= target) found |= bit;
    return from_bits(found);
}

// In each lane the largest of a block's weights.
Vec find_lane_maxima(const float* block) {
    Vec high = load(block);
    for (int i = kLanes; i < kBlock; i += kLanes) high = high > load(block + i) ? high : load(block + i);
    return high;
}

// How one row is sampled, and a thread's memory for it.
struct Row {
    const float* logits;
    const uint32_t* mask;  // tokens that may be taken, a bit each; null if all may
    int size;
    float top = 0.0f, scale = 0.0f, least = 0.0f;  // least: weights below it count as 0
    double* sums = nullptr;                        // of each block
    float* largest = nullptr;                      // of each block, or null if weights are not kept
    float* weights = nullptr;                      // [V rounded up to kBlock], with those below `least`

    bool forbids_all(int start) const {
        if (!mask) return false;
        uint32_t any = 0;
        for (int i = start; i < std::min(start + kBlock, size); i += kWordBits) any |= mask[i / kWordBits];
        return any == 0;
    }

    // The logits of the block that begins at `start`: minus infinity where the mask forbids, `beyond` past the row.
    // In `copy`, if the row itself does not hold just these.
    const float* read(int start, float beyond, float* copy) const {
        const int count = std::min(kBlock, size - start);
        const float* block = logits + start;
        if (count < kBlock) {
            std::copy_n(block, count, copy);
            std::fill_n(copy + count, kBlock - count, beyond);
            block = copy;
        }
        if (!mask) return block;
        for (int i = 0; i < count; i += kWordBits) {
            const uint32_t word = mask[(start + i) / kWordBits];
            if (count - i < kWordBits) {
                mask_word(copy + i, count - i, word);
                break;
            }
            for (int j = i; j < i + kWordBits; j += kLanes) store(copy + j, allow(load(block + j), word >> (j - i)));
        }
        return copy;
    }

    // Minus infinity in the lanes whose bits are not set.
    static Vec allow(Vec logits, uint32_t bits) {
        UintVec places;
        for (int i = 0; i < kLanes; ++i) places[i] = 1u << i;
        const IntVec is_allowed = (places & bits) != 0u;
        return is_allowed ? logits : splat(-INFINITY);
    }

    // As quire::find_largest, of what the mask allows, and the value there.
    int64_t find_largest(float* value) const {
        const int64_t found = mask ? find_allowed() : quire::find_largest(logits, size);
        float copy[kBlock];
        *value = read(int(found / kBlock) * kBlock, -INFINITY, copy)[found % kBlock];
        return found;
    }

    // Each lane notes the block in which its own maximum came first.
    int64_t find_allowed() const {
        Vec largest = splat(-INFINITY);
        IntVec first = IntVec{}, has_nan = IntVec{};
        float copy[kBlock];
        for (int start = 0; start < size; start += kBlock) {
            if (forbids_all(start)) continue;
            const float* block = read(start, -INFINITY, copy);
            Vec high = splat(-INFINITY);
            for (int i = 0; i < kBlock; i += kLanes) {
                const Vec x = load(block + i);
                has_nan |= x != x;
                high = x > high ? x : high;
            }
            first = high > largest ? IntVec{} + start : first;
            largest = high > largest ? high : largest;
        }
        const float most = max(largest);
        int found = size;
        for (int lane = 0; lane < kLanes; ++lane) {
            if (has_nan[lane]) return find_nan();
            if (largest[lane] == most) found = std::min(found, first[lane]);
        }
        const float* block = read(found, -INFINITY, copy);
        return found + (std::find(block, block + kBlock, most) - block);
    }

    // The first one that the mask allows; there is one.
    int64_t find_nan() const {
        int i = 0;
        while (logits[i] == logits[i] || !(mask[i / kWordBits] >> i % kWordBits & 1)) ++i;
        return i;
    }

    // Weights of the block that begins at `start`, zeros past the row: the most likely token has weight 1.
    void weigh(int start, float* to) const {
        float copy[kBlock];
        const float* block = read(start, kNothing, copy);
        for (int i = 0; i < kBlock; i += kLanes) store(to + i, keep(exp_below((load(block + i) - top) * scale)));
    }

    Vec keep(Vec weights) const { return weights >= least ? weights : Vec{}; }

    void weigh_all() {
        float block[kBlock];
        for (int start = 0; start < size; start += kBlock) {
            const int b = start / kBlock;
            if (forbids_all(start)) {
                sums[b] = 0.0;
                if (largest) largest[b] = 0.0f;
                continue;
            }
            float* to = largest ? weights + start : block;
            weigh(start, to);
            sums[b] = add(to);
            if (largest) largest[b] = max(find_lane_maxima(to));
        }
    }

    // The sum of one block's weights.
    double add(const float* block) const {
        Vec total = Vec{};
        for (int i = 0; i < kBlock; i += kLanes) total += keep(load(block + i));
        return double(quire::sum(total));
    }

    double add_all() const {
        double total = 0.0;
        for (int block = 0; block * kBlock < size; ++block) total += sums[block];
        return total;
    }

    // The sum of weights from `threshold` on.
    double add_from(float threshold) const {
        double total = 0.0;
        for (int b = 0; b * kBlock < size; ++b)
            if (sums[b] != 0.0 && largest[b] >= threshold) total += sum_from(weights + b * kBlock, kBlock, threshold);
        return total;
    }

    // Leaves out weights below `threshold` too.
    void raise(float threshold) {
        if (threshold <= least) return;
        least = threshold;
        for (int b = 0; b * kBlock < size; ++b) {
            if (sums[b] == 0.0) continue;
            sums[b] = largest[b] < least ? 0.0 : add(weights + b * kBlock);
        }
    }

    // The token at which the sum of weights, in the order of ids, first exceeds `fraction` of the whole; where
    // rounding leaves the sum short of it, the last token with a weight.
    int find_quantile(double fraction) const {
        const double target = fraction * add_all();
        double before = 0.0, running = 0.0;
        int block = 0;
        for (int b = 0; b * kBlock < size && running <= target; ++b) {
            if (sums[b] == 0.0) continue;
            block = b;
            before = running;
            running += sums[b];
        }
        float weights_of_block[kBlock];
        weigh(block * kBlock, weights_of_block);
        int place = 0;
        running = before;
        for (int i = 0; i < kBlock && running <= target; ++i) {
            if (weights_of_block[i] == 0.0f) continue;
            place = i;
            running += double(weights_of_block[i]);
        }
        return block * kBlock + place;
    }

    static constexpr float kNothing = -1e30f;
};

// Adds zeros up to a multiple of kLanes, and returns how many numbers there are then.
int pad(float* values, int count) {
    std::fill_n(values + count, kLanes, 0.0f);
    return round_up(count, kLanes);
}

// Copies those of kLanes weights that are `least` or more and below `end`; writes up to kLanes numbers, returns the
// end of the copy, which may overlap what has been read.
inline float* copy_between(const float* weights, float least, float end, float* to) {
#if defined(__AVX512F__)
    const __m512 all = _mm512_loadu_ps(weights);
    const __mmask16 is_kept = _mm512_cmp_ps_mask(all, _mm512_set1_ps(least), _CMP_GE_OQ) &
                              _mm512_cmp_ps_mask(all, _mm512_set1_ps(end), _CMP_LT_OQ);
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(is_kept, all));  // into memory it takes some 100 cycles on Zen 4
    return to + __builtin_popcount(is_kept);
#else
    for (int i = 0; i < kLanes; ++i) {
        const float weight = weights[i];
        *to = weight;
        to += weight >= least && weight < end;
    }
    return to;
#endif
}

// The weights of the row in [least, end), with zeros up to a multiple of kLanes, and how many. `least` is not 0. Of
// the row's vectors only each `stride`-th is read.
int copy_weights(const Row& row, float least, float end, float* to, int stride = 1) {
    float* last = to;
    int i = 0;
    for (int b = 0; b * kBlock < row.size; ++b, i -= kBlock) {
        const bool has_some = row.sums[b] != 0.0 && row.largest[b] >= least;
        const float* block = row.weights + b * kBlock;
        for (; i < kBlock; i += stride * kLanes)
            if (has_some) last = copy_between(block + i, least, end, last);
    }
    return pad(to, int(last - to));
}

// Where the threshold of top-p is looked for: in [least, end). What weighs `end` or more comes to `above`, which is
// not enough; what weighs `least` or more is.
struct Range {
    float least, end;
    double above;
};

// The largest threshold in `range` with which the weights come to `target`. `values` are those in the range, and are
// lost: each time half of the range is left out.
float select_sum(float* values, int count, double target, Range range) {
    uint32_t low = to_bits(range.least), high = to_bits(range.end);
    while (high - low > 1 && count > 0) {
        const uint32_t middle = low + (high - low) / 2;
        const double inside = sum_from(values, count, from_bits(middle));
        if (range.above + inside >= target) {
            low = middle;
        } else {
            high = middle;
            range.above += inside;
        }
        float* to = values;
        for (int i = 0; i < count; i += kLanes) to = copy_between(values + i, from_bits(low), from_bits(high), to);
        count = pad(values, int(to - values));
    }
    return from_bits(low);
}

// A lower bound for the row's `count`-th largest weight: the `count`-th largest of the maxima of its groups, each of
// which is the weight of a token. Groups are blocks, or lanes of blocks; 0 if there are fewer than `count`.
float find_reached(const Row& row, int64_t count, float* maxima) {
    const int blocks = (row.size + kBlock - 1) / kBlock;
    if (count <= blocks) {
        std::copy_n(row.largest, blocks, maxima);
        return select_count(maxima, pad(maxima, blocks), double(count));
    }
    if (count > int64_t(blocks) * kLanes) return 0.0f;
    for (int b = 0; b < blocks; ++b) store(maxima + b * kLanes, find_lane_maxima(row.weights + b * kBlock));
    return select_count(maxima, blocks * kLanes, double(count));
}

// A smaller range in which the threshold most likely is: 4 standard deviations about the one of a sample of the weights
// in `range`. `target` and `total` are sums of all weights.
Range guess_range(const Row& row, double target, double total, Range range, float* memory) {
    const int stride = std::max(2, row.size / kSample);
    const auto copy = [&] { return copy_weights(row, range.least, range.end, memory, stride); };
    int count = copy();
    const double sum = sum_from(memory, count, range.least);
    if (sum == 0.0) return range;
    Vec squares{};
    for (int i = 0; i < count; i += kLanes) squares += load(memory + i) * load(memory + i);
    const double share = (target - range.above) / (total - range.above);
    const double error = 4.0 * std::sqrt(share * (1.0 - share) * double(quire::sum(squares))) / sum;
    const Range all{range.least, range.end, 0.0};
    Range guess = range;
    if (share + error < 1.0) guess.least = select_sum(memory, count, (share + error) * sum, all);
    if (share > error) {
        count = copy();
        guess.end = next_above(select_sum(memory, count, (share - error) * sum, all));
    }
    return guess;
}

// The threshold of top-p, 0 if rounding leaves even the whole row short of it.
float find_top_p(const Row& row, double top_p, float* memory) {
    const double total = row.add_all(), target = top_p * total;
    const int blocks = (row.size + kBlock - 1) / kBlock;
    Range range{std::max(row.least, std::numeric_limits<float>::min()), next_above(1.0f), 0.0};
    if (row.size > kSample) {
        // The largest weights are few, and most often enough.
        const float heavy = find_reached(row, blocks / 2, memory);
        if (heavy > range.least) {
            const int count = copy_weights(row, heavy, range.end, memory);
            const double sum = sum_from(memory, count, heavy);
            if (sum >= target) return select_sum(memory, count, target, {heavy, range.end, 0.0});
            range.end = heavy;
            range.above = sum;
            Range guess = guess_range(row, target, total, range, memory);
            guess.above = row.add_from(guess.end);
            const int guessed = copy_weights(row, guess.least, guess.end, memory);
            const bool is_inside = guess.above < target;
            if (is_inside && guess.above + sum_from(memory, guessed, guess.least) >= target)
                return select_sum(memory, guessed, target, guess);
        }
    }
    // Weights below this cannot matter: all of them together are less than what top-p leaves out.
    range.least = std::max(range.least, float(0.999 * (1.0 - top_p) * total / row.size));
    const int count = copy_weights(row, range.least, range.end, memory);
    if (range.above + sum_from(memory, count, range.least) < target) return 0.0f;
    return select_sum(memory, count, target, range);
}

int sample_row(Row& row, int64_t top_k, double top_p, double noise, float* memory) {
    row.weigh_all();
    if (top_k < row.size) {
        const float least = std::max({row.least, find_reached(row, top_k, memory), std::numeric_limits<float>::min()});
        const int count = copy_weights(row, least, next_above(1.0f), memory);
        row.raise(select_count(memory, count, double(top_k)));
    }
    if (top_p < 1.0) row.raise(find_top_p(row, top_p, memory));
    return row.find_quantile(noise);
}

}  // namespace

// logits [S, V]; top_k is V and top_p 1 where they are off. A temperature of 0 takes the most likely token; rows
// with another take the quantile `noise`, in [0, 1). `masks`: null, or of each row its mask or null. `top`: each
// row's largest logit that its mask allows, or NaN if it has one there.
extern "C" void quire_sample(const float* logits, int rows, int size, const float* temperature,
                             const int64_t* top_k, const double* top_p, const float* min_p, const double* noise,
                             const uint32_t* const* masks, int64_t* token_ids, float* top) {
    const int padded = round_up(size, kBlock);
    parallel_for(rows, int64_t(rows) * size > kMinParallelSize, [&](int r) {
        Row row{logits + size_t(r) * size, masks ? masks[r] : nullptr, size};
        token_ids[r] = row.find_largest(&top[r]);
        if (!(temperature[r] > 0.0f) || !std::isfinite(top[r])) return;
        const bool is_kept = top_k[r] < size || top_p[r] < 1.0;
        const size_t blocks = padded / kBlock, before = round_up(3 * int(blocks), kLanes);
        float* memory = thread_memory(before + (is_kept ? 2 * size_t(padded) + 2 * kBlock : 0));
        row.top = top[r], row.scale = 1.0f / temperature[r], row.least = min_p[r];
        row.sums = reinterpret_cast<double*>(memory);
        row.largest = is_kept ? memory + 2 * blocks : nullptr;
        row.weights = memory + before;
        token_ids[r] = sample_row(row, top_k[r], top_p[r], noise[r], row.weights + padded);
    });
}
