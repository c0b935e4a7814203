// Attention over a paged cache; the formula is in paged_attention.py, the cache's layout in attention_step.h.
// Blocks are read in place, once for each task.
//
// Keys are taken in tiles at fixed absolute positions, tiles in order, in splits of kSplit keys whose sums are
// merged in order, by the same instructions for one query as for many. So a query's result depends on its own
// sequence alone: not on the other queries of a task, on chunk borders, on threads. Masked keys add exact zeros.
// Legend: T tokens, R requests, H query heads, G kv heads, D head size, E value size.
#include "attention/paged_attention.h"

#include "attention/attention_amx.h"
#include "attention/attention_codes.h"
#include "attention/attention_float.h"
#include "attention/attention_vectors.h"
#include "program/thread_pool.h"

#include <atomic>
#include <vector>

namespace {

using namespace quire;
using namespace quire::attention;

constexpr double kMinParallelWork = 200e3;  // multiply-adds worth a second thread
constexpr int kTasksPerThread = 4;  // so that none waits long for the last
constexpr int kMaxWindow = 1 << 30;         // so that a position and a window are an int together

template <typename T>
int first_key(const Step<T>& step, const Task& task) {
    return std::max(0, task.position - step.window + 1);
}

// All rows of the task against keys [start, end), which lie in one tile.
template <typename Variant, typename T>
void attend_keys(const Step<T>& step, const Task& task, int start, int end, Variant& variant, Sums& sums) {
    const int heads = task.heads, rows = task.rows(), padded = Variant::padded(step.value_size);
    variant.open(task, start, end);
    for (int first = 0; first < rows; first += Variant::kRows) {
        const int count = std::min(Variant::kRows, rows - first);
        const int low = task.position + first / heads, high = task.position + (first + count - 1) / heads;
        const int from = std::max(0, low - step.window + 1 - start);
        const int to = std::min(end, high + 1) - start;
        if (from >= to) continue;
        variant.score(first, count, from, to);
        for (int r = 0; r < count; ++r) {
            const int row = first + r, position = task.position + row / heads;
            const Seen seen{std::max(0, position - step.window + 1 - start),
                            std::min(end, position + 1) - start, from, to};
            variant.weigh(r, seen, sums.largest + row, sums.weight + row, sums.value + size_t(row) * padded);
        }
        variant.add_values(count, from, to, sums.value + size_t(first) * padded);
    }
}

template <typename Variant, typename T>
int first_tile(const Step<T>& step, const Task& task) {
    return first_key(step, task) / Variant::kKeys * Variant::kKeys;
}

// `next` is the task after this one.
template <typename Variant, typename T>
void attend_split(const Step<T>& step, const Task& task, const Task& next, int split, Variant& variant, Sums& sums) {
    const int end = std::min(task.seen_end, (split + 1) * kSplit);
    int start = std::max(first_tile<Variant>(step, task), split * kSplit);
    for (; start < end; start += Variant::kKeys) {
        const int after = start + Variant::kKeys;
        after < task.seen_end ? variant.expect(task, after) : variant.expect(next, first_tile<Variant>(step, next));
        attend_keys(step, task, start, std::min(end, after), variant, sums);
    }
}

// What a row's weighted sum is multiplied by: a sink is a key with this score and no value, the last of all.
template <typename T>
float last_factor(const Step<T>& step, int head, float largest, float weight) {
    if (step.sinks == nullptr) return 1.0f / weight;
    const float sink = step.sinks[head], high = std::max(largest, sink), keep = shrink_factor(largest, high);
    return keep / (weight * keep + shrink_factor(sink, high));
}

template <typename T>
void write_out(const Step<T>& step, const Task& task, int padded, const Sums& sums) {
    const int E = step.value_size, first = task.kv_head * step.group();
    for (int row = 0; row < task.rows(); ++row) {
        const size_t head = size_t(task.first + row / task.heads) * step.num_heads + first + row % task.heads;
        float* value = sums.value + size_t(row) * padded;
        scale_row(value, padded, last_factor(step, first + row % task.heads, sums.largest[row], sums.weight[row]));
        copy_rounded(step.out + head * E, value, E);
    }
}

template <typename T>
bool is_worth_threads(const Step<T>& step) {
    double work = 0;
    for (int r = 0; r < step.num_requests; ++r)
        work += 2.0 * (step.query_starts[r + 1] - step.query_starts[r]) * std::min(step.seq_lens[r], step.window);
    return num_threads() > 1 && work * step.num_heads * step.head_size > kMinParallelWork;
}

// Kv heads of a task that leave each thread some tasks, or splits of them.
template <typename T>
int heads_together(const Step<T>& step, bool is_parallel) {
    if (!is_parallel) return step.num_kv_heads;
    int splits = 0;
    for (int request = 0; request < step.num_requests; ++request)
        splits += (std::min(step.seq_lens[request], step.window) - 1) / kSplit + 1;
    return std::max(1, splits * step.num_kv_heads / (kTasksPerThread * num_threads()));
}

template <typename Variant, typename T>
std::vector<Task> make_tasks(const Step<T>& step, bool is_parallel) {
    std::vector<Task> tasks;
    const int group = step.group(), most = std::max(1, Variant::kTaskRows / group);
    const int together = std::min(Variant::most_heads(step, group), heads_together(step, is_parallel));
    // By heads: a core's second-level cache then holds the keys and values of one while a prompt's tokens pass. A
    // single token takes several heads, which are neighbours in a block: 1.1 to 1.25 times as fast (Zen 4).
    for (int head = 0; head < step.num_kv_heads; ++head)
        for (int request = 0; request < step.num_requests; ++request) {
            const int begin = step.query_starts[request], end = step.query_starts[request + 1];
            const bool is_one = end - begin == 1;
            if (is_one && head % together > 0) continue;
            const int heads = group * (is_one ? std::min(together, step.num_kv_heads - head) : 1);
            for (int first = begin; first < end; first += most) {
                const int tokens = std::min(most, end - first), position = step.seq_lens[request] - (end - first);
                const int seen_end = position + tokens;
                tasks.push_back({request, first, tokens, head, heads, position, seen_end});
            }
        }
    return tasks;
}

template <typename T>
int most_splits(const Step<T>& step, const std::vector<Task>& tasks) {
    int most = 1;
    for (const Task& task : tasks)
        most = std::max(most, (task.seen_end - 1) / kSplit - first_key(step, task) / kSplit + 1);
    return most;
}

// Every task by one thread, its splits merged as they come.
template <typename Variant, typename T>
void attend_tasks(const Step<T>& step, const std::vector<Task>& tasks, int max_rows, bool is_parallel) {
    const int padded = Variant::padded(step.value_size);
    const size_t size = round_up(Variant::memory_size(step, max_rows), 16), sums = Sums::size(max_rows, padded);
    parallel_for(int(tasks.size()), is_parallel, [&](int i) {
        const Task &task = tasks[i], &next = tasks[std::min(size_t(i) + 1, tasks.size() - 1)];
        const int rows = task.rows();
        float* memory = thread_memory(size + 2 * sums);
        Variant variant(step, memory);
        const AmxTiles tiles(Variant::kUsesTiles, std::min(16, rows));
        Sums total(memory + size, rows), part(memory + size + sums, rows);
        variant.stage_queries(task);
        const int first = first_key(step, task) / kSplit, last = (task.seen_end - 1) / kSplit;
        total.clear(rows, padded);
        attend_split(step, task, next, first, variant, total);
        for (int split = first + 1; split <= last; ++split) {
            part.clear(rows, padded);
            attend_split(step, task, next, split, variant, part);
            merge(rows, padded, total, part);
        }
        write_out(step, task, padded, total);
    });
}

// Few tasks over long contexts: every split by one thread, then merged in the same order as above.
template <typename Variant, typename T>
void attend_splits(const Step<T>& step, const std::vector<Task>& tasks, int max_rows, int splits) {
    const int padded = Variant::padded(step.value_size);
    const size_t size = Sums::size(max_rows, padded);
    const Floats memory = allocate(size * tasks.size() * splits);
    parallel_for(int(tasks.size()) * splits, true, [&](int i) {
        const Task& task = tasks[i / splits];
        const int split = first_key(step, task) / kSplit + i % splits, rows = task.rows();
        Variant variant(step, thread_memory(Variant::memory_size(step, max_rows)));
        const AmxTiles tiles(Variant::kUsesTiles, std::min(16, rows));
        Sums part(memory.get() + i * size, rows);
        part.clear(rows, padded);
        variant.stage_queries(task);
        attend_split(step, task, task, split, variant, part);
    });
    for (size_t i = 0; i < tasks.size(); ++i) {
        const int rows = tasks[i].rows();
        Sums total(memory.get() + i * splits * size, rows);
        for (int split = 1; split < splits; ++split)
            merge(rows, padded, total, Sums(memory.get() + (i * splits + split) * size, rows));
        write_out(step, tasks[i], padded, total);
    }
}

template <typename Variant, typename T>
void attend(const Step<T>& step) {
    const bool is_parallel = is_worth_threads(step);
    const std::vector<Task> tasks = make_tasks<Variant>(step, is_parallel);
    int max_rows = 1;
    for (const Task& task : tasks) max_rows = std::max(max_rows, task.rows());
    const int splits = most_splits(step, tasks);
    if (splits > 1 && tasks.size() < size_t(kTasksPerThread * num_threads()) && is_parallel)
        attend_splits<Variant>(step, tasks, max_rows, splits);
    else
        attend_tasks<Variant>(step, tasks, max_rows, is_parallel);
}

// In the order of preference; a machine uses one of them for a model.
enum PairVariant { kAmx, kDotted, kWidened };

#if defined(__AVX512BF16__)
constexpr bool kHasDotted = true;
#else
constexpr bool kHasDotted = false;
#endif

std::atomic<int> g_first_variant{kAmx};

bool can_use_tiles(int head_size) { return can_use_amx() && head_size % 32 == 0; }

void attend_all(const Step<float>& step) { attend<FloatAttention>(step); }

void attend_all(const Step<bf16>& step) {
    switch (quire_attention_variant(step.head_size | step.value_size)) {  // what divides both divides that
#if defined(QUIRE_HAS_AMX)
        case kAmx: return attend<AmxAttention>(step);
#endif
#if defined(__AVX512BF16__)
        case kDotted:
#if defined(__AVX512VBMI__)
            if (step.format != kModelType) return attend<CodeAttention>(step);
#endif
            return attend<VectorAttention<DottedPairs>>(step);
#endif
        default: return attend<VectorAttention<WidenedPairs>>(step);
    }
}

}  // namespace

