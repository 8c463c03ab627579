// Codes of 8 and 4 bits, decoded: a vector of adjacent ones. abi.h (regard_part) defines them.
#pragma once

#include "abi.h"
#include "float16.h"

namespace regard {
namespace REGARD_ISA {

constexpr int64_t TOKENS = 16;  // of a tile of codes

// e4m3: a sign, 4 bits of exponent from 2^-6 on, 3 of fraction; below them m * 2^-9; all bits set: NaN.
inline float fp8_number(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    float size = exponent ? float(8 + fraction) * 0x1p-10f : float(fraction) * 0x1p-9f;
    for (int i = 0; i < exponent; ++i) size *= 2;
    if ((code & 127) == 127) size = __builtin_nanf("");
    return code & 128 ? -size : size;
}

// The value of a code.
inline float coded(int64_t form, int code) {
    return form == REGARD_FP8 ? fp8_number(uint8_t(code)) : form == REGARD_INT8 ? float(int8_t(code)) : float(code);
}

// A decoded number as few rows of S meet it. Of bf16 it is rounded only where pairs of them are multiplied.
template <typename S>
REGARD_INLINE F rounded(F x) {
    return is_same<S, bf16> ? x : as_stored<S>(x);
}

// W bytes as integers, without or with their signs.
REGARD_INLINE I widen_bytes(const uint8_t *p) {
#if defined(__AVX512F__)
    return I(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return I(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    I x{};
    for (int i = 0; i < Vec<float>::lanes; ++i) x[i] = p[i];
    return x;
#endif
}
REGARD_INLINE I widen_signed(const uint8_t *p) {
#if defined(__AVX512F__)
    return I(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return I(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    I x{};
    for (int i = 0; i < Vec<float>::lanes; ++i) x[i] = int8_t(p[i]);
    return x;
#endif
}
REGARD_INLINE F numbers(I x) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps((__m512i)x);
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps((__m256i)x);
#else
    return __builtin_convertvector(x, F);
#endif
}

// What is read of a code, times `unit`, a power of 2 that the scale is multiplied with, is its value.
// Each has `tile`: dim d of W tokens of a tile, whose bytes begin at `codes`; `row`: dims d to d + W of one token; and
// `rows`: N such vectors, of which the first begins at a multiple of N * W; `turned`: N from adjacent bytes, one each.
// `fours`: four dims at once are had for less, by `tiles`; `twos`: so are vectors side by side, by `some`. Codes of a
// byte; `Code::at` reads W of them, and `Code::some` N times as many.
template <typename Code>
struct OfBytes {
    static constexpr bool nibbles = false, fours = false, twos = false;
    static constexpr float unit = 1;
    static REGARD_INLINE F tile(const uint8_t *codes, int64_t d) { return Code::at(codes + d * TOKENS); }
    static REGARD_INLINE F row(const uint8_t *codes, int64_t d) { return Code::at(codes + d); }
    template <int N>
    static REGARD_INLINE void rows(const uint8_t *codes, int64_t d, F (&x)[N]) {
        Code::some(codes + d, x);
    }
    template <int N>
    static REGARD_INLINE void turned(const uint8_t *codes, F (&x)[N]) {
        Code::some(codes, x);
    }
    template <int N>
    static REGARD_INLINE void some(const uint8_t *p, F (&x)[N]) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) x[n] = Code::at(p + n * Vec<float>::lanes);
    }
};

struct Int8 : OfBytes<Int8> {
    static REGARD_INLINE F at(const uint8_t *p) { return numbers(widen_signed(p)); }
};

#if defined(__AVX512VBMI__)
// The bf16 of the e4m3 codes without a sign, byte by byte.
struct Fp8Bytes {
    alignas(64) uint8_t high[128], low[128];

    constexpr Fp8Bytes() : high(), low() {
        for (int code = 0; code < 128; ++code) {
            const int exponent = code >> 3, fraction = code & 7;
            int bits = (exponent + 120) << 7 | fraction << 4;
            if (!exponent) {  // fraction * 2^-9
                const int first = fraction > 3 ? 2 : fraction > 1;
                bits = fraction ? (118 + first) << 7 | (fraction << (7 - first) & 127) : 0;
            }
            if (code == 127) bits = 0x7fc0;
            high[code] = uint8_t(bits >> 8), low[code] = uint8_t(bits & 255);
        }
    }
};
constexpr Fp8Bytes FP8_BYTES;

// Of four channels of a tile the places from which `Fp8::as_bf16` makes pairs of two channels.
struct Fp8Pairs {
    alignas(64) uint8_t from[64];

    constexpr Fp8Pairs() : from() {
        for (int i = 0; i < 64; ++i) from[i] = uint8_t(i % 2 * 16 + i / 8 % 2 * 32 + i / 16 * 4 + i % 8 / 2);
    }
};
constexpr Fp8Pairs FP8_PAIRS;
#endif

#if defined(__AVX512F__) && !defined(__AVX512VBMI__)
// Constants of `Fp8::four`.
struct Fp8Bits {
    alignas(64) uint32_t kept[16], exponent[16], quarters[16];
    alignas(64) uint8_t two[64], sixteen[64], even[64], odd[64], bytes[64];

    constexpr Fp8Bits() : kept(), exponent(), quarters(), two(), sixteen(), even(), odd(), bytes() {
        for (int i = 0; i < 16; ++i)
            kept[i] = 0x87f00000, exponent[i] = 112 << 23, quarters[i] = uint32_t(i % 4 * 4 + i / 4);
        for (int i = 0; i < 64; ++i) {
            two[i] = 2, sixteen[i] = 16, even[i] = i % 2 ? 0 : 16, odd[i] = i % 2 ? 16 : 0;
            bytes[i] = uint8_t(i % 4 * 4 + i / 4 % 4);
        }
    }
};
constexpr Fp8Bits FP8_BITS;
#endif

struct Fp8 : OfBytes<Fp8> {
#if defined(__AVX512F__)
    static constexpr bool fours = true;
    static REGARD_INLINE void tiles(const uint8_t *codes, int64_t d, F (&x)[4]) { some(codes + d * TOKENS, x); }
#elif defined(__AVX2__)
    static constexpr bool twos = true;
#endif
#if defined(__AVX512VBMI__)
    static REGARD_INLINE F at(const uint8_t *p) {
        F x[1];
        some(p, x);
        return x[0];
    }
    // 1, 2, 4 or 8 vectors. Looked up as bf16, whose two bytes are the upper ones of a number. Words of 4 codes go to
    // places from which lanes of 128 bits need not be crossed again.
    template <int N>
    static REGARD_INLINE void some(const uint8_t *p, F (&x)[N]) {
        if constexpr (N > 4) {
            static_assert(N == 8, "two lots of four");
            F a[4], b[4];
            some(p, a), some(p + 64, b);
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n) x[n] = a[n], x[n + 4] = b[n];
        } else {
            const __m512i places = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
            const __m512i codes = _mm512_permutexvar_epi32(places, bytes<N>(p));
            const __m512i low = looked_up(FP8_BYTES.low, codes);
            const __m512i high =
                _mm512_ternarylogic_epi32(looked_up(FP8_BYTES.high, codes), codes, _mm512_set1_epi8(-128), 0xf8);
            const __m512i zero = _mm512_setzero_si512(), first = _mm512_unpacklo_epi8(low, high);
            x[0] = (F)_mm512_unpacklo_epi16(zero, first);
            if constexpr (N > 1) x[1] = (F)_mm512_unpackhi_epi16(zero, first);
            if constexpr (N > 2) {
                const __m512i second = _mm512_unpackhi_epi8(low, high);
                x[2] = (F)_mm512_unpacklo_epi16(zero, second);
                x[3] = (F)_mm512_unpackhi_epi16(zero, second);
            }
        }
    }
#if defined(REGARD_PAIRS)
    // 64 codes as bf16, which holds each exactly: those of the lower and of the upper halves of quarters.
    static REGARD_INLINE void as_bf16(__m512i codes, U &lower, U &upper) {
        const __m512i low = looked_up(FP8_BYTES.low, codes);
        const __m512i high =
            _mm512_ternarylogic_epi32(looked_up(FP8_BYTES.high, codes), codes, _mm512_set1_epi8(-128), 0xf8);
        lower = (U)_mm512_unpacklo_epi8(low, high), upper = (U)_mm512_unpackhi_epi8(low, high);
    }
#endif
    template <int N>
    static REGARD_INLINE __m512i bytes(const uint8_t *p) {
        if constexpr (N == 1) return _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
        else if constexpr (N == 2) return _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p));
        else return _mm512_loadu_si512(p);
    }
    static REGARD_INLINE __m512i looked_up(const uint8_t (&table)[128], __m512i codes) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
    }
