// Attention of whole prompts, read from where the projection left them (encoder_attention.py has the formula).
//
// Queries are lanes: scores lie [keys, queries], so largest scores and sums of weights are taken without crossing
// lanes, and keys past the last are rows that nobody computes. A panel of queries has all its scores before the first
// weight: nothing is rescaled. A query's numbers are chains over its own prompt's keys in order, the same in every
// lane, so its bits do not depend on the other queries of a panel, on prompts beside it or on threads.
// Legend: T tokens, H query heads, G kv heads, D head size.
#include "attention/encoder_attention.h"

#include "attention/encoder_engines.h"
#include "attention/paged_attention.h"
#include "program/thread_pool.h"

#include <vector>

namespace {

using namespace quire;
using namespace quire::attention;

constexpr double kMinParallelWork = 200e3;  // multiply-adds worth a second thread
constexpr int kTaskQueries = 512;           // that share one staging of keys and values
constexpr int kMaxWindow = 1 << 30;
constexpr int kMaxHeadSize = 640;           // MAX_NATIVE_HEAD_SIZE of paged_attention.py

template <typename T>
struct Prompts {
    static constexpr int kUnit = 4 / sizeof(T);  // numbers of a dword

    const T* qkv;
    T* out;
    const float* bias;
    int num_heads, num_kv_heads, head_size, window, reach;
    float scale, soft_cap;

    int units() const { return head_size / kUnit; }
    size_t width() const { return size_t(num_heads + 2 * num_kv_heads) * head_size; }
    const T* row(int token, int head) const { return qkv + token * width() + size_t(head) * head_size; }
    bool edits_scores() const { return window < kMaxWindow || soft_cap > 0.0f || bias; }
};

// Queries [first, last) of a prompt, counted from its own first token, and one head.
struct HeadTask {
    int start, length;  // of the prompt
    int first, last, head;
    int out_row;  // of the query `first`
};

// Fetches the tokens after a prompt while its weights are computed, some cache lines with every two keys: in a large
// step they have left the second-level cache since they were written. 16 prompts of 128 tokens, beside busy processes:
// 1.65 times as fast; no gain where all lines are asked for at once.
struct Fetcher {
    static constexpr int kLine = 64;

    const char* next;
    int lines;

    void fetch() {
        for (int i = 0; i < lines; ++i, next += kLine) __builtin_prefetch(next, 0, 2);
    }
};

// A task's memory. Keys are rounded up to kKeyStep.
template <class Engine>
struct Scratch {
    typedef typename Engine::Left Left;

    Left *key, *value;  // [keys, D], [D, keys]
    float* rows;        // of V before they are turned: dwords [keys, D] at most
    float *query, *scores, *sums;  // panels [units, kPanel], [keys, kPanel], [D, kPanel]; rows and scores share memory

    static size_t size(int keys, int D) {
        return 2 * size_t(keys) * D * sizeof(Left) / sizeof(float) + size_t(keys) * std::max(D, kPanel) +
               2 * size_t(round_up(D, kKeyStep)) * kPanel;
    }

