// The formula is in causal_conv.py. A task is some channels of a request. It has what tokens of a run give to the
// convolution in rows one after the other, behind those of the tokens before: a state is some of these rows.
// Legend: T type of the inputs.
#include "recurrent/causal_conv.h"

#include "linear/activation.h"
#include "program/thread_pool.h"

#include <algorithm>

namespace {

using namespace quire;

constexpr int kRun = 32;          // tokens
constexpr int kBlock = kColumns;  // channels
constexpr int kMaxKernel = 16;    // MAX_KERNEL_SIZE of recurrent_spec.py
constexpr int64_t kMinParallelSize = 1 << 15;

template <typename T>
Vec load_some(const T* from, int count) {
    if (count >= kLanes) return load(from);
    T lanes[kLanes] = {};
    std::memcpy(lanes, from, count * sizeof(T));
    return load(lanes);
}

template <typename T>
void store_some(T* to, Vec x, int count) {
    if (count >= kLanes) return store(to, x);
    T lanes[kLanes];
    store(lanes, x);
    std::memcpy(to, lanes, count * sizeof(T));
}

template <typename T>
struct Layer {
    const QuireCausalConv& conv;
    const T* x;
    int64_t stride;
    T* y;
};

// `count` channels of a request from `channel` on.
template <typename T, typename Act>
void convolve(const Layer<T>& layer, const StateRun& run, int channel, int count) {
    const QuireCausalConv& conv = layer.conv;
    const int kernel = conv.kernel_size, kept = kernel - 1, C = conv.num_channels;
    // Only the rows before the first token are set: all of them take a quarter of a decode's time.
    alignas(64) float window[(kMaxKernel - 1 + kRun) * kBlock];
    std::memset(window, 0, kept * kBlock * sizeof(float));
    auto copy_rows = [&](const float* from, int from_stride, float* to, int to_stride) {
        for (int row = 0; row < kept; ++row)
            std::memcpy(to + row * to_stride, from + row * from_stride, count * sizeof(float));
    };
    if (!run.begins()) copy_rows(run.own() + channel, C, window, kBlock);
    for (int token = run.first; token < run.end; token += kRun) {
        const int tokens = std::min(kRun, run.end - token);
        for (int i = 0; i < count; i += kLanes) {
            const int lanes = count - i;
            const float *bias = conv.bias ? conv.bias + channel + i : nullptr, *weight = conv.weight + channel + i;
            Vec weights[kMaxKernel];
            for (int k = 0; k < kernel; ++k) weights[k] = load_some(weight + k * C, lanes);
            const Vec start = bias ? load_some(bias, lanes) : Vec{};
            for (int t = 0; t < tokens; ++t) {
                const T* row = layer.x + (token + t) * layer.stride + channel + i;
                Vec x = load_some(row + conv.first, lanes);
                if (conv.is_gated) x = x * load_some(row, lanes);
                float* place = window + t * kBlock + i;
                store(place + kept * kBlock, x);
                Vec sum = start;
                for (int k = 0; k < kernel; ++k) sum += weights[k] * load(place + k * kBlock);
                sum = Act::apply(sum);
                if (conv.is_gated) sum = sum * load_some(row + C, lanes);
                store_some(layer.y + size_t(token + t) * C + channel + i, sum, lanes);
            }
        }
        for (int t = 0; t < tokens; ++t)
            run.save_after(token + t, [&](float* to) {
                copy_rows(window + (t + 1) * kBlock, kBlock, to + channel, C);
            });
        std::memmove(window, window + tokens * kBlock, kept * kBlock * sizeof(float));
    }
    copy_rows(window, kBlock, run.own() + channel, C);
}

}  // namespace

extern "C" void quire_causal_conv(int is_bf16, const QuireCausalConv* conv, const QuireStates* states, const void* x,
                                  int64_t stride, void* y) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        const Layer<T> layer{*conv, static_cast<const T*>(x), stride, static_cast<T*>(y)};
        const int C = conv->num_channels, blocks = (C + kBlock - 1) / kBlock, requests = states->num_requests;
        const int64_t size = int64_t(states->query_starts[requests]) * C;
        parallel_for(requests * blocks, size > kMinParallelSize, [&](int task) {
            const StateRun run(*states, task / blocks, conv->offset);
            const int channel = task % blocks * kBlock, count = std::min(kBlock, C - channel);
            if (run.first == run.end) return;
            if (conv->activation == QUIRE_SILU) convolve<T, Silu>(layer, run, channel, count);
            else convolve<T, NoActivation>(layer, run, channel, count);
        });
    });
}
