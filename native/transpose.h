// Vectors as rows of a square: transposed, and neighbours added.
#pragma once

#include "simd.h"

namespace regard {
namespace REGARD_ISA {

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
