// Whole spans for up to four rows (on AMX up to 16), where keys and values are contiguous or, on AMD's cores, in pages
// of whole sixteens: all keys, then block after block of values, at the speed at which memory is read. For vectors of
// 16 words (AVX-512).
//
// What decides is which lines are on their way. 16 keys at a time are transposed in registers, and for each vector of
// words the line 8 KiB further on is prefetched into the first cache (on Zen 4 contiguous float32): so some 20 lines
// are on their way while the products of one are made, close to the 24 outstanding misses that a core can have. With 32
// keys at a time there are more prefetches than that, the core drops some of them, and the loop takes twice as long.
// Values are read in the order of memory, all dims of a token at once, which the hardware prefetcher follows; for that
// the 32 sums of four rows of 128 dims take all registers. From memory both loops take as long as reads alone, and from
// the second cache they are 1.2 to 3 times as fast.
//
// Which lines are asked for follows the machine (`Streams` of caches.h). On Zen 5 values are asked for like keys, 8 KiB
// ahead, from the end of a span's values on those keys that come next, and while weights are made, which would stop
// it, lines behind these into the second cache. On Zen 4 in pairs of bf16 and in pages that are apart, which the
// hardware prefetcher cannot follow, keys and values are asked for into the second cache, 16 KiB ahead, and the next
// 16 keys into the first. On Intel's cores with 2 MiB keys and values are asked for a block of 128 tokens ahead, a line
// of each quarter of it in turns, and the next 16 keys into the first cache: so while one page is looked up, lines of
// three others are on their way.
//
// On AMX up to four rows of bf16 make their sums by chains (chains.h), and up to 16 by tiles (decode_tiles.h).
#pragma once

