// The gradients of attention: 64 queries in lanes, keys in blocks of 128, each score computed once more.
//
// For a tile of queries and a block of keys, from the log-sum-exp that the forward pass gave:
//     p = exp(score - lse)    dp = v . dout    ds = p * (dp - delta), where delta = sum(dout * out)
//     dq += ds . k            dk += ds . q     dv += p . dout
// That is five products, and one sweep over 128 x 64 values between the second and the third. dq is summed with
// queries in lanes, as the forward pass sums its output; dk and dv in rows, [keys][64 dims], from rows of ds and p
// and copies of the rows of q and dout. So a pair is visited once, and no thread writes what another one writes
// (division.h). (Dao et al. 2022, arXiv:2205.14135, algorithm 4, with queries outside: there dq is summed in memory,
// here dk and dv.)
//
// What is hidden never arrives: p and ds of hidden pairs are 0 by choice of lanes, and as 0 times NaN is not 0, numbers
// that are not finite are taken out of the copies that products read, and added pair by pair to what sees them.
//
// Blocking: p and ds take 2 x 32 KiB; at d 64 a tile's q and dout, twice each, and dq 5 x 16 KiB, a block's k, v, dk
// and dv 4 x 32 KiB: together a quarter of an L2 of 1 MiB. Blocks of 64 are as fast. Of the limit of 10 * d FLOP per
// pair, 2,048 tokens of d 64 reach 86 % dense and 80 % causal in float32, 79 % and 73 % in bfloat16: the products
// alone make 87 % of it, the sweep takes 4 % (10 % in bfloat16), and fetching a tile of q, dout and out 3 to 5 %,
// which prefetches did not change.
#pragma once

#include <type_traits>

#include "division.h"
#include "largest.h"
#include "scores.h"

namespace regard {
namespace REGARD_ISA {

// The rows of q or dout of a tile, in both forms that products want.
template <typename K>
struct Near {
    typename K::Unit *lanes;  // [units of dim][64]
    typename K::Unit *rows;   // [groups of 64 dims][64 rows, in pairs][64], with 0 for what is not finite
    uint64_t wild;            // rows with a number that is not finite
    int64_t dim;
};

template <typename K>
struct Backward {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W, PAIR = P::pair;
    static constexpr int64_t ROW = LANES * int64_t(sizeof(T));  // bytes from row to row of weights and changes
    static constexpr double NEVER = -INFINITE;
    using Weight = std::conditional_t<K::pairs, bf16, T>;  // what a row of weights or changes holds
    static constexpr bool HALF = sizeof(S) < sizeof(T);    // then the largest p and ds are seen to: largest.h

    const regard_gradient &g;
    const regard_call &c;
    const Division division;
    const Scoring<T> scoring;
    Near<K> q, dout;
    T *weights;                       // [128][64]: scores, then p in rows of Weight
    T *changes;                       // [128][64]: dp, then ds in rows of Weight
    Unit *packed;                     // [64][64]: ds in pairs of keys; what `changes` holds if there are no pairs
    T *added;                         // [128][64]: biases, then ds before the softcap's slope
    T *dq;                            // [qk_dim][64]
    char *keys, *values, *keys_down;  // a block's, as `across` and `down` make them
    T *shift, *down;                  // [64]: -lse, with the sink's share; delta less dlse
    uint32_t *drawn;                  // [64]: what lanes draw dropout from
    Largest<T> largest;               // of p and ds
    T *lacking;                       // [64][qk_dim, whole vectors]: what dq lacks, in rows
    char *end;                        // of what is used

