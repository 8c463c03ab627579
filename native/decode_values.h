// The outputs of a few rows: weights times the values of a block, lanes are dims.
//
// 64 or 32 tokens at a time for all dims, so that lines are read nearly in order; of these the output of R rows and N
// vectors of dims is in registers; on AMX as chains (chains.h), of more than four rows in tiles (decode_tiles.h).
// found_values.h says where they are read.
#pragma once

#include "decode_scores.h"
#include "found_values.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct DecodeValues {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W;
    using Found = FoundValues<K>;

    const int64_t dim, width;   // of a value; of an output, whole vectors
    const Unit *const weights;  // [16][128 / pair]
    char *const scratch;

    static int64_t bytes(int64_t dim) {
#if defined(REGARD_INTEGERS)
        if (K::integers) return coded_at(dim) + DecodeSegments::bytes(dim);
#endif
        return coded_at(dim) + (K::tiled ? 2 * up(dim, 16) * 64 : 0);
    }
    // Where what DecodeSegments needs begins.
    static int64_t coded_at(int64_t dim) { return Found::bytes(dim); }

    DecodeValues(int64_t v_dim, int64_t whole, const Unit *w, char *at)
        : dim(v_dim), width(whole), weights(w), scratch(at) {}

    // out [rows][width] += weights x values of the tokens low to high of the block at `first`.
    void add(const Source<K> &values, const Stretch &stretch, int64_t first, int low, int high, int rows, T *out,
             Lines &lines) {
        int run = 0;
        for (int j = low, end; j < high; j = end) {
            while (stretch.run[run].first + stretch.run[run].count <= first + j) ++run;
            end = least(Found::until_other(stretch, run, first), least(j + at_once(rows), high));
            Found found(dim, scratch);
            found.find(values, stretch, run, first, j, end);
#if defined(REGARD_TILES)
            if constexpr (K::tiled) {
                mix_tiles(found, j, end, out, lines);
                continue;
            }
#endif
            [[maybe_unused]] const typename P::Mode mode{};
            switch (found.form) {
                case REGARD_INT8:
                    mix_by<Int8>(found, j, end, rows, out, lines);
                    break;
                case REGARD_INT4:
                    mix_by<Int4>(found, j, end, rows, out, lines);
                    break;
                case REGARD_FP8:
                    mix_by<Fp8>(found, j, end, rows, out, lines);
                    break;
                case REGARD_BF16:
                    mix_by<bf16>(found, j, end, rows, out, lines);
                    break;
                case REGARD_F16:
                    mix_by<f16>(found, j, end, rows, out, lines);
                    break;
                default:
                    mix_by<S>(found, j, end, rows, out, lines);
            }
        }
    }

    // Whether values are prefetched with every token. With every second one, four rows take 0.94 to 1.0 of the time on
    // AVX2 (Zen 4).
    template <int R>
    static constexpr bool asks_each = VECTOR_BYTES != 32 || R < 4;

    // Whether whole rows are read one after another: of four rows of weights or more, no 8 vectors stay in registers.
    static bool in_order(int64_t dim, int rows) { return rows < 4 && dim <= 8 * W; }

    // How often `add` asks for lines.
    static int64_t asks(int64_t tokens, int64_t dim, int rows) {
        if (K::tiled) return (tokens + 1) / 2 * ((dim + 31) / 32);
        const int64_t few = rows / 2 % 2 * times<vectors<2, S>>(dim) + rows % 2 * times<vectors<1, S>>(dim);
        const int64_t four = rows / 4 % 2 * times<vectors<4, S>>(dim), many = rows / 8 * times<vectors<8, S>>(dim);
        return tokens / P::pair * (many + four) / (asks_each<4> ? 1 : 2) + tokens / P::pair * few;
    }

  private:
    // Tokens at a time: 64 where their values stay in the first cache until all dims are done, or are needed once
    // (0.97 to 0.99 of the time on a Xeon with AMX); 32 where sums go by as many.
    int at_once(int rows) const {
        if (K::by_32) return 32;
        const int64_t bytes = Found::MOST * dim * int64_t(sizeof(S));
        return in_order(dim, rows) || bytes <= caches().first * 2 / 3 ? Found::MOST : Found::MOST / 2;
    }

    // How many times `mix` goes through the tokens.
    template <int N>
    static int64_t times(int64_t dim) {
        int64_t left = dim % (N * W);
        const int64_t four = N > 4 && left >= 4 * W;
        left -= four * 4 * W;
        const int64_t two = N > 2 && W == 16 && left >= 2 * W;
        left -= two * 2 * W;
        return dim / (N * W) + four + two + (left + W - 1) / W;
    }

    // The groups that vectors of dims are of.
    template <int N>
    using Of = int64_t[N];

    template <typename Form>
    static constexpr bool is_code = !is_same<Form, S> && !is_same<Form, bf16> && !is_same<Form, f16>;

    // Of dims at a time, whose sums stay in registers. AVX2 has 16: with twice as many vectors four rows take 1.04
    // (float32), 1.08 (bf16) and 1.09 (int8) times as long, eight 1.01 to 1.04. Of two rows codes take 1.08 times as
    // long, but float32 0.88, as values are read in the order of memory (Zen 5).
    template <int R, typename Form>
    static constexpr int vectors = K::chained                                                   ? 8 / R
                                   : VECTOR_BYTES == 32 && (R > 2 || (R == 2 && is_code<Form>)) ? (R == 2 ? 4 : 8 / R)
                                   : R > 2                                                      ? 16 / R
                                                                                                : 8;

    // Bytes of a row that are skipped for a dim by those who call `wide`.
    template <typename Form>
    static constexpr int64_t skip = is_code<Form> ? 0 : int64_t(sizeof(Form));

    template <typename Form>
    void mix_by(const Found &found, int low, int high, int rows, T *out, Lines &lines) const {
        constexpr bool code =
            is_code<Form> && !K::pairs && !K::chained && (!K::integers || is_same<Form, Fp8> || W < 16);
        if constexpr (is_same<Form, S> || is_same<S, float> || (code && sizeof(T) == 4)) {
            int r = 0;
            if constexpr (!K::chained)
                for (; r + 8 <= rows; r += 8) mix<8, vectors<8, Form>, Form>(found, low, high, r, out, lines);
            for (; r + 4 <= rows; r += 4) mix<4, vectors<4, Form>, Form>(found, low, high, r, out, lines);
            if (r + 2 <= rows) mix<2, vectors<2, Form>, Form>(found, low, high, r, out, lines), r += 2;
            if (r < rows) mix<1, vectors<1, Form>, Form>(found, low, high, r, out, lines);
        }
    }

