// Attention over a paged cache; the formula is in paged_attention.py. Blocks are read in place, once for
// each tile of queries; K of a block lies [D, block_size], V lies [block_size, D].
//
// Keys are taken in tiles of kKeys at fixed absolute positions, tiles in order, in splits of kSplit keys
// whose sums are merged in order. So a query's result depends on its own sequence alone: not on the other
// queries of a tile, on chunk borders, on threads. Masked keys add exact zeros.
// Legend: T tokens, R requests, H query heads, G kv heads, D head size.
#include "paged_attention.h"

#include "tile.h"

#include <omp.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace {

using namespace quire;

constexpr int kKeys = 64;              // keys of a tile; a multiple of every kColumns
constexpr int kSplit = 1024;           // keys of a split; a multiple of kKeys
constexpr int kMaxDirectRows = 2 * kMaxRows;  // more rows than this are worth a copy of the keys
constexpr int kQueryRows = 96;         // (token, head) rows that share one reading of K and V
constexpr double kMinParallelWork = 200e3;  // multiply-adds worth a second thread
constexpr float kNone = -std::numeric_limits<float>::infinity();

template <typename T>
struct Step {
    const T* query;
    size_t query_stride;  // elements between tokens
    T* out;               // [T, H, D]
    const T* k_cache;
    const T* v_cache;
    const int32_t* block_tables;
    size_t table_stride;
    const int32_t* query_starts;
    const int32_t* seq_lens;
    int num_requests, num_heads, num_kv_heads, head_size, block_size, window;
    float scale;
    float soft_cap;  // 0: none

    int group() const { return num_heads / num_kv_heads; }
    int padded() const { return round_up(head_size, kLanes); }
};

// Some tokens of one request and the query heads of one kv head. Row r is token r / group, head r % group.
struct Task {
    int request, first, tokens, kv_head;
    int position;  // of the first token in its sequence
    int seen_end() const { return position + tokens; }
};

// What is known of a set of rows after some keys: the largest score, the sum of weights, the weighted sum.
struct Sums {
    float *largest, *weight, *value;

    static size_t size(int rows, int padded) { return size_t(rows) * (padded + 2); }

    Sums(float* memory, int rows) : largest(memory), weight(memory + rows), value(memory + 2 * rows) {}

    void clear(int rows, int padded) {
        std::fill_n(largest, rows, kNone);
        std::fill_n(weight, rows, 0.0f);
        std::fill_n(value, size_t(rows) * padded, 0.0f);
    }
};

inline float shrink_factor(float from, float to) { return from == kNone ? 0.0f : exp(splat(from - to))[0]; }

inline void scale_row(float* row, int size, float factor) {
    for (int i = 0; i < size; i += kLanes) store(row + i, load(row + i) * factor);
}

// total <- total and part, where part's keys come after total's.
void merge(int rows, int padded, Sums& total, const Sums& part) {
    for (int r = 0; r < rows; ++r) {
        if (part.largest[r] == kNone) continue;
        const float largest = std::max(total.largest[r], part.largest[r]);
        const float keep = shrink_factor(total.largest[r], largest);
        const float take = shrink_factor(part.largest[r], largest);
        total.largest[r] = largest;
        total.weight[r] = total.weight[r] * keep + part.weight[r] * take;
        float *sum = total.value + size_t(r) * padded, *more = part.value + size_t(r) * padded;
        for (int i = 0; i < padded; i += kLanes) store(sum + i, load(sum + i) * keep + load(more + i) * take);
    }
}

// A thread's own memory for one tile of keys and one tile of queries, as floats.
struct Scratch {
    Floats memory;
    float *key, *value, *query, *scores;

    Scratch(int head_size, int padded, int rows)
        : memory(allocate(size_t(kKeys) * (head_size + padded + kMaxRows) + size_t(rows) * head_size)) {
        key = memory.get();                        // [D, kKeys]
        value = key + size_t(kKeys) * head_size;   // [kKeys, padded]
        scores = value + size_t(kKeys) * padded;   // [kMaxRows, kKeys]
        query = scores + size_t(kKeys) * kMaxRows;  // [rows, D]
    }
};

template <typename T>
void stage_queries(const Step<T>& step, const Task& task, Scratch& scratch) {
    const int size = step.group() * step.head_size;
    for (int t = 0; t < task.tokens; ++t)
        copy_floats(scratch.query + size_t(t) * size,
                    step.query + (task.first + t) * step.query_stride + size_t(task.kv_head) * size, size);
}

