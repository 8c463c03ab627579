// The sums of a block's values, in the order of memory, all dims of a token at once, for up to four rows; of bf16 on
// AMX by chains (chains.h), and else in pairs. On AVX2 some dims of 32 tokens at once, for any number of rows.
#pragma once

#include "chains.h"
#include "stream_asks.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct StreamValues {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W, EACH = Sixteens::EACH;

    const StreamAsks<K> &asks;
    const int64_t v_dim, width;

    // out [rows][width] += weights [rows][128 / pair] x a block of values, on AVX2 of `count` sixteens; `each`: tokens
    // that one address serves.
    template <typename By>
    void add(const char *const *values, [[maybe_unused]] int count, [[maybe_unused]] int each, const Unit *weights,
             [[maybe_unused]] int rows, T *out) const {
#if defined(REGARD_TILES)
        if constexpr (K::chained) return add_chains<By, 8 / (By::rows == 3 ? 4 : By::rows)>(values, weights, out);
#endif
        if constexpr (W == 16) {
            if (v_dim == 8 * W) add_dims<By, 8>(values, each, weights, out);
            else add_dims<By, 4>(values, each, weights, out);
        } else {
            add_some<By>(values, count, weights, rows, out);
        }
    }

#if defined(REGARD_TILES)
    // By chains, 32 tokens by N vectors of dims at a time, so that sums stay in registers.
    template <typename By, int MOST>
    REGARD_INLINE void add_chains(const char *const *values, const Unit *weights, T *out) const {
        if (MOST == 8 && v_dim == 4 * W) add_columns<By, 4>(values, weights, out);
        else add_columns<By, MOST>(values, weights, out);
    }

    template <typename By, int N>
    __attribute__((noinline)) void add_columns(const char *const *values, const Unit *weights, T *out) const {
        constexpr int R = By::rows;
        for (int j = 0; j < BLOCK; j += CHAINED)
            for (int64_t d = 0; d < v_dim; d += N * W) {
                V chain[2][R][N] = {};
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half)
                    add_sixteen<By>(values, j / EACH + half, d, weights + j + half * EACH, chain);
                join_chains(chain);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                    for (int n = 0; n < N; n += 2) {
                        T *const to = out + r * width + d + n * W;
                        V *const some = chain[0][r] + n;
                        join_halves(some[0], some[1]);
                        store(to, load(to) + some[0]);
                        store(to + W, load(to + W) + some[1]);
                    }
            }
    }

    // Tokens of sixteen `number`; lines are asked for in the order of memory, those of N vectors with each token.
    template <typename By, int R, int N>
    REGARD_INLINE void add_sixteen(const char *const *values, int number, int64_t d, const Unit *weights,
                                   V (&chain)[2][R][N]) const {
        constexpr int LINES = N / 2;  // of a token
        const int64_t step = v_dim * int64_t(sizeof(S)), before = d * EACH * int64_t(sizeof(S));
        const char *row = values[number] + d * int64_t(sizeof(S));
        const char *next = values[number + asks.near(asks.of_values)] + before;
        Later<By> later = asks.template later_of<By>(values, number, asks.of_values, EACH * step);
        later.pass(before / Lines::LINE);
        for (int i = 0; i < EACH; i += PLACES, weights += PLACES, later.pass(PLACES * LINES))
#pragma GCC unroll 4
            for (int t = 0; t < PLACES; ++t, row += step) {
                V value[N];
#pragma GCC unroll 4
                for (int n = 0; n < N; n += 2, next += Lines::LINE) {
                    if constexpr (By::values) later.ask(t * LINES + n / 2);
                    if (By::far) __builtin_prefetch(next);
                    load_halves(reinterpret_cast<const bf16 *>(row) + n * W, value[n], value[n + 1]);
                }
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const V w = broadcast(weights[r * BLOCK + t]);
#pragma GCC unroll 8
                    for (int n = 0; n < N; ++n) chain[t % 2][r][n] = fma(value[n], w, chain[t % 2][r][n]);
                }
            }
    }
