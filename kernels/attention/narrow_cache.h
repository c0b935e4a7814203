// The KV cache in 8 bits: codes and scales as narrow_cache.py has them, and how they are written and widened.
// A head's block is its codes, in the order of attention_step.h, then a float32 scale for each of its slots. Codes are
// exact in bfloat16: products of widened codes are those of the codes, and scales multiply scores and weights.
// Legend: D head size.
#pragma once

#include "linear/linear_narrow.h"
#include "linear/tile.h"

#include <algorithm>

namespace quire::attention {

enum KVFormat { kModelType = 0, kInt8 = 1, kFp8 = 2 };  // as find_format of narrow_cache.py

constexpr int kScaleBytes = 4;

typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));

// Bytes of a head's block.
inline size_t narrow_size(int block_size, int head_size) { return size_t(block_size) * (head_size + kScaleBytes); }

// e4m3's code of a number up to 448, to the nearest, ties to even.
inline UintVec encode_fp8(Vec x) {
    const UintVec bits = (UintVec)x, sign = bits >> 24 & 0x80u;
    const Vec size = (Vec)(bits & 0x7fffffffu);
    const UintVec whole = (((UintVec)size + 0x7ffffu + ((UintVec)size >> 20 & 1u)) >> 20) - 960u;
    const Vec small = (size + 16384.0f - 16384.0f) * 512.0f;  // below 2^-6 a step is 2^-9
    return (size < 0x1p-6f ? (UintVec)__builtin_convertvector(small, IntVec) : whole) | sign;
}

// kLanes numbers of x [D] from d on, 0 past the last.
template <typename T>
inline Vec load_part(const T* x, int d, int D) {
    if (d + kLanes <= D) return load(x + d);
    float row[kLanes];
    for (int i = 0; i < kLanes; ++i) row[i] = d + i < D ? widen(x[d + i]) : 0.0f;
    return load(row);
}

// The largest |x| of x [D]; NaN if one is.
template <typename T>
inline float find_top(const T* x, int D) {
    Vec top = Vec{};
    IntVec is_nan = IntVec{};
    for (int d = 0; d < D; d += kLanes) {
        const Vec part = load_part(x, d, D), size = (Vec)((UintVec)part & 0x7fffffffu);
        is_nan |= part != part;
        top = top > size ? top : size;
    }
    for (int i = 0; i < kLanes; ++i)
        if (is_nan[i]) return NAN;
    return max(top);
}

// Codes of x [D] / scale.
template <typename T>
inline void encode_by(float scale, const T* x, int D, KVFormat format, uint8_t* codes) {
    for (int d = 0; d < D; d += kLanes) {
        const Vec ratio = load_part(x, d, D) / scale;
        const UintVec code = format == kInt8 ? (UintVec)(ratio + 12582912.0f) : encode_fp8(ratio);  // 1.5 * 2^23
        const ByteVec bytes = __builtin_convertvector(code, ByteVec);
        std::memcpy(codes + d, &bytes, std::min(kLanes, D - d));
    }
}

// Of the largest number; a NaN stays.
inline float find_scale(float top, KVFormat format) {
    const float scale = top / (format == kInt8 ? 127.0f : 448.0f);
    return scale < 0x1p-126f ? 0x1p-126f : scale;
}

// Codes of x [D]; their scale comes back.
template <typename T>
inline float encode(const T* x, int D, KVFormat format, uint8_t* codes) {
    const float scale = find_scale(find_top(x, D), format);
    encode_by(scale, x, D, format, codes);
    return scale;
}

// What the two codes of a rotated number of a latent are multiplied by, as END_FACTORS of narrow_cache.py.
struct EndFactors {
    float high, low;
};

inline EndFactors find_end_factors(KVFormat format) {
    return format == kInt8 ? EndFactors{128.0f, 1.0f} : EndFactors{1.0f, 0.0625f};
}

// Numbers of kLanes codes.
inline Vec widen_vector(const uint8_t* from, KVFormat format) {
    ByteVec bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    const UintVec codes = __builtin_convertvector(bytes, UintVec);
    return format == kInt8 ? __builtin_convertvector((IntVec)(codes << 24) >> 24, Vec) : decode_fp8(codes);
}

