// Norms q and k by head (where the model does), rotates them in place and writes k and v to the paged cache;
// the formula is in rotate_and_write.py. K of a block is written [D, block_size], V [block_size, D].
// Legend: T tokens, H query heads, G kv heads, D head size.
#include "rms_norm.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 15;

// x is one head [D]; cos and sin are [D / 2]. Computed in float32, rounded to T once.
template <typename T>
void rotate(T* x, const float* cos, const float* sin, int head_size) {
    const int half = head_size / 2;
    T *first = x, *second = x + half;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Vec a = load(first + i), b = load(second + i), c = load(cos + i), s = load(sin + i);
        store(first + i, a * c - b * s);
        store(second + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = widen(first[i]), b = widen(second[i]);
        first[i] = narrow<T>(a * cos[i] - b * sin[i]);
        second[i] = narrow<T>(b * cos[i] + a * sin[i]);
    }
}

template <typename T>
struct Layer {
    T* qkv;  // [T, (H + 2 G) D]
    const float *cos, *sin;
    const T *query_norm, *key_norm;  // [D] or null
    float eps;
    T *k_cache, *v_cache;
    const int64_t* slots;
    int num_heads, num_kv_heads, head_size, block_size;
};

template <typename T>
void write_slot(const Layer<T>& layer, const T* keys, const T* values, int64_t slot) {
    const int D = layer.head_size, size = layer.block_size;
    const int64_t block = slot / size, offset = slot % size;
    for (int head = 0; head < layer.num_kv_heads; ++head) {
        const size_t base = (size_t(block) * layer.num_kv_heads + head) * size * D;
        T *k = layer.k_cache + base + offset, *v = layer.v_cache + base + offset * D;
        for (int d = 0; d < D; ++d) k[d * size] = keys[head * D + d];
        std::memcpy(v, values + head * D, D * sizeof(T));
    }
}

template <typename T>
void process_token(const Layer<T>& layer, int token) {
    const int D = layer.head_size, heads = layer.num_heads + layer.num_kv_heads;
    T* row = layer.qkv + size_t(token) * (heads + layer.num_kv_heads) * D;
    const float *cos = layer.cos + size_t(token) * (D / 2), *sin = layer.sin + size_t(token) * (D / 2);
    for (int head = 0; head < heads; ++head) {
        T* x = row + head * D;
        const T* norm = head < layer.num_heads ? layer.query_norm : layer.key_norm;
        if (norm) norm_row(x, norm, x, D, layer.eps);
        rotate(x, cos, sin, D);
    }
    write_slot(layer, row + layer.num_heads * D, row + heads * D, layer.slots[token]);
}

template <typename T>
void process_tokens(const Layer<T>& layer, int tokens) {
    const int64_t size = int64_t(tokens) * (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_size;
#pragma omp parallel for schedule(static) if (size > kMinParallelSize)
    for (int token = 0; token < tokens; ++token) process_token(layer, token);
}

template <typename T>
void process_pointers(void* qkv, int tokens, const float* cos, const float* sin, const void* query_norm,
                      const void* key_norm, float eps, void* k_cache, void* v_cache, const int64_t* slots,
                      int num_heads, int num_kv_heads, int head_size, int block_size) {
    process_tokens(Layer<T>{static_cast<T*>(qkv), cos, sin, static_cast<const T*>(query_norm),
                            static_cast<const T*>(key_norm), eps, static_cast<T*>(k_cache),
                            static_cast<T*>(v_cache), slots, num_heads, num_kv_heads, head_size, block_size},
                   tokens);
}

}  // namespace

// is_bf16: qkv, norms and caches, else float32. The norms are null where the model has none.
extern "C" void quire_rotate_and_write(int is_bf16, void* qkv, int tokens, const float* cos, const float* sin,
                                       const void* query_norm, const void* key_norm, float eps, void* k_cache,
                                       void* v_cache, const int64_t* slots, int num_heads, int num_kv_heads,
                                       int head_size, int block_size) {
    (is_bf16 ? process_pointers<bf16> : process_pointers<float>)(qkv, tokens, cos, sin, query_norm, key_norm, eps,
                                                                 k_cache, v_cache, slots, num_heads,
                                                                 num_kv_heads, head_size, block_size);
}
