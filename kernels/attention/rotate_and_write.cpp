// Norms q and k by head (where the model does), rotates them in place and writes k and v to the paged cache;
// the formula is in rotate_and_write.py. K of a block is written [D, block_size], V [block_size, D]; in bfloat16
// neighbours are paired, K [D / 2, block_size, 2] and V [block_size / 2, D, 2].
// Legend: T tokens, H query heads, G kv heads, D head size.
#include "attention/rotate_and_write.h"

#include "attention/narrow_cache.h"
#include "norm/rms_norm.h"
#include "program/thread_pool.h"

#include <algorithm>

namespace {

using namespace quire;
using attention::KVFormat;

constexpr int64_t kMinParallelSize = 1 << 15;
constexpr int kChunk = 16;  // tokens handled together: neighbours in a block share K's cache lines
constexpr int kHeads = 8;   // whose norms are found together: they need not wait for each other's
constexpr int kMaxHeadSize = 640;  // MAX_NATIVE_HEAD_SIZE of paged_attention.py

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
    int64_t stride;  // of its rows
    const float *cos, *sin;
    const T *query_norm, *key_norm;  // [D] or null
    float eps;
    bool norms_after;
    T *k_cache, *v_cache;
    const int64_t* slots;
    int num_heads, num_kv_heads, head_size, block_size;
    KVFormat format;

    int width() const { return (num_heads + 2 * num_kv_heads) * head_size; }
    T* row(int token) const { return qkv + token * stride; }
};

// One head's part of a block of the caches, and the slots of it from `offset` on that `count` tokens take.
template <typename T>
struct Place {
    T *k, *v;
    int offset, count;
};

void write_run(const Place<float>& place, const float* key, const float* value, size_t stride, int D, int size) {
    for (int d = 0; d < D; ++d)
        for (int t = 0; t < place.count; ++t)
            place.k[size_t(d) * size + place.offset + t] = key[t * stride + d];
    for (int t = 0; t < place.count; ++t)
        std::memcpy(place.v + size_t(place.offset + t) * D, value + t * stride, D * sizeof(float));
}

void write_run(const Place<bf16>& place, const bf16* key, const bf16* value, size_t stride, int D, int size) {
    // Tokens lie a power of two apart, in the same few sets of the first-level cache: they are brought together first.
    alignas(64) bf16 keys[kChunk * kMaxHeadSize];
    for (int t = 0; t < place.count; ++t) std::memcpy(keys + t * D, key + t * stride, D * sizeof(bf16));
    for (int d = 0; d < D; d += 2)
        for (int t = 0; t < place.count; ++t)
            std::memcpy(place.k + size_t(d) * size + 2 * (place.offset + t), keys + t * D + d, 2 * sizeof(bf16));
    for (int t = 0; t < place.count; ++t) {
        const int slot = place.offset + t;
        bf16* pairs = place.v + size_t(slot / 2) * 2 * D;
        if (slot % 2 == 0 && t + 1 < place.count) {
            interleave(value + t * stride, value + (t + 1) * stride, pairs, D);
            ++t;
        } else {
            for (int d = 0; d < D; ++d) pairs[2 * d + slot % 2] = value[t * stride + d];
        }
    }
}

template <typename T>
constexpr int kPair = sizeof(T) == sizeof(bf16) ? 2 : 1;  // numbers that lie side by side in a block

// A key's scale and codes [D] or numbers, in the place `slot` of a head's block.
template <typename T, typename Number>
void put_key(Number* block, const Number* key, int D, int size, int slot) {
    for (int d = 0; d < D; d += kPair<T>)
        std::memcpy(block + size_t(d) * size + slot * kPair<T>, key + d, kPair<T> * sizeof(Number));
}

void put_scale(uint8_t* block, float scale, int D, int size, int slot) {
    std::memcpy(block + size_t(size) * D + slot * sizeof scale, &scale, sizeof scale);
}

