// Products of a few rows with packed panels in vector registers: any processor, and those with vdpbf16ps.
//
// A sum is one chain over K, in order: of fused multiply-adds in float32 (VectorEngine), or of vdpbf16ps, two
// steps of K at a time (PairEngine). Neither depends on how many rows or columns are computed beside it.
#pragma once

#include "linear/linear_layout.h"

#include <type_traits>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace quire {

// What a tile of rows asks for while it is multiplied: its share of the weights that come after these, a line or two
// with each pair of k, because a Zen 5 drops what is asked for in bursts. Without it reading and multiplying take
// turns: 8, 16, 24, 32 and 64 rows of 1,024 x 4,096 are 1.25, 1.6, 1.6, 1.4 and 1.2 times as fast with it. For
// one tile of rows the processor's own prefetch is faster.
template <class Weight>
struct Ahead {
    static constexpr int kLine = 64 / sizeof(Weight), kLinesPerStep = kStepSize / kLine;
    static constexpr int kTurns = kTileDepth / 4;  // of a panel's in a step: two panels take turns

    const Weight* next[2];
    const size_t size;  // numbers of a turn

    Ahead(const Weight* const* panels, int num_panels, int steps, const Weight* from, int tile, int tiles)
        : size(size_t((kLinesPerStep / kTurns + tiles - 1) / tiles) * kLine) {
        const size_t first = size_t(kLinesPerStep * steps * tile / tiles) * kLine;
        next[0] = from + first;
        next[1] = next[0] + (num_panels > 1 ? panels[1] - panels[0] : 0);
    }

    // For a pair of k. Inlined, because GCC drops the call of a function that does nothing but prefetch.
    QUIRE_INLINE void fetch() {
        const Weight* const end = next[0] + size;
        for (const Weight* line = next[0]; line < end; line += kLine) __builtin_prefetch(line, 0, 2);
        next[0] = next[1];
        next[1] = end;
    }
};

struct NothingAhead {};

// An engine's multiply: sums[rows, panels * 32] += a[rows, steps * 32] W, a's rows `lda` numbers apart, sums'
// rows kGroup * 32, for num_panels <= kGroup panels whose steps to take begin at panels[i]. The weights from
// `next` on come after them and may be fetched; null where that is not known.
template <class Engine, class Number, int Group = 2>
struct RowsEngine {
    typedef Number Input;
    typedef bf16 Weight;
    static constexpr int kGroup = Group;
    static constexpr int kLeading = kGroup * kPanelColumns;
    static constexpr int kFewRows = kMaxRows;  // whose K is not cut in blocks
    static constexpr int kBlockSteps = 8;  // with a group's columns 32 KB: they stay in the first-level cache

    struct Scope {
        explicit Scope(int) {}
    };

    static int find_slot(int row, int) { return row; }

    template <class Weights>
    static void multiply(const Number* a, size_t lda, int rows, const Weights* const* panels, int num_panels, int steps,
                         float* sums, const Weights* next) {
        const int tiles = (rows + kMaxRows - 1) / kMaxRows;
        for (int tile = 0; tile < tiles; ++tile) {
            const int r = rows * tile / tiles;
            const auto multiply_tile = [&](const auto& ahead) {
                with_constant<kMaxRows>(rows * (tile + 1) / tiles - r, [&](auto count) {
                    Engine::template multiply_rows<count>(a + r * lda, lda, panels, num_panels, steps,
                                                          sums + r * kLeading, ahead);
                });
            };
            if (!next || tiles == 1)
                multiply_tile(NothingAhead());
            else
                multiply_tile(Ahead<Weights>(panels, num_panels, steps, next, tile, tiles));
        }
    }
};

struct VectorEngine : RowsEngine<VectorEngine, float> {
    static constexpr int kVectorsPerTile = kTileColumns / kLanes;

    static UintVec load_bits(const bf16* p) {
        UintVec bits;
        std::memcpy(&bits, p, sizeof bits);
        return bits;
    }

    // Vectors [first, first + Vectors) of the group's columns.
    template <int Rows, int Vectors>
    static void multiply_tile(const float* a, size_t lda, const bf16* const* panels, int first, int steps,
                              float* sums) {
        Vec total[Rows][Vectors];
        const bf16* starts[Vectors];
        for (int v = 0; v < Vectors; ++v) {
            const int tile = (first + v) / kVectorsPerTile, part = (first + v) % kVectorsPerTile;
            starts[v] = panels[tile / 2] + tile % 2 * kTileSize + part * 2 * kLanes;
        }
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < Vectors; ++v) total[r][v] = load(sums + r * kLeading + (first + v) * kLanes);
        for (int step = 0; step < steps; ++step)
            for (int pair = 0; pair < kTileDepth / 2; ++pair) {
                const float* x = a + step * kTileDepth + pair * 2;
                const size_t offset = step * kStepSize + pair * 2 * kTileColumns;
                Vec columns[Vectors];  // of the pair's first k, then of its second: both at once would spill
                for (int v = 0; v < Vectors; ++v) columns[v] = (Vec)(load_bits(starts[v] + offset) << 16);
                for (int r = 0; r < Rows; ++r)
                    for (int v = 0; v < Vectors; ++v) total[r][v] += x[r * lda] * columns[v];
                for (int v = 0; v < Vectors; ++v) columns[v] = (Vec)(load_bits(starts[v] + offset) & 0xffff0000u);
                for (int r = 0; r < Rows; ++r)
                    for (int v = 0; v < Vectors; ++v) total[r][v] += x[r * lda + 1] * columns[v];
            }
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < Vectors; ++v) store(sums + r * kLeading + (first + v) * kLanes, total[r][v]);
    }

    template <int Rows, class Next>
    static void multiply_rows(const float* a, size_t lda, const bf16* const* panels, int num_panels, int steps,
                              float* sums, const Next&) {
        const int vectors = num_panels * 2 * kVectorsPerTile;
        int v = 0;
        for (; v + kVectors <= vectors; v += kVectors)
            multiply_tile<Rows, kVectors>(a, lda, panels, v, steps, sums);
        for (; v < vectors; v += 2) multiply_tile<Rows, 2>(a, lda, panels, v, steps, sums);
    }
};

