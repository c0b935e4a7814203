// y[m, N] = x[m, K] W^T + bias in float32, W packed as panels [ceil(N / P)][K][P], zeros past N.
// The panels' width P is quire_linear_panel(). Reads W once for each kChunk rows.
#include "tile.h"

#include <algorithm>

namespace {

using namespace quire;

constexpr int kPanel = 64;    // columns; a multiple of every kColumns
constexpr int kChunk = 96;    // rows that share one reading of a panel
constexpr int kDepth = 256;   // a panel's 256 x 64 floats stay in the second-level cache over a chunk
// Multiply-adds below which a second thread costs more than it brings.
constexpr double kMinParallelWork = 400e3;

// One panel's columns for `rows` rows: y += x W, y already holds the start values.
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

void set_start(int rows, int columns, const float* bias, float* y, size_t ldy) {
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < columns; ++c) y[r * ldy + c] = bias ? bias[c] : 0.0f;
}

// A panel that reaches past N is computed in a buffer of full width.
void multiply_last_panel(int rows, int columns, const float* x, int K, const float* panel, const float* bias,
                         float* y, size_t ldy) {
    float buffer[kChunk * kPanel] = {};
    set_start(rows, columns, bias, buffer, kPanel);
    multiply_panel(rows, x, K, panel, buffer, kPanel);
    for (int r = 0; r < rows; ++r) std::copy_n(buffer + r * kPanel, columns, y + r * ldy);
}

}  // namespace

extern "C" int quire_linear_panel() { return kPanel; }

extern "C" void quire_linear(const float* x, int m, int K, const float* packed, int N, const float* bias,
                             float* y) {
    const int panels = (N + kPanel - 1) / kPanel, chunks = (m + kChunk - 1) / kChunk;
    const bool is_parallel = double(m) * K * N > kMinParallelWork;
#pragma omp parallel for schedule(static) if (is_parallel)
    for (int task = 0; task < panels * chunks; ++task) {
        const int panel = task / chunks, chunk = task % chunks;
        const int first = int(int64_t(m) * chunk / chunks), last = int(int64_t(m) * (chunk + 1) / chunks);
        const int column = panel * kPanel, columns = std::min(kPanel, N - column);
        const float* weights = packed + size_t(panel) * K * kPanel;
        const float* start = bias ? bias + column : nullptr;
        const float* rows = x + size_t(first) * K;
        float* out = y + size_t(first) * N + column;
        if (columns < kPanel) {
            multiply_last_panel(last - first, columns, rows, K, weights, start, out, N);
        } else {
            set_start(last - first, kPanel, start, out, N);
            multiply_panel(last - first, rows, K, weights, out, N);
        }
    }
}
