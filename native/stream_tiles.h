// Scores and sums of the blocks of a span by AMX's tiles (decode_tiles.h), for up to 16 rows of bf16.
#pragma once

#include "decode_tiles.h"
#include "stream_asks.h"

namespace regard {
namespace REGARD_ISA {

#if defined(REGARD_TILES)
template <typename K>
struct StreamTiles {
    using T = typename K::Wide;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int EACH = Sixteens::EACH;

    const StreamAsks<K> &asks;
    const int64_t key_dim, units, v_dim, width;

    // scores: [blocks][rows][128]; queries: [units][16].
    template <typename By>
    __attribute__((noinline)) void make(const Sixteens &keys, const Unit *queries, int rows, T *scores) const {
        const int64_t step = key_dim * int64_t(sizeof(S));
        alignas(64) float sums[2 * SIDE * SIDE];
        for (int j = 0; j < keys.tokens(); j += 2 * EACH) {
            const char *const *const at = keys.at + j / EACH;
            const SixteenRows both[2] = {{at[0], step}, {at[1], step}};
            const int n = j % BLOCK / EACH;
            Later<By> later[2] = {asks.template later_of<By>(at - n, n, asks.of_keys, keys.bytes),
                                  asks.template later_of<By>(at - n, n + 1, asks.of_keys, keys.bytes)};
            score_tiles<2>(both, queries, units / SIDE, sums, [&](int g) { ask_lines(later[g], SIDE); });
            T *const to = scores + j / BLOCK * rows * BLOCK + j % BLOCK;
            put_columns(sums, rows, to, BLOCK);
            put_columns(sums + SIDE * SIDE, rows, to + EACH, BLOCK);
        }
    }

    // 32 values are paired while those before them are multiplied, whose pairs have left for the first cache by then.
    template <typename By>
    __attribute__((noinline)) void add(const char *const *at, const Unit *weights, T *out, uint32_t *pairs) const {
        const int64_t step = v_dim * int64_t(sizeof(S));
        const int lines = int(EACH * step / Lines::LINE);
        const char *const *const block = at;
        uint32_t *now = pairs, *before = pairs + token_pairs_bytes(v_dim) / 4;
        const char *const of_32 = reinterpret_cast<const char *>(weights);
        for (int j = 0; j < BLOCK; j += 2 * EACH, at += 2) {
            const auto row = [&](int i) { return at[i / EACH] + i % EACH * step; };
            Later<By> later[2];
            for (int i = 0; i < 2; ++i)
                later[i] = asks.template later_of<By>(block, j / EACH + i, asks.of_values, EACH * step);
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

  private:
    template <typename By>
    static REGARD_INLINE void ask_lines(Later<By> &later, int count) {
#pragma GCC unroll 16
        for (int i = 0; i < count; ++i) later.ask(i);
        later.pass(count);
    }
};
#endif

}  // namespace REGARD_ISA
}  // namespace regard
