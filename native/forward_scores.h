// The scores of a block of keys and a tile of 64 queries, as [key][query].
#pragma once

#include "caches.h"
#include "scores.h"

namespace regard {
namespace REGARD_ISA {

// Bytes that operands of a product may take before products wait for them.
inline int64_t nearby() { return sizeof(F) == 64 ? caches().near : INT64_MAX / 64; }

template <typename K>
struct Scores {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W;
    static constexpr double NEVER = -INFINITE;

    const regard_call &c;
    const Scoring<T> scoring;
    const T factor;      // of a score, to the exponent of 2
    const int64_t part;  // units of queries that are multiplied at once
    T *scores;           // [128][64]
    T *added;            // [128][64]: biases
    char *keys;          // of a block, as products read them
    char *key_rows;      // the same, where they come in parts

    static int64_t queries_bytes(const regard_call &c) {
        return Tokens<K>::units(c.qk_dim) * LANES * int64_t(sizeof(Unit));
    }
    static int64_t bytes(const regard_call &c) {
        const bool biased = c.bias || c.distance;
        return (1 + biased) * BLOCK * LANES * int64_t(sizeof(T)) + Tokens<K>::across_bytes(c.qk_dim, BLOCK) +
               Source<K>::bytes(c.qk_dim, keys_of(c) ? BLOCK : 0);
    }

    Scores(const regard_call &call, char *scratch)
        : c(call),
          scoring(call),
          factor(T(scoring.unit * LOG2E)),
          part(part_of(Tokens<K>::units(c.qk_dim))),
          scores(reinterpret_cast<T *>(scratch)),
          added(scores + BLOCK * LANES),
          keys(reinterpret_cast<char *>(c.bias || c.distance ? added + BLOCK * LANES : added)),
          key_rows(keys + Tokens<K>::across_bytes(c.qk_dim, BLOCK)) {}

    void transpose_queries(const Lanes &lanes, Unit *queries) const {
        const S *data = static_cast<const S *>(c.q.data) + lanes.batch * c.q.batch;
        const auto row = [&](int lane) {
            return data + lanes.head_of(lane) * c.q.head + lanes.query_of(lane) * c.q.token;
        };
        if constexpr (K::pairs) {
            gather_lanes<Unit, Unit>(row, lanes.count, c.qk_dim / 2, queries);
            if (c.qk_dim % 2)
                for (int lane = 0; lane < LANES; ++lane)
                    queries[c.qk_dim / 2 * LANES + lane] = lane < lanes.count ? row(lane)[c.qk_dim - 1].bits : 0;
            const int64_t some = (c.qk_dim + 1) / 2 * LANES;
            memset(queries + some, 0, size_t(queries_bytes(c)) - size_t(some) * sizeof(Unit));
        } else {
            gather_lanes<T, S>(row, lanes.count, c.qk_dim, queries);
        }
    }

    // The rows of some tokens of a block.
    Rows rows(const Source<K> &k, int64_t first, int64_t count) const {
        return k.some(first, count, key_rows).across(first, count, keys);
    }

    // The parts of a piece in each half of its block.
    template <typename Work>
    static REGARD_INLINE void each_half(const Piece &p, Work work) {
        const int middle = int(TILE);
        if (p.low < middle) work(Piece{p.low, p.high < middle ? p.high : middle, p.first, p.last}, 0);
        if (p.high > middle) work(Piece{p.low > middle ? p.low : middle, p.high, p.first, p.last}, 1);
    }

    // What is added to the products of a block: a vector per head that slides along with the keys, or a table.
    Adds<T> whole_scores(const Block &block, const Lanes &lanes, int tokens) {
        alignas(64) static const T nothing[LANES] = {};
        if (!scoring.whole) return {};
        if (c.bias || (c.distance && (!lanes.one_head() || lanes.count % W))) {
            stay_awake<K>();
            bias_by_query(c, lanes, block.first, tokens, added);
            return {added, LANES, scoring.scale};
        }
        if (!c.distance) return {nothing, 0, scoring.scale};
        const T *distance = static_cast<const T *>(c.distance) + lanes.head * c.distance_head;
        return {distance + c.keys - 1 + lanes.first - block.first, -1, scoring.scale};
    }

