// Scores of a few rows of bf16 with tiles of codes that are multiplied as they are: int8 and int4 as integers
// (fixed.h), e4m3 as bf16 where these are multiplied in pairs.
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

// A tile of 16 tokens, and their scales: of channels, or of tokens.
struct CodedTile {
    const uint8_t *codes;
    const bf16 *scale, *low;  // null low: nothing is added
    bool per_token;
};

// Unit: what queries are of, pairs of bf16 or float.
template <typename Unit>
class CodedScores {
  public:
    static constexpr int SOME = 32;                    // channels
    static constexpr int64_t DIMS = int64_t(1) << 15;  // at most

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
    int8_t *bytes_;                           // [4][blocks][64]
    float *numbers_;                          // [blocks][2][4][16]
    bool written_ = false, nibbles_ = false;  // for these scales
    const bf16 *scale_ = nullptr;
    Fixed fixed_{};

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
};

#if defined(REGARD_PAIRS)
// The same with tiles of e4m3, multiplied as pairs of bf16: codes are bf16 as they are, and queries times scales are
// rounded to it.
class Fp8Scores {
  public:
    static constexpr int SOME = 32, FOUR = 64;  // channels; bytes of four

    static int64_t bytes(int64_t dim) { return 4 * up(dim, SOME) * (4 + 2); }

    // queries [rows][units], from the first row of four.
    Fp8Scores(int64_t d, const uint32_t *q, int64_t of_row, char *scratch)
        : dim(d), units(of_row), channels(up(d, SOME)), queries(q) {
        numbers_ = reinterpret_cast<float *>(scratch);
        pairs_ = reinterpret_cast<uint32_t *>(numbers_ + 4 * channels);
    }

    // Products with G tiles of one group: x[row][tile].
    template <int R, int G>
    void meet(const CodedTile (&tile)[G], F (&x)[R][G], Lines &lines) {
        const CodedTile &first = tile[0];
        const bf16 *const mine = first.per_token ? nullptr : first.scale;
        if (!widened_) widen_queries<R>();
        if (!written_ || mine != scale_) {
            if (first.per_token || first.low) write<R, true>(mine, first.per_token ? nullptr : first.low);
            else write<R, false>(mine, nullptr);
            written_ = true, scale_ = mine;
        }
        multiply<R, G>(tile, x, lines);
        for (int g = 0; g < G; ++g) {
            const F scale = first.per_token ? load_wide(tile[g].scale) : F{};
            const F low = first.per_token && first.low ? load_wide(tile[g].low) : F{};
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s) {
                const F added = broadcast(added_[s]);
                x[s][g] = first.per_token ? fma(x[s][g], scale, first.low ? added * low : F{}) : x[s][g] + added;
            }
        }
    }

    // How often `meet` asks for lines.
    static int64_t asks(int64_t dim) { return (dim + 4) / 8; }

  private:
    const int64_t dim, units, channels;
    const uint32_t *const queries;
    float *numbers_;                          // queries [4][channels]
    uint32_t *pairs_;                         // times scales [4][channels / 2]
    bool widened_ = false, written_ = false;  // for these scales
    const bf16 *scale_ = nullptr;
    float added_[4] = {};  // to sums

    // Channels c to c + 16, 0 beyond the last; null: all 1.
    REGARD_INLINE F widened(const bf16 *from, int64_t c) const {
        if (!from) return broadcast(1.0f);
        const int64_t left = dim - c;
        const __mmask16 real = left >= 16 ? 0xffff : left > 0 ? __mmask16((1u << left) - 1) : __mmask16(0);
        return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(real, from + c)), 16);
    }

    template <int R>
    void widen_queries() {
        for (int s = 0; s < R; ++s)
            for (int64_t c = 0; c < channels; c += 16)
                store(numbers_ + s * channels + c, widened(reinterpret_cast<const bf16 *>(queries + s * units), c));
        widened_ = true;
    }

    // R rows times the scales, and what lows add.
    template <int R, bool has_low>
    __attribute__((noinline)) void write(const bf16 *scale, const bf16 *low) {
        F added[R] = {};
        __m512i most{};
        for (int64_t c = 0; c < channels; c += SOME) {
            const F by[2] = {widened(scale, c), widened(scale, c + 16)};
            const F with[2] = {has_low ? widened(low, c) : F{}, has_low ? widened(low, c + 16) : F{}};
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s) {
                const F x = load(numbers_ + s * channels + c), y = load(numbers_ + s * channels + c + 16);
                if (has_low) added[s] = fma(y, with[1], fma(x, with[0], added[s]));
                const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(y * by[1], x * by[0]);
                _mm512_storeu_si512(pairs_ + (s * channels + c) / 2, words);
                most = _mm512_max_epu16(most, _mm512_add_epi16(words, words));  // without signs
            }
        }
        for (int s = 0; s < R; ++s) added_[s] = has_low ? _mm512_reduce_add_ps(added[s]) : 0;
        if (__builtin_expect(_mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(short(0xff00))) != 0, 0)) cut<R>(scale);
    }

    // The same products, within bf16: one beyond would be inf, and inf times the code 0 of another key NaN. What is not
    // finite itself stays so.
    template <int R>
    __attribute__((noinline)) void cut(const bf16 *scale) {
        for (int64_t i = 0; i < R * channels; i += 16) {
            const F x = load(numbers_ + i), by = widened(scale, i % channels);
            store_narrow(reinterpret_cast<bf16 *>(pairs_) + i, within_bf16(x * by) + (x * 0 + by * 0));
        }
    }

    template <int R, int G>
    REGARD_INLINE void multiply(const CodedTile (&tile)[G], F (&x)[R][G], Lines &lines) const {
        F sum[2][R][G] = {};  // of even and of odd pairs, or each would wait for the one before
        const uint8_t *at[G];
        for (int g = 0; g < G; ++g) at[g] = tile[g].codes;
        Lines::Place place = lines.place();
        const uint32_t *q = pairs_;
        for (int64_t d = 0; d + 4 <= dim; d += 4, q += 2) {
            step<R, G>(at, q, sum);
            if (d % 8 == 0) lines.ask(place);
            for (int g = 0; g < G; ++g) at[g] += FOUR;
        }
        lines.back(place);
        if (dim % 4) {
            alignas(64) uint8_t rest[G][FOUR];
            for (int g = 0; g < G; ++g) {
                _mm512_store_si512(rest[g], _mm512_maskz_loadu_epi8(~uint64_t(0) >> (64 - dim % 4 * 16), at[g]));
                at[g] = rest[g];
            }
            step<R, G>(at, q, sum);
        }
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s)
#pragma GCC unroll 2
            for (int g = 0; g < G; ++g) x[s][g] = sum[0][s][g] + sum[1][s][g];
    }

    // Four channels.
    template <int R, int G>
    REGARD_INLINE void step(const uint8_t *const (&at)[G], const uint32_t *q, F (&sum)[2][R][G]) const {
        U x[2][G];
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g)
            Fp8::as_bf16(_mm512_permutexvar_epi8(_mm512_load_si512(FP8_PAIRS.from), _mm512_loadu_si512(at[g])), x[0][g],
                         x[1][g]);
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s)
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const U one = broadcast_pair(q[s * channels / 2 + i]);
#pragma GCC unroll 2
                for (int g = 0; g < G; ++g) sum[i][s][g] = dot_pairs(x[i][g], one, sum[i][s][g]);
            }
    }
};
#endif

}  // namespace REGARD_ISA
}  // namespace regard
#endif