#include "caches.h"
#include "decode_sums.h"
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
    static constexpr bool known = Turned::halves && (K::pairs || K::chained || is_same<S, float>);
    static constexpr int AT_MOST = K::tiled ? FEW : 4;                  // rows
    static constexpr int64_t AHEAD = 8192, FAR = 16384, OF_ROW = 1024;  // bytes
    static constexpr int PLACES = 4, OF_BLOCK = int(BLOCK) / EACH;      // sixteens of a block
    // What `ask` reads of a block's end on is known: rows of 64 dims at least.
    static_assert((AT_MOST - 1) * OF_ROW < BLOCK * 4 * W * int64_t(sizeof(S)) || !known);

    const int64_t key_dim, units, v_dim, width;
    const bool in_one;  // whether keys and values of the span are contiguous
    const Asks asks = in_one ? of_type() : caches().streams.apart;
    // How far ahead lines are asked for: in times 16 tokens, and bytes besides.
    struct Distance {
        int sixteens;
        int64_t bytes;
    };
    const Distance of_keys = distance(key_dim), of_values = distance(v_dim);

    // Whether tokens may be in pages of whole sixteens.
    static bool reads_pages() { return known && caches().streams.pages; }

    // In tiles as many rows as there are; else up to four, whose values can be read in the order of memory. One or two
    // rows in pairs of bf16 take 1.02 to 1.04 times as long as by DecodeScores and DecodeValues on Intel, on AMD's
    // cores 0.73 to 1.0.
    static bool serves(int rows, int64_t key_dim, int64_t v_dim) {
        if (K::tiled) return key_dim % 32 == 0 && (v_dim == 4 * W || v_dim == 8 * W);
        const bool few = K::pairs ? caches().streams.few_pairs : caches().streams.few;
        return known && rows <= 4 && (rows > 2 || few) && (v_dim == 4 * W || v_dim == 8 * W);
    }

    // How many sixteens of the next span's keys are looked up.
    int next_keys(int64_t of_value, int64_t of_key) const {
        if (asks == Asks::places) return 1;
        return 1 + int(least(Sixteens::AFTER - 1, of_values.sixteens * of_value / of_key));
    }

    // Scores of the span's keys, [8][rows][128]. queries: [rows][units], for chains [units][rows], for tiles
    // [units][16]. Behind `keys` is what is read next.
    void make(const Sixteens &keys, const Unit *queries, int rows, T *scores) const {
#if defined(REGARD_TILES)
        if constexpr (K::tiled)
            return by_asks([&](auto way) { make_tiles<decltype(way)>(keys, queries, rows, scores); });
#endif
        [[maybe_unused]] const typename P::Mode mode{};
        by_rows(rows, [&](auto kind) { make_rows<decltype(kind)>(keys, queries, scores); });
    }

    // out [rows][width] += weights [rows][128 / pair] x the 128 values from token `first` of the span on. Behind
    // `values` is what is read next. pairs: room for twice 32 values in pairs, if they are multiplied in tiles.
    void add(const Sixteens &values, int64_t first, const Unit *weights, int rows, T *out,
             [[maybe_unused]] char *pairs) const {
#if defined(REGARD_TILES)
        if constexpr (K::tiled) {
            uint32_t *const to = reinterpret_cast<uint32_t *>(pairs);
            return by_asks([&](auto way) { add_values<decltype(way)>(values.at + first / EACH, weights, out, to); });
        }
#endif
        const bool turns = asks == Asks::all && first + BLOCK == SPAN;  // to what is read next
        // tokens that one address serves
        const int each = !values.in_one ? EACH : int(BLOCK) - (turns ? of_values.sixteens * EACH : 0);
        [[maybe_unused]] const typename P::Mode mode{};
        by_rows(rows, [&](auto kind) { add_rows<decltype(kind)>(values.at + first / EACH, each, weights, out); });
    }

    // Asks for a part of what is read later, while row r of the block that begins with token `first` is weighed: a few
    // lines, or they would find no place. `has_next`: keys of a next span are known, of which only these and what `add`
    // asks for come in time.
    void ask(const Sixteens &values, int64_t first, int r, bool has_next) const {
        if (asks == Asks::all) return ask_all(values, first / EACH, AHEAD + r * OF_ROW, OF_ROW);
        if (!has_next || r || asks == Asks::places) return;
        const int64_t share = (asks == Asks::far ? FAR : AHEAD) / (SPAN / BLOCK);
        ask_all(values, Sixteens::COUNT, first / BLOCK * share, share);
    }

  private:
    static Asks of_type() { return K::pairs ? caches().streams.pairs : caches().streams.floats; }

    // Whole sixteens where these are apart: behind one is what nobody reads.
    Distance distance(int64_t dim) const {
        if (asks == Asks::places) return {OF_BLOCK, 0};
        const int64_t bytes = asks == Asks::far ? FAR : AHEAD, each = EACH * dim * int64_t(sizeof(S));
        if (bytes >= Sixteens::AFTER * each) return {Sixteens::AFTER, 0};
        if (!in_one) return {int(most(bytes / each, int64_t(1))), 0};
        return {int(bytes / each), bytes % each};
    }

    // `bytes` from a distance behind the n-th sixteen on.
    static void ask_all(const Sixteens &of, int64_t n, int64_t behind, int64_t bytes) {
        n += behind >> __builtin_ctzll(uint64_t(of.bytes));  // a power of 2
        const char *const from = of.at[n] + (behind & (of.bytes - 1));
        for (int64_t i = 0; i < bytes; i += Lines::LINE) __builtin_prefetch(from + i, 0, 2);
    }

    // How many rows, and how lines are asked for.
    template <int R, Asks asks>
    struct Way {
        static constexpr int rows = R;
        static constexpr bool values = asks != Asks::keys, places = asks == Asks::places;
        static constexpr bool far = asks == Asks::far || places;  // into the second cache

        static REGARD_INLINE void ask(const char *at) {
            if constexpr (far) __builtin_prefetch(at, 0, 2);
            else __builtin_prefetch(at);
        }
    };

    // The lines that are asked for next: one after the other, or from four places in turns.
    template <typename By>
    struct Later {
        const char *at;
        int64_t apart;  // bytes from place to place

        REGARD_INLINE void ask(int n) const {
            if constexpr (By::places) By::ask(at + n % PLACES * apart + n / PLACES * Lines::LINE);
            else By::ask(at + n * Lines::LINE);
        }
        REGARD_INLINE void pass(int64_t lines) { at += (By::places ? lines / PLACES : lines) * Lines::LINE; }
    };

    // What sixteen n of a block asks for; at: the block's, then those behind it. Where nothing is known of these, lines
    // of its own, which are near.
    template <typename By>
    static REGARD_INLINE Later<By> later_of(const char *const *at, int n, const Distance &ahead, int64_t bytes) {
        if constexpr (!By::places) return {at[n + ahead.sixteens] + ahead.bytes, 0};
        const char *const next = at[OF_BLOCK] == at[OF_BLOCK - 1] ? at[0] : at[OF_BLOCK];
        return {next + n * (bytes / PLACES), bytes * OF_BLOCK / PLACES};
    }

    template <typename Work>
    REGARD_INLINE void by_rows(int rows, Work work) const {
        if (asks == Asks::all) rows_by<Asks::all>(rows, work);
        else if (asks == Asks::far) rows_by<Asks::far>(rows, work);
        else if (asks == Asks::places) rows_by<Asks::places>(rows, work);
        else rows_by<Asks::keys>(rows, work);
    }
    template <Asks asks, typename Work>
    static REGARD_INLINE void rows_by(int rows, Work work) {
        if (rows == 1) work(Way<1, asks>{});
        else if (rows == 2) work(Way<2, asks>{});
        else if (rows == 3) work(Way<3, asks>{});
        else work(Way<4, asks>{});
    }

