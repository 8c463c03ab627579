// All weights of a call once, tile by tile, and what they say: rows, columns, distances, pictures.
//
// A weight is 2^x, x = (score - total) * log2 e, total what the forward pass divided by: so no maximum is sought, no
// sum is rescaled, and one product is all that a weight costs beside its own sums. Lanes are 64 queries of one head,
// as in forward.h, whose scores these are. A half of a block (64 keys) is computed in four steps while it is in L1:
// scores; weights in their place, with the sums of each lane (mass, A x for the entropy, A^2, largest); sums of keys
// across lanes; sums along vectors, as values are mixed.
//
// Where lanes are all in one bin of distances and keys in one column of cells, the mass is summed once for all of
// them: so keys are taken in stretches, cut at cells. Sums of a block are floats, sums of blocks doubles.
#pragma once

#include "forward_scores.h"
#include "kernels.h"
#include "sweep_segments.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct Sweep {
    using T = typename K::Wide;
    using V = typename K::V;
    using M = IntVec<T>;
    using Int = typename Bits<T>::type;
    using P = typename K::Product;
    static constexpr int W = K::W, MOST = LANES / W;
    static constexpr int STRETCH = 32;
    static constexpr T FLOOR = T(-1e30);  // exponents of weights that are 0: so 0 * x is 0

    const regard_sweep &s;
    const regard_call &c;
    SweepSegment<T> segment;
    Scores<K> products;
    T *scores;  // those of `products`, and then weights
    typename K::Unit *queries;

    struct Lane {                                      // of a tile
        alignas(64) T offset[LANES], shift[LANES];     // x = (score - offset) * factor + shift
        alignas(64) T entropy[LANES], squares[LANES];  // of a block
        alignas(64) T top[LANES];
        alignas(64) Int top_key[LANES];
        alignas(64) T near[LANES];                                // of the bin that is summed now
        alignas(64) T cell_sum[W * LANES], cell_most[W * LANES];  // of W columns of cells
        alignas(64) double entropies[LANES], squared[LANES];
        alignas(64) double bins[REGARD_BINS][LANES];
        int bin[MOST];  // of `near`
        double total[LANES];
    };
    Lane *lane;
    T *along;        // [vector_count][64], of a block
    double *alongs;  // the same, of all
    int vectors;     // with lanes that exist
    Lanes lanes;
    // the cells that are summed now: the first of their columns, where the keys of the present one end, its sums
    int64_t cell_first, cell_end;
    T *cell_sum, *cell_most;

    static int64_t bytes(const regard_sweep &s) {
        return of_scores(s.call) + up(int64_t(sizeof(Lane)), 64) +
               s.vector_count * LANES * int64_t(sizeof(T) + sizeof(double));
    }

    static int64_t of_scores(const regard_call &c) { return up(Scores<K>::bytes(c) + Scores<K>::queries_bytes(c), 64); }

    Sweep(const regard_sweep &sweep, char *shared, char *scratch)
        : s(sweep), c(sweep.call), segment(sweep, shared), products(c, scratch), scores(products.scores) {
        char *at = scratch + of_scores(c);
        queries = reinterpret_cast<typename K::Unit *>(scratch + Scores<K>::bytes(c));
        lane = reinterpret_cast<Lane *>(at);
        alongs = reinterpret_cast<double *>(at + up(int64_t(sizeof(Lane)), 64));
        along = reinterpret_cast<T *>(alongs + s.vector_count * LANES);
    }

    // The tiles of a segment, from the one with number `done` on.
    regard_status run(int64_t unit, int64_t &done, const Pause &pause) {
        segment.enter(segment.cut.head(unit), segment.cut.segment(unit));
        if (!done) segment.clear_shared();
        const int64_t first = segment.first_query / TILE, end = (segment.end_query + TILE - 1) / TILE;
        const int64_t count = end - first;
        while (done < count) {
            if (regard_status bad = tile(first + done)) return bad;
            if (++done < count && pause()) return REGARD_MORE;
        }
        return REGARD_DONE;
    }

    // ---- a tile ----

    regard_status tile(int64_t number) {
        const int64_t b = segment.head / c.heads, h = segment.head % c.heads, first = number * TILE;
        lanes = {b, h, first, TILE, least(TILE, c.queries - first)};
        vectors = lanes.vectors(W);
        products.transpose_queries(lanes, queries);
        begin();
        const int64_t map = (c.maps_batch > 1 ? b : 0) * c.maps_head + (c.maps_head > 1 ? h : 0);
        const Source<K> k(keys_of(c), c.k, b, h / (c.heads / c.kv_heads), c.qk_dim);
        Walk walk(c.by_query, map * c.by_query.rows + number, c.keys);
        Block block;
        while (walk.next(c.keys, block)) step(block, k);
        if (walk.bad) return REGARD_BAD_SCHEDULE;
        if (s.mean && cell_end) put_cells();
        finish();
        return REGARD_DONE;
    }

    int64_t row_of(int i) const { return segment.head * c.queries + lanes.first + i; }

    // What is subtracted from scores, in two floats: the log of what rows are divided by has more digits than one
    // holds, and where scores are large the last ones are digits of all weights.
    void begin() {
        memset(static_cast<void *>(lane), 0, sizeof(Lane));
        memset(static_cast<void *>(alongs), 0, size_t(s.vector_count) * LANES * sizeof(double));
        memset(static_cast<void *>(along), 0, size_t(s.vector_count) * LANES * sizeof(T));
        cell_end = 0;
        const T *lse = static_cast<const T *>(c.lse), *sink = static_cast<const T *>(c.sink);
        for (int i = 0; i < LANES; ++i) {
            const double own = i < lanes.count ? double(lse[row_of(i)]) : -double(INFINITE);
            const double total = sink && i < lanes.count ? log_of_both(own, double(sink[lanes.head])) : own;
            lane->total[i] = total;
            const double unit = total / double(products.scoring.unit);
            lane->offset[i] = own == -double(INFINITE) ? T(INFINITE) : T(unit);
            const double rest = unit - double(lane->offset[i]);
            lane->shift[i] = rest - rest == 0 ? T(-rest * double(products.factor)) : T(0);
        }
    }

    static double log_of_both(double a, double b) {
        const double high = a > b ? a : b, low = a > b ? b : a;
        if (high == -double(INFINITE)) return high;
        return high + ::log1p(::exp(low - high));
    }

    // A block of 128 keys: scores as in forward.h, hidden ones -inf.
    void step(const Block &block, const Source<K> &k) {
        const int tokens = least(BLOCK, c.keys - block.first);
        Bits128 bits;
        lane_bits(block, lanes, bits);
        Piece pieces[8];
        const int n = cut<W>(block, bits, tokens, lanes.count, pieces);
        if (!n) return;
        const int low = pieces[0].low, high = pieces[n - 1].high;
        const Rows rows = products.rows(k, block.first + low, high - low);
        const Adds<T> adds = products.whole_scores(block, lanes, tokens);
        const int64_t next = block.first + BLOCK;
        Ahead ahead;
        ahead.add(k.ahead(next, least(BLOCK, c.keys - next)));
        ahead.start(rows_of(pieces, n), Tokens<K>::units(c.qk_dim), vectors);
        const bool ragged = lanes.count % W;
        if (ragged) hide_missing(block, bits);
        for (int i = 0; i < n; ++i)
            products.each_half(pieces[i], [&](const Piece &p, int half) {
                alignas(64) T top[LANES] = {};
                const uint64_t *hidden = ragged || block.half[half].bits ? bits.of : nullptr;
                products.score(p, queries, rows.data + (p.low - low) * rows.stride, rows.stride, adds, nullptr, &ahead);
                if (products.scoring.capped) products.cap(p, hidden, adds, top);
                else if (hidden) products.hide(p, hidden, top);
                gather(p, block.first);
            });
        settle();
    }

    // Lanes beyond the last query see nothing: a key that is no number would reach columns through them.
    void hide_missing(const Block &block, Bits128 &bits) const {
        const uint64_t real = (uint64_t(1) << lanes.count) - 1;
        for (int j = 0; j < BLOCK; ++j) bits.of[j] = block.half[j / TILE].bits ? bits.of[j] & real : real;
    }

    // All that a piece of scores says.
    void gather(const Piece &p, int64_t first) {
        for (int low = p.low; low < p.high;) {
            int high = least(p.high, low + STRETCH);
            if (s.mean) {
                if (first + low >= cell_end) next_cells(first + low);
                high = least(high, cell_end - first);
            }
            for (int v = p.first; v < p.last; ++v) weigh(v, low, high, first);
            low = high;
        }
        if (p.last - p.first == VECTORS && VECTORS == 4) add_columns<4>(p, first);
        else add_columns<0>(p, first);
        if (s.vector_count) {
            const T *at =
                static_cast<const T *>(s.vectors) + lanes.batch * s.vector_batch + (first + p.low) * s.vector_count;
            multiply<P, Along::down>(reinterpret_cast<const char *>(at), s.vector_count * int64_t(sizeof(T)),
                                     s.vector_count, scores + p.low * LANES, p.high - p.low, along, p.first, p.last);
        }
    }

    // The weights of a stretch of keys and a vector of lanes, in place of scores, and their sums.
    REGARD_INLINE void weigh(int v, int low, int high, int64_t first) {
        const V offset = load(lane->offset + v * W), shift = load(lane->shift + v * W),
                factor = broadcast(products.factor);
        V entropy = load(lane->entropy + v * W), squares = load(lane->squares + v * W), sum{}, most{};
        for (int j = low; j < high; ++j) {
            T *at = scores + j * LANES + v * W;
            const V x = larger(broadcast(FLOOR), fma(load(at) - offset, factor, shift));
            const V weight = exp2(x);
            store(at, weight);
            sum += weight;
            most = larger(weight, most);
            entropy = fma(weight, x, entropy);
            squares = fma(weight, weight, squares);
        }
        store(lane->entropy + v * W, entropy);
        store(lane->squares + v * W, squares);
        const M higher = most > load(lane->top + v * W);
        if (any<T>(higher)) raise(v, low, high, first, most, higher);
        if (s.mean) {
            store(cell_sum + v * W, load(cell_sum + v * W) + sum);
            store(cell_most + v * W, larger(most, load(cell_most + v * W)));
        }
        add_bin(v, low, high, first, sum);
    }

    // A new largest weight in some lanes: the first key that has it.
    void raise(int v, int low, int high, int64_t first, V most, M higher) {
        M key{};
        for (int j = high - 1; j >= low; --j) {
            const M here = load(scores + j * LANES + v * W) == most;
            key = here ? M{} + Int(first + j) : key;
        }
        store(lane->top_key + v * W, higher ? key : load(lane->top_key + v * W));
        store(lane->top + v * W, higher ? most : load(lane->top + v * W));
    }

    // ---- distances ----

    static int bin_of(int64_t distance) {
        if (!distance) return 0;
        const int bin = 64 - __builtin_clzll(uint64_t(distance));
        return bin < int(REGARD_BINS) ? bin : int(REGARD_BINS) - 1;
    }

    // The mass of a range of keys to the bin that it is in, or pair by pair to several.
    REGARD_INLINE void add_bin(int v, int low, int high, int64_t first, V sum) {
        const int64_t position = s.offset + lanes.first + v * W;
        const int64_t nearest = position - (first + high - 1), farthest = position + W - 1 - (first + low);
        const int64_t a = nearest < 0 ? -nearest : nearest, b = farthest < 0 ? -farthest : farthest;
        const int from = nearest <= 0 && farthest >= 0 ? 0 : bin_of(a < b ? a : b), to = bin_of(a < b ? b : a);
        if (from != to) return add_bins(v, low, high, position - first, from, to);
        if (lane->bin[v] != from) put_near(v), lane->bin[v] = from;
        store(lane->near + v * W, load(lane->near + v * W) + sum);
    }

    void put_near(int v) { add_to<true>(lane->bins[lane->bin[v]] + v * W, lane->near + v * W, W); }

    void add_bins(int v, int low, int high, int64_t position, int from, int to) {
        constexpr int64_t FAR = int64_t(1) << 30;  // of the last bin in any case
        position = position < -FAR ? -FAR : position > FAR ? FAR : position;
        M lanes_of{};
        for (int i = 0; i < W; ++i) lanes_of[i] = Int(position + i);
        alignas(64) T part[LANES];
        for (int bin = from; bin <= to; ++bin) {
            const Int least = bin ? Int(1) << (bin - 1) : 0, end = bin ? least * 2 : 1;
            const bool last = bin == int(REGARD_BINS) - 1;
            V sum{};
            for (int j = low; j < high; ++j) {
                const M before = lanes_of - Int(j), distance = before < 0 ? -before : before;
                const M here = last ? distance >= least : (distance >= least) & (distance < end);
                sum += here ? load(scores + j * LANES + v * W) : V{};
            }
            store(part, sum);
            add_to<false>(lane->bins[bin] + v * W, part, W);
        }
    }

    // ---- columns ----

    // Sums across lanes: of W keys at a time, so that one shuffle serves several. N: vectors of the piece, 0: any.
    template <int N>
    REGARD_INLINE void add_columns(const Piece &p, int64_t first) {
        for (int j = p.low; j < p.high; j += W) {
            V sums[W];
            const int some = least(W, p.high - j);
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) sums[i] = i < some ? across<N>(p, j + i) : V{};
#pragma GCC unroll 4
            for (int n = W / 2; n > 0; n /= 2)
#pragma GCC unroll 8
                for (int i = 0; i < n; ++i) sums[i] = neighbours<T>(sums[2 * i], sums[2 * i + 1]);
            alignas(64) T part[W];
            store(part, sums[0]);
            add_to<false>(segment.columns + first + j, part, some);
        }
    }

    template <int N>
    REGARD_INLINE V across(const Piece &p, int j) const {
        const T *at = scores + j * LANES + p.first * W;
        if constexpr (N == 4) return (load(at) + load(at + W)) + (load(at + 2 * W) + load(at + 3 * W));
        V sum = load(at);
        for (int v = 1; v < p.last - p.first; ++v) sum += load(at + v * W);
        return sum;
    }

    // ---- cells ----

    void next_cells(int64_t key) {
        const int64_t column = key / s.cell;
        if (cell_end && column >= cell_first + W) put_cells();
        if (!cell_end || column >= cell_first + W) cell_first = column;
        cell_end = (column + 1) * s.cell;
        cell_sum = lane->cell_sum + (column - cell_first) * LANES;
        cell_most = lane->cell_most + (column - cell_first) * LANES;
    }

    // The sums and the largest of lanes, to the cells of their queries: W columns at a time, transposed so that
    // they are the lanes.
    void put_cells() {
        int64_t row = lanes.first / s.cell, end = (row + 1) * s.cell - lanes.first;
        V sum{}, most{};
        for (int v = 0; v < vectors; ++v) {
            V sums[W], mosts[W];
            for (int i = 0; i < W; ++i) {
                sums[i] = load(lane->cell_sum + i * LANES + v * W);
                mosts[i] = load(lane->cell_most + i * LANES + v * W);
            }
            transpose<T>(sums);
            transpose<T>(mosts);
            for (int i = 0; i < W && v * W + i < lanes.count; ++i) {
                if (v * W + i == end) {
                    add_cells(row++, sum, most);
                    sum = most = V{};
                    end += s.cell;
                }
                sum += sums[i];
                most = larger(mosts[i], most);
            }
        }
        add_cells(row, sum, most);
        memset(lane->cell_sum, 0, sizeof lane->cell_sum);
        memset(lane->cell_most, 0, sizeof lane->cell_most);
    }

    void add_cells(int64_t row, V sum, V most) const {
        const auto cells = segment.cells(row);
        alignas(64) T sums[W], mosts[W];
        store(sums, sum);
        store(mosts, most);
        const int some = least(W, segment.cut.cells - cell_first);
        for (int i = 0; i < some; ++i) {
            cells.sum[cell_first + i] += sums[i];
            if (mosts[i] > cells.most[cell_first + i]) cells.most[cell_first + i] = mosts[i];
        }
    }

    // ---- sums of blocks, and what comes of them ----

    template <bool clear>
    static REGARD_INLINE void add_to(double *sums, T *parts, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            sums[i] += double(parts[i]);
            if (clear) parts[i] = 0;
        }
    }

    void settle() {
        add_to<true>(lane->entropies, lane->entropy, LANES);
        add_to<true>(lane->squared, lane->squares, LANES);
        add_to<true>(alongs, along, s.vector_count * LANES);
    }

    void finish() {
        for (int v = 0; v < vectors; ++v) put_near(v);
        const T *sink = static_cast<const T *>(c.sink);
        for (int i = 0; i < lanes.count; ++i) {
            const int64_t row = row_of(i);
            double mass = 0;
            T *bins = static_cast<T *>(s.bins) + row * REGARD_BINS;
            for (int bin = 0; bin < int(REGARD_BINS); ++bin) {
                bins[bin] = T(lane->bins[bin][i]);
                mass += lane->bins[bin][i];
            }
            const double own = sink ? double(sink[lanes.head]) : -double(INFINITE);  // the sink's score
            // an infinite one takes all or nothing: it has no difference from an infinite total
            const double x = own - own == 0 ? own - lane->total[i] : own > 0 ? 0 : own, share = ::exp(x);
            const double entropy = -LN2 * lane->entropies[i] - (share > 0 ? share * x : 0);
            static_cast<T *>(s.mass)[row] = T(mass);
            static_cast<T *>(s.entropy)[row] = T(entropy <= 0 ? 0 : entropy);  // of one key: 0 but for rounding
            static_cast<T *>(s.squares)[row] = T(lane->squared[i] + share * share);
            static_cast<T *>(s.top)[row] = lane->top[i];
            s.top_key[row] = int64_t(lane->top_key[i]);
            T *to = static_cast<T *>(s.along) + row * s.vector_count;
            for (int64_t m = 0; m < s.vector_count; ++m) to[m] = T(alongs[m * LANES + i]);
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
