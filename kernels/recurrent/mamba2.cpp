// The formula is in mamba2.py. A task is a head of a request. It takes runs of tokens: what does not depend on the
// state first, then the state by blocks of columns, each of which stays in the first-level cache for the whole run.
// Columns do not depend on each other, and each sum over a state's rows is two chains, of even and of odd rows, so
// neither runs nor vectors change a bit. A block lies in one piece, [N, kBlock]; the last one may have half of that.
// Legend: P numbers of a head, N rows of its state, T type of the inputs.
#include "recurrent/mamba2.h"

#include "linear/tile.h"
#include "program/thread_pool.h"

#include <algorithm>

namespace {

using namespace quire;

constexpr int kRun = 32;     // tokens
constexpr int kBlock = 32;   // columns: 128 rows of them are 16 KiB
constexpr int kPadding = 16;  // a head's columns are a multiple of it
constexpr int64_t kMinParallelSize = 1 << 12;  // numbers of states

// What tokens of a run are to a head, each [kRun, ...].
struct Tokens {
    float *b, *c;      // [N]
    float *input, *y;  // [P]; x times its step
    float decay[kRun];
};

template <typename T>
struct Layer {
    const QuireMamba2& scan;
    const T *x, *dt;
    int64_t dt_stride;
    T* y;

    int inner() const { return scan.num_heads * scan.head_size; }
    const T* row(int token) const { return x + token * (int64_t(inner()) + 2 * scan.num_groups * scan.num_rows); }
};

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <typename T>
void prepare(const Layer<T>& layer, int token, int count, int head, int padded, Tokens& tokens) {
    const QuireMamba2& scan = layer.scan;
    const int P = scan.head_size, N = scan.num_rows;
    const int group = head / (scan.num_heads / scan.num_groups);
    for (int t = 0; t < count; ++t) {
        const float step = softplus(widen(layer.dt[(token + t) * layer.dt_stride + head]) + scan.shift[head]);
        const float bounded = std::min(std::max(step, scan.least_step), scan.most_step);
        tokens.decay[t] = std::exp(-scan.rate[head] * bounded);
        const T *row = layer.row(token + t), *b = row + layer.inner() + size_t(group) * N;
        copy_floats(tokens.b + t * N, b, N);
        copy_floats(tokens.c + t * N, b + size_t(scan.num_groups) * N, N);
        float* input = tokens.input + t * padded;
        for (int p = 0; p < P; ++p) input[p] = widen(row[head * P + p]) * bounded;
        for (int p = P; p < padded; ++p) input[p] = 0.0f;
    }
}

template <int Vectors>
void advance(float* state, int N, float decay, const float* b, const float* c, const float* input, float* y) {
    Vec x[Vectors], sums[2][Vectors] = {};
    for (int v = 0; v < Vectors; ++v) x[v] = load(input + v * kLanes);
    auto update = [&](int n, Vec* sum) QUIRE_INLINE {
        float* row = state + n * Vectors * kLanes;
        for (int v = 0; v < Vectors; ++v) {
            const Vec next = load(row + v * kLanes) * decay + x[v] * b[n];
            store(row + v * kLanes, next);
            sum[v] += next * c[n];
        }
    };
    int n = 0;
    for (; n + 2 <= N; n += 2) update(n, sums[0]), update(n + 1, sums[1]);
    if (n < N) update(n, sums[0]);
    for (int v = 0; v < Vectors; ++v) store(y + v * kLanes, sums[0][v] + sums[1][v]);
}

template <int Columns>
void advance_block(float* state, int N, int count, int padded, int column, const Tokens& tokens) {
    for (int t = 0; t < count; ++t)
        advance<Columns / kLanes>(state, N, tokens.decay[t], tokens.b + t * N, tokens.c + t * N,
                                  tokens.input + t * padded + column, tokens.y + t * padded + column);
}

template <typename T>
void finish(const Layer<T>& layer, int token, int count, int head, int padded, Tokens& tokens) {
    const int P = layer.scan.head_size;
    const float skip = layer.scan.skip[head];
    for (int t = 0; t < count; ++t) {
        const T* x = layer.row(token + t) + head * P;
        T* y = layer.y + size_t(token + t) * layer.inner() + head * P;
        for (int p = 0; p < P; ++p) y[p] = narrow<T>(tokens.y[t * padded + p] + skip * widen(x[p]));
    }
}

template <typename T>
void run_head(const Layer<T>& layer, const StateRun& run, int head) {
    const QuireMamba2& scan = layer.scan;
    const int N = scan.num_rows, padded = round_up(scan.head_size, kPadding);
    const size_t size = size_t(N) * padded;
    float *state = run.own() + head * size, *memory = thread_memory(2 * kRun * (N + padded));
    Tokens tokens{memory, memory + kRun * N, memory + 2 * kRun * N, memory + kRun * (2 * N + padded), {}};
    if (run.begins()) std::memset(state, 0, size * sizeof(float));
    for (int token = run.first, last; token < run.end; token = last) {
        last = run.find_end(token, kRun);
        const int count = last - token;
        prepare(layer, token, count, head, padded, tokens);
        for (int column = 0; column < padded; column += kBlock) {
            float* block = state + size_t(column) * N;
            if (padded - column >= kBlock) advance_block<kBlock>(block, N, count, padded, column, tokens);
            else advance_block<kPadding>(block, N, count, padded, column, tokens);
        }
        finish(layer, token, count, head, padded, tokens);
        run.save_after(last - 1, [&](float* to) { std::memcpy(to + head * size, state, size * sizeof(float)); });
    }
}

}  // namespace

extern "C" void quire_mamba2(int is_bf16, const QuireMamba2* scan, const QuireStates* states, const void* x,
                             const void* dt, int64_t dt_stride, void* y) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        const Layer<T> layer{*scan, static_cast<const T*>(x), static_cast<const T*>(dt), dt_stride,
                             static_cast<T*>(y)};
        const int heads = scan->num_heads, tasks = states->num_requests * heads;
        const int64_t size = int64_t(tasks) * scan->head_size * scan->num_rows;
        parallel_for(tasks, size > kMinParallelSize, [&](int task) {
            const StateRun run(*states, task / heads, scan->offset);
            if (run.first < run.end) run_head(layer, run, task % heads);
        });
    });
}
