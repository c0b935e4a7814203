// The gated delta rule, for callers in C++; the formula is in delta_rule.py.
// Legend: T tokens, G key heads, H value heads, K and V numbers of a key and a value.
#pragma once

#include "recurrent/states.h"

extern "C" {

struct QuireDeltaRule {
    const float *rate, *shift;  // [H]; [H], or [H * K] where the decay is by channel
    int64_t offset;             // of the state [H, K, V] in a slot
    int32_t num_key_heads, num_value_heads, key_size, value_size;
    int32_t by_channel;
    int32_t is_tiled;  // value head h shares the head h % G of keys, else h G / H
};

// y [T, H * V] of the rows of qkv [2 G K + H V], of `decay` [H or H * K] and `beta` [H], which lie so many numbers
// apart; is_bf16: all of them, else float32.
void quire_delta_rule(int is_bf16, const QuireDeltaRule* rule, const QuireStates* states, const void* qkv,
                      int64_t qkv_stride, const void* decay, int64_t decay_stride, const void* beta,
                      int64_t beta_stride, void* y);

}  // extern "C"