#if defined(REGARD_TILES)
    // 32 tokens, or what there is of them.
    __attribute__((noinline)) void mix_tiles(const Found &found, int low, int high, T *out, Lines &lines) const {
        uint32_t *const pairs = reinterpret_cast<uint32_t *>(scratch + coded_at(dim));
        const auto row = [&](int j) { return found.row[j]; };
        pair_tokens(row, high - low, dim, pairs, [&] { lines.ask(); }, [](int) {});
        add_tiles(reinterpret_cast<const char *>(weights) + low * 2, BLOCK * 2, pairs, dim, out, width);
    }
#endif

    // Codes whose scale, one for a token, meets the weights instead: once for a row and not for each vector of dims.
    template <typename Form>
    static constexpr bool can_scale_weights =
        is_same<S, bf16> && !K::pairs && (is_same<Form, Fp8> || is_same<Form, Int8>);

    // Rows r to r + R: out += weights x values, N vectors of dims at a time.
    template <int R, int N, typename Form>
    __attribute__((noinline)) void mix(const Found &found, int low, int high, int r, T *out, Lines &lines) const {
        const Weights mine = {weights + r * (BLOCK / P::pair) + low / P::pair, BLOCK / P::pair};
        if constexpr (can_scale_weights<Form>)
            if (found.groups == 1 && !found.has_low) {
                alignas(64) float scaled[R * Found::MOST];
                for (int j = 0; j < high - low; j += W)
                    for (int i = 0; i < R; ++i)
                        store(scaled + i * Found::MOST + j, load(mine.first + i * BLOCK + j) * load(found.scales + j));
                return mix_with<R, N, Form, true>(found, low, high, r, {scaled, Found::MOST}, out, lines);
            }
        mix_with<R, N, Form, false>(found, low, high, r, mine, out, lines);
    }

    // Of rows, for the tokens from `low` on.
    struct Weights {
        const Unit *first;
        int64_t of_row;
    };

    template <int R, int N, typename Form, bool scaled>
    REGARD_INLINE void mix_with(const Found &found, int low, int high, int r, const Weights &w, T *out,
                                Lines &lines) const {
        int64_t d = 0;
        for (; d + N * W <= dim; d += N * W) mix_dims<R, N, false, Form, scaled>(found, low, high, r, d, w, out, lines);
        // 64 dims of one or two rows: sums of one vector at a time would wait for each other
        if constexpr (N > 4)
            if (d + 4 * W <= dim)
                mix_dims<R, 4, false, Form, scaled>(found, low, high, r, d, w, out, lines), d += 4 * W;
        // 32 dims with vectors of 16: in the order of memory
        if constexpr (N > 2 && W == 16)
            if (d + 2 * W <= dim)
                mix_dims<R, 2, false, Form, scaled>(found, low, high, r, d, w, out, lines), d += 2 * W;
        for (; d < dim; d += W) {
            if (d + W <= dim) mix_dims<R, 1, false, Form, scaled>(found, low, high, r, d, w, out, lines);
            else if constexpr (!scaled) mix_dims<R, 1, true, Form, false>(found, low, high, r, d, w, out, lines);
        }
    }

    template <int R, int N, bool tail, typename Form, bool scaled>
    REGARD_INLINE void mix_dims(const Found &found, int low, int high, int r, int64_t d, const Weights &of_tokens,
                                T *out, Lines &lines) const {
        T *const to = out + r * width + d;
        if constexpr (K::chained) return mix_chains<R, N, tail>(found, low, high, d, of_tokens, to, lines);
        V sum[R][N];
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sum[i][n] = load(to + i * width + n * W);
        Of<N> of = {};
        if (found.groups > 1)
            for (int n = 0; n < N; ++n) of[n] = (d + n * W) / found.group;
        constexpr bool apart = in_halves<N, tail, Form>;
        if constexpr (apart) swap_halves<R, N, true>(sum);
        Lines::Place place = lines.place();
        // Of fewer rows, addresses are computed where that can be: behind loads of them, lines come a quarter slower
        // (Zen 4). More rows wait for products instead, and AVX2 lacks registers for it (1.1).
        constexpr bool in_steps = R < 4;
        const int64_t skipped = d * skip<Form>;  // of a row
        const char *next = found.row[0] + skipped;
#if defined(__AVX2__) && !defined(__AVX512F__)
#pragma GCC unroll 2
#endif
        for (int j = low; j < high; j += P::pair) {
            const char *row[2] = {next, next + found.step};
            next += P::pair * found.step;
            if (!in_steps || __builtin_expect(!found.step, 0)) {
                row[0] = found.row[j - low] + skipped;
                if (j + 1 < high) row[1] = found.row[j - low + 1] + skipped;
            }
            typename P::Vector value[N];
            if constexpr (apart) halves<N>(reinterpret_cast<const bf16 *>(row[0]), value);
            else if constexpr (scaled) Form::rows(reinterpret_cast<const uint8_t *>(row[0]), d, value);
            else if constexpr (!K::pairs) single<N, tail, Form>(found, row[0], j - low, d, of, value);
#if defined(REGARD_PAIRS)
            else if (j + 1 < high) pairs<N, tail>(row, d, value);
            else half_pairs<N, tail>(row[0], d, value);
#endif
            if (asks_each<R> || j % 2) lines.ask(place);
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i) {
                const typename P::Vector w = P::repeat(
                    reinterpret_cast<const char *>(of_tokens.first + i * of_tokens.of_row + (j - low) / P::pair));
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) sum[i][n] = P::madd(value[n], w, sum[i][n]);
            }
        }
        lines.back(place);
        if constexpr (apart) swap_halves<R, N, false>(sum);
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) store(to + i * width + n * W, sum[i][n]);
    }

    // The same by chains: tokens from a multiple of 32 on.
    template <int R, int N, bool tail>
    REGARD_INLINE void mix_chains(const Found &found, int low, int high, int64_t d, const Weights &of_tokens, T *to,
                                  Lines &lines) const {
        constexpr bool apart = in_halves<N, tail, S>;
        V chain[2][R][N] = {};
        Lines::Place place = lines.place();
        for (int j = 0; j < high - low; j += 2)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; ++odd) {
                if (j + odd == high - low) break;
                const bf16 *const row = reinterpret_cast<const bf16 *>(found.row[j + odd]) + d;
                V value[N];
                if constexpr (apart) halves<N>(row, value);
                else value[0] = tail ? some_wide(row, dim - d) : load_wide(row);
                lines.ask(place);
#pragma GCC unroll 4
                for (int i = 0; i < R; ++i) {
                    const V w = broadcast(of_tokens.first[i * of_tokens.of_row + j + odd]);
#pragma GCC unroll 8
                    for (int n = 0; n < N; ++n) chain[odd][i][n] = fma(value[n], w, chain[odd][i][n]);
                }
            }
        lines.back(place);
        join_chains(chain);
        if constexpr (apart) swap_halves<R, N, false>(chain[0]);
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) store(to + i * width + n * W, load(to + i * width + n * W) + chain[0][i][n]);
    }

    static V some_wide(const bf16 *row, int64_t count) {
        V x{};
        for (int64_t i = 0; i < count; ++i) x[i] = widen(row[i]);
        return x;
    }

    // Whether bf16 are widened as even and odd dims apart.
