// y[m, N] = act(x[m, K] W^T + bias), for callers in C++. A row of y has the same bits whatever the other rows, m and
// the number of threads, as long as format and variant stay. Weights are packed once; formats and layouts:
// linear.cpp (float32) and linear_layout.h (the others).
#pragma once

#include <cstdint>

extern "C" {

// What multiplies bfloat16 x: one of these for all of a process's calls.
enum QuireLinearVariant {
    QUIRE_LINEAR_VECTOR = 0,  // float32 vectors, on any processor
    QUIRE_LINEAR_PAIR = 1,    // vdpbf16ps of AVX512-BF16
    QUIRE_LINEAR_TILE = 2,    // tdpbf16ps of AMX
};

// The last three are narrow (linear_narrow.h): unsigned codes of 4 and 8 bits, and float8_e4m3fn.
enum QuireLinearFormat {
    QUIRE_LINEAR_FLOAT32 = 0,
    QUIRE_LINEAR_BFLOAT16 = 1,
    QUIRE_LINEAR_INT4 = 2,
    QUIRE_LINEAR_INT8 = 3,
    QUIRE_LINEAR_FP8 = 4,
};

// The best variant of this processor, and whether one can be had here.
int quire_linear_best_variant(void);
int quire_linear_has_variant(int variant);

// What quire_linear is called with. Scales, offsets, codebook, permutation and group are of narrow weights.
struct QuireLinear {
    const void *packed, *scales;  // scales: bfloat16 or float32 [panels][groups][32]
    const float* offsets;         // likewise; null: none, but integers are symmetric
    const float* codebook;        // [16]; null: whole numbers
    const int32_t* permutation;   // [num_in]: the number of x that each k takes; null: in their order
    const void* bias;             // of x's type; null: none
    int32_t num_in, num_out, variant, format;
    int32_t group_size, has_bf16_scales;  // group_size: a multiple of 16, 0: all of K
    int32_t activation, padding;          // a QuireActivation
};

// The variant is that of the calls; only narrow weights differ by it, and those of TILE go with bfloat16 x alone.
int64_t quire_linear_packed_bytes(int variant, int format, int N, int K);
// weight: contiguous [N, K] of the format, of 4 bits [N, (K + 1) / 2] with the even k in the lower half of a byte;
// packed: aligned to 64 bytes, written by all threads.
void quire_linear_pack(int variant, int format, const void* weight, int N, int K, void* packed);

// x [m, num_in] and y [m, num_out]: is_bf16, else float32. float32 weights go with float32 x, bfloat16 weights with
// bfloat16 x, narrow ones with both.
void quire_linear(const QuireLinear* layer, int is_bf16, const void* x, int m, void* y);
}

namespace quire {

inline void multiply(const QuireLinear& layer, int is_bf16, const void* x, int rows, void* y) {
    quire_linear(&layer, is_bf16, x, rows, y);
}

}  // namespace quire