    Backward(const regard_gradient &gradient, char *scratch) : g(gradient), c(g.call), division(c), scoring(c) {
        uintptr_t at = reinterpret_cast<uintptr_t>(scratch);
        const auto take = [&](auto *&p, int64_t n) {
            p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(at);
            at += uintptr_t(up(n * int64_t(sizeof(*p)), 64));
        };
        Near<K> *const both[] = {&q, &dout};
        for (Near<K> *near : both) {
            near->dim = near == &q ? c.qk_dim : c.v_dim;
            take(near->lanes, Tokens<K>::units(near->dim) * LANES);
            take(near->rows, up(near->dim, LANES) * LANES / PAIR);
        }
        take(weights, BLOCK * LANES);
        take(changes, BLOCK * LANES);
        if (K::pairs) take(packed, BLOCK / 2 * LANES);
        else packed = reinterpret_cast<Unit *>(changes);
        added = nullptr;
        if (c.bias || c.distance) take(added, BLOCK * LANES);
        take(dq, c.qk_dim * LANES);
        take(keys, Tokens<K>::across_bytes(c.qk_dim, BLOCK));
        take(values, Tokens<K>::across_bytes(c.v_dim, BLOCK));
        take(keys_down, c.qk_dim * BLOCK / PAIR * int64_t(sizeof(Unit)));
        take(shift, LANES);
        take(down, LANES);
        take(drawn, LANES);
        if constexpr (HALF) {
            largest.place(take);
            take(lacking, LANES * up(c.qk_dim, W));
        }
        end = reinterpret_cast<char *>(at);
    }

    // For each thread: a tile, and the sums of a unit, once more if there are several segments.
    static int64_t bytes(const regard_gradient &g) {
        const Backward tile(g, nullptr);
        const int64_t sums = tile.division.apart ? 0 : tile.division.segments > 1 ? 2 : 1;
        return int64_t(reinterpret_cast<uintptr_t>(tile.end)) + sums * tile.division.sum_bytes;
    }

    // ---- a tile of queries -----------------------------------------------------------------------------------------

    // Lanes of consecutive queries of one head or more of a group: part of the group, tile of the queries.
    Lanes lanes_of(int64_t b, int64_t kv, int64_t part, int64_t tile) const {
        const Division &d = division;
        const int64_t left = d.group - part * d.at_once, heads = left < d.at_once ? left : d.at_once;
        const int64_t first = tile * TILE, queries = c.queries - first < TILE ? c.queries - first : TILE;
        return {b, kv * d.group + part * d.at_once, first, d.at_once > 1 ? c.queries : TILE, int(heads * queries)};
    }

    int64_t row_of(const Lanes &lanes) const {
        const int64_t map = (c.maps_batch > 1 ? lanes.batch : 0) * c.maps_head + (c.maps_head > 1 ? lanes.head : 0);
        return map * c.by_query.rows + lanes.first / TILE;
    }

    static const S *row_at(const regard_tensor &t, const Lanes &lanes, int lane) {
        const S *data = static_cast<const S *>(t.data) + lanes.batch * t.batch;
        return data + lanes.head_of(lane) * t.head + lanes.query_of(lane) * t.token;
    }

    // The row among all of the call, as lse has them.
    int64_t number(const Lanes &lanes, int lane) const {
        return (lanes.batch * c.heads + lanes.head_of(lane)) * c.queries + lanes.query_of(lane);
    }

    // `again`: delta is known.
    void prepare(const Lanes &lanes, bool again) {
        fetch(c.q, lanes, q);
        fetch(g.dout, lanes, dout);
        if constexpr (HALF) largest.clear(again || division.small ? T(INFINITE) : Largest<T>::LARGE);
        for (int lane = 0; lane < LANES; ++lane) {
            if (lane < lanes.count) set_row(lanes, lane, again);
            else shift[lane] = T(NEVER), down[lane] = 0;
        }
        for (int lane = 0; lane < lanes.count && c.dropout > 0; ++lane) {
            const int64_t head = lanes.batch * c.heads + lanes.head_of(lane);
            drawn[lane] = dropout_row(c.seed, uint32_t(head), uint32_t(lanes.query_of(lane)));
        }
    }

