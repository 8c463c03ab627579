// p and ds of a block of keys, in place of its scores and dp: the one sweep between the products of the backward pass.
#pragma once

#include <type_traits>

#include "largest.h"
#include "row_shifts.h"
#include "scores.h"

namespace regard {
namespace REGARD_ISA {

// What of a block is computed, and which of it is kept.
template <typename K>
struct BlockPart {
    const Block &block;
    const Lanes &lanes;
    Piece pieces[8];
    int n;
    bool masked[2];
    Bits128 bits;  // of masked halves

    int low() const { return pieces[0].low; }
    int high() const { return pieces[n - 1].high; }
    uint64_t kept(int j) const { return masked[j / TILE] ? bits.of[j] : ~uint64_t(0); }

    BlockPart(const Block &b, const Lanes &l, int64_t keys) : block(b), lanes(l) {
        lane_bits(block, lanes, bits);
        // lanes without a query are masked, like queries that see no key
        const uint64_t real = lanes.count == LANES ? ~uint64_t(0) : (uint64_t(1) << lanes.count) - 1;
        for (int i = 0; i < 2; ++i) {
            masked[i] = block.half[i].bits || lanes.count < LANES;
            for (int j = 0; j < TILE && lanes.count < LANES; ++j)
                bits.of[i * TILE + j] = block.half[i].bits ? bits.of[i * TILE + j] & real : real;
        }
        const int tokens = int(keys - block.first < BLOCK ? keys - block.first : BLOCK);
        n = cut<K::W, K::tiled ? 32 : 16>(block, bits, tokens, lanes.count, pieces);
    }
};

template <typename K>
struct BackwardWeights {
    using T = typename K::Wide;
    using V = typename K::V;
    using S = typename K::Stored;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using Weight = std::conditional_t<K::pairs, bf16, T>;  // of a row of p or ds
    static constexpr int W = K::W;
    static constexpr int PAIR = P::pair;
    static constexpr double NEVER = -INFINITE;
    static constexpr bool HALF = sizeof(S) < sizeof(T);  // then the largest p and ds are seen to: largest.h

    const regard_call &c;
    const Scoring<T> scoring;
    RowShifts<K> shifts;
    T *p_rows;           // [128][64]: scores, then p in rows of Weight
    T *ds_rows;          // [128][64]: dp, then ds in rows of Weight
    Unit *ds_pairs;      // [64][64]: ds in pairs of keys; `ds_rows` if there are no pairs
    T *added;            // [128][64]: biases, then ds before the softcap's slope
    uint32_t *drawn;     // [64]: what lanes draw dropout from
    Largest<T> largest;  // of p and ds

    explicit BackwardWeights(const regard_gradient &g) : c(g.call), scoring(c), shifts{g, c, nullptr, nullptr} {}

    template <typename Take>
    void place(Take take) {
        take(p_rows, BLOCK * LANES);
        take(ds_rows, BLOCK * LANES);
        if (K::pairs) take(ds_pairs, BLOCK / 2 * LANES);
        else ds_pairs = reinterpret_cast<Unit *>(ds_rows);
        added = nullptr;
        if (c.bias || c.distance) take(added, BLOCK * LANES);
        take(shifts.shift, LANES);
        take(shifts.down, LANES);
        take(drawn, LANES);
        if constexpr (HALF) largest.place(take);
    }

    // For a tile of queries. `again`: delta is known. Pairs with a p above `limit` are written down.
    void prepare(const Lanes &lanes, bool again, T limit) {
        if constexpr (HALF) largest.clear(limit);
        shifts.set_all(lanes, again);
        for (int lane = 0; lane < lanes.count && c.dropout > 0; ++lane) {
            const int64_t head = lanes.batch * c.heads + lanes.head_of(lane);
            drawn[lane] = dropout_row(c.seed, uint32_t(head), uint32_t(lanes.query_of(lane)));
        }
    }

