// y[T, F] = act(x[:, :F]) * x[:, F:], for callers in C++; is_bf16: both, else float32.
#pragma once

extern "C" {

// gelu_tanh is the approximation by tanh, gelu the exact one by erf.
enum QuireActivation { QUIRE_SILU = 0, QUIRE_GELU = 1, QUIRE_GELU_TANH = 2 };

void quire_gated_activation(int is_bf16, int activation, const void* x, void* y, int rows, int size);
}