// Where K and V of a run of keys within one block begin.
template <typename T>
struct Place {
    const T *k, *v;
    int count;
};

template <typename T>
Place<T> find_keys(const Step<T>& step, const Task& task, int key, int end) {
    const int D = step.head_size, size = step.block_size, offset = key % size;
    const int block = step.block_tables[task.request * step.table_stride + key / size];
    const size_t base = (size_t(block) * step.num_kv_heads + task.kv_head) * size * D;
    return {step.k_cache + base + offset, step.v_cache + base + size_t(offset) * D,
            std::min(size - offset, end - key)};
}

// Copies keys [start, end) of the request into the scratch, end - start <= kKeys.
template <typename T>
void stage_keys(const Step<T>& step, const Task& task, int start, int end, Scratch& scratch) {
    const int D = step.head_size, padded = step.padded();
    for (int key = start; key < end;) {
        const Place<T> from = find_keys(step, task, key, end);
        for (int d = 0; d < D; ++d)
            copy_floats(scratch.key + d * kKeys + key - start, from.k + size_t(d) * step.block_size, from.count);
        for (int j = 0; j < from.count; ++j)
            copy_floats(scratch.value + (key - start + j) * padded, from.v + size_t(j) * D, D);
        key += from.count;
    }
}

// Asks for the cache lines of keys [start, end) ahead of their use.
template <typename T>
void prefetch_keys(const Step<T>& step, const Task& task, int start, int end) {
    const int per_line = 64 / sizeof(T);
    for (int key = start; key < end;) {
        const Place<T> from = find_keys(step, task, key, end);
        const int size = from.count * step.head_size;
        // Where a tile is part of a block, K's columns of it lie apart; V's lines alone are asked for then.
        if (from.count == step.block_size)
            for (int i = 0; i < size; i += per_line) __builtin_prefetch(from.k + i, 0, 2);
        for (int i = 0; i < size; i += per_line) __builtin_prefetch(from.v + i, 0, 2);
        key += from.count;
    }
}

// The products with one tile of keys: by the scratch, whose filling pays when many rows use it and which
// evens out odd sizes, or straight from the blocks. Sums are the same chains in both, so bits are equal.
template <typename T>
struct KeyTile {
    const Step<T>& step;
    const Scratch& scratch;
    int count;  // keys
    bool is_direct;
    const T *keys[kKeys / kLanes], *values[kKeys / kLanes];  // of each vector of keys, if direct

    KeyTile(const Step<T>& step, const Task& task, int start, int end, bool is_direct, Scratch& scratch)
        : step(step), scratch(scratch), count(end - start), is_direct(is_direct) {
        if (!is_direct) stage_keys(step, task, start, end, scratch);
        for (int key = start, i = 0; is_direct && key < end; key += kLanes, ++i) {
            const Place<T> from = find_keys(step, task, key, end);
            keys[i] = from.k;
            values[i] = from.v;
        }
    }

    // scores[rows, kKeys] += query K^T
    void score(int rows, const float* query, float* scores) const {
        const int D = step.head_size;
        if (!is_direct) return multiply(rows, kKeys, query, D, scratch.key, kKeys, scores, kKeys, D);
        const int vectors = (count + kLanes - 1) / kLanes;
        for (int i = 0; i < vectors; i += kVectors)
            multiply_vectors(rows, std::min(kVectors, vectors - i), query, D, keys + i, step.block_size,
                             scores + i * kLanes, kKeys, D);
    }

    // value[rows, padded] += weights V
    void add_values(int rows, const float* weights, float* value) const {
        const int padded = step.padded();
        if (!is_direct)
            return multiply(rows, padded, weights, kKeys, scratch.value, padded, value, padded, count);
        for (int done = 0; done < count; done += kLanes)
            multiply(rows, padded, weights + done, kKeys, values[done / kLanes], padded, value, padded,
                     std::min(kLanes, count - done));
    }
};

inline Vec cap_score(Vec score, float cap) { return cap - 2.0f * cap / (exp(score * (2.0f / cap)) + 1.0f); }

