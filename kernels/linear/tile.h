// Vectors of floats and the one small matrix product that all native kernels are made of.
//
// Every output element is a chain of fused multiply-adds over `depth`, in order, from its start value. So a
// result does not depend on how many rows or columns are computed beside it: callers may tile rows, columns
// and depth as they like and get equal bits. No fast-math: that is what keeps the chains in order.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace quire {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kMaxRows = 6;  // 6 x 4 sums, 4 columns of b and a broadcast: 29 of 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kMaxRows = 3;  // 3 x 4 sums of 16 registers
#else
constexpr int kLanes = 4;
constexpr int kMaxRows = 3;
#endif
constexpr int kVectors = 4;                    // vectors side by side in a tile
constexpr int kColumns = kVectors * kLanes;    // columns of a full tile

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));
typedef uint16_t bf16;  // the upper half of a float's bits

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline Vec load(const bf16* p) {
    HalfVec h;
    std::memcpy(&h, p, sizeof h);
#if defined(__AVX512BF16__)  // GCC takes four shuffles for the conversion
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#else
    return (Vec)(__builtin_convertvector(h, UintVec) << 16);
#endif
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Round to nearest, ties to even; a NaN stays a NaN. The processor's instruction makes denormal numbers 0.
inline void store(bf16* p, Vec v) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &rounded, sizeof rounded);
#else
    UintVec bits = (UintVec)v;
    UintVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    IntVec is_nan = v != v;
    UintVec result = is_nan ? (bits >> 16) | 0x40u : rounded;
    HalfVec h = __builtin_convertvector(result, HalfVec);
    std::memcpy(p, &h, sizeof h);
#endif
}

inline float widen(float x) { return x; }

inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename T>
inline T narrow(float x);

template <>
inline float narrow<float>(float x) {
    return x;
}

template <>
inline bf16 narrow<bf16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return bf16(bits >> 16) | 0x40;
    return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// body(a zero of the type), which is bfloat16 or float32.
template <typename Body>
inline void with_type(int is_bf16, const Body& body) {
    is_bf16 ? body(bf16{}) : body(float{});
}

// body(value) for a value from Least to Most, as a constant that templates take.
template <int Most, int Least = 1, typename Body>
inline void with_constant(int value, const Body& body) {
    if (value == Least) return body(std::integral_constant<int, Least>{});
    if constexpr (Least < Most) with_constant<Most, Least + 1>(value, body);
}

// Where GCC is left to choose, sums reached through lambdas become an array in memory: a third of the speed.
#define QUIRE_INLINE __attribute__((always_inline))

template <typename Body, int... index>
QUIRE_INLINE inline void repeat_each(const Body& body, std::integer_sequence<int, index...>) {
    (body(std::integral_constant<int, index>{}), ...);
}

// body(0), body(1), ... as constants.
template <int count, typename Body>
QUIRE_INLINE inline void repeat(const Body& body) {
    repeat_each(body, std::make_integer_sequence<int, count>{});
}

inline Vec splat(float x) { return x - Vec{}; }

// exp(x) to about 2 units in the last place; 0 below -87, exp(88) above 88, exactly 1 at 0.
inline Vec exp(Vec x) {
    const IntVec is_small = x < -87.0f;
    const Vec clamped = x > 88.0f ? splat(88.0f) : x;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    Vec shifted = clamped * 1.44269504f + shift;
    Vec power = shifted - shift;
    Vec rest = clamped - power * 0.693359375f;
    rest = rest - power * -2.12194440e-4f;
    Vec series = rest * 1.3981999507e-3f + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * (rest * rest) + rest + 1.0f;
    IntVec exponent = ((IntVec)shifted - (IntVec)splat(shift) + 127) << 23;
    return is_small ? Vec{} : series * (Vec)exponent;
}

// cap * tanh(score / cap)
inline Vec cap_score(Vec score, float cap) { return cap - 2.0f * cap / (exp(score * (2.0f / cap)) + 1.0f); }

// Sum and maximum over lanes, in a fixed order.
inline float sum(Vec v) {
#if defined(__AVX512BF16__)
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float lanes[kLanes];
    std::memcpy(lanes, &v, sizeof v);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}

