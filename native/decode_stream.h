// Whole spans for up to four rows (on Zen 4 three or four), where keys and values are contiguous or, on Zen 5, in pages
// of whole sixteens: all keys, then block after block of values, at the speed at which memory is read. For vectors of
// 16 words (AVX-512).
//
// What decides on Zen 4 is which lines are on their way. 16 keys at a time are transposed in registers, and for each
// vector of words the line 8 KiB further on is prefetched into the first cache: so some 20 lines are on their way while
// the products of one are made, as many as there are places for. With 32 keys at a time there are more, those that find
// no place are dropped, and it takes twice as long; into the second cache, 1.8 times. Values are read in the order of
// memory, all dims of a token at once, which the machine's own prefetching follows; for that the 32 sums of four rows
// of 128 dims take all registers. From memory both loops take as long as reads alone, and from the second cache they
// are 1.2 to 3 times as fast.
//
// Which lines are asked for follows the machine (`Asks` of caches.h). On Zen 5 values are asked for like keys, 8 KiB
// ahead, from the end of a span's values on those keys that come next, and while weights are made, which would stop
// it, lines behind these into the second cache; pages are read so as well. Where that holds lines that are asked for
// far ahead, keys and values are asked for into it, each line once, 16 KiB ahead. One and two rows are streamed there
// as well; on Intel only those of float32.
#pragma once

