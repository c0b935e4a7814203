// The rule is in sample.py. A row is read once for its largest logit and once for its weights, whose sums over
// blocks of 128 find the noise's quantile; with top-k or top-p the weights and the largest of each block are kept, and
// a threshold is selected among the few that a bound leaves. Blocks of which a row's mask allows nothing are not read.
// Legend: S rows, V vocabulary.
#include "sampling/argmax.h"
#include "program/thread_pool.h"
#include "linear/tile.h"
#include "sampling/token_bitmask.h"

#include <algorithm>
#include <limits>

namespace {

using namespace quire;

constexpr int kBlock = 128;
constexpr int64_t kMinParallelSize = 1 << 16;

typedef float HalfFloats __attribute__((vector_size(kLanes * 2)));
typedef double Doubles __attribute__((vector_size(kLanes * 4)));

// How many of `values` are `least` or more; `count` is a multiple of kLanes.
double count_from(const float* values, int count, float least) {
    IntVec found{};
    for (int i = 0; i < count; i += kLanes) found -= load(values + i) >= least;
    double total = 0.0;
    for (int i = 0; i < kLanes; ++i) total += found[i];
    return total;
}

// Their sum.
double sum_from(const float* values, int count, float least) {
    Doubles sums{};
    for (int i = 0; i < count; i += kLanes / 2) {
        HalfFloats weights;
        std::memcpy(&weights, values + i, sizeof weights);
        sums += __builtin_convertvector(weights >= least ? weights : HalfFloats{}, Doubles);
    }
    double total = 0.0;
    for (int i = 0; i < kLanes / 2; ++i) total += sums[i];
    return total;
}

// The largest weight from which on `worth` (one of the two above) comes to `target`; 0 if all together do not. Bit by
// bit: weights are at most 1, and floats that are not negative stand in the order of their bits.
template <typename Worth>
float select(const float* values, int count, double target, Worth worth) {
    float found = 0.0f;
    for (uint32_t bit = 1u << 29, bits = 0; bit > 0; bit >>= 1) {
        const uint32_t next = bits | bit;
        float least;
        std::memcpy(&least, &next, sizeof least);
        if (worth(values, count, least) < target) continue;
        bits = next;
        found = least;
    }
    return found;
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
        for (int i = 0; i < kBlock; i += kLanes) store(to + i, keep(exp((load(block + i) - top) * scale)));
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

// As select(values, count, target, sum_from), bit for bit; values that are not 0 are `least` or more. Only those that
// are not decided yet are summed again: rounding may move such a sum by `slack`, and where that matters all are summed
// in their order. `memory` is as long as `values`.
float select_sum(const float* values, int count, double target, float least, float* memory) {
    const double total = sum_from(values, count, least);
    const double slack = std::ldexp(total * (count + 64), -52);
    double above = 0.0;  // of those that are decided to be kept
    float found = 0.0f, end = INFINITY;
    const float* undecided = values;
    int size = count;
    for (uint32_t bit = 1u << 29, bits = 0; bit > 0; bit >>= 1) {
        const uint32_t next = bits | bit;
        float middle;
        std::memcpy(&middle, &next, sizeof middle);
        if (middle > least) {
            const double inside = sum_from(undecided, size, middle);
            double sum = above + inside;
            if (std::fabs(sum - target) <= slack) sum = sum_from(values, count, middle);
            const bool is_enough = sum >= target;
            if (is_enough) {
                least = middle;
            } else {
                end = middle;
                above += inside;
            }
            float* to = memory;
            for (int i = 0; i < size; i += kLanes) to = copy_between(undecided + i, least, end, to);
            undecided = memory;
            size = pad(memory, int(to - memory));
            if (!is_enough) continue;
        } else if (total < target) {
            continue;
        }
        bits = next;
        found = middle;
    }
    return found;
}

// The weights of the row that are `least` or more and not 0, with zeros up to a multiple of kLanes, and how many.
int copy_weights(const Row& row, float least, float* to) {
    float* end = to;
    least = std::max({row.least, least, std::numeric_limits<float>::denorm_min()});
    for (int b = 0; b * kBlock < row.size; ++b) {
        if (row.sums[b] == 0.0 || row.largest[b] < least) continue;
        const float* block = row.weights + b * kBlock;
        for (int i = 0; i < kBlock; i += kLanes) end = copy_between(block + i, least, INFINITY, end);
    }
    return pad(to, int(end - to));
}

// A lower bound for the row's `count`-th largest weight: the `count`-th largest of the maxima of its groups, each of
// which is the weight of a token. Groups are blocks, or lanes of blocks; 0 if there are fewer than `count`.
float find_reached(const Row& row, int64_t count, float* maxima) {
    const int blocks = (row.size + kBlock - 1) / kBlock;
    if (count <= blocks) {
        std::copy_n(row.largest, blocks, maxima);
        return select(maxima, pad(maxima, blocks), double(count), count_from);
    }
    if (count > int64_t(blocks) * kLanes) return 0.0f;
    for (int b = 0; b < blocks; ++b) store(maxima + b * kLanes, find_lane_maxima(row.weights + b * kBlock));
    return select(maxima, blocks * kLanes, double(count), count_from);
}

int sample_row(Row& row, int64_t top_k, double top_p, double noise, float* memory) {
    row.weigh_all();
    if (top_k < row.size) {
        const int count = copy_weights(row, find_reached(row, top_k, memory), memory);
        row.raise(select(memory, count, double(top_k), count_from));
    }
    if (top_p < 1.0) {
        // Weights below this cannot matter: all of them together are less than what top-p leaves out.
        const double total = row.add_all();
        const float least = float(0.999 * (1.0 - top_p) * total / row.size);
        const int count = copy_weights(row, least, memory);
        const float smallest = std::max({row.least, least, std::numeric_limits<float>::denorm_min()});
        row.raise(select_sum(memory, count, top_p * total, smallest, memory + count));
    }
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
        float* memory = thread_memory(before + (is_kept ? 3 * size_t(padded) + 2 * kBlock : 0));
        row.top = top[r], row.scale = 1.0f / temperature[r], row.least = min_p[r];
        row.sums = reinterpret_cast<double*>(memory);
        row.largest = is_kept ? memory + 2 * blocks : nullptr;
        row.weights = memory + before;
        token_ids[r] = sample_row(row, top_k[r], top_p[r], noise[r], row.weights + padded);
    });
}
