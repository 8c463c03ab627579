// Scores of a few rows of bf16 with tiles of e4m3. Scales and lows as in coded_scores.h. Where bf16 is multiplied in
// pairs, codes are bf16 as they are, and queries times scales are rounded to it; on AVX2 both are floats. Between the
// two, on AVX-512 without such products, codes of e4m3 are decoded as they are met (decode_scores.h).
#pragma once

#include "coded_scores.h"

#if defined(REGARD_PAIRS) || (defined(__AVX2__) && !defined(__AVX512F__))
#define REGARD_FP8_SCORES 1
namespace regard {
namespace REGARD_ISA {

// Products with tiles as scores: scales of tokens, and what lows add to the sums of rows.
template <int R, int G>
REGARD_INLINE void finish_scores(const CodedTile (&tile)[G], const float (&added)[4], F (&x)[R][G]) {
    const CodedTile &first = tile[0];
    for (int g = 0; g < G; ++g) {
        const F scale = first.per_token ? load_wide(tile[g].scale) : F{};
        const F low = first.per_token && first.low ? load_wide(tile[g].low) : F{};
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s) {
            const F more = broadcast(added[s]);
            x[s][g] = first.per_token ? fma(x[s][g], scale, first.low ? more * low : F{}) : x[s][g] + more;
        }
    }
}

#if defined(REGARD_PAIRS)
class Fp8Scores {
  public:
    using Unit = uint32_t;
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
        finish_scores(tile, added_, x);
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

#else
class Fp8Scores {
  public:
    using Unit = float;

    static int64_t bytes(int64_t dim) { return up(4 * up(dim, W) * 4, 64); }

    // queries [rows][units], from the first row of four.
    Fp8Scores(int64_t d, const float *q, int64_t of_row, char *scratch)
        : dim(d), units(of_row), channels(up(d, W)), queries(q), scaled_(reinterpret_cast<float *>(scratch)) {}

    // Products with G tiles of one group: x[row][tile].
    template <int R, int G>
    void meet(const CodedTile (&tile)[G], F (&x)[R][G], Lines &lines) {
        const CodedTile &first = tile[0];
        const bf16 *const mine = first.per_token ? nullptr : first.scale;
        if (!written_ || mine != scale_) {
            write<R>(mine, first.per_token ? nullptr : first.low, first.per_token || first.low);
            written_ = true, scale_ = mine;
        }
        if (__builtin_expect(has_nan(tile), 0)) multiply<R, G, true>(tile, x, lines);
        else multiply<R, G, false>(tile, x, lines);
        finish_scores(tile, added_, x);
    }

    // How often `meet` asks for lines.
    static int64_t asks(int64_t dim) { return dim / OF_LINE; }

  private:
    static constexpr int W = Vec<float>::lanes, OF_LINE = 4;  // channels of 16 tokens in a line

    const int64_t dim, units, channels;
    const float *const queries;
    float *scaled_;         // queries times scales [4][channels]
    bool written_ = false;  // for these scales
    const bf16 *scale_ = nullptr;
    float added_[4] = {};  // to sums

    // R rows times the scales (null: 1), and, if they are asked for, what lows (null: 1) add to them.
    template <int R>
    __attribute__((noinline)) void write(const bf16 *scale, const bf16 *low, bool lows) {
        F added[R] = {}, wild{};
        for (int64_t c = 0; c < dim; c += W) {
            const F by = scale ? widened(scale + c, dim - c) * Fp8::unit : broadcast(Fp8::unit);
            const F with = low ? widened(low + c, dim - c) : broadcast(1.0f);
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s) {
                const F q = load_some(queries + s * units + c, dim - c), product = q * by;
                store(scaled_ + s * channels + c, product);
                wild = fma(product, F{}, wild);
                if (lows) added[s] = fma(q, with, added[s]);
            }
        }
        for (int s = 0; s < R; ++s) {
            added_[s] = 0;
            for (int i = 0; i < W; ++i) added_[s] += added[s][i];
        }
        if (__builtin_expect(any<float>(wild != wild), 0)) cut<R>(scale);
    }

    // The same products, within float32: one beyond would be inf, and inf times the code 0 of another key NaN. What is
    // not finite itself stays so.
    template <int R>
    __attribute__((noinline)) void cut(const bf16 *scale) {
        const F low_end = broadcast(-3.402823466e38f);
        for (int s = 0; s < R; ++s)
            for (int64_t c = 0; c < dim; c += W) {
                const F by = scale ? widened(scale + c, dim - c) * Fp8::unit : broadcast(Fp8::unit);
                const F q = load_some(queries + s * units + c, dim - c);
                const F within = larger(low_end, -larger(low_end, -(q * by)));
                store(scaled_ + s * channels + c, within + (q * 0 + by * 0));
            }
    }

    // Whether some code is NaN, of these tokens or of others in their tile; two tiles are the halves of one.
    template <int G>
    bool has_nan(const CodedTile (&tile)[G]) const {
        NanCodes nan;
        const uint8_t *at = tile[0].codes;  // perhaps of the upper half of a channel
        int64_t c = 0;
        for (; c + 3 <= dim; c += 2, at += 2 * TOKENS) nan.look32(at);
        for (; c < dim; ++c, at += TOKENS) G == 2 ? nan.look16(at) : nan.look8(at);
        return nan.found();
    }

    template <int R, int G, bool nan>
    REGARD_INLINE void multiply(const CodedTile (&tile)[G], F (&x)[R][G], Lines &lines) const {
        F sum[R][G] = {};
        const uint8_t *at[G];
        for (int g = 0; g < G; ++g) at[g] = tile[g].codes;
        const float *q = scaled_;
        Lines::Place place = lines.place();
        int64_t c = 0;
        for (; c + OF_LINE <= dim; c += OF_LINE) {
            lines.ask(place);
#pragma GCC unroll 4
            for (int n = 0; n < OF_LINE; ++n) step<R, G, nan>(at, q++, sum);
        }
        lines.back(place);
        for (; c < dim; ++c) step<R, G, nan>(at, q++, sum);
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s)
#pragma GCC unroll 2
            for (int g = 0; g < G; ++g) x[s][g] = sum[s][g];
    }

    // A channel.
    template <int R, int G, bool nan>
    REGARD_INLINE void step(const uint8_t *(&at)[G], const float *q, F (&sum)[R][G]) const {
        F x[G];
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) x[g] = nan ? Fp8::at(at[g]) : FiniteFp8::at(at[g]), at[g] += TOKENS;
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s) {
            const F one = broadcast(q[s * channels]);
#pragma GCC unroll 2
            for (int g = 0; g < G; ++g) sum[s][g] = fma(x[g], one, sum[s][g]);
        }
    }
};
#endif

}  // namespace REGARD_ISA
}  // namespace regard
#endif
