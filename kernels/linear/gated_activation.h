// y[T, F] = act(x[:, :F]) * x[:, F:], for callers in C++; is_bf16: both, else float32. The activation is a
// QuireActivation.
#pragma once

extern "C" void quire_gated_activation(int is_bf16, int activation, const void* x, void* y, int rows, int size);
