// y[m, N] = x[m, K] W^T + bias (linear.h). float32 here: W as panels [ceil(N / 64)][K][64] with zeros past N,
// read once for each kChunk rows. The other formats are in linear_packed.h.
#include "linear.h"

#include "linear_amx.h"
#include "linear_integers.h"
#include "linear_many.h"
#include "linear_pack.h"
#include "linear_packed.h"
#include "linear_vector.h"

namespace {

using namespace quire;

constexpr int kPanel = 64;   // columns; a multiple of every kColumns
constexpr int kChunk = 96;   // rows that share one reading of a panel
constexpr int kDepth = 256;  // a panel's 256 x 64 weights stay in the second-level cache over a chunk

struct Layer {
    const float* x;       // [m, K]
    const float* packed;  // panels
    const float* bias;    // [N] or null
    float* y;             // [m, N]
    int m, K, N;
    int activation;       // a QuireActivation
};

void set_start(float* row, const float* bias, int columns) {
    if (bias)
        std::copy_n(bias, columns, row);
    else
        std::fill_n(row, columns, 0.0f);
}

// y += x W for one panel's columns; y already holds the start values.
void multiply_panel(int rows, const float* x, int K, const float* panel, float* y, size_t ldy) {
    const int tiles = (rows + kMaxRows - 1) / kMaxRows;
    for (int k = 0; k < K; k += kDepth) {
        const int depth = std::min(kDepth, K - k);
        for (int tile = 0; tile < tiles; ++tile) {
            const int first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
            multiply(last - first, kPanel, x + size_t(first) * K + k, K, panel + size_t(k) * kPanel, kPanel,
                     y + first * ldy, ldy, depth);
        }
    }
}

// y = act(y) of rows `ldy` numbers apart; columns that are no multiple of a vector may be written past.
void activate(int activation, int rows, int columns, float* y, size_t ldy) {
    if (activation == QUIRE_NO_ACTIVATION) return;
    with_activation(activation, [&](auto act) {
        for (int r = 0; r < rows; ++r)
            for (int i = 0; i < columns; i += kLanes)
                store(y + r * ldy + i, decltype(act)::apply(load(y + r * ldy + i)));
    });
}

// Rows [first, last) of one panel's columns, by way of a buffer where y is narrower than the panel.
void compute(const Layer& layer, int panel, int first, int last, float* buffer) {
    const int column = panel * kPanel, columns = std::min(kPanel, layer.N - column), rows = last - first;
    const float* weights = layer.packed + size_t(panel) * layer.K * kPanel;
    const float* bias = layer.bias ? layer.bias + column : nullptr;
    const float* x = layer.x + size_t(first) * layer.K;
    float* y = layer.y + size_t(first) * layer.N + column;
    if (columns == kPanel) {
        for (int r = 0; r < rows; ++r) set_start(y + size_t(r) * layer.N, bias, columns);
        multiply_panel(rows, x, layer.K, weights, y, layer.N);
        return activate(layer.activation, rows, columns, y, layer.N);
    }
    std::fill_n(buffer, rows * kPanel, 0.0f);
    for (int r = 0; r < rows; ++r) set_start(buffer + r * kPanel, bias, columns);
    multiply_panel(rows, x, layer.K, weights, buffer, kPanel);
    activate(layer.activation, rows, columns, buffer, kPanel);
    for (int r = 0; r < rows; ++r) std::copy_n(buffer + r * kPanel, columns, y + size_t(r) * layer.N);
}

void compute_all(const Layer& layer) {
    const int panels = (layer.N + kPanel - 1) / kPanel, chunks = (layer.m + kChunk - 1) / kChunk;
    const bool is_parallel = double(layer.m) * layer.K * layer.N > kMinParallelWork;
    parallel_for(panels * chunks, is_parallel, [&](int task) {
        alignas(64) float buffer[kChunk * kPanel];
        const int panel = task / chunks, chunk = task % chunks;
        const int first = int(int64_t(layer.m) * chunk / chunks);
        const int last = int(int64_t(layer.m) * (chunk + 1) / chunks);
        compute(layer, panel, first, last, buffer);
    });
}

// float32 panels [K, 64].
void pack_floats(const float* weight, int N, int K, float* packed) {
    const int panels = (N + kPanel - 1) / kPanel;
    parallel_for(panels, true, [&](int panel) {
        for (int k = 0; k < K; ++k)
            for (int i = 0; i < kPanel; ++i) {
                const int n = panel * kPanel + i;
                packed[(size_t(panel) * K + k) * kPanel + i] = n < N ? weight[size_t(n) * K + k] : 0.0f;
            }
    });
}

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
        return int64_t((N + kPanel - 1) / kPanel) * kPanel * K * int64_t(sizeof(float));
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
        return compute_all(Layer{static_cast<const float*>(x), static_cast<const float*>(packed),
                                 static_cast<const float*>(bias), static_cast<float*>(y), m, K, N, activation});
    with_type(is_bf16, [&](auto zero) {
        using Y = decltype(zero);
        multiply_packed<Y>(variant, {static_cast<const Y*>(x), m, K, packed, N, scales, static_cast<const Y*>(bias),
                                     static_cast<Y*>(y), activation});
    });
}
