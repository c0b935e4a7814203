// The order in which few rows read a tile in place, and what they fetch meanwhile: K of one kv head after the other in
// kAhead groups of keys, then V of all heads group by group, then K of the next tile.
#pragma once

#include "attention_step.h"

namespace quire::attention {

// A head's K or V in a group: cache lines that are `stride` numbers apart.
template <typename T>
struct Lines {
    const T* next;
    size_t stride;

    // Into the second-level cache: 35 GB/s, into the first 24 (Zen 4, 64 x 2048 tokens).
    void fetch() {
        __builtin_prefetch(next, 0, 2);
        next += stride;
    }
};

// Groups are of kGroup keys that lie in one block.
template <typename T, int kGroup, int kAhead>
struct ReadOrder {
    struct Values {
        int group, head;
    };

    const T *const *keys, *const *values;  // of each group, of the task's first head
    int groups, heads;
    size_t head_stride = 0, key_stride = 0;  // numbers between two heads, and between two lines of K
    const T* next[kAhead];  // K of the next tile's first groups

    // Goes to a tile of `count` keys in blocks, and of so many heads.
    void open(const Step<T>& step, const T* const* tile_keys, const T* const* tile_values, int count, int num_heads) {
        keys = tile_keys, values = tile_values;
        groups = (count + kGroup - 1) / kGroup, heads = num_heads;
        head_stride = size_t(step.block_size) * step.head_size;
        key_stride = step.block_size * sizeof(float) / sizeof(T);
    }

    // The next tile begins at key `start` of `task`.
    void expect(const Step<T>& step, const Task& task, int start) {
        const int end = std::min(task.seen_end, start + kAhead * kGroup);
        for (const T*& group : next) {
            group = find_keys(step, task, start, end).k;
            if (start + kGroup < end) start += kGroup;
        }
    }

    Values after(Values at) const {
        return at.head + 1 < heads ? Values{at.group, at.head + 1} : Values{at.group + 1, 0};
    }

    const T* start_of(Values at) const { return values[at.group] + at.head * head_stride; }

    // After the last values the next tile's keys are read.
    Lines<T> lines_of(Values at) const {
        const int past = (at.group - groups) * heads + at.head;
        if (past < 0) return {start_of(at), 64 / sizeof(T)};
        return {next[std::min(past, kAhead - 1)], key_stride};
    }

    // What is read after the keys of `head` in the kAhead groups from `group` on.
    void find_after(int group, int head, Lines<T>* ahead) const {
        if (++head == heads) group += kAhead, head = 0;
        Values at{0, 0};
        for (int i = 0; i < kAhead; ++i, at = after(at))
            if (group < groups)
                ahead[i] = {keys[std::min(group + i, groups - 1)] + head * head_stride, key_stride};
            else
                ahead[i] = lines_of(at);
    }
};

}  // namespace quire::attention