    void weigh(const BlockPart<K> &part) {
        const bool table = c.bias || (c.distance && !part.lanes.one_head());
        const int64_t left = c.keys - part.block.first;
        if (table) bias_by_query(c, part.lanes, part.block.first, int(left < BLOCK ? left : BLOCK), added);
        for (int i = 0; i < part.n; ++i) {
            const Piece &p = part.pieces[i];
            for (int low = p.low; low < p.high;) {  // a piece may run over both halves
                const int half = low / int(TILE), stop = (half + 1) * int(TILE), high = p.high < stop ? p.high : stop;
                const Piece some{low, high, p.first, p.last};
                const bool masked = part.masked[half];
                if (scoring.whole || c.dropout > 0) weigh_piece<true, true>(part, some, table);
                else if (masked) weigh_piece<false, true>(part, some, table);
                else weigh_piece<false, false>(part, some, table);
                low = high;
            }
            if constexpr (K::tiled) pad(p);
        }
    }

    // Products in tiles take 32 keys and 32 lanes at once: what a piece does not have of these is 0.
    void pad(const Piece &p) {
        for (int i = (p.high + 1) / 2; i < up(p.high, 32) / 2; ++i)
            for (int v = p.first; v < p.last; ++v) store(ds_pairs + i * LANES + v * W, U{});
        if (p.first % 2) clear(p, p.first - 1);
        if (p.last % 2) clear(p, p.last);
    }
    void clear(const Piece &p, int v) {
        for (int j = p.low; j < p.high; ++j) {
            memset(row(p_rows, j) + v * W, 0, W * sizeof(Weight));
            memset(row(ds_rows, j) + v * W, 0, W * sizeof(Weight));
        }
    }

    template <bool general, bool masked>
    void weigh_piece(const BlockPart<K> &part, const Piece &p, bool table) {
        for (int v = p.first; v < p.last; ++v)
            for (int low = p.low; low < p.high; low += Largest<T>::AT_ONCE) {
                const int high = low + Largest<T>::AT_ONCE < p.high ? low + Largest<T>::AT_ONCE : p.high;
                typename Largest<T>::Sums sums{};
                if constexpr (HALF) sums = largest.sums(v);
                for (int j = low; j < high; j += PAIR) weigh_pair<general, masked>(part, j, high, v, table, sums);
                if constexpr (HALF) largest.keep(v, sums);
            }
    }

    // Key j, and where products take pairs the next one.
    template <bool general, bool masked>
    REGARD_INLINE void weigh_pair(const BlockPart<K> &part, int j, int high, int v, bool table,
                                  typename Largest<T>::Sums &sums) {
        const Weighed<V> one = weigh_one<general, masked>(part, j, v, table);
        const int64_t key = part.block.first + j;
        if constexpr (K::pairs) {
            const Weighed<V> two = j + 1 < high ? weigh_one<general, masked>(part, j + 1, v, table) : Weighed<V>{};
            store_rows(row(p_rows, j) + v * W, one.kept, two.kept);
            store(ds_pairs + j / 2 * LANES + v * W, store_rows(row(ds_rows, j) + v * W, one.change, two.change));
            sums.template add<general>(one), sums.template add<general>(two);
            if (!above<T>(larger(one.p, two.p), sums.limit)) return;
            largest.see(one, key, v, sums);
            largest.see(two, key + 1, v, sums);
        } else {
            store(p_rows + j * LANES + v * W, one.kept);
            store(ds_rows + j * LANES + v * W, one.change);
            if constexpr (HALF) sums.template add<general>(one), largest.see(one, key, v, sums);
        }
    }

