// The order in which few rows read a tile in place, and what they fetch meanwhile: kAhead groups of keys together, of
// these one kv head after the other; first all K, then all V, then K of the next tile.
#pragma once

#include "attention/attention_step.h"

namespace quire::attention {

// A head's K or V in a group: cache lines that are `stride` numbers apart.
template <typename T>
struct Lines {
    const T* next;
    size_t stride;

    // Into the second-level cache: 35 GB/s, into the first 24, nowhere 20 (Zen 4, 64 x 2048 tokens).
    void fetch() {
        __builtin_prefetch(next, 0, 2);
        next += stride;
    }
};

// Groups are of kGroup keys that lie in one block.
template <typename T, int kGroup, int kAhead>
struct ReadOrder {
    const T *const *keys, *const *values;  // of each group, of the task's first head
    int groups, heads;
    size_t head_stride = 0, key_stride = 0;  // numbers between two heads, and between two lines of K
    const T* next[kAhead];                   // K of the next tile's first groups

    // Goes to a tile of `count` keys in blocks, and of so many heads.
    void open(const T* const* tile_keys, const T* const* tile_values, int count, int num_heads, size_t head_size,
              size_t line_stride) {
        keys = tile_keys, values = tile_values;
        groups = (count + kGroup - 1) / kGroup, heads = num_heads;
        head_stride = head_size, key_stride = line_stride;
    }

    // The next tile begins at key `start` of `task`; find(key, end) gives K of a group.
    template <typename Find>
    void expect(const Task& task, int start, const Find& find) {
        const int end = std::min(task.seen_end, start + kAhead * kGroup);
        for (const T*& group : next) {
            group = find(start, end);
            if (start + kGroup < end) start += kGroup;
        }
    }

    // What is read two heads after `head` of the kAhead groups from `group` on, of their keys or their values.
    void find_after(bool is_keys, int group, int head, Lines<T>* ahead) const {
        head += std::min(2, heads);
        if (head >= heads) group += kAhead, head -= heads;
        const bool is_last = group >= groups;
        if (is_last) group = 0;
        const bool finds_keys = is_keys != is_last;
        const T* const* from = !finds_keys ? values : is_keys ? keys : next;
        for (int i = 0; i < kAhead; ++i) {
            const int at = from == next ? i : std::min(group + i, groups - 1);
            ahead[i] = {from[at] + head * head_stride, finds_keys ? key_stride : 64 / sizeof(T)};
        }
    }
};

}  // namespace quire::attention
