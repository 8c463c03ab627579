// Scores of a few rows of bf16 with tiles of codes that are multiplied as integers (fixed.h): int8 and int4.
//
// A key's number is code * scale + low, with one scale for each channel of a group of tokens; so the scales go to the
// queries, once for each group, and lanes are the tokens of a tile:
//
//     sum_c q_c (code_c scale_c + low_c) = sum_c (q_c scale_c) code_c + sum_c q_c low_c
//
// Scales of tokens stay outside: then the queries are written once, as if all scales and lows were 1.
#pragma once

#include "fixed.h"
#include "source.h"

#if defined(REGARD_INTEGERS)
namespace regard {
namespace REGARD_ISA {

// A tile of W tokens, and their scales: of channels, or of tokens. Of 16 tokens each channel has a byte, or a half.
struct CodedTile {
    const uint8_t *codes;
    const bf16 *scale, *low;  // null low: nothing is added
    bool per_token;
};

#if !defined(__AVX512F__)
// As many numbers as a vector has lanes, or fewer and zeros.
REGARD_INLINE F load_some(const float *from, int64_t count) {
    constexpr int W = Vec<float>::lanes;
    if (count >= W) return load(from);
    F x{};
    for (int64_t i = 0; i < count; ++i) x[i] = from[i];
    return x;
}
#endif

// Unit: what queries are of, pairs of bf16 or float.
template <typename Unit>
class CodedScores {
  public:
    static constexpr int SOME = 32, W = Vec<float>::lanes;  // channels
    static constexpr int64_t DIMS = int64_t(1) << 15;       // at most

    static int64_t bytes(int64_t dim) { return up(dim, SOME) / SOME * 4 * (64 + 2 * 64); }

    // queries [rows][units], from the first row of four.
    CodedScores(int64_t d, const Unit *q, int64_t of_row, char *scratch)
        : dim(d), units(of_row), blocks((d + SOME - 1) / SOME), queries(q) {
        bytes_ = reinterpret_cast<int8_t *>(scratch);
        numbers_ = reinterpret_cast<float *>(bytes_ + 4 * blocks * 2 * SOME);
    }

    // Products with G tiles of one group: x[row][tile].
    template <int R, int G, bool nibbles>
    void meet(const CodedTile (&tile)[G], F (&x)[R][G], Lines &lines) {
        const CodedTile &first = tile[0];
        const bf16 *const mine = first.per_token ? nullptr : first.scale;
        if (!written_ || mine != scale_ || nibbles != nibbles_) {
            if (first.per_token || first.low) write<R, nibbles, true>(mine, first.per_token ? nullptr : first.low);
            else write<R, nibbles, false>(mine, nullptr);
            written_ = true, scale_ = mine, nibbles_ = nibbles;
        }
        multiply<R, G, nibbles>(tile, x, lines);
        for (int g = 0; g < G; ++g) {
            const F scale = first.per_token ? load_wide(tile[g].scale) : F{};
            const F low = first.per_token && first.low ? load_wide(tile[g].low) : F{};
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s) {
                const F unit = broadcast(fixed_.unit[s]), added = broadcast(fixed_.added[s]);
                x[s][g] = first.per_token ? fma(x[s][g] * unit, scale, first.low ? added * low : F{})
                                          : fma(x[s][g], unit, added);
            }
        }
    }

    // How often `meet` asks for lines.
    static int64_t asks(int64_t dim, bool nibbles) { return dim / (nibbles ? 8 : 4); }