#else
#if defined(__AVX2__)
    // Codes of NaN are looked for in all of them at once, since no encoder writes one: 3 instructions less for a
    // vector.
    template <int N>
    static REGARD_INLINE void some(const uint8_t *p, F (&x)[N]) {
        if constexpr (N == 1) {
            x[0] = at(p);
#if defined(__AVX512F__)
        } else if constexpr (N % 4 == 0) {
#pragma GCC unroll 2
            for (int n = 0; n < N; n += 4) four(p + n * Vec<float>::lanes, x + n);
#endif
        } else {
#pragma GCC unroll 4
            for (int n = 0; n < N; n += 2) two(p + n * Vec<float>::lanes, x[n], x[n + 1]);
            if (__builtin_expect(some_nan<N * Vec<float>::lanes>(p), 0))
                for (int n = 0; n < N; ++n) x[n] = at(p + n * Vec<float>::lanes);
        }
    }
#endif
#if defined(__AVX512F__)
    // Four vectors, without a conversion: a code that is neither 0, subnormal nor NaN, shifted to where a float has
    // sign, exponent and fraction, is its number but for a constant in the exponent. One product shifts each second
    // byte by 4 and spreads its sign. Others are looked for in all 64 at once: they are few.
    static REGARD_INLINE void four(const uint8_t *p, F *x) {
        const Fp8Bits *bits = &FP8_BITS;
        asm("" : "+r"(bits));  // or GCC, short of registers, makes constants anew each time
        const __m512i codes = _mm512_loadu_si512(p);
        const __m512i moved = _mm512_add_epi8(_mm512_add_epi8(codes, codes), _mm512_load_si512(bits->two));
        if (__builtin_expect(_mm512_cmple_epu8_mask(moved, _mm512_load_si512(bits->sixteen)) != 0, 0)) {
            for (int n = 0; n < 4; ++n) x[n] = at(p + n * Vec<float>::lanes);
            return;
        }
        const __m512i quarters = _mm512_permutexvar_epi32(_mm512_load_si512(bits->quarters), codes);
        const __m512i fours = _mm512_shuffle_epi8(quarters, _mm512_load_si512(bits->bytes));
        const __m512i even = _mm512_maddubs_epi16(_mm512_load_si512(bits->even), fours);
        const __m512i odd = _mm512_maddubs_epi16(_mm512_load_si512(bits->odd), fours);
        const __m512i kept = _mm512_load_si512(bits->kept), exponent = _mm512_load_si512(bits->exponent);
        x[0] = (F)_mm512_ternarylogic_epi32(_mm512_slli_epi32(even, 16), kept, exponent, 0xea);
        x[1] = (F)_mm512_ternarylogic_epi32(_mm512_slli_epi32(odd, 16), kept, exponent, 0xea);
        x[2] = (F)_mm512_ternarylogic_epi32(even, kept, exponent, 0xea);
        x[3] = (F)_mm512_ternarylogic_epi32(odd, kept, exponent, 0xea);
    }
    static REGARD_INLINE void two(const uint8_t *p, F &first, F &second) {
        const __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
        const __m512i bits = _mm512_and_si512(_mm512_slli_epi16(x, 7), _mm512_set1_epi16(short(0xbfff)));
        first = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
        second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
    }
    template <int count>
    static REGARD_INLINE bool some_nan(const uint8_t *p) {
        static_assert(count % 32 == 0, "whole halves of vectors");
        const __m256i sign = _mm256_set1_epi8(-128), all = _mm256_set1_epi8(-1);
        __mmask32 found = 0;
#pragma GCC unroll 4
        for (int i = 0; i < count; i += 32)
            found |= _mm256_cmpeq_epi8_mask(_mm256_or_si256(_mm256_loadu_si256((const __m256i *)(p + i)), sign), all);
        return found;
    }
