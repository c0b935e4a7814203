// Layer norm of rows, for callers in C++; the formula is in layer_norm.py.
#pragma once

// x, residual (null: none; updated in place) and y are [T, D]; is_bf16: all of them, weight and bias (null: none) too,
// else float32. y may be x or the residual.
extern "C" void quire_layer_norm(int is_bf16, const void* x, void* residual, const void* weight, const void* bias,
                                 void* y, int rows, int size, float eps);
