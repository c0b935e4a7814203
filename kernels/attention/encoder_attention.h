// Attention of whole prompts that see both ways, for callers in C++; the formula is in encoder_attention.py.
#pragma once

#include <cstdint>

extern "C" {

// qkv [T, (H + 2 G) D] holds a step's queries, keys and values; prompt r owns tokens starts[r] to starts[r + 1] - 1.
// out [count, H, D] gets the attention of tokens [first, first + count). A query sees the keys of its prompt that are
// less than `window` away. Scores are multiplied by `scale` and bounded by `soft_cap`, 0 where there is none; then
// bias [H, 2 reach + 1] is added, by key less query (null: none). is_bf16: qkv and out, else float32.
void quire_encoder_attention(int is_bf16, const void* qkv, void* out, const int32_t* starts, int num_prompts, int first,
                             int count, const float* bias, int num_heads, int num_kv_heads, int head_size, int window,
                             int reach, float scale, float soft_cap);
}
