// y = act(x W^T + bias) of narrow weights by vdpbf16ps of AVX512-BF16. Their layout: linear_narrow.h.
//
// What is multiplied are the units that codes stand for, which are whole in bfloat16 (a codebook's are rounded to it):
// no weight is rounded. A group's products are one chain of vdpbf16ps from zero, two k at a time; its sum times the
// group's scale is added to y in float32, groups in order. A few rows look units up as they multiply them; many do so
// once, a block of K at a time. Neither changes a product or the order of an addition.
#pragma once

#include "linear/linear_narrow.h"
#include "linear/linear_packed.h"

namespace quire {

#if defined(__AVX512BF16__)

constexpr int kPairPanels = 2;                            // of a task
constexpr int kPairTiles = 2 * kPairPanels;
constexpr int kPairLeading = kPairPanels * kPanelColumns;
constexpr int kPairsPerHalf = kHalfDepth / 2;
constexpr int kBlockHalves = 8;                           // of K: with 64 columns 16 KB of units
constexpr int kPairPrefetch = 8192;                       // bytes of a panel

// One or two rows wait for memory, and a processor reads ahead where a page's lines come in order: those of 8 bits take
// two tiles at a time, one of each panel, and come at 46 instead of 35 GB/s (Zen 4). Those of 4 bits gain nothing.
constexpr int count_parts(int format, int rows) { return format != QUIRE_LINEAR_INT4 && rows <= 2 ? 2 : 1; }

// Rows up to which looking units up again for each kMaxRows of them costs less than to keep them in memory. Those of 4
// bits are looked up beside products that wait for each other anyway, and a tile's sums stay in the first-level cache:
// 128 to 512 rows of 1,024 x 6,144 are 1.07 to 1.15 times as fast as from memory.
constexpr int few_pair_rows(int format) {
    return format == QUIRE_LINEAR_INT4 ? kChunkRows : format == QUIRE_LINEAR_INT8 ? 32 : kMaxRows;
}

// Codes as the units that they stand for, for a tile's 16 columns and half a step of K.
template <int format>
class PairUnits {
  public:
    explicit PairUnits(const QuireLinear& layer) {
        if constexpr (format == QUIRE_LINEAR_INT4) {
            const __m512 units = _mm512_loadu_ps(layer.codebook ? layer.codebook : kWholeNumbers);
            const __m512 centred = _mm512_sub_ps(units, _mm512_set1_ps(layer.codebook ? 0.0f : find_middle(format)));
            table_ = (__m512i)_mm512_cvtne2ps_pbh(centred, centred);
        } else {
            const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const __m512i first = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x00040004));
            table_ = _mm512_add_epi16(first, _mm512_set1_epi32(0x00030001));
        }
    }

    // [16 columns][2] units of a pair of k.
    template <int pair>
    __m512i read(const uint8_t* from) const {
        if constexpr (format == QUIRE_LINEAR_INT4) {
            constexpr int kShift = pair % 4 * 4;
            const __m512i words = _mm512_load_si512(from + pair / 4 * 64);
            return _mm512_permutexvar_epi16(kShift ? _mm512_srli_epi16(words, kShift) : words, table_);
        } else {
            __m512 low, high;
            decode(from + pair * 32, low, high);
            return _mm512_permutex2var_epi16((__m512i)low, table_, (__m512i)high);
        }
    }

  private:
    static __m512 widen_int8(const uint8_t* from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(from))));
    }

    static void decode(const uint8_t* from, __m512& low, __m512& high) {
        if constexpr (format == QUIRE_LINEAR_INT8) {
            low = widen_int8(from);
            high = widen_int8(from + 16);
        } else {
            load_fp8(from, low, high);
        }
    }

    // Of 4 bits twice the same 16 units: of an index, the fifth bit may be anything. Of 8 bits the places of the upper
    // halves of two vectors' floats, which units of 8 bits fill: nothing is rounded.
    __m512i table_;
};

// What a task multiplies by; the last one of an odd number twice.
struct PanelPair {
    int first, second;

    int of_tile(int tile) const { return tile < 2 ? first : second; }
};

// What two panels have for half a step of K, to be asked for before it is read: a line or two at a time, because
// processors drop what is asked for in bursts, and into the second-level cache, which can wait for more lines.
template <int Bytes>
struct PairAhead {
    static constexpr int kLines = 2 * Bytes / 64;

    const uint8_t* from[2];

