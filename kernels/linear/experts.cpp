// Tokens are grouped by expert, and each expert's layers run once over its group. A token's row goes through kernels
// whose rows do not depend on their neighbours, and its experts' results are added in rising order of the experts:
// so its bits do not depend on what else is in the step, on the threads or on how work is shared between them.
#include "linear/experts.h"

#include "linear/gated_activation.h"
#include "program/thread_pool.h"
#include "linear/tile.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 15;
constexpr double kMinParallelWork = 400e3;  // multiply-adds, as linear_packed.h
constexpr int kMaxMixed = 8;  // experts a token of SparseMixer; published models have 2
constexpr int kExpertsPerThread = 2;  // from which on threads take whole experts instead of sharing each product

// The K largest of E numbers as rising indexes, of equal ones the first. A NaN is never larger, so that there are
// always K. What is chosen becomes NaN.
void choose(float* numbers, int count, int most, int32_t* choices) {
    for (int k = 0; k < most; ++k) {
        int best = -1;
        for (int e = 0; e < count; ++e)
            if (numbers[e] == numbers[e] && (best < 0 || numbers[e] > numbers[best])) best = e;
        for (int e = 0; best < 0 && e < count; ++e)  // nothing but NaN is left
            if (std::find(choices, choices + k, e) == choices + k) best = e;
        choices[k] = best;
        numbers[best] = std::numeric_limits<float>::quiet_NaN();
    }
    std::sort(choices, choices + most);
}

// Of all groups but the best no expert is chosen. A group counts by its largest number, or the sum of its two largest.
void leave_groups(const QuireRouter& router, float* numbers, std::vector<float>& scores, std::vector<int32_t>& kept) {
    const int size = router.num_experts / router.num_groups;
    scores.assign(router.num_groups, 0.0f), kept.resize(router.num_groups_per_token);
    for (int g = 0; g < router.num_groups; ++g) {
        float first = numbers[g * size], second = -std::numeric_limits<float>::infinity();
        for (int e = g * size + 1; e < (g + 1) * size; ++e) {
            second = std::max(second, std::min(first, numbers[e]));
            first = std::max(first, numbers[e]);
        }
        scores[g] = router.sums_two ? first + second : first;
    }
    choose(scores.data(), router.num_groups, router.num_groups_per_token, kept.data());
    for (int e = 0; e < router.num_experts; ++e)
        if (!std::binary_search(kept.begin(), kept.end(), e / size))
            numbers[e] = -std::numeric_limits<float>::infinity();
}

// SparseMixer: each pass takes the largest logit left, and weighs it by a softmax over those near it.
template <typename T>
void mix_row(const QuireRouter& router, const T* logits, int32_t* choices, float* weights) {
    std::pair<int32_t, float> taken[kMaxMixed];
    for (int k = 0; k < router.per_token; ++k) {
        const auto is_left = [&](int e) {
            return std::none_of(taken, taken + k, [e](const auto& each) { return each.first == e; });
        };
        int best = -1;
        for (int e = 0; e < router.num_experts; ++e) {
            if (!is_left(e)) continue;
            const float logit = widen(logits[e]);
            if (best < 0 || logit > widen(logits[best]) || (widen(logits[best]) != widen(logits[best]) && logit == logit))
                best = e;
        }
        const float most = widen(logits[best]);
        float total = 0.0f;
        for (int e = 0; e < router.num_experts; ++e) {
            const float logit = widen(logits[e]);
            const bool is_far = (most - logit) / std::max(std::abs(logit), most) > router.mixer_threshold;
            if (is_left(e) && !is_far) total += std::exp(logit - most);
        }
        taken[k] = {best, 1.0f / total};
    }
    std::sort(taken, taken + router.per_token);
    for (int k = 0; k < router.per_token; ++k) choices[k] = taken[k].first, weights[k] = taken[k].second;
}

template <typename T>
void route_row(const QuireRouter& router, const T* logits, int32_t* choices, float* weights) {
    if (router.mixer_threshold > 0.0f) return mix_row(router, logits, choices, weights);
    thread_local std::vector<float> scores, numbers, groups;
    thread_local std::vector<int32_t> kept;
    const int count = router.num_experts;
    scores.resize(count), numbers.resize(count);
    float largest = widen(logits[0]), total = 0.0f, chosen = 0.0f;
    for (int e = 1; e < count; ++e) largest = std::max(largest, widen(logits[e]));
    for (int e = 0; e < count; ++e) {
        const float logit = widen(logits[e]);
        scores[e] = router.is_sigmoid ? 1.0f / (1.0f + std::exp(-logit)) : std::exp(logit - largest);
        total += scores[e];
    }
    for (int e = 0; e < count && !router.is_sigmoid; ++e) scores[e] /= total;
    for (int e = 0; e < count; ++e)  // two logits may differ where their probabilities no longer do
        numbers[e] = router.correction ? scores[e] + router.correction[e] : widen(logits[e]);
    if (router.num_groups > 1) leave_groups(router, numbers.data(), groups, kept);
    choose(numbers.data(), count, router.per_token, choices);
    for (int k = 0; k < router.per_token; ++k) chosen += weights[k] = scores[choices[k]];
    const float divisor = router.normalizes ? chosen + 1e-20f : 1.0f;
    for (int k = 0; k < router.per_token; ++k) weights[k] = weights[k] / divisor * router.scale;
    for (int k = 0; router.expert_scales && k < router.per_token; ++k) weights[k] *= router.expert_scales[choices[k]];
}