// The numbers of `count` codes, a multiple of 8.
inline void widen_codes(const uint8_t* from, int count, KVFormat format, float* to) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, widen_vector(from + i, format));
    for (uint8_t rest[kLanes] = {}; i < count; i = count) {
        std::memcpy(rest, from + i, count - i);
        const Vec numbers = widen_vector(rest, format);
        std::memcpy(to + i, &numbers, (count - i) * sizeof(float));
    }
}

inline void widen_codes(const uint8_t* from, int count, KVFormat format, bf16* to) {
    float numbers[kLanes];
    for (int i = 0; i < count; i += kLanes) {
        const int part = std::min(kLanes, count - i);
        widen_codes(from + i, part, format, numbers);
        for (int j = 0; j < part; ++j) to[i + j] = narrow<bf16>(numbers[j]);
    }
}

// Codes [rank + 2 rope] of a latent x [rank + rope]; their scale comes back.
template <typename T>
inline float encode_latent(const T* x, int rank, int rope, KVFormat format, uint8_t* codes) {
    const EndFactors factors = find_end_factors(format);
    const float first = find_top(x, rank), second = find_top(x + rank, rope) / factors.high;
    const float scale = find_scale(first != first ? first : second < first ? first : second, format);
    encode_by(scale, x, rank, format, codes);
    float row[kLanes];
    for (int d = 0; d < rope; d += kLanes) {
        const int count = std::min(kLanes, rope - d);
        uint8_t* to = codes + rank + d;
        const Vec ratio = load_part(x + rank, d, rope) / scale;
        store(row, ratio);
        encode_by(factors.high, row, count, format, to);
        uint8_t part[kLanes] = {};
        std::memcpy(part, to, count);
        store(row, ratio - widen_vector(part, format) * factors.high);
        encode_by(factors.low, row, count, format, to + rope);
    }
    return scale;
}

// Widens codes to bfloat16, where processors look up bytes by tables of the 128 sizes.
class PairWidener {
  public:
    explicit PairWidener(KVFormat format) : format_(format) {
        for (int code = 0; code < 128; ++code) {
            const float size = format == kInt8 ? float(code) : decode_fp8(UintVec{} + uint32_t(code))[0];
            low_[code] = narrow<bf16>(size) & 0xff, high_[code] = narrow<bf16>(size) >> 8;
        }
    }

    KVFormat format() const { return format_; }

    // 32 codes.
    void operator()(const uint8_t* from, bf16* to) const {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
        alignas(64) uint8_t codes[64] = {};
        std::memcpy(codes, from, 32);
        UintVec first, second;
        (*this)(codes, first, second);
        std::memcpy(to, &first, sizeof first);
#else
        widen_codes(from, 32, format_, to);
#endif
    }

    // 64 codes, half of them to each.
    void operator()(const uint8_t* from, bf16* to, bf16* to_second) const {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
        UintVec first, second;
        (*this)(from, first, second);
        std::memcpy(to, &first, sizeof first);
        std::memcpy(to_second, &second, sizeof second);
#else
        (*this)(from, to);
        (*this)(from + 32, to_second);
#endif
    }

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
    void operator()(const uint8_t* from, UintVec& first, UintVec& second) const {
        const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // that unpacking undoes
        const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from));
        const __m512i sizes = format_ == kInt8 ? _mm512_abs_epi8(codes) : codes;  // look-ups leave the highest bit
        const __m512i low = look_up(low_, sizes), sign = _mm512_set1_epi8(char(0x80));
        const __m512i high = _mm512_ternarylogic_epi64(look_up(high_, sizes), codes, sign, 0xf8);  // a | b & c
        first = (UintVec)_mm512_unpacklo_epi8(low, high);
        second = (UintVec)_mm512_unpackhi_epi8(low, high);
    }

  private:
    static __m512i look_up(const uint8_t* table, __m512i codes) {
        return _mm512_permutex2var_epi8(_mm512_loadu_si512(table), codes, _mm512_loadu_si512(table + 64));
    }
#endif

  private:
    KVFormat format_;
    alignas(64) uint8_t low_[128], high_[128];  // bytes of each
};

inline const PairWidener& find_widener(KVFormat format) {
    static const PairWidener int8(kInt8), fp8(kFp8);
    return format == kInt8 ? int8 : fp8;
}

}  // namespace quire::attention