inline float max(Vec v) {
    float lanes[kLanes];
    std::memcpy(lanes, &v, sizeof v);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

struct NoFetch {
    void operator()(int) const {}
};

// c[Rows, Vectors * kLanes] += a[Rows, depth] b[depth, Vectors * kLanes]; ld*: elements between rows. Each
// vector of b's columns begins at a pointer of its own. fetch(k) is called before row k of b is read: it may ask for
// what comes next.
template <int Rows, int Vectors, typename B, typename Fetch = NoFetch>
inline void multiply_tile(const float* a, size_t lda, const B* const* b, size_t ldb, float* c, size_t ldc,
                          int depth, const Fetch& fetch = {}) {
    Vec sums[Rows][Vectors];
    const B* starts[Vectors];
    for (int v = 0; v < Vectors; ++v) starts[v] = b[v];
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) sums[r][v] = load(c + r * ldc + v * kLanes);
    for (int k = 0; k < depth; ++k) {
        fetch(k);
        Vec columns[Vectors];
        for (int v = 0; v < Vectors; ++v) columns[v] = load(starts[v] + k * ldb);
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < Vectors; ++v) sums[r][v] += a[r * lda + k] * columns[v];
    }
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) store(c + r * ldc + v * kLanes, sums[r][v]);
}

// The same for at most kMaxRows rows and kVectors vectors of columns.
template <typename B, typename Fetch = NoFetch>
inline void multiply_vectors(int rows, int vectors, const float* a, size_t lda, const B* const* b, size_t ldb,
                             float* c, size_t ldc, int depth, const Fetch& fetch = {}) {
    with_constant<kVectors>(vectors, [&](auto columns) {
        constexpr int kColumnVectors = columns;
        with_constant<kMaxRows>(rows, [&](auto count) {
            multiply_tile<count, kColumnVectors>(a, lda, b, ldb, c, ldc, depth, fetch);
        });
    });
}

// c[rows, columns] += a[rows, depth] b[depth, columns]; rows <= kMaxRows, columns a multiple of kLanes.
template <typename B>
inline void multiply(int rows, int columns, const float* a, size_t lda, const B* b, size_t ldb, float* c,
                     size_t ldc, int depth) {
    for (int done = 0; done < columns; done += kColumns) {
        const B* starts[kVectors];
        for (int v = 0; v < kVectors; ++v) starts[v] = b + done + v * kLanes;
        const int vectors = columns - done < kColumns ? (columns - done) / kLanes : kVectors;
        multiply_vectors(rows, vectors, a, lda, starts, ldb, c + done, ldc, depth);
    }
}

template <typename T>
inline void copy_floats(float* to, const T* from, int count) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
    for (; i < count; ++i) to[i] = widen(from[i]);
}

template <typename T>
inline void copy_rounded(T* to, const float* from, int count) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
    for (; i < count; ++i) to[i] = narrow<T>(from[i]);
}

// to = [pairs of a and b side by side], two rows of D numbers.
inline void interleave(const bf16* a, const bf16* b, bf16* to, int D) {
    int d = 0;
    for (; d + kLanes <= D; d += kLanes) {
        HalfVec first, second;
        std::memcpy(&first, a + d, sizeof first);
        std::memcpy(&second, b + d, sizeof second);
        const UintVec pairs = __builtin_convertvector(first, UintVec) | __builtin_convertvector(second, UintVec) << 16;
        std::memcpy(to + 2 * d, &pairs, sizeof pairs);
    }
    for (; d < D; ++d) {
        to[2 * d] = a[d];
        to[2 * d + 1] = b[d];
    }
}

// Asks for `count` numbers before they are read; what lies past the end of memory costs nothing.
template <typename T>
inline void fetch(const T* from, int count) {
    constexpr int kLine = 64 / sizeof(T);
    for (int i = 0; i < count; i += kLine) __builtin_prefetch(from + i);
}

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

struct FreeAligned {
    void operator()(float* p) const { std::free(p); }
};
typedef std::unique_ptr<float, FreeAligned> Floats;

inline Floats allocate(size_t count) {
    size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
    return Floats(static_cast<float*>(std::aligned_alloc(64, bytes ? bytes : 64)));
}

// Memory of this thread, kept from call to call; what was in it before is lost. 64-byte aligned.
inline float* thread_memory(size_t count) {
    static thread_local Floats memory;
    static thread_local size_t size = 0;
    if (count > size) {
        memory = allocate(count);
        size = count;
    }
    return memory.get();
}

}  // namespace quire
