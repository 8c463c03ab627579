// The vocabulary of vectors that kernels are written in, once for each instruction set.
//
// Kernels are compiled once per instruction set, with that set's flags and with REGARD_ISA naming a namespace; so
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
#if defined(__AMX_BF16__)
#define REGARD_TILES 1  // bf16 products by AMX (amx.h)
#endif
#if defined(__AVX2__)
#define REGARD_INTEGERS 1  // products of integers of 8 or 16 bits (fixed.h)
#endif

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

}  // namespace REGARD_ISA
}  // namespace regard
