// A feed-forward layer of experts, for callers in C++; the formulas are in experts.py.
// Legend: T tokens, E experts, K experts a token, H hidden size, F width of an expert.
#pragma once

#include "linear/linear.h"

#include <cstdint>

extern "C" {

// How experts are chosen; experts.py says what each field means (Router).
struct QuireRouter {
    const float *correction, *expert_scales;  // [E], or null
    int32_t num_experts, per_token, is_sigmoid, normalizes;
    int32_t num_groups, num_groups_per_token, sums_two, padding;
    float scale, mixer_threshold;  // the latter 0: no SparseMixer
};

// From router logits [T, E] to each token's experts [T, K], rising, and their weights [T, K].
void quire_route(int is_bf16, const void* logits, int rows, const QuireRouter* router, int32_t* choices,
                 float* weights);

// Scratch of quire_experts: routed [T * K, H], gate_up [T * K, 2 F] and gated [T * K, F], of x's type.
struct QuireExpertsScratch {
    void *routed, *gate_up, *gated;
};

// y[T, H] = sum of weight * down(act(gate(x)) * up(x)) over a token's experts, in float32, rounded once. gate_up and
// down are of each of the experts. scales_inputs: the weights multiply x instead, which is rounded. is_bf16: x, y and scratch, else float32.
void quire_experts(int is_bf16, int activation, const void* x, int rows, const int32_t* choices,
                   const float* weights, int num_experts, int per_token, int scales_inputs,
                   const QuireLinear* gate_up, const QuireLinear* down, const QuireExpertsScratch* scratch, void* y);
}
