// The scores of a few rows: products with the keys of a block, lanes are keys.
//
// A source gives units (dims, or pairs of them) of W keys as vectors: rows of memory are transposed in registers
// (decode_keys.h), tiles of codes hold them as they are. Then G sources meet R rows: G x R sums hide the latency of a
// multiply-add, and a number of a query is read once for G vectors. On AMX sums are chains (chains.h), those of more
// than four rows are made in tiles (decode_tiles.h).
#pragma once

#include "fp8_scores.h"
#include "decode_keys.h"
#include "decode_tiles.h"
#include "scores.h"

namespace regard {
namespace REGARD_ISA {

constexpr int FEW = 16;  // rows

template <typename K>
struct DecodeScores {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W;

    const int64_t dim, units;   // of a key
    const Unit *const queries;  // [16][units]; for tiles [units][16]
    T *const scores;            // [16][128]
    char *const scratch;        // rows of a block, for those that no other way is known for

    static int64_t bytes(int64_t dim) {
#if defined(REGARD_INTEGERS)
        if (K::integers) return fp8_at(dim) + fp8_bytes(dim);
#endif
        return Source<K>::bytes(dim, BLOCK) + (K::tiled ? 2 * 16 * Tokens<K>::units(dim) * 4 : 0);
    }
#if defined(REGARD_INTEGERS)
    // Where what Fp8Scores needs begins, behind that of CodedScores.
    static int64_t fp8_at(int64_t dim) { return Source<K>::bytes(dim, BLOCK) + CodedScores<Unit>::bytes(dim); }
    static int64_t fp8_bytes([[maybe_unused]] int64_t dim) {
#if defined(REGARD_FP8_SCORES)
        return Fp8Scores::bytes(dim);
#else
        return 0;
#endif
    }
#endif

    // Scores of tokens from `first` on, in whole groups of 16, for which `listed` has a bit.
    void make(const Source<K> &keys, const Stretch &stretch, int64_t first, uint32_t listed, int rows, Lines &lines) {
        Found found;
        find_rows(keys, stretch, first, listed, found);
        found.tiles = found.count;
        // behind the rows, whose lanes may overlap theirs
        for (int i = 0; i < stretch.count; ++i)
            if (is_tiled(stretch.run[i]) && !as_coded(stretch.run[i])) find_tiles(keys, stretch.run[i], first, found);
        found.coded = found.count;
        for (int i = 0; i < stretch.count; ++i)
            if (as_coded(stretch.run[i])) find_tiles(keys, stretch.run[i], first, found);
        int64_t asks = asks_of_rows(found, rows);
#if defined(REGARD_INTEGERS)
        for (int i = found.coded; i < found.count; i += 1 + is_pair(found, i))
            asks += (rows / 4 + (rows % 4 + 1) / 2) * asks_of_tiles(found.keys[i].form);
#endif
        lines.share(asks);
#if defined(REGARD_TILES)
        if constexpr (K::tiled) return tiled_sets(found, rows, lines);
#endif
        [[maybe_unused]] const typename P::Mode mode{};
        int r = 0;
        if constexpr (!K::chained)
            for (; r + 8 <= rows; r += 8) sets<8>(found, r, lines);
        // of three rows left a fourth is made that nobody reads, so that keys are transposed once and not twice
        if (r + 3 <= rows) sets<4>(found, r, lines), r += 4;
        if (r + 2 <= rows) sets<2>(found, r, lines), r += 2;
        if (r < rows) sets<1>(found, r, lines);
#if defined(REGARD_INTEGERS)
        if constexpr (K::integers) {
            for (r = 0; r + 4 <= rows; r += 4) coded<4>(found, r, lines);
            if (r + 2 <= rows) coded<2>(found, r, lines), r += 2;
            if (r < rows) coded<1>(found, r, lines);
        }
#endif
    }

