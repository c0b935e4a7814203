// The formula is in layer_norm.py. A row's mean and variance are sums over fixed lanes, whatever rows are beside it.
// Legend: T tokens, D hidden size.
#include "norm/layer_norm.h"

#include "norm/rms_norm.h"
#include "program/thread_pool.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelSize = 1 << 16;
constexpr int kTwo = 2 * kLanes;
constexpr int kRows = 4;  // that pass through each step together: a row's sums need not wait for another's

// kTwo numbers as two vectors, in an order of their own.
template <typename T>
void load_two(const T* from, Vec& a, Vec& b) {
    a = load(from);
    b = load(from + kLanes);
}

template <typename T>
void store_two(T* to, Vec a, Vec b) {
    store(to, a);
    store(to + kLanes, b);
}

#if defined(__AVX512BF16__)
// Even numbers and odd ones, which takes half the instructions: 1.5 times as fast.
void load_two(const bf16* from, Vec& a, Vec& b) {
    const __m512i numbers = _mm512_loadu_si512(from);
    a = (Vec)_mm512_slli_epi32(numbers, 16);
    b = (Vec)_mm512_and_si512(numbers, _mm512_set1_epi32(int(0xffff0000)));
}

void store_two(bf16* to, Vec a, Vec b) {
    IntVec order;  // dword i: words i and 16 + i
    for (int i = 0; i < kLanes; ++i) order[i] = i | (kLanes + i) << 16;
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16((__m512i)order, rounded));
}
#endif

// The numbers of a row that are normed, in float32: x, or with `residual` their sum, which is rounded where it is kept.
struct WideRow {
    const float* numbers;  // in the order of load_two
    float mean;
};

// `wide` may hold them.
template <typename T>
WideRow widen_row(const T* x, T* residual, float* wide, int size) {
    constexpr bool is_wide = std::is_same_v<T, float>;
    Vec totals[2] = {}, a, b, c, d;
    int i = 0;
    for (; i + kTwo <= size; i += kTwo) {
        load_two(x + i, a, b);
        if (residual) {
            load_two(residual + i, c, d);
            a += c, b += d;
            store_two(residual + i, a, b);
        }
        totals[0] += a, totals[1] += b;
        if constexpr (!is_wide) store_two(wide + i, a, b);
    }
    float total = sum(totals[0] + totals[1]);
    for (; i < size; ++i) {
        const float number = widen(x[i]) + (residual ? widen(residual[i]) : 0.0f);
        if (residual) residual[i] = narrow<T>(number);
        if constexpr (!is_wide) wide[i] = number;
        total += number;
    }
    const float mean = total / float(size);
    if constexpr (is_wide)
        return {residual ? residual : x, mean};
    else
        return {wide, mean};
}

float find_variance(const float* wide, float mean, int size) {
    Vec totals[2] = {};
    int i = 0;
    for (; i + kTwo <= size; i += kTwo)
        for (int v = 0; v < 2; ++v) {
            const Vec distance = load(wide + i + v * kLanes) - mean;
            totals[v] += distance * distance;
        }
    float total = sum(totals[0] + totals[1]);
    for (; i < size; ++i) total += (wide[i] - mean) * (wide[i] - mean);
    return total / float(size);
}

template <typename T>
void write_row(const WideRow& row, float factor, const T* weight, const T* bias, T* y, int size) {
    const auto [wide, mean] = row;
    int i = 0;
    for (; i + kTwo <= size; i += kTwo) {
        Vec a, b, c{}, d{};
        load_two(weight + i, a, b);
        if (bias) load_two(bias + i, c, d);
        store_two(y + i, (load(wide + i) - mean) * factor * a + c, (load(wide + i + kLanes) - mean) * factor * b + d);
    }
    for (; i < size; ++i)
        y[i] = narrow<T>((wide[i] - mean) * factor * widen(weight[i]) + (bias ? widen(bias[i]) : 0.0f));
}

template <typename T>
void norm_rows(const T* x, T* residual, const T* weight, const T* bias, T* y, int rows, int size, float eps) {
    parallel_runs(rows, int64_t(rows) * size > kMinParallelSize, [&](int64_t first, int64_t last) {
        float* memory = thread_memory(size_t(kRows) * size);
        for (int64_t start = first; start < last; start += kRows) {
            const int count = int(std::min<int64_t>(kRows, last - start));
            const int64_t place = start * size;
            WideRow wide[kRows];
            float factors[kRows];
            for (int r = 0; r < count; ++r)
                wide[r] = widen_row(x + place + r * size, residual ? residual + place + r * size : nullptr,
                                    memory + size_t(r) * size, size);
            for (int r = 0; r < count; ++r)
                factors[r] = 1.0f / std::sqrt(find_variance(wide[r].numbers, wide[r].mean, size) + eps);
            for (int r = 0; r < count; ++r)
                write_row(wide[r], factors[r], weight, bias, y + place + r * size, size);
        }
    });
}

}  // namespace

extern "C" void quire_layer_norm(int is_bf16, const void* x, void* residual, const void* weight, const void* bias,
                                 void* y, int rows, int size, float eps) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        norm_rows(static_cast<const T*>(x), static_cast<T*>(residual), static_cast<const T*>(weight),
                  static_cast<const T*>(bias), static_cast<T*>(y), rows, size, eps);
    });
}
