// y[m, N] = act(x[m, K] W^T + bias), for callers in C++. A row of y has the same bits whatever the other rows, m and
// the number of threads, as long as format and variant stay. Weights are packed once; formats and layouts:
// linear.cpp (float32) and linear_layout.h (the others).
#pragma once

#include <cstdint>

extern "C" {

// What multiplies bfloat16 or int8 weights: one of these for all of a process's calls.
enum QuireLinearVariant {
    QUIRE_LINEAR_VECTOR = 0,  // float32 vectors, on any processor
    QUIRE_LINEAR_PAIR = 1,    // vdpbf16ps of AVX512-BF16
    QUIRE_LINEAR_TILE = 2,    // tdpbf16ps of AMX, tdpbssd for int8 weights
};

enum QuireLinearFormat { QUIRE_LINEAR_FLOAT32 = 0, QUIRE_LINEAR_BFLOAT16 = 1, QUIRE_LINEAR_INT8 = 2 };

// The best variant of this processor, and whether one can be had here.
int quire_linear_best_variant(void);
int quire_linear_has_variant(int variant);

// What quire_linear is called with; scales and bias are null where there are none.
struct QuireLinear {
    const void* packed;
    const float* scales;
    const void* bias;
    int32_t num_in, num_out, variant, format;
    int32_t activation, padding;  // a QuireActivation
};

int64_t quire_linear_packed_bytes(int format, int N, int K);
// weight: contiguous [N, K] of the format; packed: aligned to 64 bytes, written by all threads.
void quire_linear_pack(int format, const void* weight, int N, int K, void* packed);
// The same of a float32 or bfloat16 weight that becomes int8, with the scales [N] that it gets.
void quire_linear_quantize(int is_bf16, const void* weight, int N, int K, void* packed, float* scales);

// x, bias (null: none) and y: is_bf16, else float32. float32 weights go with float32 x, bfloat16 weights with
// bfloat16 x; int8 weights with both (float32 x by way of the vector variant) and with scales [N], else null.
void quire_linear(int variant, int format, int is_bf16, const void* x, int m, int K, const void* packed, int N,
                  const float* scales, const void* bias, int activation, void* y);
}

namespace quire {

inline void multiply(const QuireLinear& layer, int is_bf16, const void* x, int rows, void* y) {
    quire_linear(layer.variant, layer.format, is_bf16, x, rows, layer.num_in, layer.packed, layer.num_out, layer.scales,
                 layer.bias, layer.activation, y);
}

}  // namespace quire
