// Numbers of 16 bits: widened to float, rounded from float, and bf16 multiplied in pairs.
#pragma once

#include "simd.h"

namespace regard {
namespace REGARD_ISA {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

REGARD_INLINE float widen(float x) { return x; }
REGARD_INLINE double widen(double x) { return x; }
REGARD_INLINE float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
REGARD_INLINE float widen(f16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
    __fp16 h;
    memcpy(&h, &x.bits, 2);
    return float(h);
#else
    // exponents rebased by a product with 2^112, which is exact, also for subnormals
    uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
    uint32_t special = (x.bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;
    float wide;
    memcpy(&wide, &rest, 4);
    wide *= 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &wide, 4);
    bits |= sign | special;
    memcpy(&wide, &bits, 4);
    return wide;
#endif
}

template <typename To>
REGARD_INLINE To narrow(double x);
template <>
REGARD_INLINE double narrow<double>(double x) {
    return x;
}
template <>
REGARD_INLINE float narrow<float>(double x) {
    return float(x);
}
// To the nearest, ties to even, from a float.
template <>
REGARD_INLINE bf16 narrow<bf16>(double x) {
    float f = float(x);
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return bf16{uint16_t((bits >> 16) | 0x40)};
    return bf16{uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <>
REGARD_INLINE f16 narrow<f16>(double x) {
    float f = float(x);
#if defined(__F16C__)
    return f16{uint16_t(_cvtss_sh(f, 0))};
#elif defined(__aarch64__)
    __fp16 h = __fp16(f);
    f16 out;
    memcpy(&out.bits, &h, 2);
    return out;
#else
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return f16{uint16_t(sign | 0x7e00)};
    if (bits >= 0x477ff000) return f16{uint16_t(sign | 0x7c00)};  // 65520 and above round to infinity
    if (bits < 0x38800000) {                                      // subnormal: let an addition do the rounding
        float small;
        memcpy(&small, &bits, 4);
        small += 0.5f;
        memcpy(&bits, &small, 4);
        return f16{uint16_t(sign | uint16_t(bits - 0x3f000000))};
    }
    bits += 0xfff + ((bits >> 13) & 1);
    return f16{uint16_t(sign | uint16_t((bits - 0x38000000) >> 13))};
#endif
}

// A vector of wide elements from as many stored ones, and back.
REGARD_INLINE F load_wide(const float *p) { return load(p); }
REGARD_INLINE D load_wide(const double *p) { return load(p); }
REGARD_INLINE F load_wide(const bf16 *p) {
#if defined(__AVX512F__)
    return F(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
#elif defined(__AVX2__)
    return F(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
#elif defined(__x86_64__)
    return F(_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)p)));
#elif defined(__aarch64__)
    return F(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t *>(p)), 16));
#else
    F out{};
    for (int i = 0; i < Vec<float>::lanes; ++i) out[i] = widen(p[i]);
    return out;
#endif
}
#if defined(__AVX512F__)
// Of two vectors' elements the even ones, and the odd ones: half the instructions of two vectors in order.
REGARD_INLINE void load_halves(const bf16 *p, F &even, F &odd) {
    const __m512i both = _mm512_loadu_si512(p);
    even = (F)_mm512_slli_epi32(both, 16);
    odd = (F)_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000)));
}
// Two vectors in order as even and odd ones, and back.
REGARD_INLINE void part_halves(F &first, F &second) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const F x = _mm512_permutex2var_ps(first, even, second);
    second = _mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second);
    first = x;
}
REGARD_INLINE void join_halves(F &even, F &odd) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const F x = _mm512_permutex2var_ps(even, low, odd);
    odd = _mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), odd);
    even = x;
}
#elif defined(__AVX2__)
REGARD_INLINE void load_halves(const bf16 *p, F &even, F &odd) {
    const __m256i both = _mm256_loadu_si256((const __m256i *)p);
    even = (F)_mm256_slli_epi32(both, 16);
    odd = (F)_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000)));
}
REGARD_INLINE void part_halves(F &first, F &second) {
    const __m256 low = _mm256_permute2f128_ps((__m256)first, (__m256)second, 0x20);
    const __m256 high = _mm256_permute2f128_ps((__m256)first, (__m256)second, 0x31);
    first = (F)_mm256_shuffle_ps(low, high, 0x88);
    second = (F)_mm256_shuffle_ps(low, high, 0xdd);
}
REGARD_INLINE void join_halves(F &even, F &odd) {
    const __m256 low = _mm256_unpacklo_ps((__m256)even, (__m256)odd);
    const __m256 high = _mm256_unpackhi_ps((__m256)even, (__m256)odd);
    even = (F)_mm256_permute2f128_ps(low, high, 0x20);
    odd = (F)_mm256_permute2f128_ps(low, high, 0x31);
}
#endif
REGARD_INLINE F load_wide(const f16 *p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__x86_64__)  // as the scalar one
    const U bits = U(_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)p), _mm_setzero_si128()));
    const U special = (bits & 0x7c00) == 0x7c00 ? U{} + 0x7f800000u : U{};
    return F(U(F((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16 | special);
#elif defined(__aarch64__)
    return F(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t *>(p)))));
