// The formula is in delta_rule.py. A task is a head of a request. It takes runs of tokens: what does not depend on the
// state (norms, decays) first, then the state by blocks of columns, each of which stays in the first-level cache for
// the whole run. Columns do not depend on each other, and each sum over a state's rows is a chain in their order, so
// neither runs nor vectors change a bit. A block lies in one piece, [K, kBlock], the last one may be narrower: rows of
// the whole state, 512 bytes apart, would share a quarter of the cache's sets.
//
// With S' = D S + k d and d = beta (v - k D S), q S' = q D S + (q k) d: both sums need the old state alone. So a token
// costs one pass, in which the update of the token before is made too.
// Legend: K rows and V columns of a head's state, T type of the inputs.
#include "recurrent/delta_rule.h"

#include "norm/rms_norm.h"
#include "program/thread_pool.h"

#include <algorithm>

namespace {

using namespace quire;

constexpr int kRun = 32;      // tokens: longer runs gain less than their keys and queries cost in the caches
constexpr int kBlock = 32;    // columns: K = 128 rows of them are 16 KiB
constexpr float kEps = 1e-6f;  // of the norms of keys and queries
constexpr int64_t kMinParallelSize = 1 << 15;

inline Vec multiply_add(Vec a, Vec b, Vec c) {  // which product of two is rounded is not left to the compiler
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    for (int i = 0; i < kLanes; ++i) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#endif
}

// log(1 + exp(x)), to some 3 units in the last place: log(1 + y) = 2 atanh(y / (2 + y)).
inline Vec softplus(Vec x) {
    const Vec zero = Vec{}, y = exp(x < 0.0f ? x : zero - x), t = y / (y + 2.0f), square = t * t;
    Vec series = square * 0.0666666667f + 0.0769230769f;
    for (float next : {0.0909090909f, 0.111111111f, 0.142857143f, 0.2f, 0.333333333f, 1.0f})
        series = series * square + next;
    return series * t * 2.0f + (x > 0.0f ? x : zero);
}

inline Vec decay_of(Vec x, float rate) { return exp(softplus(x) * -rate); }

// What tokens of a run are to one head. By channel: `keys` and `queries` are multiplied by `decays` already, else the
// sums are.
struct Tokens {
    float *keys, *queries;                 // [kRun, K], of unit length, queries times K^-0.5
    float *decays, *plain_keys;            // [kRun, K], by channel only
    float decay[kRun], beta[kRun], key_query[kRun];
};

template <typename T>
struct Rule {
    const QuireDeltaRule& spec;
    const T *qkv, *decay, *beta;
    int64_t qkv_stride, decay_stride, beta_stride;
    T* y;

    int K() const { return spec.key_size; }
    int V() const { return spec.value_size; }
    const T* query(int token, int head) const {
        const int heads = spec.num_key_heads;
        return qkv + token * qkv_stride + size_t(spec.is_tiled ? head % heads : head * heads / spec.num_value_heads) * K();
    }
    const T* key(int token, int head) const { return query(token, head) + size_t(spec.num_key_heads) * K(); }
    const T* value(int token, int head) const {
        return qkv + token * qkv_stride + size_t(2) * spec.num_key_heads * K() + size_t(head) * V();
    }
    T* out(int token, int head) const { return y + (size_t(token) * spec.num_value_heads + head) * V(); }
};

template <typename T>
void normalize(const T* x, float* y, int size, float scale) {
    const float factor = scale / std::sqrt(sum_squares(x, size) + kEps);
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) store(y + i, load(x + i) * factor);
    for (; i < size; ++i) y[i] = widen(x[i]) * factor;
}

float dot(const float* a, const float* b, int size) {
    Vec total = Vec{};
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) total += load(a + i) * load(b + i);
    float sum = quire::sum(total);
    for (; i < size; ++i) sum += a[i] * b[i];
    return sum;
}

// to[i] = body(from(i)) in whole vectors, whatever the count.
template <typename From, typename Body>
void map(float* to, int count, const From& from, const Body& body) {
    float lanes[kLanes];
    for (int first = 0; first < count; first += kLanes) {
        const int last = std::min(first + kLanes, count);
        for (int i = 0; i < kLanes; ++i) lanes[i] = first + i < last ? from(first + i) : 0.0f;
        store(lanes, body(load(lanes)));
        std::memcpy(to + first, lanes, (last - first) * sizeof(float));
    }
}

