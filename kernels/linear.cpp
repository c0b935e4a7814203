// y[m, N] = x[m, K] W^T + bias (linear.h): by linear_floats.h in float32, by linear_packed.h in the other formats.
#include "linear.h"

#include "linear_amx.h"
#include "linear_floats.h"
#include "linear_integers.h"
#include "linear_many.h"
#include "linear_pack.h"
#include "linear_packed.h"
#include "linear_vector.h"

namespace {

using namespace quire;

template <class Y>
void multiply_packed([[maybe_unused]] int variant, const PackedLayer<Y>& layer) {
    if constexpr (std::is_same_v<Y, bf16>) {
#if defined(QUIRE_HAS_AMX)
        if (variant == QUIRE_LINEAR_TILE && !layer.scales)
            return has_many_rows(layer) ? compute_many(layer) : compute_packed<TileEngine<bf16>, false>(layer);
        if (variant == QUIRE_LINEAR_TILE)
            return layer.K <= kMaxIntegerK ? compute_integers(layer) : compute_packed<PairEngine, true>(layer);
#endif
#if defined(__AVX512BF16__)
        if (variant == QUIRE_LINEAR_PAIR)
            return layer.scales ? compute_packed<PairEngine, true>(layer) : compute_packed<PairEngine, false>(layer);
#endif
    }
    return layer.scales ? compute_packed<VectorEngine, true>(layer) : compute_packed<VectorEngine, false>(layer);
}

}  // namespace

extern "C" int quire_linear_has_variant(int variant) {
    switch (variant) {
        case QUIRE_LINEAR_TILE: return can_use_amx();
#if defined(__AVX512BF16__)
        case QUIRE_LINEAR_PAIR: return 1;
#endif
        case QUIRE_LINEAR_VECTOR: return 1;
        default: return 0;
    }
}

extern "C" int quire_linear_best_variant(void) {
    int variant = QUIRE_LINEAR_TILE;
    while (!quire_linear_has_variant(variant)) --variant;
    return variant;
}

extern "C" int64_t quire_linear_packed_bytes(int format, int N, int K) {
    if (format == QUIRE_LINEAR_FLOAT32)
        return int64_t(count_float_panels(N)) * kFloatColumns * K * int64_t(sizeof(float));
    const bool is_int8 = format == QUIRE_LINEAR_INT8;
    const int64_t numbers = int64_t(count_panels(N)) * count_steps(K, is_int8) * kStepSize;
    return numbers * (is_int8 ? 1 : int64_t(sizeof(bf16)));
}

extern "C" void quire_linear_pack(int format, const void* weight, int N, int K, void* packed) {
    if (format == QUIRE_LINEAR_FLOAT32)
        return pack_floats(static_cast<const float*>(weight), N, K, static_cast<float*>(packed));
    if (format == QUIRE_LINEAR_INT8)
        return pack_panels(static_cast<const int8_t*>(weight), N, K, static_cast<int8_t*>(packed));
    pack_panels(static_cast<const bf16*>(weight), N, K, static_cast<bf16*>(packed));
}

extern "C" void quire_linear_quantize(int is_bf16, const void* weight, int N, int K, void* packed, float* scales) {
    with_type(is_bf16, [&](auto zero) {
        quantize_panels(static_cast<const decltype(zero)*>(weight), N, K, static_cast<int8_t*>(packed), scales);
    });
}

extern "C" void quire_linear(int variant, int format, int is_bf16, const void* x, int m, int K, const void* packed,
                             int N, const float* scales, const void* bias, int activation, void* y) {
    if (m == 0) return;
    if (format == QUIRE_LINEAR_FLOAT32)
        return compute_all_floats({static_cast<const float*>(x), static_cast<const float*>(packed),
                                   static_cast<const float*>(bias), static_cast<float*>(y), m, K, N, activation});
    with_type(is_bf16, [&](auto zero) {
        using Y = decltype(zero);
        multiply_packed<Y>(variant, {static_cast<const Y*>(x), m, K, packed, N, scales, static_cast<const Y*>(bias),
                                     static_cast<Y*>(y), activation});
    });
}
