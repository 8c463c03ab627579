// The scores of a few rows with tiles of codes, which are decoded as they are met: lanes are keys.
#pragma once

#include "found_keys.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct DecodedScores {
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W;

    const int64_t dim, units;        // of a key
    const Unit *const queries;       // [rows][units]
    typename K::Wide *const scores;  // [rows][128]

    // Products with the first tile, or with two of one group of tokens; how many they were.
    template <int R>
    int meet(const KeyGroup *keys, int count, Lines &lines) const {
        const bool two = count > 1 && keys[1].scale == keys[0].scale && !keys[0].per_token;
        if constexpr (!K::integers) {
            if (keys->form == REGARD_INT8) tiles_of<R, Int8>(keys, two, lines);
            if (keys->form == REGARD_INT4) tiles_of<R, Int4>(keys, two, lines);
        }
        if (keys->form == REGARD_FP8) tiles_of<R, Fp8>(keys, two, lines);
        return 1 + two;
    }

  private:
    // What scales meet: the codes of tokens or of channels, or, for channels, the queries instead: once for a group of
    // tokens and a row, and not for each code. Decoded keys are never rounded then, as they need not be for bf16.
    enum class By { token, channel, query };
    static constexpr By BY_CHANNEL = is_same<S, bf16> ? By::query : By::channel;

    template <int R, typename Code>
    void tiles_of(const KeyGroup *keys, bool two, Lines &lines) const {
        if (keys->per_token) tile_set<R, 1, Code, By::token>(keys, lines);
        else if (two) tile_set<R, 2, Code, BY_CHANNEL>(keys, lines);
        else tile_set<R, 1, Code, BY_CHANNEL>(keys, lines);
    }

    // Scales and lows, widened: of the tokens of a tile, or of W of its channels.
    struct Scales {
        alignas(64) float scale[W], low[W] = {};

        Scales() {
            for (float &x : scale) x = 1;  // for channels beyond the last
        }

        template <typename Code>
        void take(const KeyGroup &keys, int64_t from, int64_t count) {
            widen_all(keys.scale + from, count, Code::unit, scale);
            if (keys.low) widen_all(keys.low + from, count, 1, low);
        }
    };

    template <int R, int G, typename Code, By by>
    __attribute__((noinline)) void tile_set(const KeyGroup *keys, Lines &lines) const {
        Scales scales;
        if (by == By::token) scales.template take<Code>(*keys, 0, W);
        V sum[R][G] = {};
        alignas(64) float scaled[by == By::query ? R * W : 1];
        V added[R] = {};
        for (int64_t d = 0; d < dim; d += W) {
            const int64_t dims = least(dim - d, W);
            if (by != By::token) scales.template take<Code>(*keys, d, dims);
            for (int g = 0; g < G; ++g) lines.ask();
            const Unit *q = queries + d;
            int64_t of_row = units * int64_t(sizeof(Unit));
            if constexpr (by == By::query) {
                scale_queries<R>(queries + d, dims, scales, keys->low, scaled, added);
                q = scaled, of_row = W * int64_t(sizeof(float));
            }
            const int64_t at = d / (Code::nibbles ? 2 : 1) * TOKENS;
            int n = 0;
            if constexpr (Code::fours)
                for (; n + 4 <= dims; n += 4, q += 4) {
                    V x[4][G];
                    four_at<G, Code, by>(keys, at, n, scales, x);
#pragma GCC unroll 4
                    for (int i = 0; i < 4; ++i) meet_rows<P>(x[i], reinterpret_cast<const char *>(q + i), of_row, sum);
                }
            for (; n < dims; ++n, ++q) {
                V x[G];
                channel_at<G, Code, by>(keys, at, n, scales, x);
                meet_rows<P>(x, reinterpret_cast<const char *>(q), of_row, sum);
            }
        }
        if (by == By::query && keys->low) add_lows(added, sum);
        put_scores(scores, keys, sum);
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

    // Decodes channels n to n + 4. `at`: the byte offset of channel 0 in each tile.
    template <int G, typename Code, By by>
    static REGARD_INLINE void four_at(const KeyGroup *keys, int64_t at, int n, const Scales &scales, V (&x)[4][G]) {
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
    static REGARD_INLINE void channel_at(const KeyGroup *keys, int64_t at, int n, const Scales &scales, V (&x)[G]) {
        F code[G];
        codes_at<G, Code>(keys, at, n, code);
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) x[g] = rounded<S>(number<by>(code[g], scales, n));
    }

    template <int G, typename Code>
    static REGARD_INLINE void codes_at(const KeyGroup *keys, int64_t at, int n, F (&code)[G]) {
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
};

}  // namespace REGARD_ISA
}  // namespace regard