#endif

    // 32 tokens at a time: so they are in the first cache for other rows.
    template <typename By>
    __attribute__((noinline)) void add_some(const char *const *values, int count, const Unit *weights,
                                            [[maybe_unused]] int rows, T *out) const {
        for (int i = 0; i < count; i += 2) {
            add_two<By>(values, count, i, weights + i * EACH, out);
            if constexpr (By::others)
                behind_four(rows, [&](auto some, int r) {
                    add_two<decltype(some)>(values, count, i, weights + r * BLOCK + i * EACH, out + r * width);
                });
        }
    }

    // Sixteen i of a block's `count` and, unless it is the last, the next one: N vectors of dims at a time, so that
    // sums stay in 8 registers; then the dims that are left.
    template <typename By>
    REGARD_INLINE void add_two(const char *const *values, int count, int i, const Unit *weights, T *out) const {
        constexpr int N = 8 / (By::rows == 3 ? 4 : By::rows);
        int64_t d = 0;
        for (; d + N * W <= v_dim; d += N * W) add_dims_of_two<By, N>(values, count, i, d, weights, out + d);
        if constexpr (N > 4)
            if (d + 4 * W <= v_dim) add_dims_of_two<By, 4>(values, count, i, d, weights, out + d), d += 4 * W;
        if constexpr (N > 2)
            if (d < v_dim) add_dims_of_two<By, 2>(values, count, i, d, weights, out + d);
    }

    template <typename By, int N>
    REGARD_INLINE void add_dims_of_two(const char *const *values, int count, int i, int64_t d, const Unit *weights,
                                       T *to) const {
        constexpr int R = By::rows;
        V sum[R][N];
        take_sums(to, sum);
        if constexpr (in_halves) each_two(sum, [](V &a, V &b) { part_halves(a, b); });
        const int end = least(i + 2, count);
        for (int n = i; n < end; ++n, weights += EACH) add_tokens<By>(values, count, n, d, weights, sum);
        if constexpr (in_halves) each_two(sum, [](V &a, V &b) { join_halves(a, b); });
        put_sums(sum, to);
    }

    // R rows of outputs from `to` on.
    template <int R, int N>
    REGARD_INLINE void take_sums(const T *to, V (&sum)[R][N]) const {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sum[r][n] = load(to + r * width + n * W);
    }
    template <int R, int N>
    REGARD_INLINE void put_sums(const V (&sum)[R][N], T *to) const {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) store(to + r * width + n * W, sum[r][n]);
    }

    // Tokens of sixteen `number`; lines are asked for in the order of memory, as many as N vectors of all tokens have.
    template <typename By, int R, int N>
    REGARD_INLINE void add_tokens(const char *const *values, int count, int number, int64_t d, const Unit *weights,
                                  V (&sum)[R][N]) const {
        constexpr int BYTES = N * W * int(sizeof(S));  // of a token: a line, or half of one, or several
        const int64_t step = v_dim * int64_t(sizeof(S)), before = d * EACH * int64_t(sizeof(S));
        const char *row = values[number] + d * int64_t(sizeof(S));
        const char *next = values[number + asks.near(asks.of_values)] + before;
        Later<By> later = asks.template later_of<By>(values, count, number, asks.of_values, EACH * step);
        later.pass(before / Lines::LINE);
        constexpr int LINES = By::places ? PLACES : 1;                                       // asked for between passes
        constexpr int TURN = LINES * Lines::LINE > BYTES ? LINES * Lines::LINE / BYTES : 1;  // tokens
        for (int i = 0; i < EACH; i += TURN, weights += TURN, later.pass(TURN * BYTES / Lines::LINE))
#pragma GCC unroll 8
            for (int t = 0; t < TURN; ++t, row += step) {
#pragma GCC unroll 4
                for (int line = t * BYTES / Lines::LINE; line < (t + 1) * BYTES / Lines::LINE; ++line) {
                    if constexpr (By::values) later.ask(line);
                    if (By::far) __builtin_prefetch(next);
                    next += Lines::LINE;
                }
                V value[N];
                take_some(reinterpret_cast<const S *>(row), value);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const V w = broadcast(weights[r * BLOCK + t]);
#pragma GCC unroll 8
                    for (int n = 0; n < N; ++n) sum[r][n] = fma(value[n], w, sum[r][n]);
                }
            }
    }

    // Whether values are widened as even and odd dims apart.
    static constexpr bool in_halves = is_same<S, bf16> && W == 8;

    template <int N>
    static REGARD_INLINE void take_some(const S *row, V (&value)[N]) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n += 1 + in_halves)
            if constexpr (in_halves) load_halves(row + n * W, value[n], value[n + 1]);
            else value[n] = load_wide(row + n * W);
    }

    template <int R, int N, typename Work>
    static REGARD_INLINE void each_two(V (&sum)[R][N], Work work) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int n = 0; n < N; n += 2) work(sum[r][n], sum[r][n + 1]);
    }

    template <typename By, int N>
    __attribute__((noinline)) void add_dims(const char *const *values, int each, const Unit *weights, T *out) const {
        constexpr int R = By::rows;
        V sum[R][N];
        take_sums(out, sum);
        if constexpr (K::pairs) part_quarters(sum);
        constexpr int64_t token = N * W * int64_t(sizeof(S)), step = P::pair * token;
        for (int j = 0; j < BLOCK;) {
            const char *row = values[j / EACH];
            Later<By> later = asks.template later_of<By>(values, j / EACH, asks.of_values, EACH * token);
            for (const int end = least(j + each, int(BLOCK)); j < end; j += P::pair, row += step) {
                add_unit<By>(row, later, weights + j / P::pair, sum);
                later.pass(step / Lines::LINE);
            }
        }
        if constexpr (K::pairs) join_quarters(sum);
        put_sums(sum, out);
    }

    // The sums of a value, or of two that are a pair.
    template <typename By, int R, int N>
    REGARD_INLINE void add_unit(const char *row, const Later<By> &later, const Unit *weights, V (&sum)[R][N]) const {
        const int64_t step = v_dim * int64_t(sizeof(S));
        constexpr int LINES = N / P::pair;  // of a token
#pragma GCC unroll 8
        for (int n = 0; n < N; n += P::pair) {
            typename P::Vector value[P::pair];
            const int64_t dims = n * W * int64_t(sizeof(S));
            if constexpr (By::values) {
                later.ask(n / P::pair);
                if constexpr (K::pairs) later.ask(LINES + n / P::pair);
            }
            take(row + dims, step, value);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const Unit *at = weights + r * (BLOCK / P::pair);
#pragma GCC unroll 2
                for (int i = 0; i < P::pair; ++i)
                    sum[r][n + i] = P::madd(value[i], P::repeat(reinterpret_cast<const char *>(at)), sum[r][n + i]);
            }
        }
    }

