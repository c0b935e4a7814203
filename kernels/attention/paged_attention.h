// Attention over a paged cache, for callers in C++; formula and cache layout: paged_attention.py.
#pragma once

#include <cstdint>

extern "C" {

// Query t begins `query_stride * t` elements into `query` [T, .]; out is [T, H, E]. Request r owns queries
// query_starts[r] to query_starts[r + 1] - 1, the last of its seq_lens[r] tokens; its blocks are row r of
// block_tables. A query sees itself and the window - 1 keys before it; window is larger than any length where there
// is no bound. Scores are multiplied by `scale` and bounded by `soft_cap`, 0 where there is none. `sinks` [H] are as in
// paged_attention.py, null where there are none. Without a v_cache values are the first E = value_size numbers of the
// keys, a multiple of 16; with one E is D. D is at most MAX_NATIVE_HEAD_SIZE of paged_attention.py. is_bf16: queries, caches and out, else float32; kv_format:
// the caches' in narrow_cache.h, 0 where of that type.
void quire_paged_attention(int is_bf16, const void* query, int64_t query_stride, void* out, const void* k_cache,
                           const void* v_cache, const int32_t* block_tables, int64_t table_stride,
                           const int32_t* query_starts, const int32_t* seq_lens, int num_requests, int num_heads,
                           int num_kv_heads, int head_size, int value_size, int block_size, int window, float scale,
                           float soft_cap, const float* sinks, int kv_format);

// How bfloat16 is computed for this head size: 0 AMX, 1 avx512_bf16, 2 widened to float32.
int quire_attention_variant(int head_size);

// Leaves out the variants before `first`, for tests.
void quire_force_attention_variant(int first);
}
