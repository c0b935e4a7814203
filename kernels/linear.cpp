// y[m, N] = x[m, K] W^T + bias, W packed as panels [ceil(N / P)][K][P] with zeros past N; sums are float32.
// The panels' width P is quire_linear_panel(). Reads W once for each kChunk rows.
#include "tile.h"

#include <algorithm>

namespace {

using namespace quire;

constexpr int kPanel = 64;   // columns; a multiple of every kColumns
constexpr int kChunk = 96;   // rows that share one reading of a panel
constexpr int kDepth = 256;  // a panel's 256 x 64 weights stay in the second-level cache over a chunk
// Multiply-adds below which a second thread costs more than it brings.
constexpr double kMinParallelWork = 400e3;

template <typename T>
struct Layer {
    const float* x;   // [m, K]
    const T* packed;  // panels
    const T* bias;    // [N] or null
    T* y;             // [m, N]
    int m, K, N;
};

template <typename T>
void set_start(float* row, const T* bias, int columns) {
    if (bias)
        copy_floats(row, bias, columns);
    else
        std::fill_n(row, columns, 0.0f);
}

// y += x W for one panel's columns; y already holds the start values.
template <typename T>
void multiply_panel(int rows, const float* x, int K, const T* panel, float* y, size_t ldy) {
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

// Rows [first, last) of one panel's columns, by way of a buffer where y is narrower than float32 or the panel.
template <typename T>
void compute(const Layer<T>& layer, int panel, int first, int last, float* buffer) {
    const int column = panel * kPanel, columns = std::min(kPanel, layer.N - column), rows = last - first;
    const T* weights = layer.packed + size_t(panel) * layer.K * kPanel;
    const T* bias = layer.bias ? layer.bias + column : nullptr;
    const float* x = layer.x + size_t(first) * layer.K;
    T* y = layer.y + size_t(first) * layer.N + column;
    if constexpr (sizeof(T) == sizeof(float)) {
        if (columns == kPanel) {
            for (int r = 0; r < rows; ++r) set_start(y + size_t(r) * layer.N, bias, columns);
            return multiply_panel(rows, x, layer.K, weights, y, layer.N);
        }
    }
    std::fill_n(buffer, rows * kPanel, 0.0f);
    for (int r = 0; r < rows; ++r) set_start(buffer + r * kPanel, bias, columns);
    multiply_panel(rows, x, layer.K, weights, buffer, kPanel);
    for (int r = 0; r < rows; ++r) copy_rounded(y + size_t(r) * layer.N, buffer + r * kPanel, columns);
}

template <typename T>
void compute_all(const Layer<T>& layer) {
    const int panels = (layer.N + kPanel - 1) / kPanel, chunks = (layer.m + kChunk - 1) / kChunk;
    const bool is_parallel = double(layer.m) * layer.K * layer.N > kMinParallelWork;
#pragma omp parallel for schedule(static) if (is_parallel)
    for (int task = 0; task < panels * chunks; ++task) {
        alignas(64) float buffer[kChunk * kPanel];
        const int panel = task / chunks, chunk = task % chunks;
        const int first = int(int64_t(layer.m) * chunk / chunks);
        const int last = int(int64_t(layer.m) * (chunk + 1) / chunks);
        compute(layer, panel, first, last, buffer);
    }
}

}  // namespace

extern "C" int quire_linear_panel() { return kPanel; }

// is_bf16: x, packed, bias (null: none) and y, else float32.
extern "C" void quire_linear(int is_bf16, const void* x, int m, int K, const void* packed, int N,
                             const void* bias, void* y) {
    if (!is_bf16)
        return compute_all(Layer<float>{static_cast<const float*>(x), static_cast<const float*>(packed),
                                        static_cast<const float*>(bias), static_cast<float*>(y), m, K, N});
    const Floats wide = allocate(size_t(m) * K);
    copy_floats(wide.get(), static_cast<const bf16*>(x), m * K);
    compute_all(Layer<bf16>{wide.get(), static_cast<const bf16*>(packed), static_cast<const bf16*>(bias),
                            static_cast<bf16*>(y), m, K, N});
}
