// Activations of vectors in float32, and their numbers as Python has them (gated_activation.ACTIVATIONS).
#pragma once

#include "linear/tile.h"

extern "C" {

// gelu_tanh is the approximation by tanh, gelu the exact one by erf.
enum QuireActivation {
    QUIRE_NO_ACTIVATION = 0,
    QUIRE_SILU,
    QUIRE_GELU,
    QUIRE_GELU_TANH,
    QUIRE_RELU,
    QUIRE_CLAMPED_SWIGLU,
    QUIRE_RELU2
};
}

namespace quire {

struct NoActivation {
    static Vec apply(Vec a) { return a; }
};

struct Relu {
    static Vec apply(Vec a) { return a < 0.0f ? Vec{} : a; }
};

struct Relu2 {
    static Vec apply(Vec a) { return a < 0.0f ? Vec{} : a * a; }
};

struct Silu {
    static Vec apply(Vec a) { return a / (1.0f + exp(-a)); }
};

inline Vec clamp(Vec a, float low, float high) {
    a = a < low ? splat(low) : a;
    return a > high ? splat(high) : a;
}

// gpt-oss' gate; what it multiplies is clamped, too, and 1 larger.
struct ClampedSwiglu {
    static constexpr float kLimit = 7.0f;
    static Vec apply(Vec a) {
        a = a > kLimit ? splat(kLimit) : a;
        return a / (1.0f + exp(a * -1.702f));
    }
    static Vec lift(Vec up) { return clamp(up, -kLimit, kLimit) + 1.0f; }
};

// a (1 + tanh(u)) / 2 = a / (1 + exp(-2 u)), u = sqrt(2 / pi) (a + 0.044715 a^3)
struct GeluTanh {
    static Vec apply(Vec a) { return a / (1.0f + exp(a * (a * a * 0.044715f + 1.0f) * -1.5957691216f)); }
};

// a times the normal distribution's integral, by erfc(z) = t exp(P(t) - z^2), t = 1 / (1 + z / 2), P fitted at
// Chebyshev nodes over z in [0, 10], where it is off by 5e-8 (2e-7 in float32).
struct Gelu {
    static Vec apply(Vec a) {
        const Vec z = (a < 0.0f ? -a : a) * 0.7071067812f;
        const Vec t = 1.0f / (z * 0.5f + 1.0f);
        Vec series = t * 0.14493021f - 0.6808272f;
        series = series * t + 1.1567338f;
        series = series * t - 0.6962519f;
        series = series * t - 0.08028043f;
        series = series * t + 0.0012675865f;
        series = series * t + 0.0346028f;
        series = series * t + 0.3866404f;
        series = series * t + 0.9986328f;
        series = series * t - 1.265448f;
        const Vec half_tail = t * exp(series - z * z) * 0.5f;
        return a * (a < 0.0f ? half_tail : 1.0f - half_tail);
    }
};

// The exact gelu for a result that is rounded to bfloat16, off by 7e-5 at most, with a third of the operations and no
// division. a (1 / 2 + a P(a^2)), P fitted over |a| <= 4.25, where a P is then 1 / 2; what is beyond is a or 0.
struct RoundedGelu {
    static Vec apply(Vec a) {
        const float end = 4.25f;
        const Vec upper = a > end ? splat(end) : a, bounded = upper < -end ? splat(-end) : upper;
        const Vec square = bounded * bounded;
        Vec series = square * 6.70214856e-11f - 6.28434194e-9f;
        series = series * square + 2.59188738e-7f;
        series = series * square - 6.26716383e-6f;
        series = series * square + 1.00560021e-4f;
        series = series * square - 1.15548831e-3f;
        series = series * square + 9.98931658e-3f;
        series = series * square - 6.666141e-2f;
        series = series * square + 3.99107784e-1f;
        return a * (bounded * series + 0.5f);
    }
};

// body(an object of the activation's type), for results of type Y where only they are rounded.
template <typename Y = float, typename Body>
void with_activation(int activation, const Body& body) {
    if (std::is_same_v<Y, bf16> && activation == QUIRE_GELU) return body(RoundedGelu{});
    switch (activation) {
        case QUIRE_SILU: return body(Silu{});
        case QUIRE_GELU: return body(Gelu{});
        case QUIRE_GELU_TANH: return body(GeluTanh{});
        case QUIRE_RELU: return body(Relu{});
        case QUIRE_CLAMPED_SWIGLU: return body(ClampedSwiglu{});
        case QUIRE_RELU2: return body(Relu2{});
        default: return body(NoActivation{});
    }
}

}  // namespace quire
