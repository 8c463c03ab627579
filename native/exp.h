// Exponentials, logarithms and tanh of vectors, correct to a rounding or so where kernels use them.
//
// 2^t is split as 2^n * 2^f with n an integer, and 2^f is a polynomial whose constant term is exactly 1, so that 2^0 is
// 1 and a row that gains nothing keeps its bits. The polynomials are least-maximum fits of the relative error: degree 5
// errs by 8.2e-8 for 0 <= f < 1 (float's rounding is 6.0e-8) and by 9.1e-8 for |f| <= 1/2; degree 3, for weights that
// are to be rounded to bf16 (3.9e-3), by 1.0e-4. AVX-512 gives f in one instruction and multiplies by 2^n in one: 3.8
// cycles a vector instead of 4.6, and 2.7 instead of 3.6 in degree 3.
#pragma once

#include <cmath>

#include "simd.h"

namespace regard {
namespace REGARD_ISA {

constexpr double LOG2E = 1.4426950408889634, LN2 = 0.6931471805599453;
constexpr float INFINITE = __builtin_huge_valf();

// How exactly weights are needed: in the wide type, or to be rounded to bf16.
enum class Precision { wide, rough };

template <Precision how>
REGARD_INLINE F poly2(F f) {
#if defined(__AVX512F__)
    constexpr float wide[] = {0.001867130221f, 0.009017030001f, 0.05579991333f, 0.2401644501f,
                              0.6931513118f};  // 0 <= f < 1
    constexpr float rough[] = {0.07706705142f, 0.2276449809f, 0.6951167888f};
#else
    constexpr float wide[] = {0.001326472716f, 0.009671512838f, 0.05550733745f, 0.2402224208f,
                              0.6931469776f};  // |f| <= 1/2
    constexpr float rough[] = {0.05500893039f, 0.2422109707f, 0.6932829285f};
#endif
    constexpr int n = how == Precision::wide ? 5 : 3;
    F p = broadcast(how == Precision::wide ? wide[0] : rough[0]);
#pragma GCC unroll 8
    for (int i = 1; i < n; ++i) p = fma(p, f, broadcast(how == Precision::wide ? wide[i] : rough[i]));
    return fma(p, f, broadcast(1.0f));
}
template <Precision>
REGARD_INLINE D poly2(D f) {
    // the Taylor series suffices: the first term left out is (ln2/2)^14 / 14! = 4e-18
    const double c[] = {1.3691488853904128e-12,  2.5678435993488206e-11,
                        4.44553827187081155e-10, 7.05491162080112333e-9,
                        1.01780860092396997e-7,  1.32154867901443095e-6,
                        1.52527338040598403e-5,  1.54035303933816099e-4,
                        1.33335581464284434e-3,  9.61812910762847716e-3,
                        5.55041086648215800e-2,  2.40226506959100712e-1,
                        6.93147180559945309e-1,  1.0};
    D p = broadcast(c[0]);
#pragma GCC unroll 16
    for (int i = 1; i < 14; ++i) p = fma(p, f, broadcast(c[i]));
    return p;
}

// 2^t for t <= 0 (or a little above): 0 at -inf, and where t is so low that the machine has no such number; NaN stays.
template <Precision how = Precision::wide>
REGARD_INLINE F exp2(F t) {
#if defined(__AVX512F__)
    const F f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // t - floor(t); 0 for -inf
    return _mm512_scalef_ps(poly2<how>(f), t);                                   // by 2^floor(t)
#else
    const F magic = broadcast(0x1.8p23f);
    const F shifted = t + magic, n = shifted - magic, f = t - n;
    const F power = F((U(shifted) << 23) + 0x3f800000u);
    return t < -126.0f ? F{} : poly2<how>(f) * power;
#endif
}
template <Precision how = Precision::wide>
REGARD_INLINE D exp2(D t) {
    const D magic = broadcast(0x1.8p52);
    const D shifted = t + magic, n = shifted - magic, f = t - n;
#if defined(__AVX512F__)
    const __mmask8 seen = _mm512_cmp_pd_mask(t, broadcast(-1022.0), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_pd(seen, poly2<how>(f), n);
#else
    const D power = D((Vec<uint64_t>::type(shifted) << 52) + 0x3ff0000000000000u);
    return t < -1022.0 ? D{} : poly2<how>(f) * power;
#endif
}

// exp(x) for x <= 0, to a rounding, and to less near 0: products of many such factors stay near theirs. 0 below -150.
REGARD_INLINE F exp_below(F x) {
    x = larger(broadcast(-150.0f), x);
    const F magic = broadcast(0x1.8p23f), shifted = fma(x, broadcast(float(LOG2E)), magic), n = shifted - magic;
    const F r = fma(n, broadcast(1.42860677e-6f), fma(n, broadcast(-0.693148613f), x));  // ln 2 in two
    constexpr float parts[] = {1 / 5040.0f, 1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f, 1.0f};
    F p = broadcast(parts[0]);
#pragma GCC unroll 8
    for (int i = 1; i < 7; ++i) p = fma(p, r, broadcast(parts[i]));
    p = fma(p, r, broadcast(1.0f));
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, n);
#else
    return n < -126.0f ? F{} : p * F((U(shifted) << 23) + 0x3f800000u);
#endif
}

// -limit to limit; NaN stays.
REGARD_INLINE F within(F x, float limit) { return larger(broadcast(-limit), smaller(broadcast(limit), x)); }

// tanh: x * N(x^2) / D(x^2), a fit of the relative error on |x| <= 9, where tanh is 1 to a rounding; errs by 5.9e-8.
REGARD_INLINE F tanh(F x) {
    const F y = within(x, 9.0f), z = y * y;
    F above = broadcast(1.8254649e-11f);
    above = fma(above, z, broadcast(-1.27801981e-8f));
    above = fma(above, z, broadcast(9.26733668e-6f));
    above = fma(above, z, broadcast(0.00292075230f));
    above = fma(above, z, broadcast(0.129192194f));
    above = fma(above, z, broadcast(0.999999941f)) * y;
    F below = broadcast(0.000228098901f);
    below = fma(below, z, broadcast(0.0237631291f));
    below = fma(below, z, broadcast(0.462525033f));
    below = fma(below, z, broadcast(1.0f));
    return above / below;
}
// tanh by exp(-2|x|), and by its series near 0, where that would cancel.
REGARD_INLINE D tanh(D x) {
    const D z = x * x, size = x < 0.0 ? -x : x;
    const D e = exp2(size * (-2.0 * LOG2E));
    const D far = (1.0 - e) / (1.0 + e);
    const double c[] = {6404582.0 / 10854718875,
                        -929569.0 / 638512875,
                        21844.0 / 6081075,
                        -1382.0 / 155925,
                        62.0 / 2835,
                        -17.0 / 315,
                        2.0 / 15,
                        -1.0 / 3,
                        1.0};
    D p = broadcast(c[0]);
#pragma GCC unroll 16
    for (int i = 1; i < 9; ++i) p = fma(p, z, broadcast(c[i]));
    return size < 0.1 ? p * x : (x < 0.0 ? -far : far);
}

// Errs by up to two roundings, for divisors whose reciprocal is normal. Intel begins a division of 512 bits every 16
// cycles, and an approximate reciprocal every 4; Zen 4 divides beside multiply-adds.
REGARD_INLINE F quotient(F above, F below) {
#if defined(__AMX_BF16__)
    const F near = _mm512_rcp14_ps(below);
    return above * fma(near, fma(-near, below, broadcast(1.0f)), near);
#else
    return above / below;
#endif
}

// by * tanh(x) + added. Rough, tanh is a fit on |x| <= 7 that errs by 1.3e-6: a score is as good as its weight (1.0e-4)
// with a cap up to 75. Both polynomials begin with 1: an addition, which Zen 4 does beside multiply-adds.
template <Precision how>
REGARD_INLINE F scaled_tanh(F x, float by, F added) {
    if constexpr (how == Precision::wide) return fma(tanh(x), broadcast(by), added);
    const F y = within(x, 7.0f), z = y * y;
    const F above = fma(fma(z + 573.865112f, z, broadcast(30837.0156f)), z, broadcast(250258.484f)) * y;
    const F below = fma(fma(z + 146.902176f, z, broadcast(3170.80493f)), z, broadcast(6945.20166f));
    return fma(quotient(above, below), broadcast(by * 0.0277520847f), added);
}
template <Precision>
REGARD_INLINE D scaled_tanh(D x, double by, D added) {
    return fma(tanh(x), broadcast(by), added);
}

// The natural logarithm of normal values above 0: 2^e * m with m around 1, and log m by the series of atanh. NaN
// stays.
template <typename T>
REGARD_INLINE typename Vec<T>::type natural_log(typename Vec<T>::type x) {
    using V = typename Vec<T>::type;
    using M = IntVec<T>;
    constexpr bool single = sizeof(T) == 4;
    constexpr int digits = single ? 23 : 52, bias = single ? 127 : 1023, terms = single ? 5 : 12;
    const M bits = M(x), one = M(V{} + T(1)), fraction = ((M{} + 1) << digits) - 1;
    V m = V((bits & fraction) | one);
    M e = ((bits >> digits) & (2 * bias + 1)) - bias;
    const M large = m > T(1.4142135623730951);
    m = large ? m * T(0.5) : m;
    e -= large;  // large is -1
    const V s = (m - T(1)) / (m + T(1)), z = s * s;
    V p = V{} + T(1.0 / (2 * terms - 1));
#pragma GCC unroll 16
    for (int k = terms - 2; k >= 0; --k) p = fma(p, z, V{} + T(1.0 / (2 * k + 1)));
    const V log = fma(__builtin_convertvector(e, V), V{} + T(LN2), T(2) * s * p);
    return x == x ? log : x;
}

}  // namespace REGARD_ISA
}  // namespace regard
