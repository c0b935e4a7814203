// One token a row from logits, for callers in C++; the rule is in sample.py.
#pragma once

#include <cstdint>

extern "C" {

// logits [S, V]; top_k is V and top_p 1 where they are off. A temperature of 0 takes the most likely token; rows
// with another take the quantile `noise`, in [0, 1). `top`: each row's largest logit, or NaN if it has one.
void quire_sample(const float* logits, int rows, int size, const float* temperature, const int64_t* top_k,
                  const double* top_p, const float* min_p, const double* noise, int64_t* token_ids, float* top);
}