    // Scores of a span whose keys lie one after another: [8][rows that it makes][128]. How many those are.
    int make_span(const char *keys, int rows, Lines &lines) {
#if defined(REGARD_TILES)
        if constexpr (K::tiled) return tiled_span(keys, rows, lines), rows;
#endif
        [[maybe_unused]] const typename P::Mode mode{};
        if (rows > 2) return set_after_set<4>(keys, lines), 4;
        if (rows > 1) return set_after_set<2>(keys, lines), 2;
        return set_after_set<1>(keys, lines), 1;
    }

  private:
    // W keys: how their elements are read, their column, and which lanes are theirs.
    struct Keys {
        int64_t form;
        bool per_token;
        int at, from, to;
        const char *const *row;
        const uint8_t *codes;
        const bf16 *scale, *low;
    };

    struct Found {
        int count = 0, tiles = 0, coded = 0;  // the first of codes; of those that are multiplied as they are
        Keys keys[BLOCK + BLOCK / W];
        const char *row[BLOCK];
    };

    // Groups of keys: sums enough for the latency of a product. Where a transposed word is a vector of two rows,
    // shuffles take as long as one sum after another, but for pairs of bf16, whose product takes 6 cycles (Zen 4).
    static constexpr int together(int rows) {
        if (KeyRows<K, S>::halves) return K::pairs && rows > 1 && rows < 8 ? 2 : 1;
        return rows < 8 ? 2 : 1;
    }
    // Words between which lines are asked for: up to four at once are as good as one, and take fewer branches.
    static constexpr int words_of_ask(int groups) { return KeyRows<K, S>::halves && groups == 1 ? 4 : 1; }

    // How often lines are asked for, but for codes that are multiplied as they are.
    int64_t asks_of_rows(const Found &found, int rows) const {
        if (K::tiled) return found.count * units / 16;
        const int64_t tiles = found.tiles;
        const bool narrow = is_same<S, float> && tiles && found.keys->form == REGARD_BF16;
        const int64_t words = narrow ? KeyRows<K, bf16>::words(dim) : KeyRows<K, S>::words(dim);
        int64_t asks = 0;
        for (int left = rows, some; left > 0; left -= some) {
            some = left < 8 || K::chained ? left < 3 ? left < 2 ? 1 : 2 : 4 : 8;
            asks += (found.coded - tiles) * ((units + W - 1) / W);
            asks += (tiles + together(some) - 1) / together(some) * (words / words_of_ask(together(some)));
        }
        return asks;
    }

    bool is_tiled(const Run &run) const {
        if (K::by_32 || sizeof(T) != 4 || !run.part || run.part->form <= REGARD_F16 || !run.part->tiled) return false;
#if defined(REGARD_INTEGERS)
        if (K::integers && run.part->form != REGARD_FP8) return dim <= CodedScores<Unit>::DIMS;
#endif
        return true;
    }
    // Whether its codes meet queries that are times their scales: as integers, or e4m3 (fp8_scores.h).
    bool as_coded(const Run &run) const {
#if defined(REGARD_FP8_SCORES)
        return K::integers && is_tiled(run);
#else
        return K::integers && is_tiled(run) && run.part->form != REGARD_FP8;
#endif
    }

    // Elements of a narrower type, which are widened as they are loaded.
    static bool is_narrow(const Run &run) {
        return is_same<S, float> && run.part && (run.part->form == REGARD_BF16 || run.part->form == REGARD_F16);
    }

    int64_t form_of(const Stretch &stretch) const {
        int64_t form = -1;
        for (int i = 0; i < stretch.count; ++i) {
            const Run &run = stretch.run[i];
            if (is_tiled(run)) continue;
            if (!is_narrow(run) || (form >= 0 && form != run.part->form)) return K::form;
            form = run.part->form;
        }
        return form < 0 ? int64_t(K::form) : form;
    }

