// Penalties of the tokens that rows have seen; the formula is in penalties.py.
#include <cstdint>

#include "program/thread_pool.h"

namespace {

constexpr int64_t kMinParallelSize = 1 << 15;

// Of one row of logits: its distinct tokens, and how often each of them was seen.
struct SeenTokens {
    int64_t row;
    const int64_t* ids;
    const float* counts;
    int64_t size;
};

}  // namespace

// logits [S, size]; seen [R], of distinct rows; factors [R, 3]: repetition, frequency and presence penalty.
extern "C" void quire_penalize(float* logits, int64_t size, const SeenTokens* seen, const float* factors,
                               int num_rows) {
    int64_t total = 0;
    for (int r = 0; r < num_rows; ++r) total += seen[r].size;
    quire::parallel_for(num_rows, total > kMinParallelSize, [&](int r) {
        const auto& [index, ids, counts, num_ids] = seen[r];
        const float repetition = factors[3 * r], frequency = factors[3 * r + 1], presence = factors[3 * r + 2];
        float* row = logits + index * size;
        for (int64_t i = 0; i < num_ids; ++i) {
            float x = row[ids[i]];
            x = x > 0.0f ? x / repetition : x * repetition;
            row[ids[i]] = x - frequency * counts[i] - (counts[i] > 0.0f ? presence : 0.0f);
        }
    });
}
