// Numbers in fixed point, which meet codes of 8 and 4 bits as integers.
//
// x0 c0 + x1 c1 + ... with codes c needs no code as a float: the values x are stored as whole multiples of 1/32639
// of the largest of them. With VNNI they are cut into two bytes with signs, 256 h + l, and an instruction multiplies 64
// codes with 64 bytes and adds the products by fours. Without it they stay words of 16 bits, codes become such words,
// and an instruction multiplies 32 of them and adds the products by twos: as many products, and a sum for each besides
// (Skylake-X; on Zen 4 products of integers, additions and shuffles have pipes of their own). Integers are exact, so a
// sum has the same bits in whatever order it is made; what is lost is at most half a step of each number, 2^-16 of the
// largest, where bf16 loses 2^-9 of each.
//
// Rows come in fours, whose sums share shuffles. NaN or infinity among the values makes each of their sums NaN.
#pragma once

#include "codes.h"

#if defined(REGARD_INTEGERS)
namespace regard {
namespace REGARD_ISA {

constexpr float STEPS = 127 * 256 + 127;
constexpr float SMALLEST = 0x1p-111f;  // what is largest counts as no less, so that STEPS of it are finite

// Of four rows: the scales of their fixed-point values, and what sums of their products with codes are to become.
struct Fixed {
    alignas(16) float steps[4], unit[4];  // in 1, and of one
    alignas(16) float added[4];           // to sums
    alignas(16) int32_t high[4], low[4];  // what sums start from where codes are 128 too large
};

// Sums are of a type that says 32 bits: GCC copies registers to and fro around __m512i.

// Of each row the lanes as one: lane i of each quarter is row i's.
template <typename V, typename Op>
REGARD_INLINE __m512i merged(const V (&rows)[4], Op op) {
    const __m512i x[4] = {(__m512i)rows[0], (__m512i)rows[1], (__m512i)rows[2], (__m512i)rows[3]};
    const __m512i ab = op(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const __m512i cd = op(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    __m512i all = op(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    all = op(all, _mm512_shuffle_i32x4(all, all, 0x4e));
    return op(all, _mm512_shuffle_i32x4(all, all, 0xb1));
}

// The magnitudes as integers, in which NaN is larger than infinity.
REGARD_INLINE I larger_size(I most, F x) { return (I)_mm512_max_epi32((__m512i)most, (__m512i)((I)x & 0x7fffffff)); }

REGARD_INLINE void take_sizes(const I (&most)[4], Fixed &fixed) {
    const __m512i sizes = merged(most, [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); });
    const __m128 least = _mm_set1_ps(SMALLEST), steps = _mm_set1_ps(STEPS), unit = _mm_set1_ps(1 / STEPS);
    const __m128 size = (__m128)_mm_max_epi32(_mm512_castsi512_si128(sizes), (__m128i)least);
    _mm_store_ps(fixed.steps, steps / size);
    _mm_store_ps(fixed.unit, unit * size);
}

REGARD_INLINE void take_added(const F (&added)[4], Fixed &fixed) {
    const __m512i all = merged(added, [](__m512i a, __m512i b) { return (__m512i)((__m512)a + (__m512)b); });
    _mm_store_ps(fixed.added, (__m128)_mm512_castsi512_si128(all));
}

// From the sums of rows: 128 of them less, as 256 high + low.
REGARD_INLINE void take_sums(const I (&sums)[4], Fixed &fixed) {
    const __m512i all = merged(sums, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); });
    const __m128i sum = _mm512_castsi512_si128(all), zero = _mm_setzero_si128();
    _mm_store_si128((__m128i *)fixed.high, _mm_sub_epi32(zero, _mm_srai_epi32(sum, 1)));
    _mm_store_si128((__m128i *)fixed.low,
                    _mm_sub_epi32(zero, _mm_slli_epi32(_mm_and_si128(sum, _mm_set1_epi32(1)), 7)));
}

#if defined(__AVX512VNNI__)
// Sums of products with high and with low bytes.
struct Sum {
    I high, low;
};

// What is summed before any product; of codes that are 128 too large what is too much, else 0.
template <int R, int N, bool too_large>
REGARD_INLINE void start_sums(const Fixed &fixed, Sum (&sum)[R][N]) {
#pragma GCC unroll 4
    for (int s = 0; s < R; ++s)
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n)
            sum[s][n] = {I{} + (too_large ? fixed.high[s] : 0), I{} + (too_large ? fixed.low[s] : 0)};
}
// As one number, in steps.
REGARD_INLINE F in_one(const Sum &sum) { return fma(numbers(sum.high), broadcast(256.0f), numbers(sum.low)); }

#else
struct Sum {
    I all;
};

template <int R, int N, bool>
REGARD_INLINE void start_sums(const Fixed &, Sum (&sum)[R][N]) {
#pragma GCC unroll 4
    for (int s = 0; s < R; ++s)
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) sum[s][n] = {I{}};
}
REGARD_INLINE F in_one(const Sum &sum) { return numbers(sum.all); }
#endif

