// x = cap * tanh(x / cap) in place, for callers in C++.
#pragma once

#include <cstdint>

extern "C" void quire_soft_cap(float* x, int64_t count, float cap);