#elif defined(__AVX2__)
    static REGARD_INLINE void two(const uint8_t *p, F &first, F &second) {
        const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
        const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(short(0xbfff)));
        first = _mm256_cvtph_ps(_mm256_castsi256_si128(bits));
        second = _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
    }
    template <int count>
    static REGARD_INLINE bool some_nan(const uint8_t *p) {
        static_assert(count % 16 == 0, "whole halves of vectors");
        const __m128i sign = _mm_set1_epi8(-128), all = _mm_set1_epi8(-1);
        __m128i found = _mm_setzero_si128();
#pragma GCC unroll 4
        for (int i = 0; i < count; i += 16)
            found =
                _mm_or_si128(found, _mm_cmpeq_epi8(_mm_or_si128(_mm_loadu_si128((const __m128i *)(p + i)), sign), all));
        return _mm_movemask_epi8(found);
    }
#endif
    // As f16 with the exponent 8 too small, whose subnormals every machine converts exactly.
#if defined(__AVX2__)
    static constexpr float unit = 256;
#endif
    static REGARD_INLINE F at(const uint8_t *p) {
#if defined(__AVX512F__)
        const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
        const __m256i size = _mm256_and_si256(x, _mm256_set1_epi16(127));
        const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(short(0xbfff)));
        const __m256i nan =
            _mm256_and_si256(_mm256_cmpeq_epi16(size, _mm256_set1_epi16(127)), _mm256_set1_epi16(0x7c00));
        return _mm512_cvtph_ps(_mm256_or_si256(bits, nan));
