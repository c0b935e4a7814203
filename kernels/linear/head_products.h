// A linear layer for each head by itself, for callers in C++.
#pragma once

#include "linear/linear.h"

#include <cstdint>

extern "C" {

// y[t, h] = x[t, h] W_h^T for the heads' layers, which are of one shape and without bias. Row t of x begins
// `x_stride * t` elements into x, its head h `x_step * h` further on; of y likewise. A row's bits depend on it alone.
// is_bf16: x and y, else float32.
void quire_multiply_heads(const QuireLinear* layers, int num_heads, int is_bf16, const void* x, int64_t x_stride,
                          int x_step, int rows, void* y, int64_t y_stride, int y_step);
}
