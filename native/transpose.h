// Vectors as rows of a square: transposed, and neighbours added; squares of bytes.
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

#if defined(__AVX2__) && !defined(__AVX512F__)
// Of four vectors: words n of all in x[n], in each half.
REGARD_INLINE void words_of_four(const __m256 *x, __m256 *b) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m256 one = i ? _mm256_unpackhi_ps(x[0], x[1]) : _mm256_unpacklo_ps(x[0], x[1]);
        const __m256 other = i ? _mm256_unpackhi_ps(x[2], x[3]) : _mm256_unpacklo_ps(x[2], x[3]);
        b[2 * i] = (__m256)_mm256_unpacklo_pd((__m256d)one, (__m256d)other);
        b[2 * i + 1] = (__m256)_mm256_unpackhi_pd((__m256d)one, (__m256d)other);
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

#if defined(__AVX512BW__)
// Bytes [4][16] as [16][4].
REGARD_INLINE __m512i transposed(__m512i x) {
#if defined(__AVX512VBMI__)
    const __m512i first = _mm512_set_epi32(0x3f2f1f0f, 0x3e2e1e0e, 0x3d2d1d0d, 0x3c2c1c0c, 0x3b2b1b0b, 0x3a2a1a0a,
                                           0x39291909, 0x38281808, 0x37271707, 0x36261606, 0x35251505, 0x34241404,
                                           0x33231303, 0x32221202, 0x31211101, 0x30201000);
    return _mm512_permutexvar_epi8(first, x);
#else  // fours of bytes to their quarter, and there each byte to its place
    const __m512i fours = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m128i bytes = _mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(fours, x), _mm512_broadcast_i32x4(bytes));
#endif
}
#endif

// Bytes [16][16] transposed: row i of the result is at `turned_at(i)`.
#if defined(__AVX512BW__)
constexpr int turned_at(int i) { return i % 4 * 64 + i / 4 * 16; }
REGARD_INLINE void turn_bytes(const uint8_t *from, uint8_t *to) {
    __m512i x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) x[i] = transposed(_mm512_loadu_si512(from + i * 64));
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi64(a, c));
    _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi64(a, c));
    _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi64(b, d));
    _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi64(b, d));
}
#elif defined(__AVX2__)
constexpr int turned_at(int i) { return i * 16; }
REGARD_INLINE void turn_bytes(const uint8_t *from, uint8_t *to) {
    __m256i x[8], y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(from + i * 16))),
                                       _mm_loadu_si128((const __m128i *)(from + (i + 8) * 16)), 1);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // columns 0 to 7 of two rows together, then 8 to 15
        y[i] = _mm256_unpacklo_epi8(x[2 * i], x[2 * i + 1]);
        y[i + 4] = _mm256_unpackhi_epi8(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // four columns of four rows
        const __m256i one = y[i / 2 * 4 + i % 2 * 2], other = y[i / 2 * 4 + i % 2 * 2 + 1];
        x[i / 2 * 4 + i % 2] = _mm256_unpacklo_epi16(one, other);
        x[i / 2 * 4 + i % 2 + 2] = _mm256_unpackhi_epi16(one, other);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // two columns of eight rows, in halves; then both halves of each column
        const __m256i one = _mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        const __m256i other = _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
        _mm256_storeu_si256((__m256i *)(to + i * 64), _mm256_permute4x64_epi64(one, 0xd8));
        _mm256_storeu_si256((__m256i *)(to + i * 64 + 32), _mm256_permute4x64_epi64(other, 0xd8));
    }
}
#else
constexpr int turned_at(int i) { return i * 16; }
inline void turn_bytes(const uint8_t *from, uint8_t *to) {
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) to[j * 16 + i] = from[i * 16 + j];
}
#endif

}  // namespace REGARD_ISA
}  // namespace regard