// Scores of one row become weights in place; keys outside [first, last) get none.
void weigh_row(float* scores, int first, int last, float scale, float soft_cap, float* largest, float* weight,
               float* value, int padded) {
    IntVec lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    Vec high = splat(kNone);
    for (int j = 0; j < kKeys; j += kLanes) {
        const IntVec index = lane + j;
        const IntVec is_seen = (index >= first) & (index < last);
        Vec score = load(scores + j) * scale;
        if (soft_cap > 0.0f) score = cap_score(score, soft_cap);
        score = is_seen ? score : splat(kNone);
        high = high > score ? high : score;
        store(scores + j, score);
    }
    const float before = *largest, now = std::max(before, max(high));
    Vec total = Vec{};
    for (int j = 0; j < kKeys; j += kLanes) {
        Vec weights = exp(load(scores + j) - now);
        total += weights;
        store(scores + j, weights);
    }
    if (before != now) {
        const float factor = shrink_factor(before, now);
        *weight *= factor;
        scale_row(value, padded, factor);
    }
    *largest = now;
    *weight += sum(total);
}

// All rows of the task against keys [start, end).
template <typename T>
void attend_keys(const Step<T>& step, const Task& task, int start, int end, Scratch& scratch, Sums& sums) {
    const int D = step.head_size, padded = step.padded(), group = step.group(), rows = task.tokens * group;
    const bool is_even = D % kLanes == 0 && step.block_size % kLanes == 0;
    const KeyTile<T> tile(step, task, start, end, is_even && rows <= kMaxDirectRows, scratch);
    for (int first = 0; first < rows; first += kMaxRows) {
        const int count = std::min(kMaxRows, rows - first);
        const int low = task.position + first / group, high = task.position + (first + count - 1) / group;
        if (high < start || low - step.window >= end - 1) continue;
        std::fill_n(scratch.scores, count * kKeys, 0.0f);
        tile.score(count, scratch.query + size_t(first) * D, scratch.scores);
        for (int r = 0; r < count; ++r) {
            const int row = first + r, position = task.position + row / group;
            const int seen_first = std::max(0, position - step.window + 1 - start);
            const int seen_last = std::min(end, position + 1) - start;
            float* scores = scratch.scores + r * kKeys;
            if (seen_first < seen_last)
                weigh_row(scores, seen_first, seen_last, step.scale, step.soft_cap, sums.largest + row,
                          sums.weight + row, sums.value + size_t(row) * padded, padded);
            else
                std::fill_n(scores, kKeys, 0.0f);
        }
        tile.add_values(count, scratch.scores, sums.value + size_t(first) * padded);
    }
}

template <typename T>
int first_key(const Step<T>& step, const Task& task) {
    return std::max(0, task.position - step.window + 1);
}

template <typename T>
void attend_split(const Step<T>& step, const Task& task, int split, Scratch& scratch, Sums& sums) {
    const int end = std::min(task.seen_end(), (split + 1) * kSplit);
    int start = std::max(first_key(step, task) / kKeys * kKeys, split * kSplit);
    for (; start < end; start += kKeys) {
        const int last = std::min(end, start + kKeys);
        prefetch_keys(step, task, last, std::min(end, last + kKeys));
        attend_keys(step, task, start, last, scratch, sums);
    }
}

template <typename T>
void write_out(const Step<T>& step, const Task& task, const Sums& sums) {
    const int D = step.head_size, padded = step.padded(), group = step.group();
    for (int row = 0; row < task.tokens * group; ++row) {
        const size_t head = size_t(task.first + row / group) * step.num_heads + task.kv_head * group + row % group;
        float* value = sums.value + size_t(row) * padded;
        scale_row(value, padded, 1.0f / sums.weight[row]);
        copy_rounded(step.out + head * D, value, D);
    }
}

template <typename T>
std::vector<Task> make_tasks(const Step<T>& step, double& work) {
    std::vector<Task> tasks;
    const int most = std::max(1, kQueryRows / step.group());
    for (int request = 0; request < step.num_requests; ++request) {
        const int begin = step.query_starts[request], end = step.query_starts[request + 1];
        const int seq_len = step.seq_lens[request];
        for (int first = begin; first < end; first += most) {
            const int tokens = std::min(most, end - first), position = seq_len - (end - first);
            for (int head = 0; head < step.num_kv_heads; ++head)
                tasks.push_back({request, first, tokens, head, position});
            work += 2.0 * tokens * step.num_heads * std::min(position + tokens, step.window) * step.head_size;
        }
    }
    return tasks;
}

template <typename T>
int most_splits(const Step<T>& step, const std::vector<Task>& tasks) {
    int most = 1;
    for (const Task& task : tasks)
        most = std::max(most, (task.seen_end() - 1) / kSplit - first_key(step, task) / kSplit + 1);
    return most;
}

