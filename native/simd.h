// The vocabulary of vectors that kernels are written in, once for each instruction set.
//
// kernels.cpp is compiled once per instruction set, with that set's flags and with REGARD_ISA naming a namespace; so
// everything that a kernel uses lives in that namespace and is compiled for it. Nothing from the standard library that
// could be emitted as a shared symbol may be used here: the linker would keep one copy of it, perhaps the newest.
//
// `Vec<T>::type` is a vector of `Vec<T>::lanes` elements as the compiler knows it (+ - * / and comparisons are its
// own). Products that are added are fused where the machine can (`fma`), and never otherwise: -ffp-contract=off, so
// that two kernels that must agree to the bit do.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define REGARD_INLINE inline __attribute__((always_inline))

namespace regard {
namespace REGARD_ISA {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

#if defined(__AVX512BF16__)
#define REGARD_PAIRS 1  // bf16 products, two at a time
#endif
#if defined(__AVX512VNNI__)
#define REGARD_INTEGERS 1  // products of bytes, four at a time
#endif

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

template <typename A, typename B>
constexpr bool is_same = false;
template <typename A>
constexpr bool is_same<A, A> = true;

template <typename T>
struct Vec {
    static constexpr int lanes = VECTOR_BYTES / int(sizeof(T));
    typedef T type __attribute__((vector_size(VECTOR_BYTES)));
    typedef T loose __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));  // anywhere in memory
};
// Half of a vector, as conversions from 16 bits read it.
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));

using F = Vec<float>::type;
using D = Vec<double>::type;
using I = Vec<int32_t>::type;
using U = Vec<uint32_t>::type;
using L = Vec<int64_t>::type;

// The integers as wide as T, for the bits of a number and for comparisons.
template <typename T>
struct Bits;
template <>
struct Bits<float> {
    using type = int32_t;
};
template <>
struct Bits<uint32_t> {
    using type = int32_t;
};
template <>
struct Bits<double> {
    using type = int64_t;
};
template <typename T>
using IntVec = typename Vec<typename Bits<T>::type>::type;

template <typename T>
REGARD_INLINE typename Vec<T>::type load(const T *p) {
    return *reinterpret_cast<const typename Vec<T>::loose *>(p);
}

template <typename T>
REGARD_INLINE void store(T *p, typename Vec<T>::type v) {
    *reinterpret_cast<typename Vec<T>::loose *>(p) = v;
}

template <typename T>
REGARD_INLINE typename Vec<T>::type broadcast(T x) {
    return typename Vec<T>::type{} + x;
}