// Codes and scales of `count` tokens' keys or values, which lie in a block as numbers of T do.
template <typename T>
void write_codes(const Layer<T>& layer, T* cache, size_t head, bool is_key, const T* x, int offset, int count) {
    const int D = layer.head_size, size = layer.block_size;
    uint8_t* block = reinterpret_cast<uint8_t*>(cache) + head * attention::narrow_size(size, D);
    uint8_t codes[kMaxHeadSize];
    for (int slot = offset; slot < offset + count; ++slot, x += layer.stride) {
        put_scale(block, attention::encode(x, D, layer.format, codes), D, size, slot);
        if (is_key)
            put_key<T>(block, codes, D, size, slot);
        else
            for (int d = 0; d < D; ++d) block[slot / kPair<T> * kPair<T> * D + d * kPair<T> + slot % kPair<T>] = codes[d];
    }
}

// The keys and values of `count` tokens in a row, whose slots are neighbours in one block.
template <typename T>
void write_tokens(const Layer<T>& layer, int token, int count) {
    const int D = layer.head_size, size = layer.block_size;
    const int64_t slot = layer.slots[token];
    const T* key = layer.row(token) + size_t(layer.num_heads) * D;
    for (int head = 0; head < layer.num_kv_heads; ++head, key += D) {
        const size_t block = size_t(slot / size) * layer.num_kv_heads + head, base = block * size * D;
        if (layer.format != attention::kModelType) {
            write_codes(layer, layer.k_cache, block, true, key, slot % size, count);
            write_codes(layer, layer.v_cache, block, false, key + size_t(layer.num_kv_heads) * D, slot % size, count);
            continue;
        }
        const Place<T> place{layer.k_cache + base, layer.v_cache + base, int(slot % size), count};
        write_run(place, key, key + size_t(layer.num_kv_heads) * D, layer.stride, D, size);
    }
}

template <typename T>
void rotate_token(const Layer<T>& layer, int token) {
    const int D = layer.head_size, heads = layer.num_heads + layer.num_kv_heads;
    if (!layer.cos && !layer.query_norm) return;
    T* row = layer.row(token);
    const float *cos = layer.cos + size_t(token) * (D / 2), *sin = layer.sin + size_t(token) * (D / 2);
    for (int first = 0; first < heads; first += kHeads) {
        const int last = std::min(first + kHeads, heads);
        float factors[kHeads];
        for (int head = first; layer.norms_after && layer.cos && head < last; ++head)
            rotate(row + head * D, cos, sin, D);
        for (int head = first; layer.query_norm && head < last; ++head)
            factors[head - first] = find_norm_factor(sum_squares(row + head * D, D), D, layer.eps);
        for (int head = first; head < last; ++head) {
            T* x = row + head * D;
            const T* norm = head < layer.num_heads ? layer.query_norm : layer.key_norm;
            if (norm) scale_row(x, norm, x, D, factors[head - first], 0.0f, true);
            if (layer.cos && !layer.norms_after) rotate(x, cos, sin, D);
        }
    }
}

template <typename T>
void process_chunk(const Layer<T>& layer, int first, int last) {
    for (int token = first; token < last; ++token) rotate_token(layer, token);
    for (int token = first; layer.k_cache && token < last;) {
        const int64_t slot = layer.slots[token];
        int count = 1;
        while (token + count < last && layer.slots[token + count] == slot + count &&
               (slot + count) % layer.block_size != 0)
            ++count;
        write_tokens(layer, token, count);
        token += count;
    }
}

template <typename T>
void process_tokens(const Layer<T>& layer, int tokens) {
    const int64_t size = int64_t(tokens) * layer.width();
    parallel_for((tokens + kChunk - 1) / kChunk, size > kMinParallelSize, [&](int chunk) {
        process_chunk(layer, chunk * kChunk, std::min((chunk + 1) * kChunk, tokens));
    });
}

// Latent attention (rotate_and_write.py): queries [T, H, nope + rope] give the ends of what they are in the latent's
// space, y [T, H, rank + rope], and the token's latent [T, rank + rope], normed already, goes to the cache. In 8 bits
// a latent has two codes of each rotated number, and queries both products' factors: y is [T, H, rank + 2 rope].
template <typename T>
struct LatentLayer {
    const T* query;
    T *y, *latent;
    const float *cos, *sin;
    T* cache;
    const int64_t* slots;
    int num_heads, nope, rope, rank, block_size;
    KVFormat format;