template <typename T>
void route(const T* logits, int rows, const QuireRouter& router, int32_t* choices, float* weights) {
    const int count = router.num_experts, most = router.per_token;
    parallel_runs(rows, int64_t(rows) * count * most > kMinParallelSize, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r)
            route_row(router, logits + r * count, choices + r * most, weights + r * most);
    });
}

// Where each expert's tokens begin among all T * K places, and which place each choice has.
struct Groups {
    std::vector<int> starts, places, active;

    Groups(const int32_t* choices, int count, int num_experts) : starts(num_experts + 1), places(count) {
        for (int i = 0; i < count; ++i) ++starts[choices[i] + 1];
        for (int e = 0; e < num_experts; ++e) {
            if (starts[e + 1] > 0) active.push_back(e);
            starts[e + 1] += starts[e];
        }
        std::vector<int> next(starts.begin(), starts.end() - 1);
        for (int i = 0; i < count; ++i) places[i] = next[choices[i]]++;
    }
};

template <typename T>
struct Layer {
    int activation, per_token, scales_inputs;
    const QuireLinear *gate_up, *down;
    const QuireExpertsScratch& scratch;

    int hidden() const { return down[0].num_out; }
    T* routed(int place) const { return static_cast<T*>(scratch.routed) + size_t(place) * hidden(); }

    // The results of one expert take the places of its tokens.
    void run(int expert, const Groups& groups) const {
        const int first = groups.starts[expert], count = groups.starts[expert + 1] - first, width = down[0].num_in;
        T* wide = static_cast<T*>(scratch.gate_up) + size_t(first) * 2 * width;
        T* gated = static_cast<T*>(scratch.gated) + size_t(first) * width;
        constexpr bool is_bf16 = std::is_same_v<T, bf16>;
        multiply(gate_up[expert], is_bf16, routed(first), count, wide);
        quire_gated_activation(is_bf16, activation, wide, gated, count, width);
        multiply(down[expert], is_bf16, gated, count, routed(first));
    }

    float weight(float routers) const { return scales_inputs ? 1.0f : routers; }

    void add_row(const int* places, const float* weights, T* y) const {
        const int size = hidden();
        int i = 0;
        for (; i + kLanes <= size; i += kLanes) {
            Vec total{};
            for (int k = 0; k < per_token; ++k) total += load(routed(places[k]) + i) * weight(weights[k]);
            store(y + i, total);
        }
        for (; i < size; ++i) {
            float total = 0.0f;
            for (int k = 0; k < per_token; ++k) total += widen(routed(places[k])[i]) * weight(weights[k]);
            y[i] = narrow<T>(total);
        }
    }
};

template <typename T>
void run_experts(const Layer<T>& layer, const T* x, int rows, const int32_t* choices, const float* weights,
                 int num_experts, T* y) {
    const int per_token = layer.per_token, size = layer.hidden();
    const Groups groups(choices, rows * per_token, num_experts);
    const bool is_large = int64_t(rows) * per_token * size > kMinParallelSize;
    parallel_runs(rows, is_large, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r)
            for (int k = 0; k < per_token; ++k) {
                T* routed = layer.routed(groups.places[r * per_token + k]);
                if (!layer.scales_inputs) std::copy_n(x + r * size, size, routed);
                for (int i = 0; i < size && layer.scales_inputs; ++i)
                    routed[i] = narrow<T>(widen(x[r * size + i]) * weights[r * per_token + k]);
            }
    });
    const int count = int(groups.active.size());
    const double work = double(rows) * per_token * size * layer.down[0].num_in;
    parallel_for(count, work > kMinParallelWork && count >= kExpertsPerThread * num_threads(),
                 [&](int i) { layer.run(groups.active[i], groups); });
    parallel_runs(rows, is_large, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r)
            layer.add_row(groups.places.data() + r * per_token, weights + r * per_token, y + r * size);
    });
}

}  // namespace

extern "C" void quire_route(int is_bf16, const void* logits, int rows, const QuireRouter* router, int32_t* choices,
                            float* weights) {
    with_type(is_bf16, [&](auto zero) {
        route(static_cast<const decltype(zero)*>(logits), rows, *router, choices, weights);
    });
}

extern "C" void quire_experts(int is_bf16, int activation, const void* x, int rows, const int32_t* choices,
                              const float* weights, int num_experts, int per_token, int scales_inputs,
                              const QuireLinear* gate_up, const QuireLinear* down, const QuireExpertsScratch* scratch,
                              void* y) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        run_experts(Layer<T>{activation, per_token, scales_inputs, gate_up, down, *scratch}, static_cast<const T*>(x), rows, choices,
                    weights, num_experts, static_cast<T*>(y));
    });
}
