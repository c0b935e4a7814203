// A weight [N, K] as codes of 4 bits with a scale a group: quantize_groups.py has the same in torch, and says what.
#include "program/thread_pool.h"
#include "linear/tile.h"

#include <algorithm>
#include <limits>

namespace {

using namespace quire;

struct Groups {
    int K, size, num_clips;
    const float* clips;
};

// The number with the largest magnitude, the first of those.
float find_largest(const float* x, int count) {
    float largest = x[0];
    for (int i = 1; i < count; ++i)
        if (std::fabs(x[i]) > std::fabs(largest)) largest = x[i];
    return largest;
}

// round(x / scale) from -8 to 7, ties to even.
Vec divide(Vec x, float scale) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    Vec q = x / scale;
    q = q < -8.0f ? splat(-8.0f) : q;
    q = q > 7.0f ? splat(7.0f) : q;
    return (q + shift) - shift;
}

// x has a multiple of kLanes numbers, zeros past the group's.
float find_scale(const float* x, int padded, const Groups& groups) {
    const float largest = find_largest(x, padded);
    float best = std::numeric_limits<float>::infinity(), best_scale = 1.0f;
    for (int clip = 0; clip < groups.num_clips; ++clip) {
        float scale = widen(narrow<bf16>(largest * groups.clips[clip] / -8.0f));
        if (scale == 0.0f) scale = 1.0f;
        Vec total{};
        for (int i = 0; i < padded; i += kLanes) {
            const Vec value = load(x + i), error = divide(value, scale) * scale - value;
            total += error * error;
        }
        const float error = sum(total);
        if (error < best) {
            best = error;
            best_scale = scale;
        }
    }
    return best_scale;
}

template <class T>
void quantize_row(const T* row, const Groups& groups, uint8_t* codes, bf16* scales, float* x) {
    for (int start = 0; start < groups.K; start += groups.size) {
        const int count = std::min(groups.size, groups.K - start), padded = round_up(count, kLanes);
        copy_floats(x, row + start, count);
        std::fill(x + count, x + padded, 0.0f);
        const float scale = find_scale(x, padded, groups);
        *scales++ = narrow<bf16>(scale);
        for (int i = 0; i < padded; i += kLanes) store(x + i, divide(load(x + i), scale) + 8.0f);
        for (int i = 0; i < count; i += 2)  // past an odd count lies the code of a zero, whose number nobody reads
            codes[(start + i) / 2] = uint8_t(int(x[i]) | (i + 1 < count ? int(x[i + 1]) : 0) << 4);
    }
}

}  // namespace

// codes [N, (K + 1) / 2], scales bfloat16 [N, groups]; size: even.
extern "C" void quire_quantize_groups(int is_bf16, const void* weight, int N, int K, int size, const float* clips,
                                      int num_clips, uint8_t* codes, uint16_t* scales) {
    const Groups groups{K, size, num_clips, clips};
    const int width = (K + 1) / 2, num_groups = (K + size - 1) / size;
    with_type(is_bf16, [&](auto zero) {
        const auto* from = static_cast<const decltype(zero)*>(weight);
        parallel_runs(N, true, [&](int64_t first, int64_t last) {
            const Floats x = allocate(round_up(size, kLanes));
            for (int64_t n = first; n < last; ++n)
                quantize_row(from + n * K, groups, codes + n * width, scales + n * num_groups, x.get());
        });
    });
}
