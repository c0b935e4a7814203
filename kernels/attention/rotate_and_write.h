// Norm, rotation and cache write, for callers in C++; formula and cache layout: rotate_and_write.py.
#pragma once

#include <cstdint>

extern "C" {

// In place on qkv [T, (H + 2 G) D], whose rows are `stride` numbers apart; cos and sin are [T, D / 2], null where nothing is rotated; slots are
// block * block_size + offset. The norms [D] are null where the model has none; norms_after: rotation goes before them.
// Nothing is written without k_cache.
// is_bf16: qkv, norms and caches, else float32; kv_format: the caches' in narrow_cache.h, 0 where of that type.
void quire_rotate_and_write(int is_bf16, void* qkv, int tokens, int64_t stride, const float* cos, const float* sin,
                            const void* query_norm, const void* key_norm, float eps, int norms_after,
                            void* k_cache, void* v_cache, const int64_t* slots, int num_heads, int num_kv_heads, int head_size,
                            int block_size, int kv_format);

// Of latent attention: rotates the last `rope` numbers of each query head [T, H, nope + rope] into the end of its row
// of y [T, H, rank + rope], and those of latent [T, rank + rope] in place, which is then written to its slot.
void quire_rotate_latent(int is_bf16, const void* query, void* y, void* latent, int tokens, const float* cos,
                         const float* sin, void* cache, const int64_t* slots, int num_heads, int nope, int rope,
                         int rank, int block_size, int kv_format);
}