    // The share of one of so many turns. Inlined, because GCC drops the call of a function that only prefetches.
    template <int turn, int turns>
    QUIRE_INLINE void fetch() const {
        constexpr int begin = kLines * turn / turns, end = kLines * (turn + 1) / turns;
        for (int line = begin; line < end; ++line) __builtin_prefetch(from[line % 2] + line / 2 * 64, 0, 2);
    }
};

// A narrow layer and its rows of x, zeros past K.
template <int format>
struct PairLayer {
    static constexpr int kTileBytes = kHalfDepth * kTileColumns * bits_of(format) / 8;  // of half a step
    static constexpr int kHalfBytes = 2 * kTileBytes;                                   // of a panel

    const QuireLinear& weights;
    const bf16* x;
    size_t lda;
    const float* x_sums;  // [rows][groups], of a group's x; null without offsets
    int halves, group_halves, groups;

    size_t panel_bytes() const { return size_t(halves) * kHalfBytes; }

    int group_end(int group) const { return group + 1 == groups ? halves : (group + 1) * group_halves; }

    const uint8_t* find(int panel, int half) const {
        return static_cast<const uint8_t*>(weights.packed) + panel * panel_bytes() + size_t(half) * kHalfBytes;
    }

    const uint8_t* find_tile(PanelPair panels, int half, int tile) const {
        return find(panels.of_tile(tile), half) + tile % 2 * kTileBytes;
    }

    // What both panels have from an offset on, or beyond their end what the panels of the next task have.
    PairAhead<kHalfBytes> find_ahead(PanelPair panels, size_t offset) const {
        if (offset >= panel_bytes()) offset += panel_bytes();
        return {{find(panels.first, 0) + offset, find(panels.second, 0) + offset}};
    }

    __m512 scale(PanelPair panels, int group, int tile) const {
        const size_t at = find_group(panels, group, tile);
        return (__m512)(weights.has_bf16_scales ? load(static_cast<const bf16*>(weights.scales) + at)
                                                : load(static_cast<const float*>(weights.scales) + at));
    }

    // Of units, which are centred.
    __m512 offset(PanelPair panels, int group, int tile, __m512 scale) const {
        const float middle = weights.codebook ? 0.0f : find_middle(format);
        const __m512 whole = _mm512_loadu_ps(weights.offsets + find_group(panels, group, tile));
        return _mm512_fnmadd_ps(scale, _mm512_set1_ps(middle), whole);
    }

  private:
    size_t find_group(PanelPair panels, int group, int tile) const {
        return (size_t(panels.of_tile(tile)) * groups + group) * kPanelColumns + tile % 2 * kTileColumns;
    }
};

// Some pairs of k of one group, for some rows and the panels of a task.
struct PairSpan {
    PanelPair panels;
    int group, row;
    bool is_start, is_end;  // of the group
    float *parts, *totals;  // [rows][kPairLeading]: the group's sum so far, and that of groups before it
};

// multiply(sums) adds the span's products to the group's sums.
template <int Rows, int format, class Multiply>
QUIRE_INLINE inline void add_span(const PairLayer<format>& layer, const PairSpan& span, const Multiply& multiply) {
    __m512 sums[Rows][kPairTiles];
    const auto for_each = [&](const auto& body) QUIRE_INLINE {
        repeat<Rows>([&](auto r) QUIRE_INLINE { repeat<kPairTiles>([&](auto t) QUIRE_INLINE { body(r, t); }); });
    };
    for_each([&](auto r, auto t) QUIRE_INLINE {
        const float* part = span.parts + r * kPairLeading + t * kTileColumns;
        sums[r][t] = span.is_start ? _mm512_setzero_ps() : _mm512_load_ps(part);
    });
    multiply(sums);
    if (!span.is_end)
        return for_each([&](auto r, auto t) QUIRE_INLINE {
            _mm512_store_ps(span.parts + r * kPairLeading + t * kTileColumns, sums[r][t]);
        });
    repeat<kPairTiles>([&](auto t) QUIRE_INLINE {
        const __m512 scale = layer.scale(span.panels, span.group, t);
        const __m512 offset = layer.x_sums ? layer.offset(span.panels, span.group, t, scale) : _mm512_setzero_ps();
        repeat<Rows>([&](auto r) QUIRE_INLINE {
            float* to = span.totals + r * kPairLeading + t * kTileColumns;
            __m512 total = _mm512_load_ps(to);
            if (layer.x_sums) {
                const float x_sum = layer.x_sums[size_t(span.row + r) * layer.groups + span.group];
                total = _mm512_fnmadd_ps(_mm512_set1_ps(x_sum), offset, total);
            }
            _mm512_store_ps(to, _mm512_fmadd_ps(sums[r][t], scale, total));
        });
    });
}

