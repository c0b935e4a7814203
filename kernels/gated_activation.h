// y[T, F] = act(x[:, :F]) * x[:, F:], for callers in C++; is_bf16: both, else float32.
#pragma once

extern "C" {

void quire_silu_and_multiply(int is_bf16, const void* x, void* y, int rows, int size);
// is_tanh: the approximation by tanh, else the exact one by erf.
void quire_gelu_and_multiply(int is_bf16, int is_tanh, const void* x, void* y, int rows, int size);
}