#elif defined(__AVX2__)
        const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
        const __m128i size = _mm_and_si128(x, _mm_set1_epi16(127));
        const __m128i bits = _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16(short(0xbfff)));
        const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(size, _mm_set1_epi16(127)), _mm_set1_epi16(0x7c00));
        return _mm256_cvtph_ps(_mm_or_si128(bits, nan));
#else
        F x{};
        for (int i = 0; i < Vec<float>::lanes; ++i) x[i] = fp8_number(p[i]);
        return x;
#endif
    }
#endif
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// The same where no code is NaN.
struct FiniteFp8 {
    static REGARD_INLINE F at(const uint8_t *p) {
        const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
        return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16(short(0xbfff))));
    }
};

// Looks for NaN among codes: as bytes with a sign 127 is the largest, and as those without one 255 is.
class NanCodes {
  public:
    // Among 32, 16 or 8 of them.
    REGARD_INLINE void look32(const uint8_t *p) { look(_mm256_loadu_si256((const __m256i *)p)); }
    REGARD_INLINE void look16(const uint8_t *p) { look(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)p))); }
    REGARD_INLINE void look8(const uint8_t *p) { look(_mm256_zextsi128_si256(_mm_loadl_epi64((const __m128i *)p))); }
    REGARD_INLINE bool found() const {
        const __m256i plus = _mm256_cmpeq_epi8(with_sign_, _mm256_set1_epi8(127));
        return _mm256_movemask_epi8(_mm256_or_si256(plus, _mm256_cmpeq_epi8(without_, _mm256_set1_epi8(-1))));
    }

  private:
    __m256i with_sign_ = _mm256_setzero_si256(), without_ = _mm256_setzero_si256();

    REGARD_INLINE void look(__m256i x) {
        with_sign_ = _mm256_max_epi8(with_sign_, x), without_ = _mm256_max_epu8(without_, x);
    }
};
#endif

struct Int4 {
    static constexpr bool nibbles = true, fours = false, twos = false;
    static constexpr float unit = 1;
    static REGARD_INLINE F low(I x) {
#if defined(__AVX512F__)
        const F all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return _mm512_permutexvar_ps((__m512i)x, all);  // looks at the lowest 4 bits alone
#else
        return numbers(x & 15);
#endif
    }
    static REGARD_INLINE F high(I x) {
#if defined(__AVX512F__)
        return low(I(_mm512_srli_epi32((__m512i)x, 4)));
#else
        return numbers(x >> 4);
#endif
    }
    template <int N>
    static REGARD_INLINE void turned(const uint8_t *codes, F (&x)[N]) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) x[n] = numbers(widen_bytes(codes + n * Vec<float>::lanes));
    }
    static REGARD_INLINE F tile(const uint8_t *codes, int64_t d) {
        const I x = widen_bytes(codes + d / 2 * TOKENS);
        return d % 2 ? high(x) : low(x);
    }
    static REGARD_INLINE F row(const uint8_t *codes, int64_t d) {
        const I x = widen_bytes(codes + d / 32 * 16 + d % 16);
        return d % 32 >= 16 ? high(x) : low(x);
    }
    template <int N>
    static REGARD_INLINE void rows(const uint8_t *codes, int64_t d, F (&x)[N]) {
        constexpr int W = Vec<float>::lanes, half = 16 / W;
        if constexpr (N % (2 * half) == 0) {  // d is a multiple of 32
#pragma GCC unroll 4
            for (int n = 0; n < N; n += 2 * half)
#pragma GCC unroll 4
                for (int i = 0; i < half; ++i) {
                    const I both = widen_bytes(codes + (d + n * W) / 2 + i * W);
                    x[n + i] = low(both);
                    x[n + half + i] = high(both);
                }
        } else {
            for (int n = 0; n < N; ++n) x[n] = row(codes, d + n * W);
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