    void fetch(const regard_tensor &t, const Lanes &lanes, Near<K> &near) {
        const auto row = [&](int lane) { return row_at(t, lanes, lane); };
        const auto row_or_none = [&](int lane) { return lane < lanes.count ? row(lane) : nullptr; };
        // rows first: they are read in place
        for (int lane = 0; lane < LANES; lane += PAIR) copy_rows(row_or_none(lane), row_or_none(lane + 1), lane, near);
        if constexpr (K::pairs) {
            gather_lanes<Unit, Unit>(row, lanes.count, near.dim / 2, near.lanes);
            for (int lane = 0; lane < LANES && near.dim % 2; ++lane)
                near.lanes[near.dim / 2 * LANES + lane] = lane < lanes.count ? row(lane)[near.dim - 1].bits : 0;
        } else {
            gather_lanes<T, S>(row, lanes.count, near.dim, near.lanes);
        }
        near.wild = wild_lanes(near, lanes.count);
        if (near.wild) tame(near.rows, up(near.dim, LANES) * LANES / PAIR);
    }

    // A row, or a pair of two, up to a whole vector. A null row is 0.
    static void copy_rows(const S *even, const S *odd, int lane, Near<K> &near) {
        for (int64_t low = 0; low < near.dim; low += LANES) {
            Unit *to = near.rows + (low + lane) * LANES / PAIR;
            const int64_t dims = near.dim - low < LANES ? near.dim - low : int64_t(LANES);
            if (!even || dims < LANES) memset(to, 0, LANES * sizeof(Unit));
            if (!even) continue;
            if constexpr (K::pairs) {
                pair_rows(even + low, odd ? odd + low : nullptr, dims, to);
            } else {
                int64_t i = 0;
                for (; i + W <= dims; i += W) store(to + i, load_wide(even + low + i));
                for (; i < dims; ++i) to[i] = widen(even[low + i]);
            }
        }
    }

    // The lanes with a number that is not finite.
    static uint64_t wild_lanes(const Near<K> &near, int count) {
        using M = IntVec<Unit>;
        M bad[LANES / W] = {};
        for (int64_t i = 0; i < Tokens<K>::units(near.dim); ++i)
            for (int v = 0; v < LANES / W && v * W < count; ++v) {
                const auto x = load(near.lanes + i * LANES + v * W);
                if constexpr (K::pairs) bad[v] |= ((x & 0x7f80u) == 0x7f80u) | ((x & 0x7f800000u) == 0x7f800000u);
                else bad[v] |= x - x != 0;
            }
        uint64_t wild = 0;
        for (int v = 0; v < LANES / W; ++v)
            for (int i = 0; i < W && any<Unit>(bad[v]); ++i) wild |= uint64_t(bad[v][i] != 0) << (v * W + i);
        return wild;
    }

    // Numbers that are not finite made 0.
    static void tame(Unit *units, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
            if constexpr (K::pairs) {
                if ((units[i] & 0x7f80) == 0x7f80) units[i] &= 0xffff0000;
                if ((units[i] & 0x7f800000) == 0x7f800000) units[i] &= 0xffff;
            } else if (!(units[i] - units[i] == 0)) {
                units[i] = 0;
            }
        }
    }

    // delta, shift and down of a row. One that saw nothing has none, whatever dout and dlse are.
    void set_row(const Lanes &lanes, int lane, bool again) {
        const int64_t row = number(lanes, lane);
        const T lse = static_cast<const T *>(c.lse)[row];
        T *const delta = static_cast<T *>(g.delta) + row;
        if (!again) *delta = lse == T(NEVER) ? 0 : dot(row_at(g.dout, lanes, lane), row_at(c.out, lanes, lane));
        const double sunk = sunk_of(lanes, lane);
        shift[lane] = lse == T(NEVER) ? T(NEVER) : T(-(double(lse) + sunk));
        down[lane] = *delta;
        if (g.dlse && lse != T(NEVER)) down[lane] -= T(static_cast<const T *>(g.dlse)[row] * (sunk ? ::exp(sunk) : 1));
    }

    // By how much the sink raises the log-sum-exp of a row.
    double sunk_of(const Lanes &lanes, int lane) const {
        const T lse = static_cast<const T *>(c.lse)[number(lanes, lane)];
        if (!c.sink || lse == T(NEVER)) return 0;
        return sink_share(lse, static_cast<const T *>(c.sink)[lanes.head_of(lane)]);
    }