    // The scores of a piece, whole ones unless they are still to be capped. `top`: their largest, if they are final.
    REGARD_INLINE void score(const Piece &p, const Unit *queries, const char *rows, int64_t stride, const Adds<T> &adds,
                             T *top, Ahead *ahead) {
        const int64_t units = Tokens<K>::units(c.qk_dim);
        T *out = scores + p.low * LANES;
#if defined(REGARD_TILES)
        if constexpr (K::tiled) {
            const int count = p.high - p.low;
            const bool whole = scoring.whole && !scoring.capped;
            if (!whole && !top) return tiles_across(rows, stride, count, queries, units, out, p.first, p.last, ahead);
            return tiles_across(rows, stride, count, queries, units, out, p.first, p.last, ahead,
                                [&](const Made &made) { settle(p.low, made, whole, adds, top); });
        }
#endif
        if (scoring.whole && !scoring.capped)
            multiply<P, Along::across, Start::score>(rows, stride, p.high - p.low, queries, units, out, p.first, p.last,
                                                     top, adds.at(p.low), ahead);
        else multiply_scores(p, queries, rows, stride, units, out, top, ahead);
    }

    // Products in parts of the dims, so that the queries of a part take at most about 3/4 of the first level cache
    // while all keys pass. Else they come from the second level for each 6 keys.
    static int64_t part_of(int64_t units) {
        if (K::tiled) return units;
        const int64_t room = nearby() * 3 / 4 / (LANES * int64_t(sizeof(Unit)));
        const int64_t parts = room ? (units + room * 5 / 6 - 1) / room : 1;
        return parts > 1 ? (units + parts - 1) / parts : units;
    }

    REGARD_INLINE void multiply_scores(const Piece &p, const Unit *queries, const char *rows, int64_t stride,
                                       int64_t units, T *out, T *top, Ahead *ahead) {
        const int count = p.high - p.low;
        multiply<P, Along::across>(rows, stride, count, queries, least(part, units), out, p.first, p.last,
                                   part < units ? nullptr : top, {}, ahead);
        for (int64_t i = part; i < units; i += part)
            multiply<P, Along::across, Start::out>(rows + i * int64_t(sizeof(Unit)), stride, count, queries + i * LANES,
                                                   least(part, units - i), out, p.first, p.last,
                                                   i + part < units ? nullptr : top, {}, ahead);
    }

#if defined(REGARD_TILES)
    // Products become whole scores, if they are to, and their largest are noted, if they are final.
    void settle(int low, const Made &made, bool whole, const Adds<T> &adds, T *top) {
        constexpr int CHAINS = 4;  // of maxima, so that none waits for the one before
        const int first = low + made.row, last = first + made.rows;
        for (int v = made.first; v < made.last; ++v) {
            V most[CHAINS];
            for (V &some : most) some = top ? load(top + v * W) : V{};
            const auto settle_one = [&](int j, V &some) __attribute__((always_inline)) {
                T *at = scores + j * LANES + v * W;
                V s = load(at);
                if (whole) store(at, s = fma(s, broadcast(adds.scale), load(adds.from + j * adds.row + v * W)));
                some = larger(s, some);
            };
            int j = first;
            for (; j + CHAINS <= last; j += CHAINS)
#pragma GCC unroll 4
                for (int i = 0; i < CHAINS; ++i) settle_one(j + i, most[i]);
            for (; j < last; ++j) settle_one(j, most[0]);
            if (top) store(top + v * W, larger(larger(most[0], most[1]), larger(most[2], most[3])));
        }
    }
#endif

    // Hidden scores become -inf.
    void hide(const Piece &p, const uint64_t *bits, T *top) {
        for (int v = p.first; v < p.last; ++v) {
            V most = load(top + v * W);
            for (int j = p.low; j < p.high; ++j) {
                T *at = scores + j * LANES + v * W;
                const V s = select(bits[j] >> (v * W), load(at), broadcast(T(NEVER)));
                store(at, s);
                most = larger(s, most);
            }
            store(top + v * W, most);
        }
    }

    // Products become capped scores, hidden ones -inf.
    void cap(const Piece &p, const uint64_t *bits, const Adds<T> &adds, T *top) {
        for (int v = p.first; v < p.last; ++v) {
            stay_awake<K>();
            V most = load(top + v * W);
            for (int j = p.low; j < p.high; ++j) {
                T *at = scores + j * LANES + v * W;
                V s = scoring.template shaped<P::precision>(load(at), load(adds.from + j * adds.row + v * W));
                if (bits) s = select(bits[j] >> (v * W), s, broadcast(T(NEVER)));
                store(at, s);
                most = larger(s, most);
            }
            store(top + v * W, most);
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