    // One vector of scores and dp becomes p and ds.
    template <bool general, bool masked>
    REGARD_INLINE Weighed<V> weigh_one(const BlockPart<K> &part, int j, int v, bool table) {
        const int at = j * LANES + v * W;
        V score = load(p_rows + at), dp = load(ds_rows + at), slope{};
        uint64_t bits = masked ? part.kept(j) >> (v * W) : 0;
        if constexpr (general) score = shaped(part, j, v, table, score, slope);
        // the difference first, rounded once: lse may be large, and an error of it would be one of every weight
        const V difference = fma(score, broadcast(scoring.unit), load(shifts.shift + v * W));
        const V p = exp2<P::precision>(difference * broadcast(T(LOG2E)));
        V kept = p;
        if constexpr (general)
            if (c.dropout > 0) drop(part, j, v, kept, dp);
        const V ds = p * (dp - load(shifts.down + v * W));
        // what is hidden may be NaN: it is never multiplied with 0
        const auto shown = [&](V x) {
            if constexpr (masked) x = select(bits, x, V{});
            if constexpr (general) x = score == T(NEVER) ? V{} : x;
            return x;
        };
        if constexpr (general) {
            if (added) store(added + at, shown(ds));
            if (scoring.capped) return {shown(p), shown(kept), shown(ds), shown(ds * slope), shown(slope)};
            return {shown(p), shown(kept), shown(ds), shown(ds), broadcast(T(1))};
        }
        const V seen = shown(p), change = shown(ds);
        return {seen, seen, change, change, broadcast(T(1))};
    }

#if defined(REGARD_PAIRS)
    // Two rows of bf16, and both as pairs.
    static REGARD_INLINE U store_rows(bf16 *to, F even, F odd) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        _mm256_storeu_si256((__m256i *)to, _mm512_castsi512_si256(both));
        _mm256_storeu_si256((__m256i *)(to + 2 * LANES), _mm512_extracti64x4_epi64(both, 1));
        return pair_halves(both);
    }
#endif

    // Whether a bias of -inf hides key j from none of these rows.
    bool shows(int j, uint64_t rows) const {
        if (!c.bias && !c.distance) return true;
        uint64_t seen = 0;
        for (int lane = 0; lane < LANES; lane += W) seen |= above<T>(load_wide(row(p_rows, j) + lane), V{}) << lane;
        return (seen & rows) == rows;
    }

    static REGARD_INLINE Weight *row(T *of, int64_t j) { return reinterpret_cast<Weight *>(of + j * LANES); }

    // A whole score, and how much of a change of it the softcap lets through.
    REGARD_INLINE V shaped(const BlockPart<K> &part, int j, int v, bool table, V product, V &slope) const {
        V add{};
        if (table) add = load(added + j * LANES + v * W);
        else if (c.distance) add = some(distance_of(part, j) + v * W, part.lanes.count - v * W);
        if (!scoring.whole) return product;
        if (!scoring.capped) return scoring.shaped(product, add);
        const V t = tanh(product * broadcast(T(scoring.scale / scoring.cap)));
        slope = 1 - t * t;
        return fma(t, broadcast(scoring.cap), add);
    }

    const T *distance_of(const BlockPart<K> &part, int j) const {
        const T *distance = static_cast<const T *>(c.distance) + part.lanes.head * c.distance_head + c.keys - 1;
        return distance + part.lanes.first - part.block.first - j;
    }

    // A vector of which perhaps only the first `count` elements may be read.
    static REGARD_INLINE V some(const T *p, int count) {
        if (count >= W) return load(p);
        V v{};
        for (int i = 0; i < count; ++i) v[i] = p[i];
        return v;
    }

    // Weights and dp of dropped pairs made 0, others larger.
    void drop(const BlockPart<K> &part, int j, int v, V &p, V &dp) const {
        const uint32_t below = dropout_threshold(c.dropout), column = dropout_column(uint32_t(part.block.first + j));
        const V rest = broadcast(T(1 / (1 - c.dropout)));
        if constexpr (sizeof(T) == 4) {
            const I gone = dropout_bits(load(drawn + v * W), broadcast(column)) < below;
            p = gone ? V{} : p * rest;
            dp = gone ? V{} : dp * rest;
        } else {
            for (int i = 0; i < W; ++i) {
                const bool gone = dropout_bits(drawn[v * W + i], column) < below;
                p[i] = gone ? T(0) : p[i] * rest[i];
                dp[i] = gone ? T(0) : dp[i] * rest[i];
            }
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