#if defined(__AVX2__)
    template <int N, bool tail, typename Form>
    static constexpr bool in_halves = is_same<Form, bf16> && !K::pairs && sizeof(T) == 4 && N % 2 == 0 && !tail;
    template <int N>
    static REGARD_INLINE void halves(const bf16 *from, V (&x)[N]) {
#pragma GCC unroll 4
        for (int n = 0; n < N; n += 2) load_halves(from + n * W, x[n], x[n + 1]);
    }
    template <int R, int N, bool apart>
    static REGARD_INLINE void swap_halves(V (&sum)[R][N]) {
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
            for (int n = 0; n < N; n += 2)
                apart ? part_halves(sum[i][n], sum[i][n + 1]) : join_halves(sum[i][n], sum[i][n + 1]);
    }
#else
    template <int N, bool tail, typename Form>
    static constexpr bool in_halves = false;
    template <int N>
    static void halves(const bf16 *, V (&)[N]) {}
    template <int R, int N, bool apart>
    static void swap_halves(V (&)[R][N]) {}
#endif

    // Vectors of dims from d on of token j, widened; those of codes not yet rounded.
    template <int N, bool tail, typename Form>
    REGARD_INLINE void wide(const Found &found, const char *row, int j, int64_t d, const Of<N> &of, V (&x)[N]) const {
        if constexpr (is_same<Form, S> || is_same<Form, bf16> || is_same<Form, f16>) {
            const Form *at = reinterpret_cast<const Form *>(row);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) {
                if constexpr (tail) {
                    x[n] = V{};
                    for (int64_t i = d; i < dim; ++i) x[n][i - d] = widen(at[i - d]);
                } else {
                    x[n] = load_wide(at + n * W);
                }
            }
        } else {
            const float *scale = found.scales + j * found.groups, *low = found.lows + j * found.groups;
            Form::rows(reinterpret_cast<const uint8_t *>(row), d, x);
            if (found.groups == 1) {
                const F by = broadcast(*scale), with = broadcast(*low);
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) x[n] = fma(x[n], by, with);
            } else {
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) x[n] = fma(x[n], broadcast(scale[of[n]]), broadcast(low[of[n]]));
            }
        }
    }

    template <int N, bool tail, typename Form>
    REGARD_INLINE void single(const Found &found, const char *row, int j, int64_t d, const Of<N> &of, V (&x)[N]) const {
        wide<N, tail, Form>(found, row, j, d, of, x);
        if constexpr (!is_same<Form, S>)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) x[n] = is_code<Form> ? rounded<S>(x[n]) : as_stored<S>(x[n]);
    }