// broadcast(-0.0) by addition would be 0.0; this is for every x, and reads memory.
#if defined(__AVX512F__)
REGARD_INLINE F broadcast(float x) { return _mm512_set1_ps(x); }
REGARD_INLINE D broadcast(double x) { return _mm512_set1_pd(x); }
REGARD_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
REGARD_INLINE D fma(D a, D b, D c) { return _mm512_fmadd_pd(a, b, c); }
// The larger; if either is NaN, the second.
REGARD_INLINE F larger(F a, F b) { return _mm512_max_ps(a, b); }
REGARD_INLINE D larger(D a, D b) { return _mm512_max_pd(a, b); }
// The smaller, likewise.
REGARD_INLINE F smaller(F a, F b) { return _mm512_min_ps(a, b); }
// yes where the lane's bit is set, else no.
REGARD_INLINE F select(uint64_t bits, F yes, F no) { return _mm512_mask_mov_ps(no, __mmask16(bits), yes); }
REGARD_INLINE D select(uint64_t bits, D yes, D no) { return _mm512_mask_mov_pd(no, __mmask8(bits), yes); }
REGARD_INLINE F sqrt(F a) { return _mm512_sqrt_ps(a); }
#elif defined(__AVX2__)
REGARD_INLINE F broadcast(float x) { return _mm256_set1_ps(x); }
REGARD_INLINE D broadcast(double x) { return _mm256_set1_pd(x); }
REGARD_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
REGARD_INLINE D fma(D a, D b, D c) { return _mm256_fmadd_pd(a, b, c); }
REGARD_INLINE F larger(F a, F b) { return _mm256_max_ps(a, b); }
REGARD_INLINE D larger(D a, D b) { return _mm256_max_pd(a, b); }
REGARD_INLINE F smaller(F a, F b) { return _mm256_min_ps(a, b); }
REGARD_INLINE F select(uint64_t bits, F yes, F no) {
    const I lane = {1, 2, 4, 8, 16, 32, 64, 128};
    return ((broadcast(int32_t(bits)) & lane) != 0) ? yes : no;
}
REGARD_INLINE D select(uint64_t bits, D yes, D no) {
    const L lane = {1, 2, 4, 8};
    return ((broadcast(int64_t(bits)) & lane) != 0) ? yes : no;
}
#else
#if defined(__aarch64__)
REGARD_INLINE F fma(F a, F b, F c) { return F(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b))); }
REGARD_INLINE D fma(D a, D b, D c) { return D(vfmaq_f64(float64x2_t(c), float64x2_t(a), float64x2_t(b))); }
#else
REGARD_INLINE F fma(F a, F b, F c) { return a * b + c; }
REGARD_INLINE D fma(D a, D b, D c) { return a * b + c; }
#endif
REGARD_INLINE F broadcast(float x) { return F{x, x, x, x}; }
REGARD_INLINE D broadcast(double x) { return D{x, x}; }
REGARD_INLINE F larger(F a, F b) { return a > b ? a : b; }
REGARD_INLINE D larger(D a, D b) { return a > b ? a : b; }
REGARD_INLINE F smaller(F a, F b) { return a < b ? a : b; }
REGARD_INLINE F select(uint64_t bits, F yes, F no) {
    const I lane = {1, 2, 4, 8};
    return ((broadcast(int32_t(bits)) & lane) != 0) ? yes : no;
}
REGARD_INLINE D select(uint64_t bits, D yes, D no) {
    const L lane = {1, 2};
    return ((broadcast(int64_t(bits)) & lane) != 0) ? yes : no;
}
#endif

// The lanes of a that are above those of b, a bit for each.
template <typename T>
REGARD_INLINE uint64_t above(typename Vec<T>::type a, typename Vec<T>::type b) {
#if defined(__AVX512F__)
    if constexpr (is_same<T, float>) return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
    if constexpr (is_same<T, double>) return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ);
#else
#if defined(__x86_64__)
    if constexpr (is_same<T, float> && VECTOR_BYTES == 16) return uint64_t(_mm_movemask_ps(__m128(a > b)));
#if defined(__AVX2__)
    if constexpr (is_same<T, float> && VECTOR_BYTES == 32) return uint64_t(_mm256_movemask_ps(__m256(a > b)));
#endif
#endif
    const auto yes = a > b;
    uint64_t bits = 0;
    for (int i = 0; i < Vec<T>::lanes; ++i) bits |= uint64_t(yes[i] != 0) << i;
    return bits;
#endif
}

// The lanes that have a bit, side by side. A whole vector is written: what follows them may be anything.
REGARD_INLINE void store_lanes(float *to, F x, uint64_t bits) {
#if defined(__AVX512F__)
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(__mmask16(bits), x));
#else
    for (int i = 0; i < Vec<float>::lanes; ++i) {
        *to = x[i];
        to += bits >> i & 1;
    }
#endif
}

