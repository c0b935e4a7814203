// y[m, N] = x[m, K] W^T + bias (linear.h): by linear_floats.h in float32, by linear_packed.h in the other formats.
#include "linear/linear.h"

#include "linear/linear_amx.h"
#include "linear/linear_few.h"
#include "linear/linear_floats.h"
#include "linear/linear_many.h"
#include "linear/linear_narrow.h"
#include "linear/linear_pack.h"
#include "linear/linear_packed.h"
#include "linear/linear_pairs.h"
#include "linear/linear_vector.h"

namespace {

using namespace quire;

void multiply_packed([[maybe_unused]] int variant, const PackedLayer<bf16>& layer) {
#if defined(QUIRE_HAS_AMX)
    if (variant == QUIRE_LINEAR_TILE && has_few_rows(layer)) return compute_few(layer);
    if (variant == QUIRE_LINEAR_TILE && has_many_rows(layer)) return compute_many(layer);
    if (variant == QUIRE_LINEAR_TILE)
        return layer.narrow ? compute_packed<TileEngine, true>(layer) : compute_packed<TileEngine, false>(layer);
#endif
#if defined(__AVX512BF16__)
    if (variant == QUIRE_LINEAR_PAIR)
        return layer.narrow ? compute_pairs(layer) : compute_packed<PairEngine, false>(layer);
#endif
    layer.narrow ? compute_packed<FloatEngine, true>(layer) : compute_packed<VectorEngine, false>(layer);
}

void multiply_packed(int, const PackedLayer<float>& layer) { compute_packed<FloatEngine, true>(layer); }

// x [m, K] with its columns in the order of the weight's k.
template <class Y>
Floats take_columns(const Y* x, int m, int K, const int32_t* order) {
    Floats memory = allocate((size_t(m) * K * sizeof(Y) + sizeof(float) - 1) / sizeof(float));
    Y* to = reinterpret_cast<Y*>(memory.get());
    parallel_runs(m, double(m) * K > kMinParallelWork, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r)
            for (int k = 0; k < K; ++k) to[r * K + k] = x[r * K + order[k]];
    });
    return memory;
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

extern "C" int64_t quire_linear_packed_bytes(int variant, int format, int N, int K) {
    if (format == QUIRE_LINEAR_FLOAT32)
        return int64_t(count_float_panels(N)) * kFloatColumns * K * int64_t(sizeof(float));
    const int64_t panels = count_panels(N);
    if (!is_narrow_format(format)) return panels * count_steps(K) * kStepSize * int64_t(sizeof(bf16));
    if (variant == QUIRE_LINEAR_TILE) return panels * count_blocks(format, K) * kPanelColumns * column_bytes(format);
    return panels * count_steps(K) * kStepSize * bits_of(format) / 8;
}

extern "C" void quire_linear_pack(int variant, int format, const void* weight, int N, int K, void* packed) {
    if (format == QUIRE_LINEAR_FLOAT32)
        return pack_floats(static_cast<const float*>(weight), N, K, static_cast<float*>(packed));
    if (is_narrow_format(format))
        return pack_narrow(variant, format, static_cast<const uint8_t*>(weight), N, K, static_cast<uint8_t*>(packed));
    pack_bf16(static_cast<const bf16*>(weight), N, K, static_cast<bf16*>(packed));
}

extern "C" void quire_linear(const QuireLinear* layer, int is_bf16, const void* x, int m, void* y) {
    const int N = layer->num_out, K = layer->num_in;
    if (m == 0) return;
    if (layer->format == QUIRE_LINEAR_FLOAT32)
        return compute_all_floats({static_cast<const float*>(x), static_cast<const float*>(layer->packed),
                                   static_cast<const float*>(layer->bias), static_cast<float*>(y), m, K, N,
                                   layer->activation});
    with_type(is_bf16, [&](auto zero) {
        using Y = decltype(zero);
        const Y* rows = static_cast<const Y*>(x);
        const bool is_ordered = !layer->permutation;
        const Floats memory = is_ordered ? nullptr : take_columns(rows, m, K, layer->permutation);
        multiply_packed(layer->variant, PackedLayer<Y>{is_ordered ? rows : reinterpret_cast<const Y*>(memory.get()), m, K,
                                                       layer->packed, N, is_narrow_format(layer->format) ? layer : nullptr,
                                                       static_cast<const Y*>(layer->bias), static_cast<Y*>(y),
                                                       layer->activation});
    });
}
