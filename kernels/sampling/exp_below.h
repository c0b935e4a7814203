// exp of numbers that are at most 0, as differences to a maximum are.
#pragma once

#include "linear/tile.h"

namespace quire {

// To about 2 units in the last place; exactly 1 at 0, and 0 below -87.
inline Vec exp_below(Vec x) {
#if defined(__AVX512F__)  // half the instructions of `exp`: nothing to clamp, and the exponent has one of its own
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Vec power = (x * 1.44269504f + shift) - shift;
    const Vec rest = x - power * 0.693147181f;  // of the product nothing is lost before the difference is taken
    Vec series = rest * 8.290143683552742e-3f + 4.189885035157204e-2f;  // 9e-8 from exp at most
    series = series * rest + 0.16667644679546356f;
    series = series * rest + 0.49999141693115234f;
    series = series * rest + 0.9999997019767761f;
    series = series * rest + 1.0f;
    const __mmask16 is_large = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (Vec)_mm512_maskz_scalef_ps(is_large, (__m512)series, (__m512)power);
#else
    return exp(x);
#endif
}

}  // namespace quire
