// The formulas are in gated_activation.py. Legend: T tokens, F width of the layer.
#include "gated_activation.h"

#include "thread_pool.h"
#include "tile.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 15;

struct Silu {
    static Vec apply(Vec a) { return a / (1.0f + exp(-a)); }
};

// a (1 + tanh(u)) / 2 = a / (1 + exp(-2 u)), u = sqrt(2 / pi) (a + 0.044715 a^3)
struct GeluTanh {
    static Vec apply(Vec a) { return a / (1.0f + exp(a * (a * a * 0.044715f + 1.0f) * -1.5957691216f)); }
};

// a times the normal distribution's integral, by erfc(z) = t exp(P(t) - z^2), t = 1 / (1 + z / 2), P fitted at
// Chebyshev nodes over z in [0, 10], where it is off by 5e-8 (2e-7 in float32).
struct Gelu {
    static Vec apply(Vec a) {
        const Vec z = (a < 0.0f ? -a : a) * 0.7071067812f;
        const Vec t = 1.0f / (z * 0.5f + 1.0f);
        Vec series = t * 0.14493021f - 0.6808272f;
        series = series * t + 1.1567338f;
        series = series * t - 0.6962519f;
        series = series * t - 0.08028043f;
        series = series * t + 0.0012675865f;
        series = series * t + 0.0346028f;
        series = series * t + 0.3866404f;
        series = series * t + 0.9986328f;
        series = series * t - 1.265448f;
        const Vec half_tail = t * exp(series - z * z) * 0.5f;
        return a * (a < 0.0f ? half_tail : 1.0f - half_tail);
    }
};

// The gate is rounded to T before it multiplies, as two separate operations would do.
template <typename Act, typename T>
void gate_row(const T* gate, const T* up, T* y, int size) {
    T gated[kLanes], tail[kLanes] = {};
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        store(gated, Act::apply(load(gate + i)));
        store(y + i, load(gated) * load(up + i));
    }
    for (int j = i; j < size; ++j) tail[j - i] = gate[j];
    store(gated, Act::apply(load(tail)));
    for (; i < size; ++i) y[i] = narrow<T>(widen(gated[i % kLanes]) * widen(up[i]));
}

template <typename Act, typename T>
void gate_rows(const T* x, T* y, int rows, int size) {
    parallel_runs(rows, int64_t(rows) * size > kMinParallelSize, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const T* row = x + size_t(r) * 2 * size;
            gate_row<Act>(row, row + size, y + size_t(r) * size, size);
        }
    });
}

template <typename Act>
void gate(int is_bf16, const void* x, void* y, int rows, int size) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        gate_rows<Act>(static_cast<const T*>(x), static_cast<T*>(y), rows, size);
    });
}

}  // namespace

extern "C" void quire_gated_activation(int is_bf16, int activation, const void* x, void* y, int rows, int size) {
    switch (activation) {
        case QUIRE_SILU: return gate<Silu>(is_bf16, x, y, rows, size);
        case QUIRE_GELU: return gate<Gelu>(is_bf16, x, y, rows, size);
        case QUIRE_GELU_TANH: return gate<GeluTanh>(is_bf16, x, y, rows, size);
    }
}