extern "C" int quire_attention_variant(int head_size) {
    const int first = g_first_variant.load(std::memory_order_relaxed);
    if (first <= kAmx && can_use_tiles(head_size)) return kAmx;
    return first <= kDotted && kHasDotted ? kDotted : kWidened;
}

extern "C" void quire_force_attention_variant(int first) {
    g_first_variant.store(first, std::memory_order_relaxed);
}

extern "C" void quire_paged_attention(int is_bf16, const void* query, int64_t query_stride, void* out,
                                      const void* k_cache, const void* v_cache, const int32_t* block_tables,
                                      int64_t table_stride, const int32_t* query_starts,
                                      const int32_t* seq_lens, int num_requests, int num_heads,
                                      int num_kv_heads, int head_size, int value_size, int block_size, int window,
                                      float scale, float soft_cap, const float* sinks, int kv_format) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        attend_all(Step<T>{static_cast<const T*>(query), size_t(query_stride), static_cast<T*>(out),
                           static_cast<const T*>(k_cache), static_cast<const T*>(v_cache), block_tables,
                           size_t(table_stride), query_starts, seq_lens, num_requests, num_heads, num_kv_heads,
                           head_size, block_size, std::min(window, kMaxWindow), scale, soft_cap, sinks, value_size,
                           KVFormat(kv_format)});
    });
}