  private:
    const int64_t dim, units, blocks;
    const Unit *const queries;
    int8_t *bytes_;                           // [4][blocks][64], on AVX2 32 words
    float *numbers_;                          // [blocks][2][4][16], on AVX2 [4][32 blocks]
    bool written_ = false, nibbles_ = false;  // for these scales
    const bf16 *scale_ = nullptr;
    Fixed fixed_{};

#if defined(__AVX512BW__)
    // bf16 scales widened: even ones, then odd ones. Null: all 1.
    REGARD_INLINE void widened(const bf16 *from, int64_t d, F &even, F &odd) const {
        if (!from) {
            even = odd = broadcast(1.0f);
            return;
        }
        const __mmask32 real = dim - d >= SOME ? 0xffffffff : (1u << (dim - d)) - 1;
        halves(_mm512_maskz_loadu_epi16(real, from + d), even, odd);
    }
    static REGARD_INLINE void halves(__m512i pairs, F &even, F &odd) {
        even = (F)_mm512_slli_epi32(pairs, 16);
        odd = (F)_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000)));
    }

    // Channels of block b of a query, even and odd ones.
    REGARD_INLINE void take_query(int s, int64_t b, F &even, F &odd) const {
        constexpr bool pairs = is_same<Unit, uint32_t>;
        const Unit *const from = queries + s * units + b * (pairs ? 16 : 32);
        const int64_t left = units - b * (pairs ? 16 : 32);
        const uint32_t real = left >= 32 ? 0xffffffff : (1u << left) - 1;
        if constexpr (pairs) {
            halves(_mm512_maskz_loadu_epi32(__mmask16(real), from), even, odd);
        } else {
            even = _mm512_maskz_loadu_ps(__mmask16(real), from);
            odd = _mm512_maskz_loadu_ps(__mmask16(real >> 16), from + 16);
            part_halves(even, odd);
        }
    }

    // R rows times the scales, in fixed point.
    template <int R, bool nibbles, bool has_low>
    __attribute__((noinline)) void write(const bf16 *scale, const bf16 *low) {
        I most[4] = {}, sums[4] = {};
        F added[4] = {};
        for (int64_t b = 0; b < blocks; ++b) {
            F by_even, by_odd, low_even{}, low_odd{};
            widened(scale, b * SOME, by_even, by_odd);
            if (has_low) widened(low, b * SOME, low_even, low_odd);
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s) {
                F even, odd;
                take_query(s, b, even, odd);
                if (has_low) added[s] = fma(odd, low_odd, fma(even, low_even, added[s]));
                even *= by_even, odd *= by_odd;
                store(numbers_ + (b * 8 + s) * 16, even);
                store(numbers_ + (b * 8 + s + 4) * 16, odd);
                most[s] = larger_size(larger_size(most[s], even), odd);
            }
        }
        take_sizes(most, fixed_);
        for (int64_t b = 0; b < blocks; ++b)
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s) {
                const float *const from = numbers_ + (b * 8 + s) * 16;
                const __m512i whole = in_steps(load(from), load(from + 64), broadcast(fixed_.steps[s]));
                _mm512_storeu_si512(bytes_ + (s * blocks + b) * 64,
                                    by_fours<nibbles ? Order::apart : Order::together>(whole));
                if (!nibbles && UNSIGNED) sums[s] = add_steps(sums[s], whole);
            }
        take_added(added, fixed_);  // zeros where this part has no lows, as the one before may have some
        if (!nibbles && UNSIGNED) take_sums(sums, fixed_);
    }

    template <int R, int G, bool nibbles>
    REGARD_INLINE void multiply(const CodedTile (&tile)[G], F (&x)[R][G], Lines &lines) const {
        constexpr int at_once = nibbles ? 8 : 4;  // channels, in 64 bytes
        Sum sum[R][G];
        start_sums<R, G, !nibbles>(fixed_, sum);
        F before[R][G] = {};  // sums of earlier channels, where one of 32 bits cannot have all
        const uint8_t *at[G];
        for (int g = 0; g < G; ++g) at[g] = tile[g].codes;
        alignas(64) uint8_t rest[G][64];
        Lines::Place place = lines.place();
        int64_t steps = dim / at_once, d = 0;
        for (int64_t b = 0; b < blocks; ++b, d += SOME) {
            int n = least(steps, SOME / at_once);
            const int8_t *q = bytes_ + b * 64;
            for (int i = 0; i < n; ++i, q += at_once * 2) {
                step<R, G, nibbles>(at, q, sum);
                lines.ask(place);
                for (int g = 0; g < G; ++g) at[g] += 64;
            }
            steps -= n;
            if (EXACT < DIMS && __builtin_expect((b + 1) % (EXACT / SOME) == 0, 0))
                for (int s = 0; s < R; ++s)
                    for (int g = 0; g < G; ++g) before[s][g] += in_one(sum[s][g]), sum[s][g] = Sum{};
        }
        lines.back(place);
        if (dim % at_once) {
            const int bytes = int((dim % at_once + nibbles) / (1 + nibbles)) * 16;  // 16 to 64
            for (int g = 0; g < G; ++g) {
                _mm512_store_si512(rest[g], _mm512_maskz_loadu_epi8(~uint64_t(0) >> (64 - bytes), at[g]));
                at[g] = rest[g];
            }
            step<R, G, nibbles>(at, bytes_ + dim / at_once * at_once * 2, sum);
        }
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s)
#pragma GCC unroll 2
            for (int g = 0; g < G; ++g) x[s][g] = EXACT < DIMS ? before[s][g] + in_one(sum[s][g]) : in_one(sum[s][g]);
    }

    template <int R, int G, bool nibbles>
    REGARD_INLINE void step(const uint8_t *const (&at)[G], const int8_t *q, Sum (&sum)[R][G]) const {
        __m512i codes[G];
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) {
            codes[g] = transposed(_mm512_loadu_si512(at[g]));
            if (!nibbles) codes[g] = as_stored_codes(codes[g]);
        }