    int latent_size() const { return rank + rope; }
    int head_size() const { return rank + (format == attention::kModelType ? rope : 2 * rope); }
};

template <typename T>
void write_latent(const LatentLayer<T>& layer, const T* latent, int64_t slot) {
    const int size = layer.block_size, D = layer.head_size(), place = int(slot % size);
    const size_t block = size_t(slot / size);
    if (layer.format == attention::kModelType) return put_key<T>(layer.cache + block * size * D, latent, D, size, place);
    uint8_t codes[kMaxHeadSize];
    uint8_t* to = reinterpret_cast<uint8_t*>(layer.cache) + block * attention::narrow_size(size, D);
    put_scale(to, attention::encode_latent(latent, layer.rank, layer.rope, layer.format, codes), D, size, place);
    put_key<T>(to, codes, D, size, place);
}

template <typename T>
void rotate_latent(const LatentLayer<T>& layer, int token) {
    const int rope = layer.rope, size = layer.head_size();
    const attention::EndFactors factors = attention::find_end_factors(layer.format);
    const float *cos = layer.cos + size_t(token) * (rope / 2), *sin = layer.sin + size_t(token) * (rope / 2);
    for (int head = 0; head < layer.num_heads; ++head) {
        const size_t row = size_t(token) * layer.num_heads + head;
        T* end = layer.y + row * size + layer.rank;
        std::memcpy(end, layer.query + row * (layer.nope + rope) + layer.nope, rope * sizeof(T));
        if (layer.cos) rotate(end, cos, sin, rope);
        for (int d = 0; layer.format != attention::kModelType && d < rope; ++d) {
            const float x = widen(end[d]);
            end[d] = narrow<T>(x * factors.high), end[d + rope] = narrow<T>(x * factors.low);
        }
    }
    T* latent = layer.latent + size_t(token) * layer.latent_size();
    if (layer.cos) rotate(latent + layer.rank, cos, sin, rope);
    write_latent(layer, latent, layer.slots[token]);
}

}  // namespace

extern "C" void quire_rotate_latent(int is_bf16, const void* query, void* y, void* latent, int tokens, const float* cos,
                                    const float* sin, void* cache, const int64_t* slots, int num_heads, int nope,
                                    int rope, int rank, int block_size, int kv_format) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        const LatentLayer<T> layer{static_cast<const T*>(query), static_cast<T*>(y), static_cast<T*>(latent), cos, sin,
                                   static_cast<T*>(cache), slots, num_heads, nope, rope, rank, block_size,
                                   KVFormat(kv_format)};
        const int64_t size = int64_t(tokens) * (num_heads * rope + layer.head_size());
        // Tokens that lie side by side in a block share cache lines: a thread takes several.
        parallel_for((tokens + kChunk - 1) / kChunk, size > kMinParallelSize, [&](int chunk) {
            for (int token = chunk * kChunk; token < std::min((chunk + 1) * kChunk, tokens); ++token)
                rotate_latent(layer, token);
        });
    });
}

extern "C" void quire_rotate_and_write(int is_bf16, void* qkv, int tokens, int64_t stride, const float* cos, const float* sin,
                                       const void* query_norm, const void* key_norm, float eps, int norms_after,
                                       void* k_cache, void* v_cache, const int64_t* slots, int num_heads, int num_kv_heads,
                                       int head_size, int block_size, int kv_format) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        process_tokens(Layer<T>{static_cast<T*>(qkv), stride, cos, sin, static_cast<const T*>(query_norm),
                                static_cast<const T*>(key_norm), eps, norms_after != 0,
                                static_cast<T*>(k_cache), static_cast<T*>(v_cache), slots, num_heads, num_kv_heads, head_size, block_size,
                                KVFormat(kv_format)},
                       tokens);
    });
}