#else
    F out{};
    for (int i = 0; i < Vec<float>::lanes; ++i) out[i] = widen(p[i]);
    return out;
#endif
}
// The nearest that bf16 holds; NaN stays NaN.
REGARD_INLINE F as_bf16(F x) {
    const U bits = U(x), even = (bits >> 16) & 1;
    const U near = (bits + 0x7fff + even) & 0xffff0000u, nan = (bits & 0xffff0000u) | 0x400000u;
    return x == x ? F(near) : F(nan);
}
REGARD_INLINE void store_narrow(float *p, F v) { store(p, v); }
REGARD_INLINE void store_narrow(double *p, D v) { store(p, v); }
REGARD_INLINE void store_narrow(bf16 *p, F v) {
#if defined(__AVX512BF16__)
    *(__m256i_u *)p = (__m256i)_mm512_cvtneps_pbh(v);
#elif defined(__AVX512F__)
    *(__m256i_u *)p = _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)as_bf16(v), 16));
#elif defined(__AVX2__)
    const __m256i words = _mm256_srli_epi32((__m256i)as_bf16(v), 16);
    *(__m128i_u *)p = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#else
    for (int i = 0; i < Vec<float>::lanes; ++i) p[i] = narrow<bf16>(v[i]);
#endif
}
REGARD_INLINE void store_narrow(f16 *p, F v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, 0));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, 0));
#else
    for (int i = 0; i < Vec<float>::lanes; ++i) p[i] = narrow<f16>(v[i]);
#endif
}

// A float as S holds it.
template <typename S>
REGARD_INLINE F as_stored(F x) {
    if constexpr (is_same<S, bf16>) {
        return as_bf16(x);
    } else if constexpr (is_same<S, f16>) {
        f16 narrower[Vec<float>::lanes];
        store_narrow(narrower, x);
        return load_wide(narrower);
    } else {
        return x;
    }
}

// ---- pairs of bf16 -------------------------------------------------------------------------------------------------

#if defined(REGARD_PAIRS)
// c + a.low * b.low + a.high * b.high in each lane, whose 32 bits are two bf16.
REGARD_INLINE F dot_pairs(U a, U b, F c) { return _mm512_dpbf16_ps(c, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b); }
// Lanes of bf16 pairs from the lower ones of each pair, and then the higher ones.
REGARD_INLINE U pair_halves(__m512i both) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (U)_mm512_permutexvar_epi16(order, both);
}
// Lanes of bf16 pairs from two vectors of floats.
REGARD_INLINE U pack_pairs(F low, F high) { return pair_halves((__m512i)_mm512_cvtne2ps_pbh(high, low)); }
REGARD_INLINE U broadcast_pair(uint32_t x) { return (U)_mm512_set1_epi32(int(x)); }
// Rounded to bf16, and widened again.
REGARD_INLINE F through_bf16(F x) {
    return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16);
}
// The nearest that is no larger than bf16 can be; NaN becomes finite.
REGARD_INLINE F within_bf16(F x) {
    const F most = broadcast(0x1.fep127f);
    return larger(-most, -larger(-most, -x));
}
#endif

}  // namespace REGARD_ISA
}  // namespace regard