#include "caches.h"
#include "decode_values.h"
#include "sixteens.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct DecodeStream {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    using Turned = KeyRows<K, S>;
    static constexpr int W = K::W, EACH = Sixteens::EACH;  // where spans are streamed these are equal
    static constexpr bool known = Turned::halves && (K::pairs || is_same<S, float>);
    static constexpr int64_t AHEAD = 8192, FAR = 16384, OF_ROW = 1024;  // bytes

    const int64_t key_dim, units, v_dim, width;
    const Asks asks = caches().asks;
    // How far ahead lines are asked for: in times 16 tokens, and bytes besides.
    struct Distance {
        int sixteens;
        int64_t bytes;
    };
    const Distance of_keys = distance(key_dim, asks), of_values = distance(v_dim, asks);

    // Whether tokens may be in pages of whole sixteens. Measured on Zen 5 only.
    static bool reads_pages() { return known && caches().asks == Asks::all; }

    // Up to four rows, whose values can be read in the order of memory. Loops of one or two have fewer instructions
    // for a line, so on Zen 4 more lines are on their way than there are places for: with one row, pages of 4 KiB and
    // float32 it took 1.0 to 1.4 times as long as DecodeScores and DecodeValues. Elsewhere one or two rows in pairs of
    // bf16 take 1.02 to 1.04 times as long, but on Zen 5 0.91 to 0.98.
    static bool serves(int rows, int64_t v_dim) {
        const Asks asks = caches().asks;
        const bool few = asks == Asks::all || (asks == Asks::far && !K::pairs);
        return known && rows <= 4 && (rows > 2 || few) && (v_dim == 4 * W || v_dim == 8 * W);
    }

    // Scores of the span's keys, [8][rows][128]. Behind `keys` is what is read next.
    void make(const Sixteens &keys, const Unit *queries, int rows, T *scores) const {
        by_rows(rows, [&](auto kind) { make_rows<decltype(kind)>(keys, queries, scores); });
    }

    // out [rows][width] += weights [rows][128 / pair] x the 128 values from token `first` of the span on. Behind
    // `values` is what is read next.
    void add(const Sixteens &values, int64_t first, const Unit *weights, int rows, T *out) const {
        const bool turns = asks == Asks::all && first + BLOCK == SPAN;  // to what is read next
        // tokens that one address serves
        const int each = !values.in_one ? EACH : int(BLOCK) - (turns ? of_values.sixteens * EACH : 0);
        by_rows(rows, [&](auto kind) { add_rows<decltype(kind)>(values.at + first / EACH, each, weights, out); });
    }

    // Asks for a part of what is read later, while row r of the block that begins with token `first` is weighed: a few
    // lines, or they would find no place. `has_next`: keys of a next span are known, of which only these and what `add`
    // asks for come in time.
    void ask(const Sixteens &values, int64_t first, int r, bool has_next) const {
        if (asks == Asks::all) {
            const int64_t at = AHEAD + r * OF_ROW, sixteens = at >> __builtin_ctzll(uint64_t(values.bytes));
            return ask_all(values.at[first / EACH + sixteens] + (at & (values.bytes - 1)), OF_ROW);  // a power of 2
        }
        if (!has_next || r) return;
        const int64_t share = (asks == Asks::far ? FAR : AHEAD) / (SPAN / BLOCK);
        ask_all(values.at[Sixteens::COUNT] + first / BLOCK * share, share);
    }

  private:
    static Distance distance(int64_t dim, Asks asks) {
        const int64_t bytes = asks == Asks::far ? FAR : AHEAD, each = EACH * dim * int64_t(sizeof(S));
        if (bytes >= Sixteens::AFTER * each) return {Sixteens::AFTER, 0};
        return {int(bytes / each), bytes % each};
    }

    static void ask_all(const char *from, int64_t bytes) {
        for (int64_t i = 0; i < bytes; i += Lines::LINE) __builtin_prefetch(from + i, 0, 2);
    }

    // How many rows, and how lines are asked for.
    template <int R, Asks asks>
    struct Way {
        static constexpr int rows = R;
        static constexpr bool values = asks != Asks::keys;

        static REGARD_INLINE void ask(const char *at) {
            if constexpr (asks == Asks::far) __builtin_prefetch(at, 0, 2);  // into the second cache
            else __builtin_prefetch(at);
        }
    };

    template <typename Work>
    REGARD_INLINE void by_rows(int rows, Work work) const {
        if (asks == Asks::all) few_rows<Asks::all>(rows, work);
        else if (asks == Asks::far) few_rows<Asks::far>(rows, work);
        else if (rows == 3) work(Way<3, Asks::keys>{});
        else work(Way<4, Asks::keys>{});
    }
    template <Asks asks, typename Work>
    static REGARD_INLINE void few_rows(int rows, Work work) {
        if (rows == 1) work(Way<1, asks>{});
        else if (rows == 2) work(Way<2, asks>{});
        else if (rows == 3) work(Way<3, asks>{});
        else work(Way<4, asks>{});
    }

    // Rows of memory, in five registers: 16 addresses would wait in memory for their turn.
    struct Steps {
        const char *fourth[W / 4];
        int64_t step;

        REGARD_INLINE Steps(const char *first, int64_t apart) : step(apart) {
            for (int i = 0; i < W / 4; ++i) fourth[i] = first + 4 * i * apart;
        }
        REGARD_INLINE const char *operator[](int i) const { return fourth[i / 4] + i % 4 * step; }
    };

    template <typename By>
    __attribute__((noinline)) void make_rows(const Sixteens &keys, const Unit *queries, T *scores) const {
        constexpr int R = By::rows;
        const int64_t step = key_dim * int64_t(sizeof(S));
        const int turn = keys.in_one ? SPAN - of_keys.sixteens * EACH : 0;  // from here on addresses are looked up
        const char *row = keys.at[0], *later = keys.at[of_keys.sixteens] + of_keys.bytes;
        for (int j = 0; j < SPAN; j += W, row += W * step, later += W * step) {
            if (j >= turn) {
                if (!keys.in_one) row = keys.at[j / EACH];
                later = keys.at[j / EACH + of_keys.sixteens] + of_keys.bytes;
            }
            V sum[R] = {};
            meet<By>(Steps(row, step), later, queries, sum);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) store(scores + (j / BLOCK * R + r) * BLOCK + j % BLOCK, sum[r]);
        }
    }

    // Sums of R rows with W keys.
    template <typename By, int R>
    REGARD_INLINE void meet(const Steps &rows, const char *ahead, const Unit *queries, V (&sum)[R]) const {
        const Unit *q = queries;
        int64_t u = 0;
        for (; (u + Turned::UNITS) * P::pair <= key_dim; u += Turned::UNITS) {
            typename P::Vector word[Turned::WORDS];
            Turned::turn(rows, u, word);
#pragma GCC unroll 8
            for (int n = 0; n < Turned::WORDS; ++n, ++q, ahead += Lines::LINE) {
                By::ask(ahead);
                meet_one(word[n], q, sum);
            }
        }
        for (; u < units; ++u, ++q) meet_one(Turned::single(rows, key_dim, u), q, sum);
    }

    template <int R>
    REGARD_INLINE void meet_one(typename P::Vector x, const Unit *q, V (&sum)[R]) const {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
            sum[r] = P::madd(x, P::repeat(reinterpret_cast<const char *>(q + r * units)), sum[r]);
    }

    template <typename By>
    void add_rows(const char *const *values, int each, const Unit *weights, T *out) const {
        if (v_dim == 8 * W) add_dims<By, 8>(values, each, weights, out);
        else add_dims<By, 4>(values, each, weights, out);
    }

    template <typename By, int N>
    __attribute__((noinline)) void add_dims(const char *const *values, int each, const Unit *weights, T *out) const {
        constexpr int R = By::rows;
        V sum[R][N];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sum[r][n] = load(out + r * width + n * W);
        if constexpr (K::pairs) part_quarters(sum);
        const int64_t step = P::pair * v_dim * int64_t(sizeof(S));
        for (int j = 0; j < BLOCK;) {
            const char *row = values[j / EACH], *later = values[j / EACH + of_values.sixteens] + of_values.bytes;
            for (const int end = least(j + each, int(BLOCK)); j < end; j += P::pair, row += step, later += step)
                add_unit<By>(row, later, weights + j / P::pair, sum);
        }
        if constexpr (K::pairs) join_quarters(sum);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) store(out + r * width + n * W, sum[r][n]);
    }

    // The sums of a value, or of two that are a pair.
    template <typename By, int R, int N>
    REGARD_INLINE void add_unit(const char *row, const char *ahead, const Unit *weights, V (&sum)[R][N]) const {
        const int64_t step = v_dim * int64_t(sizeof(S));
#pragma GCC unroll 8
        for (int n = 0; n < N; n += P::pair) {
            typename P::Vector value[P::pair];
            const int64_t dims = n * W * int64_t(sizeof(S));
            if constexpr (By::values) {
                By::ask(ahead + dims);
                if constexpr (K::pairs) By::ask(ahead + step + dims);
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
