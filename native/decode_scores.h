// The scores of a few rows: products with the keys of a block, lanes are keys.
//
// A source gives units (dims, or pairs of them) of W keys as vectors: rows of memory are transposed in registers
// (decode_keys.h), tiles of codes hold them as they are. Then G sources meet R rows: G x R sums hide the latency of a
// multiply-add, and a number of a query is read once for G vectors. On AMX sums are chains (chains.h), those of more
// than four rows are made in tiles (decode_tiles.h).
#pragma once

#include "decode_keys.h"
#include "decode_tiles.h"
#include "decoded_scores.h"

namespace regard {
namespace REGARD_ISA {

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
        FoundKeys<K> found(dim, scratch);
        found.find(keys, stretch, first, listed);
        int64_t asks = asks_of_rows(found, rows);
#if defined(REGARD_INTEGERS)
        for (int i = found.coded; i < found.count; i += 1 + found.is_pair(i))
            asks += (rows / 4 + (rows % 4 + 1) / 2) * asks_of_tiles(found.groups[i].form);
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

    // Scores of the keys of whole blocks, which lie one after another: [blocks][rows that it makes][128]. How many
    // those are.
    int make_blocks(const char *keys, int tokens, int rows, Lines &lines) {
#if defined(REGARD_TILES)
        if constexpr (K::tiled) return tiled_blocks(keys, tokens, rows, lines), rows;
#endif
        [[maybe_unused]] const typename P::Mode mode{};
        if (rows > 2) return set_after_set<4>(keys, tokens, lines), 4;
        if (rows > 1) return set_after_set<2>(keys, tokens, lines), 2;
        return set_after_set<1>(keys, tokens, lines), 1;
    }

  private:
    // Groups of keys: sums enough for the latency of a product. Where a transposed word is a vector of two rows,
    // shuffles take as long as one sum after another, but for pairs of bf16, whose product takes 6 cycles (Zen 4).
    static constexpr int together(int rows) {
        if (KeyRows<K, S>::halves && W == 16) return K::pairs && rows > 1 && rows < 8 ? 2 : 1;
        return rows < 8 ? 2 : 1;
    }
    // Words between which lines are asked for: up to four at once are as good as one, and take fewer branches.
    static constexpr int words_of_ask(int groups) { return KeyRows<K, S>::halves && groups == 1 ? 4 : 1; }

    // How often lines are asked for, but for codes that are multiplied as they are.
    int64_t asks_of_rows(const FoundKeys<K> &found, int rows) const {
        if (K::tiled) return found.count * units / 16;
        const int64_t tiles = found.tiles;
        const bool narrow = is_same<S, float> && tiles && found.groups->form == REGARD_BF16;
        const int64_t words = narrow ? KeyRows<K, bf16>::words(dim) : KeyRows<K, S>::words(dim);
        int64_t asks = 0;
        for (int left = rows, some; left > 0; left -= some) {
            some = left < 8 || K::chained ? left < 3 ? left < 2 ? 1 : 2 : 4 : 8;
            asks += (found.coded - tiles) * ((units + W - 1) / W);
            asks += (tiles + together(some) - 1) / together(some) * (words / words_of_ask(together(some)));
        }
        return asks;
    }

    // ---- products --------------------------------------------------------------------------------------------------

#if defined(REGARD_TILES)
    void tiled_sets(const FoundKeys<K> &found, int rows, Lines &lines) {
        int i = 0;
        for (; i + 2 <= found.count; i += 2) tiled_set<2>(found.groups + i, rows, lines);
        if (i < found.count) tiled_set<1>(found.groups + i, rows, lines);
    }

