// Weights of 4 and 8 bits: their packed layout, and how a kernel gets the numbers that they stand for.
//
// Panels, tiles and steps are those of linear_layout.h: 32 columns, two times 16, and 32 k. Codes lie column by column:
// those of 8 bits as [panels][steps][2][16 columns][32 k] bytes, those of 4 bits as [panels][ceil(K / 128)][2]
// [16 columns][32 words] of 16 bits, whose four nibbles are k, k + 32, k + 64 and k + 96. Scales and offsets are
// [panels][groups][32]. What comes out is code * scale - offset, or codebook[code] * scale - offset, rounded once (to
// float32, then to bfloat16): a layer has the bits of a plain one over those numbers. Of 4 bits there are 16 such
// numbers a group, so they are computed once and looked up.
#pragma once

#include "linear.h"
#include "linear_layout.h"

#include <algorithm>

namespace quire {

constexpr int kHalfDepth = 16;         // k of half a step; a group has a multiple of them
constexpr int kStepsPerWord = 4;       // of 4 bits
constexpr int kNarrowPrefetch = 4096;  // bytes: reading pauses while a block is multiplied

inline bool is_narrow_format(int format) { return format >= QUIRE_LINEAR_INT4; }

constexpr int steps_per_block(int format) { return format == QUIRE_LINEAR_INT4 ? kStepsPerWord : 1; }

// Bytes of a column in a block of so many steps.
constexpr int column_bytes(int format) { return format == QUIRE_LINEAR_INT4 ? 64 : kTileDepth; }

inline int count_blocks(int format, int K) {
    return (count_steps(K) + steps_per_block(format) - 1) / steps_per_block(format);
}

// Offset of a symmetric integer weight, in scales.
constexpr float find_middle(int format) { return format == QUIRE_LINEAR_INT4 ? 8.0f : 128.0f; }

// What 4-bit codes stand for where there is no codebook.
alignas(64) constexpr float kWholeNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Scales and offsets of a panel's columns for each half of a step.
template <int format>
class PanelGroups {
  public:
    PanelGroups(const QuireLinear& layer, int panel)
        : layer_(layer),
          size_(layer.group_size ? layer.group_size : layer.num_in),
          groups_((layer.num_in + size_ - 1) / size_),
          first_(size_t(panel) * groups_ * kPanelColumns) {}

    // Whether they are others than those of the step before.
    bool seek(int step) {
        if (step < end_) return false;
        const int group = std::min(step * kTileDepth / size_, groups_ - 1);
        load(group, 0);
        const int next = std::min((step * kTileDepth + kHalfDepth) / size_, groups_ - 1);
        load(next, 1);
        is_even = group == next;
        end_ = is_even ? std::max(step + 1, (group + 1) * size_ / kTileDepth) : step + 1;
        if (group == groups_ - 1) end_ = INT32_MAX;
        return true;
    }

    bool is_even = true;  // whether both halves have the same
    alignas(64) float scales[2][kPanelColumns];
    alignas(64) float offsets[2][kPanelColumns];

  private:
    void load(int group, int half) {
        const size_t at = first_ + size_t(group) * kPanelColumns;
        const bool has_middle = format != QUIRE_LINEAR_FP8 && !layer_.codebook;
        for (int i = 0; i < kPanelColumns; i += kLanes) {
            const Vec scale = layer_.has_bf16_scales ? quire::load(static_cast<const bf16*>(layer_.scales) + at + i)
                                                     : quire::load(static_cast<const float*>(layer_.scales) + at + i);
            store(scales[half] + i, scale);
            store(offsets[half] + i, layer_.offsets ? quire::load(layer_.offsets + at + i)
                                                    : has_middle ? scale * find_middle(format) : Vec{});
        }
    }

