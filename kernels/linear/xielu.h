// xIELU in place, for callers in C++; the formula is in xielu.py. is_bf16: x [count], else float32.
#pragma once

#include <cstdint>

extern "C" {

struct QuireXielu {
    float alpha_p, alpha_n, beta, eps;
};

void quire_xielu(int is_bf16, void* x, int64_t count, const QuireXielu* numbers);
}