    void find_rows(const Source<K> &keys, const Stretch &stretch, int64_t first, uint32_t listed, Found &found) const {
        const int64_t form = form_of(stretch);
        uint32_t some = 0;
        int done = 0;  // rows below are known
        for (int i = 0; i < stretch.count; ++i) {
            const Run &run = stretch.run[i];
            if (is_tiled(run)) continue;
            const int low = int(run.first - first), high = low + int(run.count);
            const char *at;
            int64_t step;
            if (run.part && run.part->form == form) {
                at = keys.row(run, 0);
                step = run.part->data_step * Source<K>::bytes_of(form);
            } else {
                S *rows = reinterpret_cast<S *>(scratch) + low * dim;
                decode(run, keys.head, dim, rows);
                at = reinterpret_cast<const char *>(rows), step = dim * int64_t(sizeof(S));
            }
            const int begin = low / 16 * 16, end = (high + 15) / 16 * 16;
            for (int j = done > begin ? done : begin; j < low; ++j) found.row[j] = at;  // lanes that nobody looks at
            for (int j = low; j < high; ++j) found.row[j] = at + (j - low) * step;
            for (int j = high; j < end; ++j) found.row[j] = at;
            done = high;
            for (int j = begin; j < end; j += 16) some |= 1u << j / 16;
        }
        for (int j = 0; j < BLOCK; j += W)
            if (some & listed & 1u << j / 16)
                found.keys[found.count++] = {form, false, j, 0, W, found.row + j, nullptr, nullptr, nullptr};
    }

    void find_tiles(const Source<K> &keys, const Run &run, int64_t first, Found &found) const {
        const regard_part &p = *run.part;
        const int column = int(run.first - first);
        for (int64_t slot = run.slot / W * W; slot < run.slot + run.count; slot += W) {
            const int at = column + int(slot - run.slot);
            found.keys[found.count++] = {p.form,
                                         bool(p.per_token),
                                         at,
                                         at < column ? column - at : 0,
                                         least(W, column + run.count - at),
                                         nullptr,
                                         codes_of(p, run.page, keys.head, slot) + slot % TOKENS,
                                         scales_of(p, p.scale, run.page, keys.head, slot),
                                         scales_of(p, p.low, run.page, keys.head, slot)};
        }
    }

    // ---- products --------------------------------------------------------------------------------------------------

#if defined(REGARD_TILES)
    void tiled_sets(const Found &found, int rows, Lines &lines) {
        int i = 0;
        for (; i + 2 <= found.count; i += 2) tiled_set<2>(found.keys + i, rows, lines);
        if (i < found.count) tiled_set<1>(found.keys + i, rows, lines);
    }

    template <int G>
    void tiled_set(const Keys *keys, int rows, Lines &lines) {
        SixteenRows some[G];
        for (int g = 0; g < G; ++g) some[g] = sixteen(keys[g].row, g);
        tiled_scores<G>(some, rows, lines, [&](int g) { return scores + keys[g].at; });
    }

    template <int G, typename To>
    void tiled_scores(const SixteenRows *keys, int rows, Lines &lines, To to) {
        alignas(64) float sums[G * SIDE * SIDE];
        score_tiles<G>(keys, queries, units / SIDE, sums, [&](int) { lines.ask(); });
        for (int g = 0; g < G; ++g) put_columns(sums + g * SIDE * SIDE, rows, to(g), BLOCK);
    }

    // Rows as a tile reads them: evenly apart, of whole steps of 32 dims.
    SixteenRows sixteen(const char *const *row, int place) const {
        const int64_t step = row[1] - row[0], bytes = units * 4;
        bool even = dim == 2 * units;
        for (int i = 2; i < SIDE; ++i) even &= row[i] - row[i - 1] == step;
        if (even) return {row[0], step};
        char *const to = scratch + Source<K>::bytes(dim, BLOCK) + place * SIDE * bytes;
        for (int i = 0; i < SIDE; ++i) {
            memcpy(to + i * bytes, row[i], size_t(dim) * 2);
            memset(to + i * bytes + dim * 2, 0, size_t(bytes - dim * 2));
        }
        return {to, bytes};
    }