#if defined(REGARD_TILES)
    template <typename Work>
    REGARD_INLINE void by_asks(Work work) const {
        if (asks == Asks::all) work(Way<0, Asks::all>{});
        else if (asks == Asks::far) work(Way<0, Asks::far>{});
        else if (asks == Asks::places) work(Way<0, Asks::places>{});
        else work(Way<0, Asks::keys>{});
    }

    template <typename By>
    static REGARD_INLINE void ask_lines(Later<By> &later, int count) {
#pragma GCC unroll 16
        for (int i = 0; i < count; ++i) later.ask(i);
        later.pass(count);
    }

    template <typename By>
    __attribute__((noinline)) void make_tiles(const Sixteens &keys, const Unit *queries, int rows, T *scores) const {
        const int64_t step = key_dim * int64_t(sizeof(S));
        alignas(64) float sums[2 * SIDE * SIDE];
        for (int j = 0; j < SPAN; j += 2 * EACH) {
            const char *const *const at = keys.at + j / EACH;
            const SixteenRows both[2] = {{at[0], step}, {at[1], step}};
            const int n = j % BLOCK / EACH;
            Later<By> later[2] = {later_of<By>(at - n, n, of_keys, keys.bytes),
                                  later_of<By>(at - n, n + 1, of_keys, keys.bytes)};
            score_tiles<2>(both, queries, units / SIDE, sums, [&](int g) { ask_lines(later[g], SIDE); });
            T *const to = scores + j / BLOCK * rows * BLOCK + j % BLOCK;
            put_columns(sums, rows, to, BLOCK);
            put_columns(sums + SIDE * SIDE, rows, to + EACH, BLOCK);
        }
    }

    // 32 values are paired while those before them are multiplied, whose pairs have left for the first cache by then.
    template <typename By>
    __attribute__((noinline)) void add_values(const char *const *at, const Unit *weights, T *out,
                                              uint32_t *pairs) const {
        const int64_t step = v_dim * int64_t(sizeof(S));
        const int lines = int(EACH * step / Lines::LINE);
        const char *const *const block = at;
        uint32_t *now = pairs, *before = pairs + token_pairs_bytes(v_dim) / 4;
        const char *const of_32 = reinterpret_cast<const char *>(weights);
        for (int j = 0; j < BLOCK; j += 2 * EACH, at += 2) {
            const auto row = [&](int i) { return at[i / EACH] + i % EACH * step; };
            Later<By> later[2];
            for (int i = 0; i < 2; ++i) later[i] = later_of<By>(block, j / EACH + i, of_values, EACH * step);
            int n = 0;
            const auto ask = [&] {
                const int second = n >= lines, line = n - second * lines;
                later[second].ask(line), later[second].ask(line + 1);
                n += 2;
            };
            if (j) take_weights(of_32 + (j - 2 * EACH) * int64_t(sizeof(S)), BLOCK * int64_t(sizeof(S)));
            pair_tokens(row, 2 * EACH, v_dim, now, ask, [&](int t) {
                const int64_t all = sides(v_dim);
                if (j) add_sides(before, all * t / SIDE, all * (t + 1) / SIDE, out, width);
            });
            uint32_t *const paired = now;
            now = before, before = paired;
        }
        add_tiles(of_32 + (BLOCK - 2 * EACH) * int64_t(sizeof(S)), BLOCK * int64_t(sizeof(S)), before, v_dim, out,
                  width);
    }