#pragma GCC unroll 2
        for (int half = 0; half < (nibbles ? 2 : 1); ++half) {
            FourCodes some[G];
#pragma GCC unroll 2
            for (int g = 0; g < G; ++g)
                some[g] = !nibbles ? stored_codes(codes[g]) : half ? high_codes(codes[g]) : low_codes(codes[g]);
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s)
#pragma GCC unroll 2
                for (int g = 0; g < G; ++g) add_products(sum[s][g], some[g], q + s * blocks * 64 + half * 8);
        }
    }
#else
    // R rows times the scales, in fixed point. Stores could change what `this` points to, so its members are copied.
    template <int R, bool, bool has_low>
    __attribute__((noinline)) void write(const bf16 *scale, const bf16 *low) {
        const Unit *const from = queries;
        const int64_t of_row = units, channels = SOME * blocks, count = dim;
        float *const to = numbers_;
        I most[4] = {};
        F added[4] = {};
        const auto take = [&](int64_t d, F by, F with, auto number) {
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s) {
                const F q = number(from + s * of_row + d), x = q * by;
                if (has_low) added[s] = fma(q, with, added[s]);
                store(to + s * channels + d, x);
                most[s] = larger_size(most[s], x);
            }
        };
        const F one = broadcast(1.0f);
        int64_t d = 0;
        for (; d + W <= count; d += W)
            take(d, scale ? load_wide(scale + d) : one, low ? load_wide(low + d) : one,
                 [](const Unit *q) { return load(q); });
        for (; d < channels; d += W) {
            const int64_t left = count - d;
            take(d, scale ? widened(scale + d, left) : one, low ? widened(low + d, left) : one,
                 [&](const Unit *q) { return load_some(q, left); });
        }
        take_sizes(most, fixed_);
        take_added(added, fixed_);  // zeros where this part has no lows, as the one before may have some
        int16_t *const words = reinterpret_cast<int16_t *>(bytes_);
        for (int s = 0; s < R; ++s) {
            const F steps = broadcast(fixed_.steps[s]);
            for (int64_t i = s * channels; i < (s + 1) * channels; i += 2 * W)
                _mm256_storeu_si256((__m256i *)(words + i), in_steps(load(to + i), load(to + i + W), steps));
        }
    }

    // A tile of 8 tokens, or the two halves of one of 16.
    template <int R, int G, bool nibbles>
    REGARD_INLINE void multiply(const CodedTile (&tile)[G], F (&x)[R][G], Lines &lines) const {
        constexpr int at_once = nibbles ? 8 : 4;  // channels, in a line of 16 tokens
        const int16_t *q = reinterpret_cast<const int16_t *>(bytes_);
        const uint8_t *at = tile[0].codes;
        I sum[R][G] = {};
        F before[R][G] = {};  // sums of earlier channels, where one of 32 bits cannot have all
        Lines::Place place = lines.place();
        int64_t d = 0;
        while (dim - d >= at_once) {
            for (const int64_t end = d + least(dim - d, EXACT); d + at_once <= end; d += at_once) {
                lines.ask(place);
#pragma GCC unroll 4
                for (int n = 0; n < at_once; n += 2, q += 2) step<R, G, nibbles>(at, q, sum);
            }
            if (__builtin_expect(d < dim, 0)) flush(sum, before);
        }
        lines.back(place);
        for (; d + 2 <= dim; d += 2, q += 2) step<R, G, nibbles>(at, q, sum);
        if (d < dim) step<R, G, nibbles, true>(at, q, sum);
        flush(sum, before);
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s) {
            if constexpr (nibbles && G == 2) in_order(before[s]);
#pragma GCC unroll 2
            for (int g = 0; g < G; ++g) x[s][g] = before[s][g];
        }
    }

    template <int R, int G>
    static REGARD_INLINE void flush(I (&sum)[R][G], F (&before)[R][G]) {
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s)
#pragma GCC unroll 2
            for (int g = 0; g < G; ++g) before[s][g] += numbers(sum[s][g]), sum[s][g] = I{};
    }

    // Two channels, or the last one.
    template <int R, int G, bool nibbles, bool last = false>
    REGARD_INLINE void step(const uint8_t *&at, const int16_t *q, I (&sum)[R][G]) const {
        __m256i x[G];
        if constexpr (nibbles) halves(at, x);
        else bytes<last>(at, x);
        at += nibbles ? TOKENS : 2 * TOKENS;
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s) add_products(sum[s], x, q + s * blocks * SOME);
    }

    // Two channels of each token as words side by side; the last one beside zeros.
    template <bool last>
    static REGARD_INLINE void bytes(const uint8_t *at, __m256i (&x)[1]) {
        const __m128i a = _mm_loadl_epi64((const __m128i *)at);
        const __m128i b = last ? _mm_setzero_si128() : _mm_loadl_epi64((const __m128i *)(at + TOKENS));
        x[0] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
    }
    template <bool last>
    static REGARD_INLINE void bytes(const uint8_t *at, __m256i (&x)[2]) {
        const __m128i a = _mm_loadu_si128((const __m128i *)at);
        const __m128i b = last ? _mm_setzero_si128() : _mm_loadu_si128((const __m128i *)(at + TOKENS));
        x[0] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
        x[1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
    }
    static REGARD_INLINE void halves(const uint8_t *at, __m256i (&x)[1]) {
        const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
        x[0] = _mm256_and_si256(_mm256_or_si256(both, _mm256_slli_epi32(both, 12)), _mm256_set1_epi16(15));
    }
    // Tokens 0 to 3 and 8 to 11, and the others.
    static REGARD_INLINE void halves(const uint8_t *at, __m256i (&x)[2]) {
        const __m256i both = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)at));
        const __m256i low = _mm256_and_si256(both, _mm256_set1_epi16(15)), high = _mm256_srli_epi16(both, 4);
        x[0] = _mm256_unpacklo_epi16(low, high), x[1] = _mm256_unpackhi_epi16(low, high);
    }
    static REGARD_INLINE void in_order(F (&x)[2]) {
        const F first = _mm256_permute2f128_ps(x[0], x[1], 0x20);
        x[1] = _mm256_permute2f128_ps(x[0], x[1], 0x31), x[0] = first;
    }
#endif
};

}  // namespace REGARD_ISA
}  // namespace regard
#endif