// body(first, count as a constant) for runs of at most kMaxRows rows.
template <class Body>
void for_row_tiles(int rows, const Body& body) {
    const int tiles = (rows + kMaxRows - 1) / kMaxRows;
    for (int tile = 0; tile < tiles; ++tile) {
        const int row = rows * tile / tiles;
        with_constant<kMaxRows>(rows * (tile + 1) / tiles - row, [&](auto count) { body(row, count); });
    }
}

// sums += a pair of x of each row, times the pair's numbers of every `Parts`th tile from `first` on.
template <int Rows, int Parts = 1, int first = 0>
QUIRE_INLINE inline void add_pair(const bf16* x, size_t lda, const __m512i (&numbers)[kPairTiles / Parts],
                                  __m512 (&sums)[Rows][kPairTiles]) {
    repeat<Rows>([&](auto r) QUIRE_INLINE {
        int32_t pair;
        std::memcpy(&pair, x + r * lda, sizeof pair);
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
        repeat<kPairTiles / Parts>([&](auto i) QUIRE_INLINE {
            __m512& sum = sums[r][Parts * i + first];
            sum = _mm512_dpbf16_ps(sum, both, (__m512bh)numbers[i]);
        });
    });
}

// totals of `Rows` rows from `row` on, group by group.
template <int Rows, int format>
void multiply_few_pairs(const PairLayer<format>& layer, PanelPair panels, int row, float* totals) {
    typedef PairLayer<format> Layer;
    constexpr int kParts = count_parts(format, Rows), kTiles = kPairTiles / kParts;
    const PairUnits<format> units(layer.weights);
    int half = 0;
    for (int group = 0; group < layer.groups; ++group) {
        const int end = layer.group_end(group);
        const PairSpan span{panels, group, row, true, true, nullptr, totals};
        add_span<Rows>(layer, span, [&](auto& sums) QUIRE_INLINE {
            for (; half < end; ++half) {
                const bf16* x = layer.x + row * layer.lda + half * kHalfDepth;
                const auto ahead = layer.find_ahead(panels, size_t(half) * Layer::kHalfBytes + kPairPrefetch);
                repeat<kParts>([&](auto part) QUIRE_INLINE {
                    repeat<kPairsPerHalf>([&](auto pair) QUIRE_INLINE {
                        ahead.template fetch<part * kPairsPerHalf + pair, kParts * kPairsPerHalf>();
                        __m512i numbers[kTiles];
                        repeat<kTiles>([&](auto i) QUIRE_INLINE {
                            numbers[i] = units.template read<pair>(layer.find_tile(panels, half, kParts * i + part));
                        });
                        add_pair<Rows, kParts, part>(x + 2 * pair, layer.lda, numbers, sums);
                    });
                });
            }
        });
    }
}

// Units of a block of K: a tile's pairs side by side.
struct PairBlock {
    static constexpr int kTileSize = kBlockHalves * kHalfDepth * kTileColumns;

    alignas(64) bf16 units[kPairTiles * kTileSize];

    const bf16* find(int tile, int pair) const { return units + tile * kTileSize + pair * 2 * kTileColumns; }

    template <int format>
    void fill(const PairLayer<format>& layer, PanelPair panels, int first, int last) {
        const PairUnits<format> reader(layer.weights);
        for (int t = 0; t < kPairTiles; ++t)
            for (int half = first; half < last; ++half) {
                bf16* to = units + t * kTileSize + (half - first) * kHalfDepth * kTileColumns;
                const uint8_t* from = layer.find_tile(panels, half, t);
                repeat<kPairsPerHalf>([&](auto pair) QUIRE_INLINE {
                    _mm512_store_si512(to + pair * 2 * kTileColumns, reader.template read<pair>(from));
                });
            }
    }
};

