// Rows of keys as vectors whose lanes are keys, in registers.
//
// Vectors are of words: units as rows hold them, or pairs of bf16 that become two units of float32. On AVX-512 eight
// words of 16 keys are transposed at a time: lower and upper halves of a vector are loaded from two rows, which the
// ports for loads and for arithmetic do, so that 24 shuffles are left of the 32 that 8 of 16 vectors need otherwise.
// Bound by shuffles was Cascade Lake, which has one port for those of 512 bits. Eight are as many as stay in registers
// for two groups of keys beside the sums. On AVX2 they are four words of 8 keys, likewise: 8 shuffles, where 8 x 8 take
// 32 with the blends between them. Other instruction sets transpose W x W.
#pragma once

#include "rows.h"

namespace regard {
namespace REGARD_ISA {

template <typename K, typename From>
struct KeyRows {
    using Unit = typename K::Unit;
    using X = typename Vec<Unit>::type;
    static constexpr int W = K::W, PAIR = K::Product::pair;
#if defined(__AVX2__)
    static constexpr bool halves = sizeof(Unit) == 4;                          // a vector is of two rows
    static constexpr bool split = is_same<From, bf16> && halves && !K::pairs;  // a word is two units
#else
    static constexpr bool halves = false, split = false;
#endif
    static constexpr int WORDS = halves ? W / 2 : W;         // at a time
    static constexpr int UNITS = split ? 2 * WORDS : WORDS;  // that they become
    static constexpr int UNITS_OF_WORD = UNITS / WORDS;

    // Words that `turn` gives of keys.
    static int64_t words(int64_t dim) { return dim / PAIR / UNITS * WORDS; }

    // Words of W keys: those that hold units u to u + UNITS.
    template <typename Rows>
    static REGARD_INLINE void turn(const Rows &row, int64_t u, X (&x)[WORDS]) {
        if constexpr (halves) {
            turn_halves(row, u, x);
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) x[i] = load_units(units_of(row[i]) + u);
            transpose<Unit>(x);
        }
    }

    // Unit i of those of a word.
    static REGARD_INLINE X unit(X word, [[maybe_unused]] int i) {
        if constexpr (split) {
            const U bits = (U)word;
            return (X)(i ? bits & 0xffff0000u : bits << 16);
        } else {
            return word;
        }
    }

    // Unit u of W keys, of whose dims some may lack.
    template <typename Rows>
    static REGARD_INLINE X single(const Rows &row, int64_t dim, int64_t u) {
        alignas(64) Unit x[W];
        for (int i = 0; i < W; ++i) x[i] = of_one(reinterpret_cast<const From *>(row[i]), dim, u);
        return load(x);
    }

  private:
    static REGARD_INLINE auto units_of(const char *row) {
        if constexpr (K::pairs) return reinterpret_cast<const Unit *>(row);
        else return reinterpret_cast<const From *>(row);
    }

    static REGARD_INLINE Unit of_one(const From *row, int64_t dim, int64_t u) {
        if constexpr (K::pairs)
            return uint32_t(row[2 * u].bits) | (2 * u + 1 < dim ? uint32_t(row[2 * u + 1].bits) << 16 : 0u);
        else return widen(row[u]);
    }

#if defined(__AVX512F__)
    // Eight words of one row and eight of another.
    static REGARD_INLINE __m512i of_two(const char *one, const char *other, int64_t u) {
        const int64_t at = u * PAIR * int64_t(sizeof(From));
        if constexpr (is_same<From, f16>) {
            const __m128i first = _mm_loadu_si128((const __m128i *)(one + at));
            return (__m512i)_mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(first),
                                                                    _mm_loadu_si128((const __m128i *)(other + at)), 1));
        } else {
            const __m256i first = _mm256_loadu_si256((const __m256i *)(one + at));
            return _mm512_inserti64x4(_mm512_castsi256_si512(first), _mm256_loadu_si256((const __m256i *)(other + at)),
                                      1);
        }
    }

    template <typename Rows>
    static REGARD_INLINE void turn_halves(const Rows &row, int64_t u, X (&x)[WORDS]) {
        __m512i two[8], b[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {  // rows i and i + 4, then 8 + i and 12 + i: so quarters come out in order
            const int first = i < 4 ? i : i + 4;
            two[i] = of_two(row[first], row[first + 4], u);
        }
        words_of_four(two, b);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {  // quarters of 16 rows together
            x[i] = (X)_mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
            x[i + 4] = (X)_mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        }
    }
#elif defined(__AVX2__)
    // Four words of one row and four of another.
    static REGARD_INLINE __m256 of_two(const char *one, const char *other, int64_t u) {
        const int64_t at = u * int64_t(sizeof(From));
        if constexpr (is_same<From, f16>) {
            const __m128i first = _mm_loadl_epi64((const __m128i *)(one + at));
            return _mm256_cvtph_ps(_mm_unpacklo_epi64(first, _mm_loadl_epi64((const __m128i *)(other + at))));
        } else {
            const __m256 first = _mm256_castps128_ps256(_mm_loadu_ps((const float *)(one + at)));
            return _mm256_insertf128_ps(first, _mm_loadu_ps((const float *)(other + at)), 1);
        }
    }

    template <typename Rows>
    static REGARD_INLINE void turn_halves(const Rows &row, int64_t u, X (&x)[WORDS]) {
        __m256 two[4], words[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) two[i] = of_two(row[i], row[i + 4], u);
        words_of_four(two, words);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) x[i] = (X)words[i];
    }
#else
    template <typename Rows>
    static void turn_halves(const Rows &, int64_t, X (&)[WORDS]) {}
#endif
};

}  // namespace REGARD_ISA
}  // namespace regard