    template <int G>
    void tiled_set(const KeyGroup *keys, int rows, Lines &lines) {
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

    void tiled_blocks(const char *at, int tokens, int rows, Lines &lines) {
        const int64_t step = dim * int64_t(sizeof(S));
        lines.share(tokens / SIDE * units / SIDE);
        const char *row[SIDE];
        for (int j = 0; j < tokens; j += SIDE) {
            for (int i = 0; i < SIDE; ++i) row[i] = at + (j + i) * step;
            const SixteenRows keys = sixteen(row, 0);
            tiled_scores<1>(&keys, rows, lines,
                            [&](int) { return scores + j / int(BLOCK) * rows * int(BLOCK) + j % int(BLOCK); });
        }
    }
#endif

    template <int R>
    void sets(const FoundKeys<K> &found, int r, Lines &lines) {
        if (found.tiles) {
            if (found.groups->form == K::form) sets_of<R, S>(found, r, lines);
            if constexpr (is_same<S, float>) {
                if (found.groups->form == REGARD_BF16) sets_of<R, bf16>(found, r, lines);
                if (found.groups->form == REGARD_F16) sets_of<R, f16>(found, r, lines);
            }
        }
        if constexpr (sizeof(T) == 4 && !K::pairs && !K::chained) {
            const DecodedScores<K> decoded{dim, units, queries + r * units, scores + r * BLOCK};
            for (int i = found.tiles; i < found.coded;)
                i += decoded.template meet<R>(found.groups + i, found.coded - i, lines);
        }
    }

    template <int R, typename From>
    void sets_of(const FoundKeys<K> &found, int r, Lines &lines) {
        constexpr int G = together(R);
        int i = 0;
        for (; i + G <= found.tiles; i += G) set<R, G, From>(found.groups + i, r, lines);
        for (; i < found.tiles; ++i) set<R, 1, From>(found.groups + i, r, lines);
    }

    template <int R>
    void set_after_set(const char *at, int tokens, Lines &lines) {
        constexpr int G = together(R), MANY = G * W;
        const int64_t step = dim * int64_t(sizeof(S));
        const char *row[MANY];
        for (int i = 0; i < MANY; ++i) row[i] = at + i * step;
        KeyGroup keys[G];
        for (int g = 0; g < G; ++g) keys[g] = {K::form, false, 0, 0, W, row + g * W, nullptr, nullptr, nullptr};
        lines.share(tokens / MANY * (KeyRows<K, S>::words(dim) / words_of_ask(G)));
        for (int j = 0; j < tokens; j += MANY) {
            for (int g = 0; g < G; ++g) keys[g].at = j / int(BLOCK) * R * int(BLOCK) + j % int(BLOCK) + g * W;
            set<R, G, S>(keys, 0, lines);
            for (int i = 0; i < MANY; ++i) row[i] += MANY * step;
        }
    }

    template <int R, int G, typename From>
    __attribute__((noinline)) void set(const KeyGroup *keys, int r, Lines &lines) {
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
                    if constexpr (K::chained) meet_rows<P>(x, q, of_row, chain[i]);
                    else meet_rows<P>(x, q, of_row, sum);
                }
            }
            if constexpr (K::chained)
                if ((u + Turned::UNITS) % CHAINED == 0) end_chains(chain, sum);
        }
        lines.back(place);
        for (; u < units; ++u, q += sizeof(Unit)) {
            typename P::Vector x[G];
            for (int g = 0; g < G; ++g) x[g] = Turned::single(keys[g].row, dim, u);
            if constexpr (!K::chained) meet_rows<P>(x, q, of_row, sum);
            else if (u % 2) meet_rows<P>(x, q, of_row, chain[1]);
            else meet_rows<P>(x, q, of_row, chain[0]);
        }
        if constexpr (K::chained) end_chains(chain, sum);
        put_scores(scores + r * BLOCK, keys, sum);
    }

#if defined(REGARD_INTEGERS)
    // ---- tiles of codes that are multiplied as they are ------------------------------------------------------------

    int64_t asks_of_tiles(int64_t form) const {
#if defined(REGARD_FP8_SCORES)
        if (form == REGARD_FP8) return Fp8Scores::asks(dim);
#endif
        return CodedScores<Unit>::asks(dim, form == REGARD_INT4);
    }

    template <int R>
    __attribute__((noinline)) void coded(const FoundKeys<K> &found, int r, Lines &lines) {
        CodedScores<Unit> products(dim, queries + r * units, units, scratch + Source<K>::bytes(dim, BLOCK));
#if defined(REGARD_FP8_SCORES)
        Fp8Scores floats(dim, reinterpret_cast<const Fp8Scores::Unit *>(queries) + r * units, units,
                         scratch + fp8_at(dim));
#endif
        for (int i = found.coded; i < found.count;) {
            const KeyGroup *const keys = found.groups + i;
            const bool two = found.is_pair(i);
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
    REGARD_INLINE void integers(CodedScores<Unit> &products, const KeyGroup *keys, int r, Lines &lines) {
        coded_set<R, G>(keys, r,
                        [&](auto &tile, auto &sum) { products.template meet<R, G, nibbles>(tile, sum, lines); });
    }

    template <int R, int G, typename Meet>
    REGARD_INLINE void coded_set(const KeyGroup *keys, int r, Meet meet) {
        CodedTile tile[G];
        for (int g = 0; g < G; ++g) tile[g] = {keys[g].codes, keys[g].scale, keys[g].low, keys[g].per_token};
        V sum[R][G];
        meet(tile, sum);
        put_scores(scores + r * BLOCK, keys, sum);
    }
#endif
};

}  // namespace REGARD_ISA
}  // namespace regard
