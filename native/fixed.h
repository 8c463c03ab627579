// Numbers in fixed point, which meet codes of 8 and 4 bits as integers.
//
// x0 c0 + x1 c1 + ... with codes c needs no code as a float: the values x are stored as whole multiples of 1/32639
// of the largest of them. With VNNI they are cut into two bytes with signs, 256 h + l, and an instruction multiplies 64
// codes with 64 bytes and adds the products by fours. Without it they stay words of 16 bits, codes become such words,
// and an instruction multiplies 32 of them (AVX2: 16) and adds the products by twos: as many products, and a sum for
// each besides (Skylake-X; on Zen 4 products of integers, additions and shuffles have pipes of their own). Integers are
// exact, so a sum has the same bits in whatever order it is made; what is lost is at most half a step of each number,
// 2^-16 of the largest, where bf16 loses 2^-9 of each.
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

// Of each row the lanes as one: lane i of the result is row i's.
template <typename V, typename Op>
REGARD_INLINE __m128i merged(const V (&rows)[4], Op op) {
#if defined(__AVX512F__)
    const __m512i x[4] = {(__m512i)rows[0], (__m512i)rows[1], (__m512i)rows[2], (__m512i)rows[3]};
    const V ab = op((V)_mm512_unpacklo_epi32(x[0], x[1]), (V)_mm512_unpackhi_epi32(x[0], x[1]));
    const V cd = op((V)_mm512_unpacklo_epi32(x[2], x[3]), (V)_mm512_unpackhi_epi32(x[2], x[3]));
    const __m512i a = (__m512i)ab, c = (__m512i)cd;
    __m512i all = (__m512i)op((V)_mm512_unpacklo_epi64(a, c), (V)_mm512_unpackhi_epi64(a, c));
    all = (__m512i)op((V)all, (V)_mm512_shuffle_i32x4(all, all, 0x4e));
    return _mm512_castsi512_si128((__m512i)op((V)all, (V)_mm512_shuffle_i32x4(all, all, 0xb1)));
#else
    const __m256i x[4] = {(__m256i)rows[0], (__m256i)rows[1], (__m256i)rows[2], (__m256i)rows[3]};
    const V ab = op((V)_mm256_unpacklo_epi32(x[0], x[1]), (V)_mm256_unpackhi_epi32(x[0], x[1]));
    const V cd = op((V)_mm256_unpacklo_epi32(x[2], x[3]), (V)_mm256_unpackhi_epi32(x[2], x[3]));
    const __m256i a = (__m256i)ab, c = (__m256i)cd;
    const __m256i all = (__m256i)op((V)_mm256_unpacklo_epi64(a, c), (V)_mm256_unpackhi_epi64(a, c));
    return _mm256_castsi256_si128((__m256i)op((V)all, (V)_mm256_permute2x128_si256(all, all, 1)));
#endif
}

REGARD_INLINE I larger_int(I a, I b) {
#if defined(__AVX512F__)
    return (I)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    return (I)_mm256_max_epi32((__m256i)a, (__m256i)b);
#endif
}
// The magnitudes as integers, in which NaN is larger than infinity.
REGARD_INLINE I larger_size(I most, F x) { return larger_int(most, (I)x & 0x7fffffff); }

REGARD_INLINE void take_sizes(const I (&most)[4], Fixed &fixed) {
    const __m128 least = _mm_set1_ps(SMALLEST), steps = _mm_set1_ps(STEPS), unit = _mm_set1_ps(1 / STEPS);
    const __m128 size = (__m128)_mm_max_epi32(merged(most, larger_int), (__m128i)least);
    _mm_store_ps(fixed.steps, steps / size);
    _mm_store_ps(fixed.unit, unit * size + size * _mm_setzero_ps());  // NaN where it is infinite
}

REGARD_INLINE void take_added(const F (&added)[4], Fixed &fixed) {
    _mm_store_ps(fixed.added, (__m128)merged(added, [](F a, F b) { return a + b; }));
}

#if defined(__AVX512BW__)
// From the sums of rows: 128 of them less, as 256 high + low.
REGARD_INLINE void take_sums(const I (&sums)[4], Fixed &fixed) {
    const __m128i sum = merged(sums, [](I a, I b) { return a + b; }), zero = _mm_setzero_si128();
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

#else
// ---- AVX2: codes as words, and products of 16 of them ---------------------------------------------------------------

constexpr int64_t EXACT = 512;  // products of a sum that fits 32 bits

// 16 values in steps, 16 bits each, in order.
REGARD_INLINE __m256i in_steps(F first, F second, F steps) {
    const F whole = broadcast(0x1.8p23f);  // the nearest integer is in the lowest bits
    const I a = (I)fma(first, steps, whole) - (I)whole, b = (I)fma(second, steps, whole) - (I)whole;
    const __m256i words = _mm256_packs_epi32((__m256i)a, (__m256i)b);
    return _mm256_permute4x64_epi64(words, 0xd8);
}

// The products of codes with a pair of steps added to sums. Row after row: GCC would broadcast the pairs of all rows at
// once, and then lack registers for the sums.
REGARD_INLINE __m256i broadcast_steps(const int16_t *steps) {
    int32_t pair;
    memcpy(&pair, steps, 4);
    __m256i pairs = _mm256_set1_epi32(pair);
    asm volatile("" : "+x"(pairs));
    return pairs;
}
REGARD_INLINE void add_products(I (&sums)[1], const __m256i (&codes)[1], const int16_t *steps) {
    sums[0] += (I)_mm256_madd_epi16(codes[0], broadcast_steps(steps));
}
REGARD_INLINE void add_products(I (&sums)[2], const __m256i (&codes)[2], const int16_t *steps) {
    const __m256i pairs = broadcast_steps(steps);
    I first = sums[0] + (I)_mm256_madd_epi16(codes[0], pairs), second = sums[1] + (I)_mm256_madd_epi16(codes[1], pairs);
    asm volatile("" : "+x"(first), "+x"(second));
    sums[0] = first, sums[1] = second;
}
#endif

}  // namespace REGARD_ISA
}  // namespace regard
#endif
