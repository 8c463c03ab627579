// The backward pass, unit by unit: what backward.h computes of a tile, summed over the tiles that share a key head.
#pragma once

#include "backward.h"
#include "kernels.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct Gradients {
    using T = typename K::Wide;
    using V = typename K::V;
    using S = typename K::Stored;
    static constexpr int W = K::W;

    const regard_gradient &g;
    const regard_call &c;
    Backward<K> backward;
    const Division &division;
    char *const scratch;  // beyond what a tile needs: the sums of a unit, and of a segment
    Range *ranges;        // [units][segments]: the keys that a segment adds to
    T *sums, *distances;  // [units][segments]: dk and dv of segments apart; ddistance of the group's heads

    Gradients(const regard_gradient &gradient, char *shared, char *own)
        : g(gradient), c(g.call), backward(g, own), division(backward.division), scratch(backward.end) {
        const Division &d = division;
        ranges = reinterpret_cast<Range *>(shared);
        sums = reinterpret_cast<T *>(shared + range_bytes(d));
        distances = reinterpret_cast<T *>(shared + range_bytes(d) + sum_bytes(d));
    }

    static int64_t range_bytes(const Division &d) {
        return d.apart ? up(d.units * d.segments * int64_t(sizeof(Range)), 64) : 0;
    }
    static int64_t sum_bytes(const Division &d) { return d.apart ? d.units * d.segments * d.sum_bytes : 0; }

    static int64_t shared_bytes(const regard_gradient &g) {
        const Division d(g.call);
        const int64_t distances = g.ddistance ? d.units * d.segments * d.group * d.distances * int64_t(sizeof(T)) : 0;
        return range_bytes(d) + sum_bytes(d) + distances;
    }

    // ---- first half: dq, and the sums of dk and dv ------------------------------------------------------------------

    // `done` counts tiles: of the segment where segments are apart, else of the unit.
    regard_status first(int64_t unit, int64_t &done, const Pause &pause) {
        if (!division.apart) return whole(unit, done, pause);
        const int64_t segment = division.segments - 1 - unit / division.units;  // causal: the long ones first
        unit %= division.units;
        Range &range = ranges[unit * division.segments + segment];
        range = range_of(unit, segment);
        T *own = sums_of(unit, segment);
        if (!done) clear(range, own);
        return run(unit, segment, own, done, pause);
    }

    // A unit of one tile: dk and dv of each block are written while its sums are in a cache.
    regard_status single(int64_t unit) {
        T *total = reinterpret_cast<T *>(scratch);
        int64_t next = 0;
        const auto hidden_until = [&](int64_t key) { write(unit, next, key, [](int64_t, int64_t) { return V{}; }); };
        const regard_status status = backward.tile(tile_of(unit, 0), total, distances_of(unit, 0), [&](int64_t first) {
            hidden_until(first);
            next = Division::least(first + BLOCK, c.keys);
            write(unit, first, next, [&](int64_t at, int64_t) { return load(total + at); });
        });
        hidden_until(c.keys);
        return status;
    }

    // All segments of a unit, one after the other.
    regard_status whole(int64_t unit, int64_t &done, const Pause &pause) {
        if (division.single) {
            clear_distances(unit, 0);
            return single(unit);
        }
        T *total = reinterpret_cast<T *>(scratch), *own = reinterpret_cast<T *>(scratch + division.sum_bytes);
        if (!done) memset(total, 0, size_t(division.sum_bytes));
        for (int64_t segment = 0; segment < division.segments; ++segment) {
            const int64_t before = first_tile(segment);
            if (done && done >= first_tile(segment + 1)) continue;  // added before a pause
            int64_t of_segment = done - before;
            const Range range = range_of(unit, segment);
            if (segment && !of_segment) clear(range, own);
            const regard_status status = run(unit, segment, segment ? own : total, of_segment, pause);
            done = before + of_segment;
            if (status) return status;
            if (!segment) continue;
            each_group(range, [&](int64_t at, int64_t n) {
                for (int64_t i = at; i < at + n; i += W) store(total + i, load(total + i) + load(own + i));
            });
        }
        write(unit, 0, c.keys, [&](int64_t at, int64_t) { return load(total + at); });
        return REGARD_DONE;
    }

    void clear(const Range &range, T *own) const {
        each_group(range, [&](int64_t at, int64_t n) { memset(own + at, 0, size_t(n) * sizeof(T)); });
    }

    // The number of a segment's first tile among those of its unit.
    int64_t first_tile(int64_t segment) const { return division.parts * division.tiles * segment / division.segments; }

    T *sums_of(int64_t unit, int64_t segment) const {
        return sums + (unit * division.segments + segment) * (division.sum_bytes / int64_t(sizeof(T)));
    }

    // each(start, count) for the ranges of sums of these keys.
    template <typename Each>
    void each_group(const Range &range, Each each) const {
        const int64_t n = (range.high - range.low) * LANES;
        for (int64_t d = 0; d < c.qk_dim; d += LANES) each(backward.sum_at(false, range.low, d), n);
        for (int64_t d = 0; d < c.v_dim; d += LANES) each(backward.sum_at(true, range.low, d), n);
    }

    // Tile `number` of a unit.
    Lanes tile_of(int64_t unit, int64_t number) const {
        const int64_t tiles = division.tiles;
        return backward.lanes_of(unit / c.kv_heads, unit % c.kv_heads, number / tiles, number % tiles);
    }

    // The keys that some tile of the segment lists; of a schedule that is wrong, some keys.
    Range range_of(int64_t unit, int64_t segment) const {
        const regard_schedule &s = c.by_query;
        const int64_t tiles = division.key_tiles(c);
        const auto clipped = [&](int64_t tile) { return tile < 0 ? 0 : Division::least(tile, tiles); };
        int64_t low = tiles, high = 0;
        const auto include = [&](int64_t first, int64_t last, int64_t length) {
            low = Division::least(low, clipped(first));
            const int64_t end = clipped(clipped(last) + clipped(length));
            high = high < end ? end : high;
        };
        for (int64_t tile = first_tile(segment); tile < first_tile(segment + 1); ++tile) {
            const int64_t row = backward.row_of(tile_of(unit, tile));
            const int64_t run = s.run_start[row + 1] - 1, patch = s.patch_start[row + 1] - 1;
            if (s.run_start[row] <= run) include(s.run_tile[s.run_start[row]], s.run_tile[run], s.run_length[run]);
            if (s.patch_start[row] <= patch) include(s.patch_tile[s.patch_start[row]], s.patch_tile[patch], 1);
        }
        low = Division::least(low, high);
        return {low * TILE, Division::least(high * TILE, c.keys)};
    }

    // ddistance of the heads of a unit, of a segment; null if nothing learns from distances.
    T *distances_of(int64_t unit, int64_t segment) const {
        const int64_t n = division.group * division.distances;
        return g.ddistance ? distances + (unit * division.segments + segment) * n : nullptr;
    }
    void clear_distances(int64_t unit, int64_t segment) const {
        T *const own = distances_of(unit, segment);
        if (own) memset(own, 0, size_t(division.group * division.distances) * sizeof(T));
    }

    // The tiles of a segment from `done` on, until all are done or it is left.
    regard_status run(int64_t unit, int64_t segment, T *own, int64_t &done, const Pause &pause) {
        if (!done) clear_distances(unit, segment);
        const int64_t first = first_tile(segment), tiles = first_tile(segment + 1) - first;
        while (done < tiles) {
            const Lanes lanes = tile_of(unit, first + done);
            if (regard_status status = backward.tile(lanes, own, distances_of(unit, segment), [](int64_t) {}))
                return status;
            if (++done < tiles && pause()) return REGARD_MORE;
        }
        return REGARD_DONE;
    }

    // dk and dv of some keys; sum(at, key) is a vector of them.
    template <typename Sum>
    void write(int64_t unit, int64_t low, int64_t high, Sum sum) const {
        for (int value = 0; value < 2; ++value) {
            const regard_tensor &t = value ? g.dv : g.dk;
            const int64_t dim = value ? c.v_dim : c.qk_dim;
            const V by = broadcast(value ? T(1) : backward.weights.scoring.scale);
            S *data = static_cast<S *>(t.data) + unit / c.kv_heads * t.batch + unit % c.kv_heads * t.head;
            for (int64_t key = low; key < high; ++key)
                for (int64_t d = 0; d < dim; d += W) {
                    const V x = sum(backward.sum_at(value, key, d), key) * by;
                    S *to = data + key * t.token + d;
                    if (d + W <= dim) store_narrow(to, x);
                    else
                        for (int64_t i = 0; i < dim - d; ++i) to[i] = narrow<S>(x[i]);
                }
        }
    }

    // ---- second half: sums of segments, and gradients that units share ----------------------------------------------

    regard_status second(int64_t unit, int64_t &done, const Pause &pause) {
        if (unit < bias_units(g)) return bias(unit, done, pause);
        unit -= bias_units(g);
        if (unit < distance_units(g)) return distance(unit);
        unit -= distance_units(g);
        const int64_t tiles = division.key_tiles(c), tile = unit % tiles;
        add_segments(unit / tiles, tile * TILE, Division::least(c.keys, (tile + 1) * TILE));
        return REGARD_DONE;
    }

    // In the same order as `whole`.
    void add_segments(int64_t unit, int64_t low, int64_t high) const {
        const Range *range = ranges + unit * division.segments;
        write(unit, low, high, [&](int64_t at, int64_t key) {
            V total = range[0].has(key) ? load(sums_of(unit, 0) + at) : V{};
            for (int64_t s = 1; s < division.segments; ++s)
                if (range[s].has(key)) total += load(sums_of(unit, s) + at);
            return total;
        });
    }

    // ddistance of a head, or of all.
    regard_status distance(int64_t head) const {
        T *to = static_cast<T *>(g.ddistance) + head * c.distance_head;
        const int64_t n = c.queries + c.keys - 1, per_batch = c.kv_heads * division.segments * division.group;
        for (int64_t i = 0; i < c.batch * per_batch; ++i) {
            const int64_t kv = i % per_batch / (division.segments * division.group);
            const int64_t h = kv * division.group + i % division.group;
            if (c.distance_head && h != head) continue;
            const T *from = distances + i * division.distances;
            for (int64_t at = 0; at < n; ++at) to[at] += from[at];
        }
        return REGARD_DONE;
    }

    // dbias of a bias head, or of a tile of its rows: the changes of all pairs that share it, computed once more.
    regard_status bias(int64_t unit, int64_t &done, const Pause &pause) {
        const int64_t *n = g.bias_sizes, of_head = n[2] > 1 ? division.tiles : 1;
        const Range batches = shared_by(unit / of_head / n[1], n[0], c.batch);
        const Range heads = shared_by(unit / of_head % n[1], n[1], c.heads);
        const Range tiles = shared_by(unit % of_head, of_head, division.tiles);
        const auto add = [&](const auto &part, const Tokens<K> &, const Rows &) { backward.biases.add_pairs(part); };
        const int64_t all = batches.size() * heads.size() * tiles.size();
        while (done < all) {
            const int64_t b = batches.low + done / tiles.size() / heads.size();
            const int64_t h = heads.low + done / tiles.size() % heads.size(), tile = tiles.low + done % tiles.size();
            const int64_t queries = Division::least(c.queries - tile * TILE, TILE);
            const Lanes lanes{b, h, tile * TILE, TILE, int(queries)};
            if (regard_status status = backward.each_block(lanes, true, add)) return status;
            if (++done < all && pause()) return REGARD_MORE;
        }
        return REGARD_DONE;
    }

    // Which of an axis add to number `at` of `size`: that one, or all if there is one number for all.
    static Range shared_by(int64_t at, int64_t size, int64_t all) {
        return size > 1 ? Range{at, at + 1} : Range{0, all};
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
