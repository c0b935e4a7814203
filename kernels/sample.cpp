// The rule is in sample.py. A row is read once for its largest logit and once for its weights, whose sums over
// blocks of 128 find the noise's quantile; with top-k or top-p the weights are kept, and their threshold is selected
// among the few that a bound leaves. Blocks of which a row's mask allows nothing are not read.
// Legend: S rows, V vocabulary.
#include "argmax.h"
#include "thread_pool.h"
#include "tile.h"
#include "token_bitmask.h"

#include <algorithm>
#include <functional>

namespace {

using namespace quire;

constexpr int kBlock = 128;
constexpr int64_t kMinParallelSize = 1 << 16;

// The weight at which the largest, taken in falling order and each worth `worth(w)`, add up to `target`; 0 if all
// together do not. Rearranges `values`. Selection by halves: each pass keeps one side of a pivot.
template <typename Worth>
float select(float* values, int count, double target, Worth worth) {
    double above = 0.0;
    while (count > 0) {
        float samples[9];
        for (int i = 0; i < 9; ++i) samples[i] = values[size_t(count - 1) * i / 8];
        std::nth_element(samples, samples + 4, samples + 9);
        const float pivot = samples[4];
        // [0, larger) are above the pivot, [larger, other) equal it.
        float* larger = std::partition(values, values + count, [=](float w) { return w > pivot; });
        double sum = 0.0;
        for (const float* w = values; w < larger; ++w) sum += worth(*w);
        if (larger > values && above + sum >= target) {
            count = int(larger - values);
            continue;
        }
        float* smaller = std::partition(larger, values + count, [=](float w) { return w == pivot; });
        above += sum + double(smaller - larger) * worth(pivot);
        if (above >= target) return pivot;
        count -= int(smaller - values);
        values = smaller;
    }
    return 0.0f;
}

// How one row is sampled, and a thread's memory for it.
struct Row {
    const float* logits;
    const uint32_t* mask;  // tokens that may be taken, a bit each; null if all may
    int size;
    float top = 0.0f, scale = 0.0f, least = 0.0f;  // least: weights below it count as 0
    float* weights = nullptr;                      // [V rounded up to kBlock], or null if they are not kept
    double* sums = nullptr;                        // of each block

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
            float* to = weights ? weights + start : block;
            if (forbids_all(start)) {
                if (weights) std::fill_n(to, kBlock, 0.0f);
                sums[start / kBlock] = 0.0;
                continue;
            }
            weigh(start, to);
            sums[start / kBlock] = add(to);
        }
    }

    // The sum of one block's weights.
    static double add(const float* block) {
        Vec total = Vec{};
        for (int i = 0; i < kBlock; i += kLanes) total += load(block + i);
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
        for (int start = 0; start < size; start += kBlock) {
            for (int i = start; i < start + kBlock; i += kLanes) store(weights + i, keep(load(weights + i)));
            sums[start / kBlock] = add(weights + start);
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

// In each lane the largest of a block's weights.
Vec find_lane_maxima(const float* block) {
    Vec high = load(block);
    for (int i = kLanes; i < kBlock; i += kLanes) high = high > load(block + i) ? high : load(block + i);
    return high;
}

// The weights of the row that are `least` or more and not 0, and how many they are.
int copy_weights(const Row& row, float least, float* to) {
    float* end = to;
    for (int start = 0; start < row.size; start += kBlock) {
        const float* block = row.weights + start;
        if (row.sums[start / kBlock] == 0.0 || max(find_lane_maxima(block)) < least) continue;
        for (int i = 0; i < kBlock; ++i) {
            *end = block[i];
            end += block[i] >= least && block[i] > 0.0f;
        }
    }
    return int(end - to);
}

// A lower bound for the row's `count`-th largest weight: the `count`-th largest of the maxima of its groups, each of
// which is the weight of a token. Groups are blocks, or lanes of blocks; 0 if there are fewer than `count`.
float find_reached(const Row& row, int64_t count, float* maxima) {
    const int blocks = (row.size + kBlock - 1) / kBlock, per_block = count > blocks ? kLanes : 1;
    if (count > int64_t(blocks) * per_block) return 0.0f;
    for (int b = 0; b < blocks; ++b) {
        const Vec high = find_lane_maxima(row.weights + b * kBlock);
        if (per_block == 1)
            maxima[b] = max(high);
        else
            store(maxima + b * kLanes, high);
    }
    std::nth_element(maxima, maxima + count - 1, maxima + blocks * per_block, std::greater<float>());
    return maxima[count - 1];
}

int sample_row(Row& row, int64_t top_k, double top_p, double noise, float* memory) {
    row.weigh_all();
    if (top_k < row.size) {
        const int count = copy_weights(row, find_reached(row, top_k, memory), memory);
        row.raise(select(memory, count, double(top_k), [](float) { return 1.0; }));
    }
    if (top_p < 1.0) {
        // Weights below this cannot matter: all of them together are less than what top-p leaves out.
        const double total = row.add_all(), least = 0.999 * (1.0 - top_p) * total / row.size;
        const int count = copy_weights(row, float(least), memory);
        row.raise(select(memory, count, top_p * total, [](float w) { return double(w); }));
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
        float* memory = thread_memory(2 * size_t(padded / kBlock) + (is_kept ? 2 * size_t(padded) + kBlock : 0));
        row.top = top[r], row.scale = 1.0f / temperature[r], row.least = min_p[r];
        row.sums = reinterpret_cast<double*>(memory);
        row.weights = is_kept ? memory + 2 * size_t(padded / kBlock) : nullptr;
        token_ids[r] = sample_row(row, top_k[r], top_p[r], noise[r], row.weights + (is_kept ? padded : 0));
    });
}