// Every task by one thread, its splits merged as they come.
template <typename T>
void attend_tasks(const Step<T>& step, const std::vector<Task>& tasks, int max_rows, bool is_parallel) {
    const int padded = step.padded();
#pragma omp parallel if (is_parallel)
    {
        Scratch scratch(step.head_size, padded, max_rows);
        Floats memory = allocate(2 * Sums::size(max_rows, padded));
        std::fill_n(scratch.memory.get(), size_t(kKeys) * (step.head_size + padded), 0.0f);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < tasks.size(); ++i) {
            const Task& task = tasks[i];
            const int rows = task.tokens * step.group();
            Sums total(memory.get(), rows), part(memory.get() + Sums::size(rows, padded), rows);
            stage_queries(step, task, scratch);
            const int first = first_key(step, task) / kSplit, last = (task.seen_end() - 1) / kSplit;
            total.clear(rows, padded);
            attend_split(step, task, first, scratch, total);
            for (int split = first + 1; split <= last; ++split) {
                part.clear(rows, padded);
                attend_split(step, task, split, scratch, part);
                merge(rows, padded, total, part);
            }
            write_out(step, task, total);
        }
    }
}

// Few tasks over long contexts: every split by one thread, then merged in the same order as above.
template <typename T>
void attend_splits(const Step<T>& step, const std::vector<Task>& tasks, int max_rows, int splits) {
    const int padded = step.padded();
    const size_t size = Sums::size(max_rows, padded);
    Floats memory = allocate(size * tasks.size() * splits);
#pragma omp parallel
    {
        Scratch scratch(step.head_size, padded, max_rows);
        std::fill_n(scratch.memory.get(), size_t(kKeys) * (step.head_size + padded), 0.0f);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < tasks.size() * splits; ++i) {
            const Task& task = tasks[i / splits];
            const int split = first_key(step, task) / kSplit + int(i % splits), rows = task.tokens * step.group();
            Sums part(memory.get() + i * size, rows);
            part.clear(rows, padded);
            stage_queries(step, task, scratch);
            attend_split(step, task, split, scratch, part);
        }
#pragma omp for schedule(static)
        for (size_t i = 0; i < tasks.size(); ++i) {
            const int rows = tasks[i].tokens * step.group();
            Sums total(memory.get() + i * splits * size, rows);
            for (int split = 1; split < splits; ++split)
                merge(rows, padded, total, Sums(memory.get() + (i * splits + split) * size, rows));
            write_out(step, tasks[i], total);
        }
    }
}

template <typename T>
void attend(const Step<T>& step) {
    double work = 0;
    const std::vector<Task> tasks = make_tasks(step, work);
    int max_rows = 1;
    for (const Task& task : tasks) max_rows = std::max(max_rows, task.tokens * step.group());
    const int splits = most_splits(step, tasks), threads = omp_get_max_threads();
    if (splits > 1 && tasks.size() < 2 * size_t(threads) && threads > 1)
        attend_splits(step, tasks, max_rows, splits);
    else
        attend_tasks(step, tasks, max_rows, work > kMinParallelWork);
}

template <typename T>
void attend_pointers(const void* query, int64_t query_stride, void* out, const void* k_cache,
                     const void* v_cache, const int32_t* block_tables, int64_t table_stride,
                     const int32_t* query_starts, const int32_t* seq_lens, int num_requests, int num_heads,
                     int num_kv_heads, int head_size, int block_size, int window, float soft_cap) {
    attend(Step<T>{static_cast<const T*>(query), size_t(query_stride), static_cast<T*>(out),
                   static_cast<const T*>(k_cache), static_cast<const T*>(v_cache), block_tables,
                   size_t(table_stride), query_starts, seq_lens, num_requests, num_heads, num_kv_heads,
                   head_size, block_size, window, 1.0f / std::sqrt(float(head_size)), soft_cap});
}

}  // namespace

extern "C" void quire_paged_attention(int is_bf16, const void* query, int64_t query_stride, void* out,
                                      const void* k_cache, const void* v_cache, const int32_t* block_tables,
                                      int64_t table_stride, const int32_t* query_starts,
                                      const int32_t* seq_lens, int num_requests, int num_heads,
                                      int num_kv_heads, int head_size, int block_size, int window,
                                      float soft_cap) {
    (is_bf16 ? attend_pointers<bf16> : attend_pointers<float>)(
        query, query_stride, out, k_cache, v_cache, block_tables, table_stride, query_starts, seq_lens,
        num_requests, num_heads, num_kv_heads, head_size, block_size, window, soft_cap);
}