// Halves [first, last) of a block that begins at `start`, all of one group.
template <int Rows, int format>
void multiply_block(const PairLayer<format>& layer, const PairBlock& block, const PairSpan& span, int start, int first,
                    int last) {
    const bf16* x = layer.x + span.row * layer.lda + start * kHalfDepth;
    add_span<Rows>(layer, span, [&](auto& sums) QUIRE_INLINE {
        for (int pair = (first - start) * kPairsPerHalf; pair < (last - start) * kPairsPerHalf; ++pair) {
            __m512i numbers[kPairTiles];
            repeat<kPairTiles>([&](auto t) QUIRE_INLINE { numbers[t] = _mm512_load_si512(block.find(t, pair)); });
            add_pair<Rows>(x + 2 * pair, layer.lda, numbers, sums);
        }
    });
}

// The same of rows [first, first + rows) of any number.
template <int format>
void multiply_many_pairs(const PairLayer<format>& layer, PanelPair panels, int first, int rows, float* totals) {
    typedef PairLayer<format> Layer;
    alignas(64) float parts[kChunkRows * kPairLeading];
    PairBlock block;
    for (int start = 0, group = 0; start < layer.halves; start += kBlockHalves) {
        const int stop = std::min(start + kBlockHalves, layer.halves);
        block.fill(layer, panels, start, stop);
        for (int half = stop; half < stop + kBlockHalves; ++half)
            layer.find_ahead(panels, size_t(half) * Layer::kHalfBytes).template fetch<0, 1>();
        for (int from = start; from < stop;) {
            const int to = std::min(stop, layer.group_end(group));
            const bool is_start = from == group * layer.group_halves, is_end = to == layer.group_end(group);
            for_row_tiles(rows, [&](int row, auto count) {
                const PairSpan span{panels, group, first + row, is_start, is_end, parts + row * kPairLeading,
                                    totals + row * kPairLeading};
                multiply_block<count>(layer, block, span, start, from, to);
            });
            if (is_end) ++group;
            from = to;
        }
    }
}

template <int format>
void multiply_pairs(const PairLayer<format>& layer, PanelPair panels, int first, int rows, float* totals) {
    if (rows > few_pair_rows(format)) return multiply_many_pairs(layer, panels, first, rows, totals);
    for_row_tiles(rows, [&](int row, auto count) {
        multiply_few_pairs<count>(layer, panels, first + row, totals + row * kPairLeading);
    });
}

// [rows][groups] sums of x, each of 16 chains.
template <int format>
void add_up_groups(const PairLayer<format>& layer, int rows, float* to) {
    parallel_runs(rows, double(rows) * layer.halves * kHalfDepth > kMinParallelWork, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r)
            for (int group = 0, half = 0; group < layer.groups; ++group) {
                Vec total{};
                for (const int end = layer.group_end(group); half < end; ++half)
                    total += load(layer.x + r * layer.lda + half * kHalfDepth);
                to[r * layer.groups + group] = sum(total);
            }
    });
}

template <int format>
void compute_pairs_of(const PackedLayer<bf16>& layer) {
    const QuireLinear& weights = *layer.narrow;
    const int size = find_group_size(weights), groups = (layer.K + size - 1) / size, panels = count_panels(layer.N);
    const int tasks = (panels + kPairPanels - 1) / kPairPanels, chunks = (layer.m + kChunkRows - 1) / kChunkRows;
    with_padded_rows<bf16>(layer, [&](const bf16* x, size_t lda, bool is_parallel) {
        PairLayer<format> pairs{weights, x, lda, nullptr, 2 * count_steps(layer.K), size / kHalfDepth, groups};
        const Floats x_sums = weights.offsets ? allocate(size_t(layer.m) * groups) : nullptr;
        if (x_sums) add_up_groups(pairs, layer.m, x_sums.get());
        pairs.x_sums = x_sums.get();
        parallel_for(tasks * chunks, is_parallel, [&](int task) {
            const int panel = task % tasks * kPairPanels, chunk = task / tasks;
            const int first = int(int64_t(layer.m) * chunk / chunks);
            const int last = int(int64_t(layer.m) * (chunk + 1) / chunks);
            alignas(64) float totals[kChunkRows * kPairLeading];
            std::fill_n(totals, (last - first) * kPairLeading, 0.0f);
            multiply_pairs(pairs, {panel, std::min(panel + 1, panels - 1)}, first, last - first, totals);
            finish_rows(layer, totals, kPairLeading, first, last, panel * kPanelColumns, kPairLeading,
                        [](int row) { return row; });
        });
    });
}

inline void compute_pairs(const PackedLayer<bf16>& layer) {
    with_narrow_format(layer.narrow->format, [&](auto format) { compute_pairs_of<format>(layer); });
}

#endif

}  // namespace quire