    // log(exp(lse) + exp(sink)) - lse.
    static double sink_share(double lse, double sink) {
        return sink > lse ? sink - lse + ::log1p(::exp(lse - sink)) : ::log1p(::exp(sink - lse));
    }

    T dot(const S *a, const S *b) const {
        V sum{};
        int64_t i = 0;
        for (; i + W <= c.v_dim; i += W) sum = fma(load_wide(a + i), load_wide(b + i), sum);
        T lane[W], rest = 0;
        store(lane, sum);
        for (int n = W / 2; n; n /= 2)
            for (int l = 0; l < n; ++l) lane[l] += lane[l + n];
        for (; i < c.v_dim; ++i) rest = fma(widen(a[i]), widen(b[i]), rest);
        return lane[0] + rest;
    }

    // ---- a block of keys -------------------------------------------------------------------------------------------

    // What of a block is computed, and which of it is kept.
    struct Part {
        const Block &block;
        const Lanes &lanes;
        Piece pieces[8];
        int n;
        bool masked[2];
        Bits128 bits;  // of masked halves

        int low() const { return pieces[0].low; }
        int high() const { return pieces[n - 1].high; }
        uint64_t kept(int j) const { return masked[j / TILE] ? bits.of[j] : ~uint64_t(0); }

        Part(const Block &b, const Lanes &l, int64_t keys) : block(b), lanes(l) {
            lane_bits(block, lanes, bits);
            // lanes without a query are masked, like queries that see no key
            const uint64_t real = lanes.count == LANES ? ~uint64_t(0) : (uint64_t(1) << lanes.count) - 1;
            for (int i = 0; i < 2; ++i) {
                masked[i] = block.half[i].bits || lanes.count < LANES;
                for (int j = 0; j < TILE && lanes.count < LANES; ++j)
                    bits.of[i * TILE + j] = block.half[i].bits ? bits.of[i * TILE + j] & real : real;
            }
            n = cut<W>(block, bits, int(keys - block.first < BLOCK ? keys - block.first : BLOCK), lanes.count, pieces);
        }
    };

    // visit(part, k, rows) once `weights` and `changes` hold p and ds, for every block of the tile; rows: its keys.
    // `again`: the tile was visited before, and its delta is known.
    template <typename Visit>
    regard_status each_block(const Lanes &lanes, bool again, Visit visit) {
        const int64_t kv = lanes.head / division.group;
        const Tokens<K> k(c.k, lanes.batch, kv, c.qk_dim), v(c.v, lanes.batch, kv, c.v_dim);
        prepare(lanes, again);
        Walk walk(c.by_query, row_of(lanes), c.keys);
        Block block;
        while (walk.next(c.keys, block)) {
            const Part part(block, lanes, c.keys);
            if (!part.n) continue;
            const Rows rows = k.across(block.first + part.low(), part.high() - part.low(), keys);
            multiply_all(part, rows, q, weights);
            multiply_all(part, v.across(block.first + part.low(), part.high() - part.low(), values), dout, changes);
            weigh(part);
            visit(part, k, rows);
        }
        return walk.bad ? REGARD_BAD_SCHEDULE : REGARD_DONE;
    }

    void multiply_all(const Part &part, const Rows &rows, const Near<K> &near, T *out) {
        for (int i = 0; i < part.n; ++i) {
            const Piece &p = part.pieces[i];
            const char *from = rows.data + (p.low - part.low()) * rows.stride;
            multiply<P, Along::across>(from, rows.stride, p.high - p.low, near.lanes, Tokens<K>::units(near.dim),
                                       out + p.low * LANES, p.first, p.last);
        }
    }

    void weigh(const Part &part) {
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
        }
    }