    const QuireLinear& layer_;
    const int size_, groups_;
    const size_t first_;
    int end_ = 0;
};

#if defined(__AVX512BF16__)

// e4m3 numbers as float32: a half float with the same bits has an exponent that is less by 8.
inline void load_fp8(const uint8_t* from, __m512& low, __m512& high) {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(wide, 8), _mm512_set1_epi16(short(0x8000)));
    const __m512i size = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(0x3F80));
    const __m512i half = _mm512_or_si512(sign, size);
    const __m512 factor = _mm512_set1_ps(256.0f);
    low = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), factor);
    high = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)), factor);
}

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

    // put(column, 16 of them as float32), for a half of the step.
    template <class Put>
    void read_floats(int tile, int half, const Put& put) const {
        const uint8_t* from = find(tile);
        for (int n = 0; n < kTileColumns; ++n, from += column_bytes(format)) {
            __m512 low, high;
            compute(from, tile * kTileColumns + n, low, high);
            put(n, half ? high : low);
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
        if constexpr (format == QUIRE_LINEAR_INT4) {
            const __m512i words = _mm512_loadu_si512(from);
            const __m128i shift = _mm_cvtsi32_si128(step_ % kStepsPerWord * 4);
            low = _mm512_permutexvar_ps(_mm512_srl_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(words)), shift), units_);
            high = _mm512_permutexvar_ps(
                _mm512_srl_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1)), shift), units_);
        } else if constexpr (format == QUIRE_LINEAR_INT8) {
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

template <int format>
void expand_step(const PanelReader<format>& reader, float* to) {
    for (int tile = 0; tile < 2; ++tile)
        for (int half = 0; half < 2; ++half) {
            __m512i rows[16];
            reader.read_floats(tile, half, [&](int n, __m512 numbers) { rows[n] = (__m512i)numbers; });
            transpose(rows);
            for (int k = 0; k < 16; ++k)
                _mm512_store_si512(to + (half * kHalfDepth + k) * kPanelColumns + tile * kTileColumns, rows[k]);
        }
}

#else

inline float decode_fp8(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent ? std::ldexp(float(8 + fraction), exponent - 10) : std::ldexp(float(fraction), -9);
    return code & 128 ? -size : size;
}

// As above, a number at a time.
template <int format>
class PanelReader {
  public:
    PanelReader(const QuireLinear& layer, int panel)
        : groups_(layer, panel),
          units_(layer.codebook ? layer.codebook : kWholeNumbers),
          from_(static_cast<const uint8_t*>(layer.packed) +
                size_t(panel) * count_blocks(format, layer.num_in) * kPanelColumns * column_bytes(format)) {}

    void seek(int step) {
        step_ = step;
        groups_.seek(step);
    }

    float read(int column, int k) const {
        const size_t block = step_ / steps_per_block(format);
        const uint8_t* from = from_ + (block * kPanelColumns + column) * column_bytes(format);
        float unit;
        if (format == QUIRE_LINEAR_INT4)
            unit = units_[from[2 * k + step_ % kStepsPerWord / 2] >> step_ % 2 * 4 & 15];
        else
            unit = format == QUIRE_LINEAR_INT8 ? float(from[k]) : decode_fp8(from[k]);
        const int half = k / kHalfDepth;
        return std::fma(unit, groups_.scales[half][column], -groups_.offsets[half][column]);
    }

  private:
    PanelGroups<format> groups_;
    const float* const units_;
    const uint8_t* const from_;
    int step_ = 0;
};

template <int format, class To>
void expand_step(const PanelReader<format>& reader, To* to) {
    for (int n = 0; n < kPanelColumns; ++n)
        for (int k = 0; k < kTileDepth; ++k) {
            const int paired = n / kTileColumns * kTileSize + k / 2 * 2 * kTileColumns + n % kTileColumns * 2 + k % 2;
            to[std::is_same_v<To, float> ? k * kPanelColumns + n : paired] = narrow<To>(reader.read(n, k));
        }
}

#endif

template <int format, class To>
void expand_panel(const QuireLinear& layer, int panel, int step, int count, To* to) {
    PanelReader<format> reader(layer, panel);
    for (int i = 0; i < count; ++i) {
        reader.seek(step + i);
        expand_step(reader, to + i * kStepSize);
    }
}

// `count` steps of a panel as bfloat16 in the layout of bfloat16 weights, or as float [k][32]; `to` aligned to 64.
template <class To>
void expand_narrow(const QuireLinear& layer, int panel, int step, int count, To* to) {
    switch (layer.format) {
        case QUIRE_LINEAR_INT4: return expand_panel<QUIRE_LINEAR_INT4>(layer, panel, step, count, to);
        case QUIRE_LINEAR_INT8: return expand_panel<QUIRE_LINEAR_INT8>(layer, panel, step, count, to);
        default: return expand_panel<QUIRE_LINEAR_FP8>(layer, panel, step, count, to);
    }
}

}  // namespace quire