#if defined(REGARD_PAIRS)
    // 32 dims of a token and the next, side by side: even quarters of the dims, then odd ones, which takes one
    // instruction each where their order takes two registers besides.
    static REGARD_INLINE void take(const char *row, int64_t step, U (&value)[2]) {
        const __m512i even = _mm512_loadu_si512(row), odd = _mm512_loadu_si512(row + step);
        value[0] = (U)_mm512_unpacklo_epi16(even, odd);
        value[1] = (U)_mm512_unpackhi_epi16(even, odd);
    }
    // Sums in that order, and in the order of dims again.
    template <int R, int N>
    static REGARD_INLINE void part_quarters(F (&sum)[R][N]) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; n += 2) {
                const F a = sum[r][n], b = sum[r][n + 1];
                sum[r][n] = (F)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88);
                sum[r][n + 1] = (F)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xdd);
            }
    }
    template <int R, int N>
    static REGARD_INLINE void join_quarters(F (&sum)[R][N]) {
        const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0),
                      high = _mm512_add_epi64(low, _mm512_set1_epi64(4));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; n += 2) {
                const __m512d a = (__m512d)sum[r][n], b = (__m512d)sum[r][n + 1];
                sum[r][n] = (F)_mm512_permutex2var_pd(a, low, b);
                sum[r][n + 1] = (F)_mm512_permutex2var_pd(a, high, b);
            }
    }
#endif
    // A vector of dims.
    static REGARD_INLINE void take(const char *row, int64_t, V (&value)[1]) {
        value[0] = load(reinterpret_cast<const T *>(row));
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
