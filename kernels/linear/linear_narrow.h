// Weights of 4 and 8 bits: what codes stand for, their packed layout, and how they become float32 numbers.
//
// A code stands for code * scale - offset, or codebook[code] * scale - offset. For float32 x (and bfloat16 x without
// instructions for it) that is rounded once, to float32, and for AMX then to bfloat16: a layer has the bits of a plain
// one over those numbers. AVX512-BF16 rounds no weight (linear_pairs.h).
//
// Panels, tiles and steps are those of linear_layout.h: 32 columns, two times 16, and 32 k. Scales and offsets are
// [panels][groups][32]. Codes lie as bfloat16 pairs would: [panels][halves of steps][2][16 columns, 16 k], those of 8
// bits as [8 pairs][16 columns][2] bytes, with the upper bit of an integer turned (two's complement), those of 4 bits
// as [2 quads][16 columns][2] words of 16 bits, whose four nibbles are 2 k apart. For AMX they lie column by column
// (linear_columns.h).
#pragma once

#include "linear/linear.h"
#include "linear/linear_layout.h"

#include <algorithm>

namespace quire {

constexpr int kHalfDepth = 16;  // k of half a step; a group has a multiple of them
constexpr int kQuadDepth = 8;   // k of a word's nibbles, for two words
constexpr int kTurnedBit = 128;

inline bool is_narrow_format(int format) { return format >= QUIRE_LINEAR_INT4; }

constexpr int bits_of(int format) { return format == QUIRE_LINEAR_INT4 ? 4 : 8; }

inline int find_group_size(const QuireLinear& layer) { return layer.group_size ? layer.group_size : layer.num_in; }

// body(format) for a narrow format, as a constant that templates take.
template <class Body>
void with_narrow_format(int format, const Body& body) {
    with_constant<QUIRE_LINEAR_FP8, QUIRE_LINEAR_INT4>(format, body);
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
          size_(find_group_size(layer)),
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

#endif

// e4m3 numbers as float32.
inline Vec decode_fp8(UintVec codes) {
    const UintVec size = codes & 127u;
    const Vec whole = (Vec)((size << 20) + (120u << 23)), small = __builtin_convertvector((IntVec)size, Vec) * 0x1p-9f;
    return (Vec)((UintVec)(size < 8u ? small : whole) | (codes & 128u) << 24);
}

inline Vec look_up(const float* table, UintVec codes) {
#if defined(__AVX512BF16__)
    return (Vec)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(table));
#else
    float numbers[kLanes];
    for (int i = 0; i < kLanes; ++i) numbers[i] = table[codes[i]];
    return load(numbers);
#endif
}

// A panel's numbers as float32, a step at a time.
template <int format>
class FloatReader {
  public:
    FloatReader(const QuireLinear& layer, int panel)
        : groups_(layer, panel),
          codebook_(layer.codebook),
          from_(static_cast<const uint8_t*>(layer.packed) + size_t(panel) * count_steps(layer.num_in) * kStepBytes) {}

    // to: [32 k][32 columns].
    void read(int step, float* to) {
        groups_.seek(step);
        const uint8_t* from = from_ + size_t(step) * kStepBytes;
        for (int half = 0; half < 2; ++half)
            for (int tile = 0; tile < 2; ++tile, from += kTileBytes)
                for (int n = 0; n < kTileColumns; n += kLanes)
                    read_columns(from, half, tile * kTileColumns + n, to + half * kHalfDepth * kPanelColumns);
    }

  private:
    static constexpr int kTileBytes = kHalfDepth * kTileColumns * bits_of(format) / 8, kStepBytes = 4 * kTileBytes;

    void read_columns(const uint8_t* from, int half, int column, float* to) const {
        const Vec scale = load(groups_.scales[half] + column), offset = load(groups_.offsets[half] + column);
        const auto put = [&](int k, UintVec codes) {
            store(to + k * kPanelColumns + column, decode(codes) * scale - offset);
        };
        const int n = column % kTileColumns;
        if constexpr (format == QUIRE_LINEAR_INT4) {
            for (int quad = 0; quad < kHalfDepth / kQuadDepth; ++quad) {
                UintVec words;
                std::memcpy(&words, from + (quad * kTileColumns + n) * 4, sizeof words);
                for (int i = 0; i < kQuadDepth; ++i)
                    put(quad * kQuadDepth + i, words >> (i % 2 * 16 + i / 2 * 4) & 15u);
            }
        } else {
            for (int k = 0; k < kHalfDepth; k += 2) {
                HalfVec pairs;
                std::memcpy(&pairs, from + k * kTileColumns + n * 2, sizeof pairs);
                const UintVec words = __builtin_convertvector(pairs, UintVec);
                put(k, words & 255u);
                put(k + 1, words >> 8);
            }
        }
    }

    Vec decode(UintVec codes) const {
        if (format == QUIRE_LINEAR_FP8) return decode_fp8(codes);
        if (format == QUIRE_LINEAR_INT4 && codebook_) return look_up(codebook_, codes);
        if (format == QUIRE_LINEAR_INT8) codes ^= unsigned(kTurnedBit);
        return __builtin_convertvector((IntVec)codes, Vec);
    }

    PanelGroups<format> groups_;
    const float* const codebook_;
    const uint8_t* const from_;
};

// `count` steps of a panel as float32 [k][32]; `to` aligned to 64.
inline void expand_narrow(const QuireLinear& layer, int panel, int step, int count, float* to) {
    with_narrow_format(layer.format, [&](auto format) {
        FloatReader<format> reader(layer, panel);
        for (int i = 0; i < count; ++i) reader.read(step + i, to + i * kStepSize);
    });
}

}  // namespace quire
