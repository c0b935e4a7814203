// Narrow weights for AMX: their layout, and how they become bfloat16 numbers.
//
// Codes lie column by column: those of 8 bits as [panels][steps][2][16 columns][32 k] bytes, those of 4 bits as
// [panels][ceil(K / 128)][2][16 columns][32 words] of 16 bits, whose four nibbles are k, k + 32, k + 64 and k + 96. Of
// 4 bits there are 16 numbers a group, so they are computed once and looked up.
#pragma once

#include "linear/linear_narrow.h"

namespace quire {

constexpr int kStepsPerWord = 4;       // of 4 bits
constexpr int kNarrowPrefetch = 4096;  // bytes: reading pauses while a block is multiplied

constexpr int steps_per_block(int format) { return format == QUIRE_LINEAR_INT4 ? kStepsPerWord : 1; }

// Bytes of a column in a block of so many steps.
constexpr int column_bytes(int format) { return format == QUIRE_LINEAR_INT4 ? 64 : kTileDepth; }

inline int count_blocks(int format, int K) {
    return (count_steps(K) + steps_per_block(format) - 1) / steps_per_block(format);
}

#if defined(__AVX512BF16__)

inline __m512 load_int8(const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// The numbers of a panel's columns, 32 k at a time.
template <int format>
class PanelReader {
  public:
    // `num_beside` other panels after this one are read beside it.
    PanelReader(const QuireLinear& layer, int panel, int num_beside = 0)
        : groups_(layer, panel),
          units_(_mm512_loadu_ps(layer.codebook ? layer.codebook : kWholeNumbers)),
          num_blocks_(count_blocks(format, layer.num_in)),
          from_(static_cast<const uint8_t*>(layer.packed) + panel * panel_bytes()),
          skipped_(num_beside * panel_bytes()) {}

    // Goes to a step; steps rise.
    void seek(int step) {
        step_ = step;
        const int block = step / steps_per_block(format);
        const size_t end = size_t(num_blocks_ - block) * block_bytes();
        ahead_ = kNarrowPrefetch + (end > kNarrowPrefetch ? 0 : skipped_);
        if (groups_.seek(step) && format == QUIRE_LINEAR_INT4) make_tables();
    }

    // put(column, its 32 numbers as bfloat16) for a tile's 16 columns.
    template <class Put>
    void read(int tile, const Put& put) const {
        if constexpr (format == QUIRE_LINEAR_INT4) {
            with_constant<kStepsPerWord - 1, 0>(step_ % kStepsPerWord, [&](auto place) {
                groups_.is_even ? look_up<place, true>(tile, put) : look_up<place, false>(tile, put);
            });
        } else {
            const uint8_t* from = find(tile);
            for (int n = 0; n < kTileColumns; ++n, from += column_bytes(format)) {
                __builtin_prefetch(from + ahead_);
                __m512 low, high;
                compute(from, tile * kTileColumns + n, low, high);
                put(n, (__m512i)_mm512_cvtne2ps_pbh(high, low));
            }
        }
    }

  private:
    const uint8_t* find(int tile) const {
        const size_t block = step_ / steps_per_block(format);
        return from_ + (block * 2 + tile) * kTileColumns * column_bytes(format);
    }

    static constexpr size_t block_bytes() { return size_t(kPanelColumns) * column_bytes(format); }

    size_t panel_bytes() const { return num_blocks_ * block_bytes(); }

    // The nibble at `place` of each word is looked up by the lowest 5 bits. If both halves of a step have one group, so
    // do both halves of the table, and the fifth bit may be anything.
    template <int place, bool is_even, class Put>
    void look_up(int tile, const Put& put) const {
        const uint8_t* from = find(tile);
        const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
        for (int n = 0; n < kTileColumns; ++n, from += 64) {
            if (n / kStepsPerWord == place) __builtin_prefetch(from + ahead_);
            __m512i words = _mm512_load_si512(from);
            if (place > 0) words = _mm512_srli_epi16(words, 4 * place);
            const int column = tile * kTileColumns + n;
            __m512i table;
            if (is_even) {
                table = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(tables_ + column * 16)));
            } else {
                table = _mm512_load_si512(tables_ + column * 32);
                words = _mm512_ternarylogic_epi32(words, _mm512_set1_epi16(15), upper, 0xEA);  // words & 15 | upper
            }
            put(n, _mm512_permutexvar_epi16(words, table));
        }
    }

    void compute(const uint8_t* from, int column, __m512& low, __m512& high) const {
        if constexpr (format == QUIRE_LINEAR_INT8) {
            low = load_int8(from);
            high = load_int8(from + kHalfDepth);
        } else {
            load_fp8(from, low, high);
        }
        low = scale(low, 0, column);
        high = scale(high, 1, column);
    }

    __m512 scale(__m512 units, int half, int column) const {
        return _mm512_fmsub_ps(units, _mm512_set1_ps(groups_.scales[half][column]),
                               _mm512_set1_ps(groups_.offsets[half][column]));
    }

    // What the codes stand for: [column][16], or where a step's halves are in two groups [column][half][16].
    void make_tables() {
        if (groups_.is_even)
            for (int n = 0; n < kPanelColumns; n += 2) put_table(n * 16, scale(units_, 0, n), scale(units_, 0, n + 1));
        else
            for (int n = 0; n < kPanelColumns; ++n) put_table(n * 32, scale(units_, 0, n), scale(units_, 1, n));
    }

    void put_table(int at, __m512 first, __m512 second) {
        _mm512_store_si512(tables_ + at, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }

    PanelGroups<format> groups_;
    const __m512 units_;
    const int num_blocks_;
    const uint8_t* const from_;
    const size_t skipped_;
    size_t ahead_ = 0;
    int step_ = 0;
    alignas(64) bf16 tables_[format == QUIRE_LINEAR_INT4 ? kPanelColumns * 32 : 32];
};

// Rows of a matrix of 16 x 16 words of 32 bits become its columns.
inline void transpose(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
        }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) {
            t[i + 8 * j] = _mm512_shuffle_i32x4(r[i + 8 * j], r[i + 4 + 8 * j], 0x88);
            t[i + 4 + 8 * j] = _mm512_shuffle_i32x4(r[i + 8 * j], r[i + 4 + 8 * j], 0xDD);
        }
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    }
}

template <int format>
void expand_step(const PanelReader<format>& reader, bf16* to) {
    for (int tile = 0; tile < 2; ++tile) {
        __m512i rows[16];
        reader.read(tile, [&](int n, __m512i numbers) { rows[n] = numbers; });
        transpose(rows);
        for (int pair = 0; pair < 16; ++pair) _mm512_store_si512(to + tile * kTileSize + pair * 2 * kTileColumns, rows[pair]);
    }
}

// `count` steps of a panel in the layout of bfloat16 weights; `to` aligned to 64.
inline void expand_narrow(const QuireLinear& layer, int panel, int step, int count, bf16* to) {
    with_narrow_format(layer.format, [&](auto format) {
        PanelReader<format> reader(layer, panel);
        for (int i = 0; i < count; ++i) {
            reader.seek(step + i);
            expand_step(reader, to + i * kStepSize);
        }
    });
}

#endif

}  // namespace quire