// float32 weights [k][32], which narrow ones become for float32 x.
struct FloatEngine : RowsEngine<FloatEngine, float, 1> {
    typedef float Weight;
    static constexpr int kBlockSteps = 4;  // 16 KB

    template <int Rows, class Next>
    static void multiply_rows(const float* a, size_t lda, const float* const* panels, int, int steps, float* sums,
                              const Next&) {
        quire::multiply(Rows, kPanelColumns, a, lda, panels[0], kPanelColumns, sums, kLeading, steps * kTileDepth);
    }
};

#if defined(__AVX512BF16__)
struct PairEngine : RowsEngine<PairEngine, bf16> {
    template <int Rows, int Panels, class Next>
    static void multiply_tile(const bf16* a, size_t lda, const bf16* const* panels, int steps, float* sums,
                              Next ahead) {
        __m512 total[Rows][2 * Panels];
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < 2 * Panels; ++v)
                total[r][v] = _mm512_loadu_ps(sums + r * kLeading + v * kTileColumns);
        for (int step = 0; step < steps; ++step)
            for (int pair = 0; pair < kTileDepth / 2; ++pair) {
                ahead.fetch();
                __m512i columns[2 * Panels];
                for (int v = 0; v < 2 * Panels; ++v)
                    columns[v] = _mm512_loadu_si512(panels[v / 2] + step * kStepSize + v % 2 * kTileSize +
                                                    pair * 2 * kTileColumns);
                for (int r = 0; r < Rows; ++r) {
                    int32_t x;
                    std::memcpy(&x, a + r * lda + step * kTileDepth + pair * 2, sizeof x);
                    for (int v = 0; v < 2 * Panels; ++v)
                        total[r][v] = _mm512_dpbf16_ps(total[r][v], (__m512bh)_mm512_set1_epi32(x),
                                                       (__m512bh)columns[v]);
                }
            }
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < 2 * Panels; ++v)
                _mm512_storeu_ps(sums + r * kLeading + v * kTileColumns, total[r][v]);
    }

    // The same of a single tile of rows. It waits for memory, and a processor reads ahead what is read in order, so it
    // takes the panels' first tiles of a step, then their second ones. Both in turn, 1 KB apart, come at 22 GB/s, these
    // at 44 to 52, a plain read at 53 (Zen 4). More rows would have to load each number of x twice.
    template <int Rows, int Panels>
    static void multiply_in_order(const bf16* a, size_t lda, const bf16* const* panels, int steps, float* sums) {
        __m512 total[2][Rows][Panels];
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < 2 * Panels; ++v)
                total[v % 2][r][v / 2] = _mm512_loadu_ps(sums + r * kLeading + v * kTileColumns);
        for (int step = 0; step < steps; ++step)
            repeat<2>([&](auto tile) QUIRE_INLINE {
                for (int pair = 0; pair < kTileDepth / 2; ++pair) {
                    const size_t offset = step * kStepSize + tile * kTileSize + pair * 2 * kTileColumns;
                    __m512i columns[Panels];
                    for (int p = 0; p < Panels; ++p) columns[p] = _mm512_loadu_si512(panels[p] + offset);
                    for (int r = 0; r < Rows; ++r) {
                        int32_t x;
                        std::memcpy(&x, a + r * lda + step * kTileDepth + pair * 2, sizeof x);
                        for (int p = 0; p < Panels; ++p)
                            total[tile][r][p] = _mm512_dpbf16_ps(total[tile][r][p], (__m512bh)_mm512_set1_epi32(x),
                                                                 (__m512bh)columns[p]);
                    }
                }
            });
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < 2 * Panels; ++v)
                _mm512_storeu_ps(sums + r * kLeading + v * kTileColumns, total[v % 2][r][v / 2]);
    }

    template <int Rows, class Next>
    static void multiply_rows(const bf16* a, size_t lda, const bf16* const* panels, int num_panels, int steps,
                              float* sums, const Next& ahead) {
        with_constant<kGroup>(num_panels, [&](auto count) {
            if constexpr (std::is_same_v<Next, NothingAhead>)
                multiply_in_order<Rows, count>(a, lda, panels, steps, sums);
            else
                multiply_tile<Rows, count>(a, lda, panels, steps, sums, ahead);
        });
    }
};
#endif

}  // namespace quire