#if defined(REGARD_PAIRS)
    // Of two tokens side by side, vectors of dims from d on, which the rows begin with.
    template <int N, bool tail>
    REGARD_INLINE void pairs(const char *const (&row)[2], int64_t d, U (&x)[N]) const {
        if constexpr (N % 2 == 0) {
            const bf16 *even = reinterpret_cast<const bf16 *>(row[0]);
            const bf16 *odd = reinterpret_cast<const bf16 *>(row[1]);
#pragma GCC unroll 8
            for (int n = 0; n < N; n += 2) pair_dims(even + n * W, odd + n * W, x[n], x[n + 1]);
        } else {
            const __mmask16 real = tail ? __mmask16((1u << (dim - d)) - 1) : __mmask16(0xffff);
            x[0] = (U)_mm512_or_si512(words(row[0], real), _mm512_slli_epi32(words(row[1], real), 16));
        }
    }

    // The same where there is no second one.
    template <int N, bool tail>
    REGARD_INLINE void half_pairs(const char *row, int64_t d, U (&x)[N]) const {
        const __mmask16 real = tail ? __mmask16((1u << (dim - d)) - 1) : __mmask16(0xffff);
        for (int n = 0; n < N; ++n) x[n] = (U)words(row + n * W * 2, real);
    }

    static REGARD_INLINE __m512i words(const char *row, __mmask16 real) {
        return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(real, row));
    }
#endif
};

}  // namespace REGARD_ISA
}  // namespace regard
