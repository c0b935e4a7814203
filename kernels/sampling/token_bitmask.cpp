// Sets the logits that a row's bits do not allow to minus infinity; the layout is in token_bitmask.py.
#include "sampling/token_bitmask.h"

#include "program/thread_pool.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 20;  // below it takes 0.2 ms on one core

}  // namespace

extern "C" void quire_token_bitmask(float* logits, int64_t size, const uint32_t* bitmask, const int64_t* rows,
                                    int num_rows) {
    const int64_t num_words = (size + kWordBits - 1) / kWordBits;
    parallel_for(num_rows, num_rows * size > kMinParallelSize, [&](int r) {
        float* row = logits + rows[r] * size;
        const uint32_t* words = bitmask + r * num_words;
        for (int64_t w = 0; w < size / kWordBits; ++w) mask_word(row + w * kWordBits, kWordBits, words[w]);
        const int rest = size % kWordBits;
        if (rest) mask_word(row + size - rest, rest, words[num_words - 1]);
    });
}