    void tiled_span(const char *at, int rows, Lines &lines) {
        const int64_t step = dim * int64_t(sizeof(S));
        lines.share(SPAN / SIDE * units / SIDE);
        const char *row[SIDE];
        for (int j = 0; j < SPAN; j += SIDE) {
            for (int i = 0; i < SIDE; ++i) row[i] = at + (j + i) * step;
            const SixteenRows keys = sixteen(row, 0);
            tiled_scores<1>(&keys, rows, lines,
                            [&](int) { return scores + j / int(BLOCK) * rows * int(BLOCK) + j % int(BLOCK); });
        }
    }
#endif

    template <int R>
    void sets(const Found &found, int r, Lines &lines) {
        if (found.tiles) {
            if (found.keys->form == K::form) sets_of<R, S>(found, r, lines);
            if constexpr (is_same<S, float>) {
                if (found.keys->form == REGARD_BF16) sets_of<R, bf16>(found, r, lines);
                if (found.keys->form == REGARD_F16) sets_of<R, f16>(found, r, lines);
            }
        }
        if constexpr (sizeof(T) == 4 && !K::pairs && !K::chained)
            for (int i = found.tiles; i < found.coded;) i += tiles<R>(found.keys + i, found.coded - i, r, lines);
    }

    template <int R, typename From>
    void sets_of(const Found &found, int r, Lines &lines) {
        constexpr int G = together(R);
        int i = 0;
        for (; i + G <= found.tiles; i += G) set<R, G, From>(found.keys + i, r, lines);
        for (; i < found.tiles; ++i) set<R, 1, From>(found.keys + i, r, lines);
    }

    template <int R>
    void set_after_set(const char *at, Lines &lines) {
        constexpr int G = together(R), MANY = G * W;
        const int64_t step = dim * int64_t(sizeof(S));
        const char *row[MANY];
        for (int i = 0; i < MANY; ++i) row[i] = at + i * step;
        Keys keys[G];
        for (int g = 0; g < G; ++g) keys[g] = {K::form, false, 0, 0, W, row + g * W, nullptr, nullptr, nullptr};
        lines.share(SPAN / MANY * (KeyRows<K, S>::words(dim) / words_of_ask(G)));
        for (int j = 0; j < SPAN; j += MANY) {
            for (int g = 0; g < G; ++g) keys[g].at = j / int(BLOCK) * R * int(BLOCK) + j % int(BLOCK) + g * W;
            set<R, G, S>(keys, 0, lines);
            for (int i = 0; i < MANY; ++i) row[i] += MANY * step;
        }
    }

    template <int R, int G, typename From>
    __attribute__((noinline)) void set(const Keys *keys, int r, Lines &lines) {
        using Turned = KeyRows<K, From>;
        constexpr int N = Turned::WORDS;
        V sum[R][G] = {};
        V chain[K::chained ? 2 : 1][R][G] = {};  // only if chained
        Lines::Place place = lines.place();
        const char *q = reinterpret_cast<const char *>(queries + r * units);
        const int64_t of_row = units * int64_t(sizeof(Unit));
        int64_t u = 0;
        for (; (u + Turned::UNITS) * P::pair <= dim; u += Turned::UNITS) {
            typename P::Vector word[G][N];
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) Turned::turn(keys[g].row, u, word[g]);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) {
                if (n % words_of_ask(G) == 0) lines.ask(place);
#pragma GCC unroll 2
                for (int i = 0; i < Turned::UNITS_OF_WORD; ++i, q += sizeof(Unit)) {
                    typename P::Vector x[G];
#pragma GCC unroll 4
                    for (int g = 0; g < G; ++g) x[g] = Turned::unit(word[g][n], i);
                    if constexpr (K::chained) meet(x, q, of_row, chain[i]);
                    else meet(x, q, of_row, sum);
                }
            }
            if constexpr (K::chained)
                if ((u + Turned::UNITS) % CHAINED == 0) end_chains(chain, sum);
        }
        lines.back(place);
        for (; u < units; ++u, q += sizeof(Unit)) {
            typename P::Vector x[G];
            for (int g = 0; g < G; ++g) x[g] = Turned::single(keys[g].row, dim, u);
            if constexpr (!K::chained) meet(x, q, of_row, sum);
            else if (u % 2) meet(x, q, of_row, chain[1]);
            else meet(x, q, of_row, chain[0]);
        }
        if constexpr (K::chained) end_chains(chain, sum);
        put(keys, r, sum);
    }