    template <bool general, bool masked>
    void weigh_piece(const Part &part, const Piece &p, bool table) {
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
    REGARD_INLINE void weigh_pair(const Part &part, int j, int high, int v, bool table,
                                  typename Largest<T>::Sums &sums) {
        const Weighed<V> one = weigh_one<general, masked>(part, j, v, table);
        const int64_t key = part.block.first + j;
        if constexpr (K::pairs) {
            const Weighed<V> two = j + 1 < high ? weigh_one<general, masked>(part, j + 1, v, table) : Weighed<V>{};
            store_rows(row(weights, j) + v * W, one.kept, two.kept);
            store(packed + j / 2 * LANES + v * W, store_rows(row(changes, j) + v * W, one.change, two.change));
            sums.add(one), sums.add(two);
            if (!above<T>(larger(one.p, two.p), sums.limit)) return;
            largest.see(one, key, v, sums);
            largest.see(two, key + 1, v, sums);
        } else {
            store(weights + j * LANES + v * W, one.kept);
            store(changes + j * LANES + v * W, one.change);
            if constexpr (HALF) sums.add(one), largest.see(one, key, v, sums);
        }
    }

    // One vector of scores and dp becomes p and ds.
    template <bool general, bool masked>
    REGARD_INLINE Weighed<V> weigh_one(const Part &part, int j, int v, bool table) {
        const int at = j * LANES + v * W;
        V score = load(weights + at), dp = load(changes + at), slope{};
        uint64_t bits = masked ? part.kept(j) >> (v * W) : 0;
        if constexpr (general) score = shaped(part, j, v, table, score, slope);
        // the difference first, rounded once: lse may be large, and an error of it would be one of every weight
        const V difference = fma(score, broadcast(scoring.unit), load(shift + v * W));
        const V p = exp2<P::precision>(difference * broadcast(T(LOG2E)));
        V kept = p;
        if constexpr (general)
            if (c.dropout > 0) drop(part, j, v, kept, dp);
        const V ds = p * (dp - load(down + v * W));
        // what is hidden may be NaN: it is never multiplied with 0
        const auto shown = [&](V x) {
            if constexpr (masked) x = select(bits, x, V{});
            if constexpr (general) x = score == T(NEVER) ? V{} : x;
            return x;
        };
        if constexpr (general) {
            if (added) store(added + at, shown(ds));
            if (scoring.capped) return {shown(p), shown(kept), shown(ds), shown(ds * slope), slope};
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

    static REGARD_INLINE Weight *row(T *rows, int64_t j) { return reinterpret_cast<Weight *>(rows + j * LANES); }

    // A whole score, and how much of a change of it the softcap lets through.
    REGARD_INLINE V shaped(const Part &part, int j, int v, bool table, V product, V &slope) const {
        V add{};
        if (table) add = load(added + j * LANES + v * W);
        else if (c.distance) add = some(distance_of(part, j) + v * W, part.lanes.count - v * W);
        if (!scoring.whole) return product;
        if (!scoring.capped) return scoring.shaped(product, add);
        const V t = tanh(product * broadcast(T(scoring.scale / scoring.cap)));
        slope = 1 - t * t;
        return fma(t, broadcast(scoring.cap), add);
    }

    const T *distance_of(const Part &part, int j) const {
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
    void drop(const Part &part, int j, int v, V &p, V &dp) const {
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

    // ---- sums ------------------------------------------------------------------------------------------------------

    // Where in the sums of a unit, [groups of 64 dims][keys][64] for dk and then for dv, a number stands.
    int64_t sum_at(bool value, int64_t key, int64_t dim = 0) const {
        const int64_t before = value ? up(c.qk_dim, LANES) * c.keys : 0;
        return before + (dim / LANES * c.keys + key) * LANES + dim % LANES;
    }

    // One tile of queries: its dq is written, its dk and dv are added to the sums.
    regard_status tile(const Lanes &lanes, T *sums, T *ddistance) {
        for (int64_t i = 0; i < c.qk_dim * LANES; i += W) store(dq + i, V{});
        if (HALF && division.small) {  // once for delta alone
            if (regard_status status = each_block(lanes, false, [](auto &&...) {})) return status;
            for (int lane = 0; lane < lanes.count; ++lane) correct_delta(lanes, lane);
        }
        const regard_status status =
            each_block(lanes, HALF && division.small, [&](const Part &part, const Tokens<K> &k, const Rows &rows) {
                add_dq(part, k, rows);
                add_rows(part, changes, q, sums + sum_at(false, part.block.first));
                add_rows(part, weights, dout, sums + sum_at(true, part.block.first));
                if (q.wild) add_wild(part, c.q, changes, q, sums + sum_at(false, part.block.first));
                if (dout.wild) add_wild(part, g.dout, weights, dout, sums + sum_at(true, part.block.first));
                if (ddistance) add_distance(part, ddistance);
                if (g.dbias && !shares_bias(g)) add_bias(part);
            });
        if (HALF && !division.small) add_lacking(lanes, sums, ddistance);
        S *data = static_cast<S *>(g.dq.data) + lanes.batch * g.dq.batch;
        const auto to = [&](int lane) {
            return data + lanes.head_of(lane) * g.dq.head + lanes.query_of(lane) * g.dq.token;
        };
        scatter_lanes<T, S>(to, lanes.count, c.qk_dim, [&](int64_t i, int lane) {
            return load(dq + i * LANES + lane) * broadcast(scoring.scale);
        });
        return status;
    }

    void add_dq(const Part &part, const Tokens<K> &k, Rows rows) {
        const int low = part.low(), count = part.high() - low;
        if (K::pairs) rows = k.down(part.block.first + low, count, keys_down);
        const bool wild = (part.masked[0] || part.masked[1]) && k.wild(part.block.first + low, count);
        if (wild) rows = tamed(rows, count);
        for (int i = 0; i < part.n; ++i) {
            const Piece &p = part.pieces[i];
            const int first = p.low / PAIR, units = (p.high - p.low + PAIR - 1) / PAIR;
            multiply<P, Along::down>(rows.data + (first - low / PAIR) * rows.stride, rows.stride, c.qk_dim,
                                     packed + first * LANES, units, dq, p.first, p.last);
        }
        if (wild) add_wild_keys(part, k);
    }

    // A copy without what is not finite.
    Rows tamed(const Rows &rows, int count) {
        const int64_t n = (count + PAIR - 1) / PAIR, bytes = c.qk_dim * int64_t(sizeof(Unit));
        for (int64_t j = 0; j < n; ++j) {
            Unit *to = reinterpret_cast<Unit *>(keys_down + j * bytes);
            memmove(to, rows.data + j * rows.stride, size_t(bytes));
            tame(to, c.qk_dim);
        }
        return {keys_down, bytes};
    }

    // What keys that are not finite add to dq of queries that see them.
    void add_wild_keys(const Part &part, const Tokens<K> &k) {
        for (int i = 0; i < part.n; ++i)
            for (int j = part.pieces[i].low; j < part.pieces[i].high; ++j)
                for (int64_t d = 0; d < c.qk_dim; ++d) {
                    const T x = widen(k.at(part.block.first + j)[d]);
                    if (x - x == 0) continue;
                    for (int lane = part.pieces[i].first * W; lane < part.pieces[i].last * W; ++lane)
                        if (part.kept(j) >> lane & 1) dq[d * LANES + lane] += x * widen(row(changes, j)[lane]);
                }
    }

    // sums[key] += rows of weights or changes . rows of dout or q. `sums` is where the block begins.
    void add_rows(const Part &part, const T *by, const Near<K> &near, T *sums) {
        for (int i = 0; i < part.n; ++i) {
            const Piece &p = part.pieces[i];
            const char *from = reinterpret_cast<const char *>(by) + p.low * ROW + p.first * W * int64_t(sizeof(Weight));
            for (int64_t low = 0; low < near.dim; low += LANES) {
                const int64_t dims = near.dim - low < LANES ? near.dim - low : int64_t(LANES);
                const Unit *rows = near.rows + (low + p.first * W) * LANES / PAIR;
                T *out = sums + low * c.keys + p.low * LANES;
                const int steps = (p.last - p.first) * W / PAIR, vectors = int((dims + W - 1) / W);
                multiply<P, Along::across, Start::added>(from, ROW, p.high - p.low, rows, steps, out, 0, vectors);
            }
        }
    }

    // What queries that are not finite, or whose dout is not, add to the keys that they see.
    void add_wild(const Part &part, const regard_tensor &t, T *by, const Near<K> &near, T *sums) {
        for (int i = 0; i < part.n; ++i)
            for (int j = part.pieces[i].low; j < part.pieces[i].high; ++j)
                for (int lane = part.pieces[i].first * W; lane < part.pieces[i].last * W; ++lane) {
                    if (!((part.kept(j) & near.wild) >> lane & 1)) continue;
                    const T weight = widen(row(by, j)[lane]);
                    if (scoring.whole && weight == 0) continue;  // a bias of -inf hides too
                    for (int64_t d = 0; d < near.dim; ++d) {
                        const T x = widen(row_at(t, part.lanes, lane)[d]);
                        if (!(x - x == 0)) sums[(d / LANES * c.keys + j) * LANES + d % LANES] += weight * x;
                    }
                }
    }

    // ---- what the largest p and ds lack (largest.h) ----------------------------------------------------------------

    // delta is corrected, and to all that pairs were added to is added what they lack.
    void add_lacking(const Lanes &lanes, T *sums, T *ddistance) {
        T wrong[LANES];
        for (int lane = 0; lane < lanes.count; ++lane) wrong[lane] = correct_delta(lanes, lane);
        if (!largest.count) return;
        memset(lacking, 0, size_t(LANES * up(c.qk_dim, W)) * sizeof(T));
        for (int64_t i = 0; i < largest.count; ++i) {
            const int lane = int(largest.lane[i]);
            if ((q.wild | dout.wild) >> lane & 1 || !(wrong[lane] - wrong[lane] == 0)) continue;
            add_pair(lanes, lane, i, -largest.p[i] * wrong[lane], sums, ddistance);
        }
        add_lanes(lacking);
    }

    // The error of a row's delta. The ds of a row must add up to 0, or to the gradient of lse where there is one. p is
    // divided by its sum, which is 1 up to the rounding of exponentials.
    T correct_delta(const Lanes &lanes, int lane) {
        const T total = largest.weights[lane];
        if (!(total > 0)) return 0;
        T *const delta = static_cast<T *>(g.delta) + number(lanes, lane);
        const T right = (largest.changes[lane] / total + down[lane]) * T(::exp(-sunk_of(lanes, lane)));
        const T wrong = right - *delta;
        *delta = right;
        return wrong;
    }

    // Pair i of `largest`, whose ds is still to gain `more`.
    void add_pair(const Lanes &lanes, int lane, int64_t i, T more, T *sums, T *ddistance) {
        const int64_t key = largest.key[i], kv = lanes.head / division.group;
        const T kept = largest.kept[i], slope = largest.slope[i], change = largest.ds[i] * slope;
        const T by = change - as_multiplied(change) + more * slope;
        const Tokens<K> k(c.k, lanes.batch, kv, c.qk_dim);
        add_row(by, k.at(key), c.qk_dim, LANES, lacking + lane * up(c.qk_dim, W));
        add_row(by, row_at(c.q, lanes, lane), c.qk_dim, c.keys * LANES, sums + sum_at(false, key));
        if (K::pairs)
            add_row(kept - as_multiplied(kept), row_at(g.dout, lanes, lane), c.v_dim, c.keys * LANES,
                    sums + sum_at(true, key));
        if (ddistance) {
            const int64_t head = lanes.head_of(lane) % division.group;
            ddistance[head * division.distances + c.keys - 1 + lanes.query_of(lane) - key] += more;
        }
        if (g.dbias && !shares_bias(g)) bias_row(lanes, lane, 0)[g.bias_sizes[3] > 1 ? key : 0] += more;
    }

    // A weight or change as products have it.
    static T as_multiplied(T x) { return T(widen(narrow<Weight>(x))); }

    // to += by * row, in groups of 64 dims that are `step` elements apart.
    static void add_row(T by, const S *row, int64_t dim, int64_t step, T *to) {
        for (int64_t low = 0; low < dim; low += LANES, row += LANES, to += step) {
            const int64_t some = dim - low < LANES ? dim - low : int64_t(LANES);
            int64_t i = 0;
            for (; i + W <= some; i += W) store(to + i, fma(load_wide(row + i), broadcast(by), load(to + i)));
            for (; i < some; ++i) to[i] = fma(widen(row[i]), by, to[i]);
        }
    }

    // dq, whose lanes are queries, gains rows.
    void add_lanes(const T *rows) {
        const int64_t step = up(c.qk_dim, W);
        for (int lane = 0; lane < LANES; lane += W)
            for (int64_t low = 0; low < c.qk_dim; low += W) {
                V block[W];
                for (int i = 0; i < W; ++i) block[i] = load(rows + (lane + i) * step + low);
                transpose<T>(block);
                for (int64_t i = 0; i < W && low + i < c.qk_dim; ++i) {
                    T *at = dq + (low + i) * LANES + lane;
                    store(at, load(at) + block[i]);
                }
            }
    }

    // ddistance of the group's heads, [heads][division.distances], gains the changes along its diagonals.
    void add_distance(const Part &part, T *ddistance) const {
        const Lanes &lanes = part.lanes;
        ddistance += lanes.head % division.group * division.distances + c.keys - 1 + lanes.first - part.block.first;
        for (int i = 0; i < part.n; ++i) {
            const Piece &p = part.pieces[i];
            for (int j = p.low; j < p.high; ++j) {
                T *to = ddistance - j;
                const T *from = added + j * LANES;
                if (lanes.one_head()) {
                    for (int v = p.first; v < p.last; ++v) store(to + v * W, load(to + v * W) + load(from + v * W));
                } else {
                    for (int lane = p.first * W; lane < lanes.count && lane < p.last * W; ++lane)
                        to[lane / lanes.per_head * division.distances + lane % lanes.per_head] += from[lane];
                }
            }
        }
    }

    // dbias gains the changes; elements that several pairs share are summed in the order of lanes, then keys.
    void add_bias(const Part &part) const {
        const bool along_keys = g.bias_sizes[3] > 1;
        for (int i = 0; i < part.n; ++i) {
            const Piece &p = part.pieces[i];
            for (int v = p.first; v < p.last; ++v) {
                T *to[W];
                const int some = part.lanes.count - v * W < W ? part.lanes.count - v * W : W;
                for (int lane = 0; lane < some; ++lane) to[lane] = bias_row(part.lanes, v * W + lane, part.block.first);
                int j = p.low;
                for (; j + W <= p.high && along_keys; j += W) add_bias_square(j, v, some, to);
                for (int lane = 0; lane < some; ++lane)
                    for (int k = j; k < p.high; ++k) to[lane][along_keys ? k : 0] += added[k * LANES + v * W + lane];
            }
        }
    }

    // Where the elements of a lane begin, for keys from `first` on.
    T *bias_row(const Lanes &lanes, int lane, int64_t first) const {
        const int64_t *n = g.bias_sizes;
        const int64_t b = n[0] > 1 ? lanes.batch : 0, h = n[1] > 1 ? lanes.head_of(lane) : 0;
        const int64_t row = (b * n[1] + h) * n[2] + (n[2] > 1 ? lanes.query_of(lane) : 0);
        return static_cast<T *>(g.dbias) + row * n[3] + (n[3] > 1 ? first : 0);
    }

    // W keys from j on by a vector of lanes, transposed: memory has keys side by side.
    void add_bias_square(int j, int v, int some, T *const *to) const {
        V block[W];
        for (int i = 0; i < W; ++i) block[i] = load(added + (j + i) * LANES + v * W);
        transpose<T>(block);
        for (int lane = 0; lane < some; ++lane) store(to[lane] + j, load(to[lane] + j) + block[lane]);
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