#endif

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
        [[maybe_unused]] const int next = of_keys.sixteens > 0;
        const char *row = keys.at[0];
        Later<By> later = later_of<By>(keys.at, 0, of_keys, keys.bytes);
        for (int j = 0; j < SPAN; j += W, row += W * step, later.at += W * step) {
            if (!keys.in_one) row = keys.at[j / EACH];
            if (By::places || j >= turn)
                later = later_of<By>(keys.at + j / BLOCK * OF_BLOCK, j % BLOCK / EACH, of_keys, keys.bytes);
            V sum[R][1] = {};
            const char *const near = keys.at[j / EACH + next];
            if constexpr (K::chained) meet_chains<By>(Steps(row, step), later, near, queries, sum);
            else meet<By>(Steps(row, step), later, near, queries, sum);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) store(scores + (j / BLOCK * R + r) * BLOCK + j % BLOCK, sum[r][0]);
        }
    }

    // Sums of R rows with W keys. Where lines are asked for into the second cache, those of the `next` keys are into
    // the first.
    template <typename By, int R>
    REGARD_INLINE void meet(const Steps &rows, Later<By> later, const char *next, const Unit *queries,
                            V (&sum)[R][1]) const {
        const Unit *q = queries;
        int64_t u = 0;
        for (; (u + Turned::UNITS) * P::pair <= key_dim; u += Turned::UNITS) {
            typename P::Vector word[Turned::WORDS];
            Turned::turn(rows, u, word);
#pragma GCC unroll 8
            for (int n = 0; n < Turned::WORDS; ++n, ++q, next += Lines::LINE) {
                later.ask(n);
                if (By::far) __builtin_prefetch(next);
                meet_one(word[n], q, units, sum);
            }
            later.pass(Turned::WORDS);
        }
        for (; u < units; ++u, ++q) meet_one(Turned::single(rows, key_dim, u), q, units, sum);
    }

    // The same by chains: a word is an even unit and an odd one. queries: [units][R].
    template <typename By, int R>
    REGARD_INLINE void meet_chains(const Steps &rows, Later<By> later, const char *next, const Unit *queries,
                                   V (&sum)[R][1]) const {
        const Unit *q = queries;
        V chain[2][R][1] = {};
        int64_t u = 0;
        for (; u + Turned::UNITS <= key_dim; u += Turned::UNITS) {
            typename P::Vector word[Turned::WORDS];
            Turned::turn(rows, u, word);
#pragma GCC unroll 8
            for (int n = 0; n < Turned::WORDS; ++n, q += 2 * R, next += Lines::LINE) {
                later.ask(n);
                if (By::far) __builtin_prefetch(next);
                meet_one(Turned::unit(word[n], 0), q, 1, chain[0]);
                meet_one(Turned::unit(word[n], 1), q + R, 1, chain[1]);
            }
            later.pass(Turned::WORDS);
            if ((u + Turned::UNITS) % CHAINED == 0) end_chains(chain, sum);
        }
        for (; u < units; ++u, q += R)
            if (u % 2) meet_one(Turned::single(rows, key_dim, u), q, 1, chain[1]);
            else meet_one(Turned::single(rows, key_dim, u), q, 1, chain[0]);
        end_chains(chain, sum);
    }

    // Unit x of W keys meets that of R queries, which are `apart` units apart.
    template <int R>
    REGARD_INLINE void meet_one(typename P::Vector x, const Unit *q, int64_t apart, V (&sum)[R][1]) const {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
            sum[r][0] = P::madd(x, P::repeat(reinterpret_cast<const char *>(q + r * apart)), sum[r][0]);
    }

    template <typename By>
    void add_rows(const char *const *values, int each, const Unit *weights, T *out) const {
#if defined(REGARD_TILES)
        if constexpr (K::chained) return add_chains<By, 8 / (By::rows == 3 ? 4 : By::rows)>(values, weights, out);
#endif
        if (v_dim == 8 * W) add_dims<By, 8>(values, each, weights, out);
        else add_dims<By, 4>(values, each, weights, out);
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
        const char *next = values[number + (of_values.sixteens > 0)] + before;
        Later<By> later = later_of<By>(values, number, of_values, EACH * step);
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

    template <typename By, int N>
    __attribute__((noinline)) void add_dims(const char *const *values, int each, const Unit *weights, T *out) const {
        constexpr int R = By::rows;
        V sum[R][N];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sum[r][n] = load(out + r * width + n * W);
        if constexpr (K::pairs) part_quarters(sum);
        constexpr int64_t token = N * W * int64_t(sizeof(S)), step = P::pair * token;
        for (int j = 0; j < BLOCK;) {
            const char *row = values[j / EACH];
            Later<By> later = later_of<By>(values, j / EACH, of_values, EACH * token);
            for (const int end = least(j + each, int(BLOCK)); j < end; j += P::pair, row += step) {
                add_unit<By>(row, later, weights + j / P::pair, sum);
                later.pass(step / Lines::LINE);
            }
        }
        if constexpr (K::pairs) join_quarters(sum);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) store(out + r * width + n * W, sum[r][n]);
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