    // Sums of R rows, from the address q on of the first and `of_row` bytes apart, with a unit of G times W keys.
    template <int R, int G>
    static REGARD_INLINE void meet(const typename P::Vector (&x)[G], const char *q, int64_t of_row, V (&sum)[R][G]) {
#pragma GCC unroll 8
        for (int s = 0; s < R; ++s) {
            const typename P::Vector one = P::repeat(q + s * of_row);
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) sum[s][g] = P::madd(x[g], one, sum[s][g]);
        }
    }

    template <int R, int G>
    REGARD_INLINE void put(const Keys *keys, int r, const V (&sum)[R][G]) {
        for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
            for (int s = 0; s < R; ++s) put_lanes(scores + (r + s) * BLOCK, keys[g], sum[s][g]);
    }

    static REGARD_INLINE void put_lanes(T *row, const Keys &keys, V x) {
        if (keys.from == 0 && keys.to == W) return store(row + keys.at, x);
        for (int i = keys.from; i < keys.to; ++i) row[keys.at + i] = x[i];
    }

    // ---- tiles of codes, multiplied with the queries as they are decoded -------------------------------------------

    // Products with the first tile, or with two of one group of tokens; how many they were.
    template <int R>
    int tiles(const Keys *keys, int count, int r, Lines &lines) {
        const bool two = count > 1 && keys[1].scale == keys[0].scale && !keys[0].per_token;
        if constexpr (!K::integers) {
            if (keys->form == REGARD_INT8) tiles_of<R, Int8>(keys, two, r, lines);
            if (keys->form == REGARD_INT4) tiles_of<R, Int4>(keys, two, r, lines);
        }
        if (keys->form == REGARD_FP8) tiles_of<R, Fp8>(keys, two, r, lines);
        return 1 + two;
    }

    // What scales meet: the codes of tokens or of channels, or, for channels, the queries instead: once for a group of
    // tokens and a row, and not for each code. Decoded keys are never rounded then, as they need not be for bf16.
    enum class By { token, channel, query };
    static constexpr By BY_CHANNEL = is_same<S, bf16> ? By::query : By::channel;

    template <int R, typename Code>
    void tiles_of(const Keys *keys, bool two, int r, Lines &lines) {
        if (keys->per_token) tile_set<R, 1, Code, By::token>(keys, r, lines);
        else if (two) tile_set<R, 2, Code, BY_CHANNEL>(keys, r, lines);
        else tile_set<R, 1, Code, BY_CHANNEL>(keys, r, lines);
    }

    // Scales and lows, widened: of the tokens of a tile, or of W of its channels.
    struct Scales {
        alignas(64) float scale[W], low[W] = {};

        Scales() {
            for (float &x : scale) x = 1;  // of channels that there are not
        }

        template <typename Code>
        void take(const Keys &keys, int64_t from, int64_t count) {
            widen_all(keys.scale + from, count, Code::unit, scale);
            if (keys.low) widen_all(keys.low + from, count, 1, low);
        }
    };

    template <int R, int G, typename Code, By by>
    __attribute__((noinline)) void tile_set(const Keys *keys, int r, Lines &lines) {
        Scales scales;
        if (by == By::token) scales.template take<Code>(*keys, 0, W);
        V sum[R][G] = {};
        alignas(64) float scaled[by == By::query ? R * W : 1];
        V added[R] = {};
        for (int64_t d = 0; d < dim; d += W) {
            const int64_t dims = least(dim - d, W);
            if (by != By::token) scales.template take<Code>(*keys, d, dims);
            for (int g = 0; g < G; ++g) lines.ask();
            const Unit *q = queries + r * units + d;
            int64_t of_row = units * int64_t(sizeof(Unit));
            if constexpr (by == By::query) {
                scale_queries<R>(queries + r * units + d, dims, scales, keys->low, scaled, added);
                q = scaled, of_row = W * int64_t(sizeof(float));
            }
            const int64_t at = d / (Code::nibbles ? 2 : 1) * TOKENS;
            int n = 0;
            if constexpr (Code::fours)
                for (; n + 4 <= dims; n += 4, q += 4) {
                    V x[4][G];
                    four_at<G, Code, by>(keys, at, n, scales, x);
#pragma GCC unroll 4
                    for (int i = 0; i < 4; ++i) meet(x[i], reinterpret_cast<const char *>(q + i), of_row, sum);
                }
            for (; n < dims; ++n, ++q) {
                V x[G];
                channel_at<G, Code, by>(keys, at, n, scales, x);
                meet(x, reinterpret_cast<const char *>(q), of_row, sum);
            }
        }
        if (by == By::query && keys->low) add_lows(added, sum);
        put(keys, r, sum);
    }

    // `count` channels of R rows times the scales; what lows add to their sums.
    template <int R>
    void scale_queries(const Unit *from, int64_t count, const Scales &scales, bool has_low, float *to,
                       V (&added)[R]) const {
        const F scale = load(scales.scale), low = load(scales.low);
        F wild{};
#pragma GCC unroll 8
        for (int s = 0; s < R; ++s) {
            alignas(64) float some[W] = {};
            const float *q = reinterpret_cast<const float *>(from + s * units);
            if (count < W) {
                for (int i = 0; i < count; ++i) some[i] = q[i];
                q = some;
            }
            const F x = load(q), product = x * scale;
            store(to + s * W, product);
            wild = fma(product, F{}, wild);
            if (has_low) added[s] = fma(x, low, added[s]);
        }
        if (__builtin_expect(any<float>(wild != wild), 0)) cut_queries<R>(from, count, scale, to);
    }

    // The same products, within float32: one beyond would be inf, and inf times the code 0 of another key NaN. What is
    // not finite itself stays so.
    template <int R>
    __attribute__((noinline)) void cut_queries(const Unit *from, int64_t count, F scale, float *to) const {
        const F low_end = broadcast(-3.402823466e38f);
        for (int s = 0; s < R; ++s) {
            alignas(64) float some[W] = {};
            for (int i = 0; i < W && i < count; ++i) some[i] = reinterpret_cast<const float *>(from + s * units)[i];
            const F x = load(some), cut = larger(low_end, -larger(low_end, -(x * scale)));
            store(to + s * W, cut + (x * 0 + scale * 0));
        }
    }

    template <int R, int G>
    static void add_lows(const V (&added)[R], V (&sum)[R][G]) {
#pragma GCC unroll 8
        for (int s = 0; s < R; ++s) {
            float all = 0;
            for (int i = 0; i < W; ++i) all += added[s][i];
#pragma GCC unroll 2
            for (int g = 0; g < G; ++g) sum[s][g] += broadcast(all);
        }
    }

    // Channels n to n + 4 of those that begin `at` bytes into the tiles.
    template <int G, typename Code, By by>
    static REGARD_INLINE void four_at(const Keys *keys, int64_t at, int n, const Scales &scales, V (&x)[4][G]) {
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) {
            F code[4];
            Code::tiles(keys[g].codes + at, n, code);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) x[i][g] = rounded<S>(number<by>(code[i], scales, n + i));
        }
    }

    template <By by>
    static REGARD_INLINE F number(F code, const Scales &scales, int i) {
        if constexpr (by == By::query) return code;
        const F scale = by == By::token ? load(scales.scale) : broadcast(scales.scale[i]);
        return fma(code, scale, by == By::token ? load(scales.low) : broadcast(scales.low[i]));
    }

    // Channel n of those.
    template <int G, typename Code, By by>
    static REGARD_INLINE void channel_at(const Keys *keys, int64_t at, int n, const Scales &scales, V (&x)[G]) {
        F code[G];
        codes_at<G, Code>(keys, at, n, code);
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) x[g] = rounded<S>(number<by>(code[g], scales, n));
    }

    template <int G, typename Code>
    static REGARD_INLINE void codes_at(const Keys *keys, int64_t at, int n, F (&code)[G]) {
        if constexpr (Code::twos && G == 2)
            if (keys[1].codes == keys[0].codes + W) return Code::some(keys[0].codes + at + n * TOKENS, code);
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) code[g] = Code::tile(keys[g].codes + at, n);
    }

    static REGARD_INLINE void widen_all(const bf16 *from, int64_t count, float unit, float *to) {
        int64_t i = 0;
        for (; i + W <= count; i += W) store(to + i, load_wide(from + i) * unit);
        for (; i < count; ++i) to[i] = widen(from[i]) * unit;
    }

