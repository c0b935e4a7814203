// A causal convolution of each channel by itself, for callers in C++; the formula is in causal_conv.py.
// Legend: T tokens, C channels.
#pragma once

#include "recurrent/states.h"

extern "C" {

struct QuireCausalConv {
    const float *weight, *bias;  // [kernel_size, C], the newest token's row last; [C], or null
    int64_t offset;              // of the state [kernel_size - 1, C] in a slot, the oldest token's row first
    int32_t num_channels, kernel_size;
    int32_t first;     // of a row's numbers, the first channel
    int32_t is_gated;  // rows begin with C numbers that multiply x, and C that multiply what comes out
    int32_t activation, padding;  // a QuireActivation
};

// y [T, C] of the rows of x, which are `stride` numbers long; is_bf16: both, else float32.
void quire_causal_conv(int is_bf16, const QuireCausalConv* conv, const QuireStates* states, const void* x,
                       int64_t stride, void* y);

}  // extern "C"