// The largest lane.
template <typename V>
REGARD_INLINE auto largest(V x) {
#if defined(__AVX512F__)
    if constexpr (is_same<V, F>) return _mm512_reduce_max_ps(x);
    if constexpr (is_same<V, D>) return _mm512_reduce_max_pd(x);
#else
    auto most = x[0];
    for (int i = 1; i < int(sizeof x / sizeof x[0]); ++i) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// a * b + c of scalars, rounded as the lanes of `fma` are.
#if defined(__AVX2__) || defined(__aarch64__)
REGARD_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
REGARD_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
REGARD_INLINE float fma(float a, float b, float c) { return a * b + c; }
REGARD_INLINE double fma(double a, double b, double c) { return a * b + c; }
#endif

// ---- 16-bit types -------------------------------------------------------------------------------------------------

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
// Of 32 elements the even ones, and the odd ones: half the instructions of two vectors in order.
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
REGARD_INLINE void store_narrow(float *p, F v) { store(p, v); }
REGARD_INLINE void store_narrow(double *p, D v) { store(p, v); }
REGARD_INLINE void store_narrow(bf16 *p, F v) {
#if defined(__AVX512BF16__)
    *(__m256i_u *)p = (__m256i)_mm512_cvtneps_pbh(v);
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
        const U bits = U(x), even = (bits >> 16) & 1;
        const U near = (bits + 0x7fff + even) & 0xffff0000u, nan = (bits & 0xffff0000u) | 0x400000u;
        return x == x ? F(near) : F(nan);
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
#endif

// ---- shuffles ------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
// Of eight rows, in each quarter: words of four of them together.
REGARD_INLINE void words_of_four(const __m512i *x, __m512i *b) {
    __m512i a[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {  // of two
        a[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int n = 0; n < 2; ++n) {
            b[i + 2 * n] = _mm512_unpacklo_epi64(a[i + n], a[i + n + 2]);
            b[i + 2 * n + 1] = _mm512_unpackhi_epi64(a[i + n], a[i + n + 2]);
        }
}

// 16 x 16 by shuffles that need no table: a fifth less time than by those of `transpose`.
REGARD_INLINE void transpose_16(__m512i *x) {
    __m512i b[16];
    words_of_four(x, b);
    words_of_four(x + 8, b + 8);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // quarters of 16 rows together
        const __m512i even[2] = {_mm512_shuffle_i32x4(b[i], b[i + 4], 0x88),
                                 _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88)};
        const __m512i odd[2] = {_mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd),
                                _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd)};
        x[i] = _mm512_shuffle_i32x4(even[0], even[1], 0x88);
        x[i + 4] = _mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(even[0], even[1], 0xdd);
        x[i + 12] = _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
    }
}
#endif

// In place: `block[i]` holds row i; afterwards lane i of `block[j]` is what lane j of `block[i]` was. T has 4 or 8
// bytes.
template <typename T>
REGARD_INLINE void transpose(typename Vec<T>::type (&block)[Vec<T>::lanes]) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return transpose_16(reinterpret_cast<__m512i *>(block));
#endif
    constexpr int n = Vec<T>::lanes;
    using V = typename Vec<T>::type;
    using M = IntVec<T>;
    // log2(n) rounds: in each, rows whose indices differ in one bit exchange the lanes whose indices differ in it
#pragma GCC unroll 4
    for (int step = 1; step < n; step *= 2) {
        M first{}, second{};
#pragma GCC unroll 16
        for (int lane = 0; lane < n; ++lane) {
            first[lane] = (lane & step) ? n + lane - step : lane;
            second[lane] = (lane & step) ? n + lane : lane + step;
        }
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) {
            if (i & step) continue;
            V a = block[i], b = block[i + step];
#if defined(__clang__)
            V x, y;
            for (int lane = 0; lane < n; ++lane) {
                x[lane] = (lane & step) ? b[lane - step] : a[lane];
                y[lane] = (lane & step) ? b[lane] : a[lane + step];
            }
            block[i] = x;
            block[i + step] = y;
#else
            block[i] = __builtin_shuffle(a, b, first);
            block[i + step] = __builtin_shuffle(a, b, second);
#endif
        }
    }
}

// Sums of neighbours: a0 + a1, a2 + a3, ..., then those of b.
template <typename T>
REGARD_INLINE typename Vec<T>::type neighbours(typename Vec<T>::type a, typename Vec<T>::type b) {
    constexpr int n = Vec<T>::lanes;
    using V = typename Vec<T>::type;
#if defined(__clang__)
    V even, odd;
    for (int i = 0; i < n; ++i) {
        even[i] = i < n / 2 ? a[2 * i] : b[2 * i - n];
        odd[i] = i < n / 2 ? a[2 * i + 1] : b[2 * i + 1 - n];
    }
    return even + odd;
#else
    IntVec<T> even{}, odd{};
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
    const V first = __builtin_shuffle(a, b, even), second = __builtin_shuffle(a, b, odd);
    return first + second;
#endif
}

}  // namespace REGARD_ISA
}  // namespace regard