// 32 values in steps, 16 bits each: even places from the one, odd places from the other.
REGARD_INLINE __m512i in_steps(F even, F odd, F steps) {
    const F whole = broadcast(0x1.8p23f);  // the nearest integer is in the lowest bits
    const __m512i a = (__m512i)fma(even, steps, whole), b = (__m512i)fma(odd, steps, whole);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16));
}

// Fours of them in 8 bytes, as products with codes want them. Of places as they come, or of the even before the odd
// of 8.
enum class Order { together, apart };
#if defined(__AVX512VNNI__)
// Four high bytes before four low ones.
template <Order order>
REGARD_INLINE __m512i by_fours(__m512i x) {
    const __m512i high = _mm512_add_epi16(x, _mm512_set1_epi16(128));
    const __m512i bytes = _mm512_ternarylogic_epi32(_mm512_set1_epi16(short(0xff00)), high, x, 0xca);
    const __m128i by = order == Order::together ? _mm_set_epi8(14, 12, 10, 8, 15, 13, 11, 9, 6, 4, 2, 0, 7, 5, 3, 1)
                                                : _mm_set_epi8(14, 10, 6, 2, 15, 11, 7, 3, 12, 8, 4, 0, 13, 9, 5, 1);
    return _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(by));
}
#else
// The first and the third before the second and the fourth.
template <Order order>
REGARD_INLINE __m512i by_fours(__m512i x) {
    const __m128i by = order == Order::together ? _mm_set_epi8(15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0)
                                                : _mm_set_epi8(15, 14, 7, 6, 11, 10, 3, 2, 13, 12, 5, 4, 9, 8, 1, 0);
    return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(by));
}
#endif

// Sums with the products of pairs of words added.
REGARD_INLINE I add_pairs(I sums, __m512i x, __m512i y) {
#if defined(__AVX512VNNI__)
    return (I)_mm512_dpwssd_epi32((__m512i)sums, x, y);
#else
    return (I)_mm512_add_epi32((__m512i)sums, _mm512_madd_epi16(x, y));
#endif
}
// The sums of neighbours, added to others.
REGARD_INLINE I add_steps(I sums, __m512i x) { return add_pairs(sums, x, _mm512_set1_epi16(1)); }

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

// Four codes in each lane, as products want them: of bytes with signs, or of the lower or upper halves of bytes.
#if defined(__AVX512VNNI__)
constexpr bool UNSIGNED = true;              // whether bytes are multiplied as codes from 0 to 255
constexpr int64_t EXACT = int64_t(1) << 15;  // products of a sum that fits 32 bits
struct FourCodes {
    __m512i x;
};
// Codes with signs are stored as those from 0 to 255.
REGARD_INLINE __m512i as_stored_codes(__m512i x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
REGARD_INLINE FourCodes stored_codes(__m512i x) { return {x}; }
REGARD_INLINE FourCodes low_codes(__m512i x) { return {_mm512_and_si512(x, _mm512_set1_epi8(15))}; }
REGARD_INLINE FourCodes high_codes(__m512i x) { return low_codes(_mm512_srli_epi16(x, 4)); }

// Codes times four steps of a row.
REGARD_INLINE void add_products(Sum &sum, const FourCodes &codes, const int8_t *steps) {
    int32_t high, low;
    memcpy(&high, steps, 4);
    memcpy(&low, steps + 4, 4);
    sum.high = (I)_mm512_dpbusd_epi32((__m512i)sum.high, codes.x, _mm512_set1_epi32(high));
    sum.low = (I)_mm512_dpbusd_epi32((__m512i)sum.low, codes.x, _mm512_set1_epi32(low));
}
#else
constexpr bool UNSIGNED = false;
constexpr int64_t EXACT = 512;
struct FourCodes {
    __m512i even, odd;
};
REGARD_INLINE __m512i as_stored_codes(__m512i x) { return x; }
REGARD_INLINE FourCodes stored_codes(__m512i x) {  // a product with 1 and 0 takes each first byte with its sign
    return {_mm512_maddubs_epi16(_mm512_set1_epi16(1), x), _mm512_srai_epi16(x, 8)};
}
REGARD_INLINE FourCodes low_codes(__m512i x) {
    const __m512i lowest = _mm512_set1_epi16(15);
    return {_mm512_and_si512(x, lowest), _mm512_and_si512(_mm512_srli_epi16(x, 8), lowest)};
}
REGARD_INLINE FourCodes high_codes(__m512i x) {
    return {_mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi16(15)), _mm512_srli_epi16(x, 12)};
}

REGARD_INLINE void add_products(Sum &sum, const FourCodes &codes, const int8_t *steps) {
    int32_t even, odd;
    memcpy(&even, steps, 4);
    memcpy(&odd, steps + 4, 4);
    sum.all += (I)_mm512_madd_epi16(codes.even, _mm512_set1_epi32(even));
    sum.all += (I)_mm512_madd_epi16(codes.odd, _mm512_set1_epi32(odd));
}
#endif

}  // namespace REGARD_ISA
}  // namespace regard
#endif