#if defined(REGARD_INTEGERS)
    // ---- tiles of codes that are multiplied as they are ------------------------------------------------------------

    int64_t asks_of_tiles(int64_t form) const {
#if defined(REGARD_FP8_SCORES)
        if (form == REGARD_FP8) return Fp8Scores::asks(dim);
#endif
        return CodedScores<Unit>::asks(dim, form == REGARD_INT4);
    }

    // Whether a tile and the next have the same scales, or scales of tokens.
    static bool is_pair(const Found &found, int i) {
        const Keys &one = found.keys[i], &next = found.keys[i + 1];
        return i + 1 < found.count && one.form == next.form && one.per_token == next.per_token &&
               (one.per_token ? !one.low == !next.low : one.scale == next.scale);
    }

    template <int R>
    __attribute__((noinline)) void coded(const Found &found, int r, Lines &lines) {
        CodedScores<Unit> products(dim, queries + r * units, units, scratch + Source<K>::bytes(dim, BLOCK));
#if defined(REGARD_FP8_SCORES)
        Fp8Scores floats(dim, reinterpret_cast<const Fp8Scores::Unit *>(queries) + r * units, units,
                         scratch + fp8_at(dim));
#endif
        for (int i = found.coded; i < found.count;) {
            const Keys *const keys = found.keys + i;
            const bool two = is_pair(found, i);
            switch (keys->form) {
#if defined(REGARD_FP8_SCORES)
                case REGARD_FP8:
                    if (two) coded_set<R, 2>(keys, r, [&](auto &tile, auto &sum) { floats.meet(tile, sum, lines); });
                    else coded_set<R, 1>(keys, r, [&](auto &tile, auto &sum) { floats.meet(tile, sum, lines); });
                    break;
#endif
                case REGARD_INT4:
                    if (two) integers<R, 2, true>(products, keys, r, lines);
                    else integers<R, 1, true>(products, keys, r, lines);
                    break;
                default:
                    if (two) integers<R, 2, false>(products, keys, r, lines);
                    else integers<R, 1, false>(products, keys, r, lines);
            }
            i += 1 + two;
        }
    }

    template <int R, int G, bool nibbles>
    REGARD_INLINE void integers(CodedScores<Unit> &products, const Keys *keys, int r, Lines &lines) {
        coded_set<R, G>(keys, r,
                        [&](auto &tile, auto &sum) { products.template meet<R, G, nibbles>(tile, sum, lines); });
    }

    template <int R, int G, typename Meet>
    REGARD_INLINE void coded_set(const Keys *keys, int r, Meet meet) {
        CodedTile tile[G];
        for (int g = 0; g < G; ++g) tile[g] = {keys[g].codes, keys[g].scale, keys[g].low, keys[g].per_token};
        V sum[R][G];
        meet(tile, sum);
        put(keys, r, sum);
    }
#endif
};

}  // namespace REGARD_ISA
}  // namespace regard