    Scratch(float* memory, int keys, int D) {
        key = reinterpret_cast<Left*>(memory);
        value = key + size_t(keys) * D;
        query = reinterpret_cast<float*>(value + size_t(keys) * D);
        sums = query + size_t(round_up(D, kKeyStep)) * kPanel;
        rows = scores = sums + size_t(round_up(D, kKeyStep)) * kPanel;
    }
};

inline Vec greater(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// Rows [length, D] of keys, with zeros up to `keys` of them.
template <typename T, typename Left>
void stage_key(const T* from, size_t stride, int length, int keys, int D, Left* to) {
    for (int j = 0; j < length; ++j, to += D) {
        if constexpr (sizeof(T) == sizeof(Left))
            std::memcpy(to, from + j * stride, D * sizeof(T));
        else
            copy_floats(to, from + j * stride, D);
    }
    std::fill_n(to, size_t(keys - length) * D, Left(0));
}

// V [D, keys] as float32.
template <typename T>
void stage_value(const T* from, size_t stride, int length, int keys, int D, float* rows, float* to) {
    stage_key(from, stride, length, keys, D, rows);
    transpose(rows, D, keys, D, to, keys, true);
}

// V [D, keys] as bfloat16, whose neighbours are a pair of keys.
void stage_value(const bf16* from, size_t stride, int length, int keys, int D, float* rows, bf16* to) {
    static const bf16 zeros[kMaxHeadSize] = {};
    bf16* pairs = reinterpret_cast<bf16*>(rows);
    for (int j = 0; j < length; j += 2) {
        const bf16* row = from + j * stride;
        interleave(row, j + 1 < length ? row + stride : zeros, pairs + size_t(j) * D, D);
    }
    const int done = round_up(length, 2);
    std::fill_n(pairs + size_t(done) * D, size_t(keys - done) * D, bf16(0));
    transpose(pairs, D, keys / 2, D, to, keys / 2, true);
}

// Scores of keys [from, to) with the queries from `first` on become those of the model, in place.
template <typename T>
void edit_scores(const Prompts<T>& step, int head, int first, int from, int to, int vectors, float* scores) {
    const float* bias = step.bias ? step.bias + size_t(head) * (2 * step.reach + 1) + step.reach : nullptr;
    IntVec lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    for (int j = from; j < to; ++j)
        for (int v = 0; v < vectors; ++v) {
            const int query = first + v * kLanes;
            float* row = scores + size_t(j) * kPanel + v * kLanes;
            Vec score = load(row) * step.scale;
            if (step.soft_cap > 0.0f) score = cap_score(score, step.soft_cap);
            if (bias) {
                float backwards[kLanes];
                for (int i = 0; i < kLanes; ++i) backwards[i] = bias[j - query - i];
                score += load(backwards);
            }
            const IntVec distance = lane + (query - j);
            const IntVec is_seen = (distance < step.window) & (distance > -step.window);
            store(row, is_seen ? score : splat(kNone));
        }
}

// Makes weights of the scores of keys [from, to), in place. First it sees all of them, in any order, then begin() is
// called, then units in order: a unit of float32 is a key, of bfloat16 a pair of keys, which takes half the memory.
template <typename T, int Vectors>
class Weigher {
  public:
    Weigher(float* scores, int from, int to, float scale, Fetcher fetcher)
        : scores_(scores + size_t(from) * kPanel), count_(to - from), scale_(scale), fetcher_(fetcher) {
        for (int v = 0; v < Vectors; ++v) largest_[v] = splat(kNone), totals[v] = second_[v] = Vec{};
    }

    // Scores of keys [begin, end), counted from `from`.
    void see(int begin, int end) {
        Vec high[2][Vectors];
        for (int v = 0; v < Vectors; ++v) high[0][v] = high[1][v] = largest_[v];
        for (int j = begin; j < end; ++j)
            for (int v = 0; v < Vectors; ++v) high[j % 2][v] = greater(high[j % 2][v], load(at(j, v)));
        for (int v = 0; v < Vectors; ++v) largest_[v] = greater(high[0][v], high[1][v]);
    }

    void begin() {
        scale_ *= sizeof(T) == sizeof(float) ? 1.0f : kRoughScale;
        for (int v = 0; v < Vectors; ++v) largest_[v] *= scale_;
    }

    // Units [begin, end) become weights, those past the last key zeros.
    void weigh(int begin, int end) {
        if constexpr (sizeof(T) == sizeof(float))
            weigh_keys(begin, end);
        else
            weigh_pairs(begin, end);
    }

    // After all weights.
    void finish() {
        for (int v = 0; v < Vectors; ++v) totals[v] += second_[v];
    }

    Vec totals[Vectors];  // sums of weights

  private:
    float* at(int row, int v) const { return scores_ + size_t(row) * kPanel + v * kLanes; }

    void weigh_keys(int begin, int end) {
        const int last = std::min(end, count_);
        Vec sums[Vectors], largest[Vectors];  // which stores into the scores might change, for all the compiler knows
        for (int v = 0; v < Vectors; ++v) sums[v] = totals[v], largest[v] = largest_[v];
        for (int j = begin; j < last; ++j) {
            if (j % 2) fetcher_.fetch();
            for (int v = 0; v < Vectors; ++v) {
                const Vec weight = exp(load(at(j, v)) * scale_ - largest[v]);
                sums[v] += weight;
                store(at(j, v), weight);
            }
        }
        for (int v = 0; v < Vectors; ++v) totals[v] = sums[v];
        std::fill(at(last, 0), at(end, 0), 0.0f);
    }

    // Pair i takes the place of key i, which has been read.
    void weigh_pairs(int begin, int end) {
        Vec first[Vectors], second[Vectors], largest[Vectors];
        for (int v = 0; v < Vectors; ++v) first[v] = totals[v], second[v] = second_[v], largest[v] = largest_[v];
        const int whole = std::min(end, count_ / 2), last = std::min(end, (count_ + 1) / 2);
        for (int i = begin; i < whole; ++i) {
            fetcher_.fetch();
            for (int v = 0; v < Vectors; ++v) {
                const Vec one = rough_power(load(at(2 * i, v)) * scale_ - largest[v]);
                const Vec other = rough_power(load(at(2 * i + 1, v)) * scale_ - largest[v]);
                first[v] += one;
                second[v] += other;
                store_pairs(at(i, v), one, other);
            }
        }
        for (int v = 0; v < Vectors; ++v) {
            if (whole < last) {  // the last key has no neighbour
                const Vec one = rough_power(load(at(2 * whole, v)) * scale_ - largest[v]);
                first[v] += one;
                store_pairs(at(whole, v), one, Vec{});
            }
            totals[v] = first[v], second_[v] = second[v];
        }
        std::fill(at(last, 0), at(end, 0), 0.0f);
    }

    float* const scores_;
    const int count_;
    float scale_;
    Fetcher fetcher_;
    Vec largest_[Vectors], second_[Vectors];
};

// Sums [D, queries] over their totals become rows of `out`.
template <typename T>
void write_out(const Prompts<T>& step, float* sums, const Vec* totals, int count, T* out) {
    const int vectors = (count + kLanes - 1) / kLanes;
    for (int v = 0; v < vectors; ++v) {
        const Vec factor = 1.0f / totals[v];
        for (int u = 0; u < step.units(); ++u) {
            const float* sum = sums + size_t(u) * Prompts<T>::kUnit * kPanel + v * kLanes;
            float* to = sums + size_t(u) * kPanel + v * kLanes;
            if constexpr (sizeof(T) == sizeof(float))
                store(to, load(sum) * factor);
            else
                store_pairs(to, load(sum) * factor, load(sum + kPanel) * factor);
        }
    }
    transpose(sums, kPanel, step.units(), count, out, size_t(step.num_heads) * step.units(), false);
}

// What the panel from `first` on fetches: its share of as many tokens as the prompt has.
template <typename T>
Fetcher find_next(const Prompts<T>& step, const HeadTask& task, int first, int keys) {
    const size_t panels = (task.length + kPanel - 1) / kPanel, shares = step.num_heads * panels;
    const size_t size = task.length * step.width() * sizeof(T) / shares;
    const char* next = reinterpret_cast<const char*>(step.row(task.start + task.length, 0));
    const int steps = keys / 2 + 1, lines = int(size / Fetcher::kLine);
    return {next + (task.head * panels + first / kPanel) * size, (lines + steps - 1) / steps};
}

template <int Vectors, class Engine, typename T>
void attend_panel(const Prompts<T>& step, const HeadTask& task, int first, const Scratch<Engine>& scratch, int keys) {
    const int D = step.head_size, count = std::min(kPanel, task.last - first);
    const int from = std::max(0, first - step.window + 1) / kKeyStep * kKeyStep;
    const int to = std::min(task.length, first + count + step.window - 1), end = round_up(to, kKeyStep);
    const bool edits = step.edits_scores();
    float* scores = scratch.scores + size_t(from) * kPanel;
    Weigher<T, Vectors> weigher(scratch.scores, from, to, edits ? 1.0f : step.scale,
                                find_next(step, task, first, to - from));
    const auto see = [&](int begin, int end) {
        if (edits) edit_scores(step, task.head, first, from + begin, from + end, Vectors, scratch.scores);
        weigher.see(begin, end);
    };
    const auto weigh = [&](int begin, int end) { weigher.weigh(begin, end); };
    const auto nothing = [](int, int) {};
    transpose(step.row(task.start + first, task.head), step.width() / step.kUnit, count, step.units(), scratch.query,
              kPanel, true);
    Engine::multiply(to - from, Vectors, scratch.key + size_t(from) * D, D, scratch.query, scores, step.units(),
                     nothing, see);
    weigher.begin();
    Engine::multiply(D, Vectors, scratch.value + from, keys, scores, scratch.sums, (end - from) / step.kUnit, weigh,
                     nothing);
    weigher.finish();
    const size_t row = task.out_row + (first - task.first);
    write_out(step, scratch.sums, weigher.totals, count, step.out + (row * step.num_heads + task.head) * D);
}

template <class Engine, typename T>
void attend_task(const Prompts<T>& step, const HeadTask& task) {
    const int D = step.head_size, keys = round_up(task.length, kKeyStep);
    const Scratch<Engine> scratch(thread_memory(Scratch<Engine>::size(keys, D)), keys, D);
    [[maybe_unused]] const typename Engine::Scope scope;
    const int kv_head = step.num_heads + task.head / (step.num_heads / step.num_kv_heads);
    stage_key(step.row(task.start, kv_head), step.width(), task.length, keys, D, scratch.key);
    stage_value(step.row(task.start, kv_head + step.num_kv_heads), step.width(), task.length, keys, D, scratch.rows,
                scratch.value);
    for (int first = task.first; first < task.last; first += kPanel)
        with_constant<2>(task.last - first > kLanes ? 2 : 1,
                         [&](auto wide) { attend_panel<wide>(step, task, first, scratch, keys); });
}

// Prompt by prompt: the heads of a token are neighbours in memory.
std::vector<HeadTask> make_tasks(const int32_t* starts, int num_prompts, int first, int count, int num_heads) {
    std::vector<HeadTask> tasks;
    for (int prompt = 0; prompt < num_prompts; ++prompt) {
        const int start = starts[prompt], length = starts[prompt + 1] - start;
        const int begin = std::max(first, start) - start, end = std::min(first + count, start + length) - start;
        for (int query = begin; query < end; query += kTaskQueries)
            for (int head = 0; head < num_heads; ++head) {
                const int last = std::min(end, query + kTaskQueries);
                tasks.push_back({start, length, query, last, head, start + query - first});
            }
    }
    return tasks;
}

template <class Engine, typename T>
void attend_all(const Prompts<T>& step, const std::vector<HeadTask>& tasks) {
    double work = 0;
    for (const HeadTask& task : tasks) work += 2.0 * (task.last - task.first) * task.length * step.head_size;
    parallel_for(int(tasks.size()), work > kMinParallelWork, [&](int i) { attend_task<Engine>(step, tasks[i]); });
}

void attend_all(const Prompts<float>& step, const std::vector<HeadTask>& tasks) {
    attend_all<FloatEngine>(step, tasks);
}

void attend_all(const Prompts<bf16>& step, const std::vector<HeadTask>& tasks) {
    switch (quire_attention_variant(step.head_size)) {
#if defined(QUIRE_HAS_AMX)
        case 0: return attend_all<TilesEngine>(step, tasks);
#endif
#if defined(__AVX512BF16__)
        case 1: return attend_all<PairsEngine<DottedPairs>>(step, tasks);
#endif
        default: return attend_all<PairsEngine<WidenedPairs>>(step, tasks);
    }
}

}  // namespace

extern "C" void quire_encoder_attention(int is_bf16, const void* qkv, void* out, const int32_t* starts,
                                        int num_prompts, int first, int count, const float* bias, int num_heads,
                                        int num_kv_heads, int head_size, int window, int reach, float scale,
                                        float soft_cap) {
    const std::vector<HeadTask> tasks = make_tasks(starts, num_prompts, first, count, num_heads);
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        attend_all(Prompts<T>{static_cast<const T*>(qkv), static_cast<T*>(out), bias, num_heads, num_kv_heads,
                              head_size, std::min(window, kMaxWindow), reach, scale, soft_cap},
                   tasks);
    });
}
