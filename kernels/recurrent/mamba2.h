// The recurrence of Mamba-2, for callers in C++; the formula is in mamba2.py.
// Legend: T tokens, H heads of P numbers, G groups of N rows.
#pragma once

#include "recurrent/states.h"

extern "C" {

struct QuireMamba2 {
    const float *rate, *shift, *skip;  // [H]
    int64_t offset;                    // of the state in a slot: [H, N, P], P rounded up to 16
    int32_t num_heads, head_size, num_groups, num_rows;
    float least_step, most_step;
};

// y [T, H * P] of the rows of x, [H P + 2 G N], and of dt [H], whose rows lie `dt_stride` numbers apart; is_bf16: all
// of them, else float32.
void quire_mamba2(int is_bf16, const QuireMamba2* scan, const QuireStates* states, const void* x, const void* dt,
                  int64_t dt_stride, void* y);

}  // extern "C"