template <bool ByChannel, typename T>
void prepare(const Rule<T>& rule, int first, int count, int head, Tokens& tokens) {
    const int K = rule.K();
    const float rate = rule.spec.rate[head], *shift = rule.spec.shift;
    map(tokens.beta, count, [&](int t) { return widen(rule.beta[(first + t) * rule.beta_stride + head]); },
        [](Vec x) { return 1.0f / (exp(Vec{} - x) + 1.0f); });
    if (!ByChannel)
        map(tokens.decay, count,
            [&](int t) { return widen(rule.decay[(first + t) * rule.decay_stride + head]) + shift[head]; },
            [&](Vec x) { return decay_of(x, rate); });
    for (int t = 0; t < count; ++t) {
        float *key = tokens.keys + t * K, *query = tokens.queries + t * K;
        normalize(rule.key(first + t, head), key, K, 1.0f);
        normalize(rule.query(first + t, head), query, K, 1.0f / std::sqrt(float(K)));
        tokens.key_query[t] = dot(key, query, K);
        if (!ByChannel) continue;
        float *decay = tokens.decays + t * K, *plain = tokens.plain_keys + t * K;
        const T* channels = rule.decay + (first + t) * rule.decay_stride + size_t(head) * K;
        map(decay, K, [&](int i) { return widen(channels[i]) + shift[size_t(head) * K + i]; },
            [&](Vec x) { return decay_of(x, rate); });
        std::memcpy(plain, key, K * sizeof(float));
        for (int i = 0; i < K; ++i) key[i] *= decay[i], query[i] *= decay[i];
    }
}

// Some columns of a state: whole vectors of them, or fewer than a vector.
template <int Vectors>
struct Columns {
    static constexpr int kVectors = Vectors;
    template <typename T>
    Vec load(const T* from, int vector) const { return quire::load(from + vector * kLanes); }
    template <typename T>
    void store(T* to, int vector, Vec x) const { quire::store(to + vector * kLanes, x); }
};

struct SomeColumns {
    static constexpr int kVectors = 1;
    int count;
    template <typename T>
    Vec load(const T* from, int) const {
        T lanes[kLanes] = {};
        std::memcpy(lanes, from, count * sizeof(T));
        return quire::load(lanes);
    }
    template <typename T>
    void store(T* to, int, Vec x) const {
        T lanes[kLanes];
        quire::store(lanes, x);
        std::memcpy(to, lanes, count * sizeof(T));
    }
};

// The rows of some columns: with `Updates` each becomes S D + k d of token `before`; with `Sums` they are then
// multiplied by the key and the query of token `now`.
template <bool ByChannel, bool Updates, bool Sums, typename Part>
inline void pass(const Part& part, float* state, int K, int width, const Tokens& tokens, int before, int now,
                 const Vec* delta, Vec* key_sums, Vec* query_sums) {
    constexpr int kVectors = Part::kVectors;
    Vec keys[kVectors], queries[kVectors], deltas[kVectors];
    for (int v = 0; v < kVectors; ++v) keys[v] = queries[v] = Vec{}, deltas[v] = Updates ? delta[v] : Vec{};
    const float* updated = (ByChannel ? tokens.plain_keys : tokens.keys) + before * K;
    const float* decays = ByChannel ? tokens.decays + before * K : nullptr;
    const float *key = tokens.keys + now * K, *query = tokens.queries + now * K;
    const Vec decay = splat(tokens.decay[before]);
    for (int i = 0; i < K; ++i, state += width) {
        const Vec row_decay = ByChannel && Updates ? splat(decays[i]) : decay;
        for (int v = 0; v < kVectors; ++v) {
            Vec row = part.load(state, v);
            if (Updates) part.store(state, v, row = multiply_add(splat(updated[i]), deltas[v], row * row_decay));
            if (!Sums) continue;
            keys[v] = multiply_add(row, splat(key[i]), keys[v]);
            queries[v] = multiply_add(row, splat(query[i]), queries[v]);
        }
    }
    for (int v = 0; Sums && v < kVectors; ++v) key_sums[v] = keys[v], query_sums[v] = queries[v];
}

