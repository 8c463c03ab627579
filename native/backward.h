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
//
// In tiles (amx.h) pieces are cut by 32 keys, weights are whole tiles of 32 keys by 32 lanes, with 0 where there is no
// piece, and dk and dv gain the products of 32 queries at a time.
#pragma once

#include "backward_weights.h"
#include "bias_gradients.h"
#include "key_mean.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct Backward {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W, PAIR = P::pair, UNIT = Tokens<K>::together;
    static constexpr int64_t ROW = LANES * int64_t(sizeof(T));  // bytes from row to row of p and ds
    using Weight = typename BackwardWeights<K>::Weight;
    using Part = BlockPart<K>;
    static constexpr bool HALF = BackwardWeights<K>::HALF;

    const regard_gradient &g;
    const regard_call &c;
    const Division division;
    // Each tile is computed once for delta alone where there are few pairs, or a bias learns: an element of a bias by
    // distance adds the errors of all its pairs.
    const bool twice;
    QueryRows<K> q, dout;
    BackwardWeights<K> weights;
    BiasGradients<K> biases;
    T *dq;                            // [qk_dim, whole tiles][64]
    char *keys, *values, *keys_down;  // a block's, as `across` and `down` make them
    T *lacking;                       // [64][qk_dim, whole vectors]: what dq lacks, in rows
    KeyMean<K> mean;
    char *end;  // of what is used

    Backward(const regard_gradient &gradient, char *scratch)
        : g(gradient),
          c(g.call),
          division(c),
          twice(HALF && (division.small || g.ddistance || (g.dbias && !shares_bias(g)))),
          weights(g),
          biases{g, c, division, nullptr},
          mean{c, nullptr, V{}, 0} {
        uintptr_t at = reinterpret_cast<uintptr_t>(scratch);
        const auto take = [&](auto *&p, int64_t n) {
            p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(at);
            at += uintptr_t(up(n * int64_t(sizeof(*p)), 64));
        };
        QueryRows<K> *const both[] = {&q, &dout};
        for (QueryRows<K> *near : both) {
            near->dim = near == &q ? c.qk_dim : c.v_dim;
            take(near->lanes, Tokens<K>::units(near->dim) * LANES);
            take(near->rows, up(near->dim, LANES) * LANES / PAIR);
        }
        weights.place(take);
        biases.added = weights.added;
        take(dq, dq_rows() * LANES);
        take(keys, Tokens<K>::across_bytes(c.qk_dim, BLOCK));
        take(values, Tokens<K>::across_bytes(c.v_dim, BLOCK));
        take(keys_down, BLOCK / UNIT * Tokens<K>::unit_bytes(c.qk_dim));
        if constexpr (HALF) take(lacking, LANES * up(c.qk_dim, W)), take(mean.sums, mean.size());
        end = reinterpret_cast<char *>(at);
    }

    int64_t dq_rows() const { return up(c.qk_dim, K::tiled ? 16 : 1); }

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

    // ---- a block of keys -------------------------------------------------------------------------------------------

    // visit(part, k, rows) once `weights` has p and ds, for every block of the tile; rows: its keys.
    // `again`: the tile was visited before, and its delta is known.
    template <typename Visit>
    regard_status each_block(const Lanes &lanes, bool again, Visit visit) {
        const int64_t kv = lanes.head / division.group;
        const Tokens<K> k(c.k, lanes.batch, kv, c.qk_dim), v(c.v, lanes.batch, kv, c.v_dim);
        q.fetch(c.q, lanes);
        dout.fetch(g.dout, lanes);
        weights.prepare(lanes, again, (twice && !again) || division.small ? T(INFINITE) : Largest<T>::LARGE);
        Walk walk(c.by_query, row_of(lanes), c.keys);
        Block block;
        while (walk.next(c.keys, block)) {
            const Part part(block, lanes, c.keys);
            if (!part.n) continue;
            const Rows rows = k.across(block.first + part.low(), part.high() - part.low(), keys);
            multiply_all(part, rows, q, weights.p_rows);
            multiply_all(part, v.across(block.first + part.low(), part.high() - part.low(), values), dout,
                         weights.ds_rows);
            weights.weigh(part);
            visit(part, k, rows);
        }
        return walk.bad ? REGARD_BAD_SCHEDULE : REGARD_DONE;
    }

    void multiply_all(const Part &part, const Rows &rows, const QueryRows<K> &near, T *out) {
        for (int i = 0; i < part.n; ++i) {
            const Piece &p = part.pieces[i];
            const char *from = rows.data + (p.low - part.low()) * rows.stride;
            const int64_t units = Tokens<K>::units(near.dim);
            T *to = out + p.low * LANES;
#if defined(REGARD_TILES)
            if constexpr (K::tiled) {
                tiles_across(from, rows.stride, p.high - p.low, near.lanes, units, to, p.first, p.last);
                continue;
            }
#endif
            multiply<P, Along::across>(from, rows.stride, p.high - p.low, near.lanes, units, to, p.first, p.last);
        }
    }

    // ---- sums ------------------------------------------------------------------------------------------------------

    // Where in the sums of a unit, [groups of 64 dims][keys][64] for dk and then for dv, a number is.
    int64_t sum_at(bool value, int64_t key, int64_t dim = 0) const {
        const int64_t before = value ? up(c.qk_dim, LANES) * division.sum_keys : 0;
        const int64_t row = division.single ? key % BLOCK : key;
        return before + (dim / LANES * division.sum_keys + row) * LANES + dim % LANES;
    }

    // One tile of queries: its dq is written, its dk and dv are added to the sums. added(first) is called after those
    // of the block that begins with key `first` were added.
    template <typename Added>
    regard_status tile(const Lanes &lanes, T *sums, T *ddistance, Added added) {
        for (int64_t i = 0; i < dq_rows() * LANES; i += W) store(dq + i, V{});
        if (twice) {  // once for delta alone
            if (regard_status status = each_block(lanes, false, [](auto &&...) {})) return status;
            for (int lane = 0; lane < lanes.count; ++lane) correct_delta(lanes, lane);
        }
        const bool corrects = HALF && !division.small;
        if (corrects) mean.clear();
        const regard_status status =
            each_block(lanes, twice, [&](const Part &part, const Tokens<K> &k, const Rows &rows) {
                if (division.single) memset(sums, 0, size_t(division.sum_bytes));
                add_dq(part, k, rows);
                if (corrects) mean.add(part, k, weights);
                add_rows(part, weights.ds_rows, q, sums + sum_at(false, part.block.first));
                add_rows(part, weights.p_rows, dout, sums + sum_at(true, part.block.first));
                if (q.wild) add_wild(part, c.q, weights.ds_rows, q, sums + sum_at(false, part.block.first));
                if (dout.wild) add_wild(part, g.dout, weights.p_rows, dout, sums + sum_at(true, part.block.first));
                if (ddistance) biases.add_diagonals(part, ddistance);
                if (g.dbias && !shares_bias(g)) biases.add_pairs(part);
                added(part.block.first);
            });
        if (corrects) add_lacking(lanes, sums, ddistance);
        S *data = static_cast<S *>(g.dq.data) + lanes.batch * g.dq.batch;
        const auto to = [&](int lane) {
            return data + lanes.head_of(lane) * g.dq.head + lanes.query_of(lane) * g.dq.token;
        };
        scatter_lanes<T, S>(to, lanes.count, c.qk_dim, [&](int64_t i, int lane) {
            return load(dq + i * LANES + lane) * broadcast(weights.scoring.scale);
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
            const char *from = rows.data + (p.low - low) / UNIT * rows.stride;
            const Unit *by = weights.ds_pairs + p.low / PAIR * LANES;
            const int units = (p.high - p.low + UNIT - 1) / UNIT;
#if defined(REGARD_TILES)
            if constexpr (K::tiled) {
                tiles_down<true>(from, c.qk_dim, units, by, dq, p.first, p.last);
                continue;
            }
#endif
            multiply<P, Along::down>(from, rows.stride, c.qk_dim, by, units, dq, p.first, p.last);
        }
        if (wild) add_wild_keys(part, k);
    }

    // A copy without what is not finite.
    Rows tamed(const Rows &rows, int count) {
        const int64_t n = (count + UNIT - 1) / UNIT, bytes = Tokens<K>::unit_bytes(c.qk_dim);
        for (int64_t j = 0; j < n; ++j) {
            Unit *to = reinterpret_cast<Unit *>(keys_down + j * bytes);
            memmove(to, rows.data + j * rows.stride, size_t(bytes));
            q.tame(to, bytes / int64_t(sizeof(Unit)));
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
                        if (part.kept(j) >> lane & 1)
                            dq[d * LANES + lane] += x * widen(weights.row(weights.ds_rows, j)[lane]);
                }
    }

    // sums[key] += rows of weights or changes . rows of dout or q. `sums` is where the block begins.
    void add_rows(const Part &part, const T *by, const QueryRows<K> &near, T *sums) {
        for (int i = 0; i < part.n; ++i) {
            const Piece &p = part.pieces[i];
            const int first = K::tiled ? p.first / 2 * 2 : p.first, last = K::tiled ? (p.last + 1) / 2 * 2 : p.last;
            const char *from = reinterpret_cast<const char *>(by) + p.low * ROW + first * W * int64_t(sizeof(Weight));
            for (int64_t low = 0; low < near.dim; low += LANES) {
                const int64_t dims = near.dim - low < LANES ? near.dim - low : int64_t(LANES);
                const Unit *rows = near.rows + (low + first * W) * LANES / PAIR;
                T *out = sums + low * division.sum_keys + p.low * LANES;
                const int lanes = int(least(last * W, K::tiled ? last * W : part.lanes.count)) - first * W;
                const int steps = (lanes + PAIR - 1) / PAIR, vectors = int((dims + W - 1) / W);
#if defined(REGARD_TILES)
                if constexpr (K::tiled) {
                    tiles_across<true>(from, ROW, p.high - p.low, rows, steps, out, 0, vectors);
                    continue;
                }
#endif
                multiply<P, Along::across, Start::added>(from, ROW, p.high - p.low, rows, steps, out, 0, vectors);
            }
        }
    }

    // What queries that are not finite, or whose dout is not, add to the keys that they see.
    void add_wild(const Part &part, const regard_tensor &t, T *by, const QueryRows<K> &near, T *sums) {
        for (int i = 0; i < part.n; ++i)
            for (int j = part.pieces[i].low; j < part.pieces[i].high; ++j)
                for (int lane = part.pieces[i].first * W; lane < part.pieces[i].last * W; ++lane) {
                    if (!((part.kept(j) & near.wild) >> lane & 1)) continue;
                    const T weight = widen(weights.row(by, j)[lane]);
                    if (weights.scoring.whole && weight == 0) continue;  // a bias of -inf hides too
                    for (int64_t d = 0; d < near.dim; ++d) {
                        const T x = widen(row_at<S>(t, part.lanes, lane)[d]);
                        if (!(x - x == 0)) sums[(d / LANES * division.sum_keys + j) * LANES + d % LANES] += weight * x;
                    }
                }
    }

    // ---- what the largest p and ds lack (largest.h) ----------------------------------------------------------------

    T correct_delta(const Lanes &lanes, int lane) {
        const Largest<T> &sums = weights.largest;
        return weights.shifts.correct(lanes, lane, sums.weights[lane], sums.changes[lane]);
    }

    // delta is corrected, and to all that pairs were added to is added what they lack.
    void add_lacking(const Lanes &lanes, T *sums, T *ddistance) {
        const Largest<T> &largest = weights.largest;
        const T *passed = weights.scoring.capped ? largest.passed : largest.weights;
        T wrong[LANES], rest[LANES] = {};  // rest: p * slope of the pairs that are not written down
        uint64_t known = 0;
        for (int lane = 0; lane < lanes.count; ++lane) {
            wrong[lane] = correct_delta(lanes, lane);
            if ((q.wild | dout.wild) >> lane & 1 || !(wrong[lane] - wrong[lane] == 0)) continue;
            known |= uint64_t(1) << lane;
            rest[lane] = passed[lane];
        }
        if (largest.count) memset(lacking, 0, size_t(LANES * up(c.qk_dim, W)) * sizeof(T));
        for (int64_t i = 0; i < largest.count; ++i) {
            const int lane = int(largest.lane[i]);
            if (!(known >> lane & 1)) continue;
            rest[lane] -= largest.p[i] * largest.slope[i];
            add_pair(lanes, lane, i, -largest.p[i] * wrong[lane], sums, ddistance);
        }
        if (largest.count) add_lanes(lacking);
        for (int lane = 0; lane < lanes.count; ++lane)
            if (known >> lane & 1) rest[lane] *= -wrong[lane];
        mean.add_times(rest, dq);
    }

    // Pair i of `largest`, whose ds is still to gain `more`.
    void add_pair(const Lanes &lanes, int lane, int64_t i, T more, T *sums, T *ddistance) {
        const Largest<T> &largest = weights.largest;
        const int64_t key = largest.key[i], kv = lanes.head / division.group;
        const T kept = largest.kept[i], slope = largest.slope[i], change = largest.ds[i] * slope;
        const T by = change - as_multiplied(change) + more * slope;
        const Tokens<K> k(c.k, lanes.batch, kv, c.qk_dim);
        add_row(by, k.at(key), c.qk_dim, LANES, lacking + lane * up(c.qk_dim, W));
        add_row(by, row_at<S>(c.q, lanes, lane), c.qk_dim, division.sum_keys * LANES, sums + sum_at(false, key));
        if (K::pairs)
            add_row(kept - as_multiplied(kept), row_at<S>(g.dout, lanes, lane), c.v_dim, division.sum_keys * LANES,
                    sums + sum_at(true, key));
        if (ddistance) {
            const int64_t head = lanes.head_of(lane) % division.group;
            ddistance[head * division.distances + c.keys - 1 + lanes.query_of(lane) - key] += more;
        }
        if (g.dbias && !shares_bias(g)) biases.row(lanes, lane, 0)[g.bias_sizes[3] > 1 ? key : 0] += more;
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
};

}  // namespace REGARD_ISA
}  // namespace regard
