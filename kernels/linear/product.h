// x *= act(y), for callers in C++; the formula is in product.py.
#pragma once

#include <cstdint>

extern "C" {

enum QuireGate { QUIRE_NO_GATE = 0, QUIRE_SIGMOID_GATE, QUIRE_SILU_GATE };

// x [rows, size] times rows of y that are `stride` numbers apart; is_bf16: both, else float32.
void quire_product(int is_bf16, int gate, void* x, int rows, int size, const void* y, int64_t stride);

}  // extern "C"