// All tokens of a run for some columns of a block, which are those of the head's values from `first` on.
template <bool ByChannel, typename Part, typename T>
void advance(const Part& part, const Rule<T>& rule, float* state, int width, int first, int first_token, int count,
             int head, const Tokens& tokens) {
    constexpr int kVectors = Part::kVectors;
    const int K = rule.K();
    Vec delta[kVectors], keys[kVectors], queries[kVectors];
    for (int t = 0; t < count; ++t) {
        if (t == 0) pass<ByChannel, false, true>(part, state, K, width, tokens, 0, t, delta, keys, queries);
        else pass<ByChannel, true, true>(part, state, K, width, tokens, t - 1, t, delta, keys, queries);
        const T* value = rule.value(first_token + t, head) + first;
        T* out = rule.out(first_token + t, head) + first;
        for (int v = 0; v < kVectors; ++v) {
            if (!ByChannel) keys[v] *= tokens.decay[t], queries[v] *= tokens.decay[t];
            delta[v] = (part.load(value, v) - keys[v]) * tokens.beta[t];
            part.store(out, v, multiply_add(delta[v], splat(tokens.key_query[t]), queries[v]));
        }
    }
    pass<ByChannel, true, false>(part, state, K, width, tokens, count - 1, 0, delta, keys, queries);
}

template <bool ByChannel, typename T>
void advance_block(const Rule<T>& rule, float* block, int width, int column, int first, int count, int head,
                   const Tokens& tokens) {
    const auto take = [&](const auto& part, int done) {
        advance<ByChannel>(part, rule, block + done, width, column + done, first, count, head, tokens);
    };
    if (width == kBlock) return take(Columns<kBlock / kLanes>(), 0);
    int done = 0;
    for (; done + kLanes <= width; done += kLanes) take(Columns<1>(), done);
    if (done < width) take(SomeColumns{width - done}, done);
}

template <bool ByChannel, typename T>
void advance_head(const Rule<T>& rule, const StateRun& run, int head) {
    const int K = rule.K(), V = rule.V();
    const size_t size = size_t(K) * V, place = head * size;
    Tokens tokens;
    tokens.keys = thread_memory((ByChannel ? 4 : 2) * kRun * size_t(K));
    tokens.queries = tokens.keys + kRun * K;
    tokens.decays = ByChannel ? tokens.queries + kRun * K : nullptr;
    tokens.plain_keys = ByChannel ? tokens.decays + kRun * K : nullptr;
    float* state = run.own() + place;
    if (run.begins()) std::memset(state, 0, size * sizeof(float));
    for (int first = run.first, end; first < run.end; first = end) {
        end = run.find_end(first, kRun);
        prepare<ByChannel>(rule, first, end - first, head, tokens);
        for (int column = 0; column < V; column += kBlock) {
            const int width = std::min(kBlock, V - column);
            advance_block<ByChannel>(rule, state + size_t(column) * K, width, column, first, end - first, head, tokens);
        }
        run.save_after(end - 1, [&](float* to) { std::memcpy(to + place, state, size * sizeof(float)); });
    }
}

}  // namespace

extern "C" void quire_delta_rule(int is_bf16, const QuireDeltaRule* rule, const QuireStates* states, const void* qkv,
                                 int64_t qkv_stride, const void* decay, int64_t decay_stride, const void* beta,
                                 int64_t beta_stride, void* y) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        const Rule<T> all{*rule,      static_cast<const T*>(qkv), static_cast<const T*>(decay), static_cast<const T*>(beta),
                          qkv_stride, decay_stride,               beta_stride,                  static_cast<T*>(y)};
        const int heads = rule->num_value_heads;
        const int64_t size = int64_t(states->num_requests) * heads * rule->key_size * rule->value_size;
        parallel_for(states->num_requests * heads, size > kMinParallelSize, [&](int task) {
            const StateRun run(*states, task / heads, rule->offset);
            if (run.first == run.end) return;
            if (rule->by_channel) advance_head<true>(all, run, task % heads);
            else advance_head<false>(all, run, task % heads);
        });
    });
}
