// What a word of a token bitmask does to the logits of its tokens; the layout is in token_bitmask.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace quire {

constexpr int kWordBits = 32;

// Minus infinity for those of `count` logits whose bits are not set.
inline void mask_word(float* logits, int count, uint32_t word) {
    if (word == 0) {
        std::fill_n(logits, count, -INFINITY);
    } else if (word != ~0u) {
        for (int i = 0; i < count; ++i) logits[i] = word >> i & 1 ? logits[i] : -INFINITY;
    }
}

}  // namespace quire
