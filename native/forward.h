// Attention for many queries: 64 queries in lanes, keys in blocks of 128.
//
// For each tile of queries: scores of a block [key][query] from keys read in place and queries transposed once; the
// running maximum; weights 2^(score - maximum); the output [v_dim][query] gains weights x values. Every sum is a chain
// of its own lane, so nothing is shuffled, and a row's bits depend on its own query and keys only: on their positions,
// since running sums are rescaled at blocks (multiples of 128) and restarted at spans (multiples of 1,024; walk.h).
// decode.h makes the same sums in the same order.
//
// Blocking: scores 128 x 64 floats = 32 KiB and queries 64 x d floats = 16 KiB at d 64 stay in L1 and L2; keys and
// values stream, used 64 times each. The maximum is only moved when a score exceeds it by 2^8: then weights are at most
// 256, sums lose nothing, and rescaling the output becomes rare. (Online softmax: Milakov & Gimelshein 2018,
// arXiv:1805.02867; tiles: Dao et al. 2022, arXiv:2205.14135; the rare rescaling: as in the fourth FlashAttention.)
#pragma once

#include "scores.h"

namespace regard {
namespace REGARD_ISA {

// Attention over some keys, lanes are queries: out [v_dim][64], not yet divided by total.
template <typename T>
struct Sums {
    T *out, *top, *total;
};

// The log-sum-exp of rows, and what their sums are multiplied with. No key was seen: -inf and 0.
template <typename T>
REGARD_INLINE void finished(typename Vec<T>::type top, typename Vec<T>::type total, T unit, T *lse, T *share) {
    using V = typename Vec<T>::type;
    const IntVec<T> empty = total == T(0);
    const V some = empty ? V{} + T(1) : total;
    store(lse, empty ? broadcast(T(-INFINITE)) : top * unit + natural_log<T>(some));
    store(share, empty ? V{} : T(1) / some);
}

// The share of a row's sums where a sink takes weight as well: sums / total * sigmoid(lse - sink).
template <typename T>
T sunk(T lse, T share, T sink) {
    if (share == 0) return 0;
    const double below = double(sink) - double(lse);
    return share * T(below > 0 ? ::exp(-below) / (1 + ::exp(-below)) : 1 / (1 + ::exp(below)));
}

template <typename K>
struct Forward {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W;
    static constexpr double NEVER = -INFINITE;
    // Whether 128 x 64 floats, 32 KiB, are more than the first level cache can hold besides: on Skylake and Cascade
    // Lake, which start two products a cycle and so wait for the second level where an operand comes from there. Zen 4
    // has the same cache, but one product a cycle: there halves cost 0.6 %. (Machines with bf16 products and two a
    // cycle, Zen 5 and Sapphire Rapids, have 48 KiB.)
#if defined(__AVX512F__) && !defined(REGARD_PAIRS)
    static constexpr bool SMALL_CACHE = true;
#else
    static constexpr bool SMALL_CACHE = false;
#endif

    const regard_call &c;
    const Scoring<T> scoring;
    const T factor;  // of a score, to the exponent of 2
    Unit *queries;   // [units of qk_dim][64]
    T *scores;       // [128][64]; the weights in pairs in the same place
    T *added;        // [128][64]: biases
    char *keys, *values;
    char *key_rows, *value_rows;  // of a block, where they come in parts
    const char *paired;           // all values in pairs, made beforehand, or null
    Sums<T> whole, span;
    Ahead::Part later[2] = {};  // what a tile's first block asks memory for besides

    static int64_t bytes(const regard_call &c) {
        const int64_t out = up(c.v_dim * LANES * int64_t(sizeof(T)), 64) + 2 * LANES * int64_t(sizeof(T));
        const bool biased = c.bias || c.distance;
        return Tokens<K>::units(c.qk_dim) * LANES * int64_t(sizeof(Unit)) +
               (1 + biased) * BLOCK * LANES * int64_t(sizeof(T)) + Tokens<K>::across_bytes(c.qk_dim, BLOCK) +
               Tokens<K>::down_bytes(c.v_dim, BLOCK) + Source<K>::bytes(c.qk_dim, keys_of(c) ? BLOCK : 0) +
               Source<K>::bytes(c.v_dim, values_of(c) ? BLOCK : 0) + 2 * out;
    }

    Forward(const regard_call &call, const char *pairs, char *scratch)
        : c(call), scoring(call), factor(T(scoring.unit * LOG2E)), paired(pairs) {
        const auto take = [&](int64_t n) {
            char *at = scratch;
            scratch += n;
            return at;
        };
        queries = reinterpret_cast<Unit *>(take(Tokens<K>::units(c.qk_dim) * LANES * int64_t(sizeof(Unit))));
        scores = reinterpret_cast<T *>(take(BLOCK * LANES * int64_t(sizeof(T))));
        added = c.bias || c.distance ? reinterpret_cast<T *>(take(BLOCK * LANES * int64_t(sizeof(T)))) : nullptr;
        keys = take(Tokens<K>::across_bytes(c.qk_dim, BLOCK));
        values = take(Tokens<K>::down_bytes(c.v_dim, BLOCK));
        key_rows = take(Source<K>::bytes(c.qk_dim, keys_of(c) ? BLOCK : 0));
        value_rows = take(Source<K>::bytes(c.v_dim, values_of(c) ? BLOCK : 0));
        Sums<T> *const both[] = {&whole, &span};
        for (Sums<T> *sums : both) {
            sums->out = reinterpret_cast<T *>(take(up(c.v_dim * LANES * int64_t(sizeof(T)), 64)));
            sums->top = reinterpret_cast<T *>(take(LANES * int64_t(sizeof(T))));
            sums->total = reinterpret_cast<T *>(take(LANES * int64_t(sizeof(T))));
        }
    }

    // What a thread probably computes next: these rows, from this block of keys on.
    struct After {
        Lanes lanes;
        Block block;
    };

    // Rows against all keys.
    regard_status run(const Lanes &lanes, int64_t row, const After *after) {
        Blocks blocks(c.by_query, row, c.keys, 0, c.keys);
        if (blocks.next()) transpose_queries(lanes);
        later[0] = rows_at(c.out, lanes, c.v_dim);
        if (after) later[1] = rows_at(c.q, after->lanes, c.qk_dim);
        bool first = true;
        while (blocks.next()) {
            if (!sum(blocks, lanes, after)) continue;
            if (first) swap_sums();
            else merge(lanes);
            first = false;
        }
        if (blocks.bad()) return REGARD_BAD_SCHEDULE;
        if (first) clear(whole, vectors(lanes));
        finish(lanes);
        return REGARD_DONE;
    }

    // What is kept of a span until all are merged.
    struct Part {
        Sums<T> sums;
        int64_t *some;  // whether a key was listed
    };

    static int64_t part_bytes(const regard_call &c) { return up((c.v_dim + 2) * LANES * int64_t(sizeof(T)), 64) + 64; }

    static Part part(const regard_call &c, char *at) {
        T *out = reinterpret_cast<T *>(at);
        return {{out, out + c.v_dim * LANES, out + (c.v_dim + 1) * LANES},
                reinterpret_cast<int64_t *>(at + part_bytes(c) - 64)};
    }

    // Rows against one span.
    regard_status run_span(const Lanes &lanes, int64_t row, int64_t number, const Part &into, const After *after) {
        span = into.sums;
        transpose_queries(lanes);
        Blocks blocks(c.by_query, row, c.keys, number * SPAN, (number + 1) * SPAN);
        *into.some = blocks.next() && sum(blocks, lanes, after);
        return blocks.bad() ? REGARD_BAD_SCHEDULE : REGARD_DONE;
    }

    // All spans merged in order; they are `stride` bytes apart.
    void finish_spans(const Lanes &lanes, char *parts, int64_t stride, int64_t spans) {
        bool first = true;
        for (int64_t s = 0; s < spans; ++s) {
            const Part p = part(c, parts + s * stride);
            if (!*p.some) continue;
            span = p.sums;
            if (first) swap_sums();
            else merge(lanes);
            first = false;
        }
        if (first) clear(whole, vectors(lanes));
        finish(lanes);
    }

    static int vectors(const Lanes &lanes) { return (lanes.count + W - 1) / W; }

    // The sums of the next block's span; false if it lists no key.
    bool sum(Blocks &blocks, const Lanes &lanes, const After *after) {
        const int64_t group = c.heads / c.kv_heads, number = blocks.next()->first / SPAN;
        const auto keys_seen = [&](const Lanes &by) {
            return Source<K>(keys_of(c), c.k, by.batch, by.head / group, c.qk_dim);
        };
        const Source<K> k = keys_seen(lanes), v(values_of(c), c.v, lanes.batch, lanes.head / group, c.v_dim);
        bool fresh = true;
        while (blocks.next() && blocks.next()->first / SPAN == number) {
            const Block block = blocks.take();
            Ahead ahead;
            if (blocks.next()) ask(ahead, k, lanes, *blocks.next());
            else if (after) ask(ahead, keys_seen(after->lanes), after->lanes, after->block);
            fresh &= !step(block, lanes, k, v, vectors(lanes), fresh, ahead);
        }
        return !fresh;
    }

    // What a block's scores will be made of: the keys that it lists, and their biases.
    void ask(Ahead &ahead, const Source<K> &k, const Lanes &lanes, const Block &block) const {
        const int64_t first = block.first + (block.half[0].listed ? 0 : TILE);
        const int64_t count = least(block.first + (block.half[1].listed ? BLOCK : TILE), c.keys) - first;
        ahead.add(k.ahead(first, count));
        if (!c.bias || c.bias_key != 1) return;
        const int64_t item = c.bias_dtype == REGARD_F64 ? 8 : c.bias_dtype == REGARD_F32 ? 4 : 2;
        const int64_t at = lanes.batch * c.bias_batch + lanes.head * c.bias_head + lanes.first * c.bias_row + first;
        const int64_t rows = c.bias_row ? least(lanes.per_head, lanes.count) : 1;
        ahead.add({static_cast<const char *>(c.bias) + at * item, c.bias_row * item, count * item, rows});
    }

    void swap_sums() {
        const Sums<T> other = whole;
        whole = span;
        span = other;
    }

    // The rows of a tile, of its first head if there are several.
    Ahead::Part rows_at(const regard_tensor &t, const Lanes &lanes, int64_t dim) const {
        const int64_t item = sizeof(S), at = lanes.batch * t.batch + lanes.head * t.head + lanes.first * t.token;
        return {static_cast<const char *>(t.data) + at * item, t.token * item, dim * item,
                least(lanes.per_head, lanes.count)};
    }

    void transpose_queries(const Lanes &lanes) {
        const S *data = static_cast<const S *>(c.q.data) + lanes.batch * c.q.batch;
        const auto row = [&](int lane) {
            return data + lanes.head_of(lane) * c.q.head + lanes.query_of(lane) * c.q.token;
        };
        if constexpr (K::pairs) {
            gather_lanes<Unit, Unit>(row, lanes.count, c.qk_dim / 2, queries);
            if (c.qk_dim % 2)
                for (int lane = 0; lane < LANES; ++lane)
                    queries[c.qk_dim / 2 * LANES + lane] = lane < lanes.count ? row(lane)[c.qk_dim - 1].bits : 0;
        } else {
            gather_lanes<T, S>(row, lanes.count, c.qk_dim, queries);
        }
    }

    void clear(Sums<T> &s, int vectors) {
        for (int v = 0; v < vectors; ++v) store(s.top + v * W, broadcast(T(NEVER))), store(s.total + v * W, V{});
        for (int64_t i = 0; i < c.v_dim; ++i)
            for (int v = 0; v < vectors; ++v) store(s.out + i * LANES + v * W, V{});
    }

    // One block of keys. `fresh`: the first of a span, whose sums hold nothing yet.
    bool step(const Block &block, const Lanes &lanes, const Source<K> &k, const Source<K> &v, int vectors, bool fresh,
              Ahead &ahead) {
        const int tokens = int(c.keys - block.first < BLOCK ? c.keys - block.first : BLOCK);
        Bits128 bits;
        lane_bits(block, lanes, bits);
        Piece pieces[8];
        const int n = cut<W>(block, bits, tokens, lanes.count, pieces);
        if (!n) return false;
        alignas(64) T top[LANES], shift[LANES];
        for (int u = 0; u < vectors; ++u) store(top + u * W, broadcast(T(NEVER)));
        const int low = pieces[0].low, high = pieces[n - 1].high;
        const Rows rows = k.some(block.first + low, high - low, key_rows).across(block.first + low, high - low, keys);
        const Adds<T> adds = whole_scores(block, lanes, tokens);
        ask_besides(ahead, block, low, high, v);
        ahead.start(rows_of(pieces, n), Tokens<K>::units(c.qk_dim), vectors);
        for (int i = 0; i < n; ++i)
            each_half(pieces[i], [&](const Piece &p, int half) {
                const uint64_t *hidden = block.half[half].bits ? bits.of : nullptr;
                const char *from = rows.data + (p.low - low) * rows.stride;
                score(p, from, rows.stride, adds, scoring.capped || hidden ? nullptr : top, &ahead);
                if (scoring.capped) cap(p, hidden, adds, top);
                else if (hidden) hide(p, hidden, top);
            });
        const bool covers = fresh && pieces[0].first == 0 && pieces[0].last == vectors;
        if (fresh && covers) start(span, top, vectors);
        else if (fresh) clear(span, vectors);
        raise(top, shift, vectors);
        const Values all(*this, block, low, high, v);
        for (int i = 0; i < n; ++i)
            in_steps(pieces[i], [&](const Piece &p) {
                weigh(p, shift);
                if (c.dropout > 0) drop(block, lanes, p);
                mix(block, bits, p, all, covers && p.low == low);
            });
        return true;
    }

    // What else memory is asked for while scores are computed: this block's values, and in a tile's first block its
    // rows of the output and the next tile's queries.
    void ask_besides(Ahead &ahead, const Block &block, int low, int high, const Source<K> &v) {
        const int64_t pairs = c.v_dim * 4;
        if (paired) ahead.add({paired_at(block.first + low).data, pairs, pairs, (high - low + 1) / 2});
        else ahead.add(v.ahead(block.first + low, high - low));
        for (Ahead::Part &rows : later) ahead.add(rows), rows.rows = 0;
    }

    // Sums of a span whose output the first product will write.
    void start(Sums<T> &s, const T *top, int vectors) {
        for (int v = 0; v < vectors; ++v) store(s.top + v * W, load(top + v * W)), store(s.total + v * W, V{});
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
            bias_by_query(c, lanes, block.first, tokens, added);
            return {added, LANES, scoring.scale};
        }
        if (!c.distance) return {nothing, 0, scoring.scale};
        const T *distance = static_cast<const T *>(c.distance) + lanes.head * c.distance_head;
        return {distance + c.keys - 1 + lanes.first - block.first, -1, scoring.scale};
    }

    // The scores of a piece, whole ones unless they are still to be capped. `top`: their largest, if they are final.
    REGARD_INLINE void score(const Piece &p, const char *rows, int64_t stride, const Adds<T> &adds, T *top,
                             Ahead *ahead) {
        const int64_t units = Tokens<K>::units(c.qk_dim);
        T *out = scores + p.low * LANES;
        if (scoring.whole && !scoring.capped)
            multiply<P, Along::across, Start::score>(rows, stride, p.high - p.low, queries, units, out, p.first, p.last,
                                                     top, adds.at(p.low), ahead);
        else multiply_scores(p, rows, stride, units, out, top, ahead);
    }

    // Products in parts of the dims, so that the queries of a part, 64 dims x 64 floats, stay in a small cache while
    // all keys pass. 128 dims at once fill 32 KiB, and come from the second level for each 6 keys.
    REGARD_INLINE void multiply_scores(const Piece &p, const char *rows, int64_t stride, int64_t units, T *out, T *top,
                                       Ahead *ahead) {
        const int64_t parts = SMALL_CACHE && units > 112 ? (units + 79) / 96 : 1, part = (units + parts - 1) / parts;
        const int count = p.high - p.low;
        multiply<P, Along::across>(rows, stride, count, queries, least(part, units), out, p.first, p.last,
                                   part < units ? nullptr : top, {}, ahead);
        if constexpr (SMALL_CACHE)
            for (int64_t i = part; i < units; i += part)
                multiply<P, Along::across, Start::out>(rows + i * int64_t(sizeof(Unit)), stride, count,
                                                       queries + i * LANES, least(part, units - i), out, p.first,
                                                       p.last, i + part < units ? nullptr : top, {}, ahead);
    }

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
            V most = load(top + v * W);
            for (int j = p.low; j < p.high; ++j) {
                T *at = scores + j * LANES + v * W;
                V s = scoring.shaped(load(at), load(adds.from + j * adds.row + v * W));
                if (bits) s = select(bits[j] >> (v * W), s, broadcast(T(NEVER)));
                store(at, s);
                most = larger(s, most);
            }
            store(top + v * W, most);
        }
    }

    // The maximum moved where it must be; shift: what is taken from scores. (Not fma(score, factor, -shift * factor):
    // that rounds the second product, by more than the exponent of any weight where scores are large.)
    void raise(const T *top, T *shift, int vectors) {
        for (int v = 0; v < vectors; ++v) {
            const V found = load(top + v * W), old = load(span.top + v * W);
            const IntVec<T> higher = (found - old) * factor > T(8);
            const V now = any<T>(higher) ? (higher ? found : old) : old;
            store(shift + v * W, now == T(NEVER) ? V{} : now);
            if (any<T>(higher)) rescale(v, higher, now);
        }
    }

    void rescale(int v, IntVec<T> higher, V now) {
        const V alpha = higher ? exp2<P::precision>((load(span.top + v * W) - now) * factor) : broadcast(T(1));
        store(span.top + v * W, now);
        store(span.total + v * W, load(span.total + v * W) * alpha);
        for (int64_t i = 0; i < c.v_dim; ++i) {
            T *at = span.out + i * LANES + v * W;
            store(at, load(at) * alpha);
        }
    }

    // Weights in place of scores, and their sum: 16 keys as a tree, these one after the other.
    void weigh(const Piece &p, const T *shift) {
        int j = p.low;
        for (; j + 16 <= p.high; j += 16)
            for (int v = p.first; v < p.last; ++v)
                store(span.total + v * W, load(span.total + v * W) + sixteen<0, 16>(j, v, load(shift + v * W)));
        for (int v = p.first; v < p.last && j < p.high; ++v)
            store(span.total + v * W, load(span.total + v * W) + sixteen_at_most(j, p.high, v, load(shift + v * W)));
    }

    REGARD_INLINE V weight(int j, int v, V shift) const {
        return exp2<P::precision>((load(scores + j * LANES + v * W) - shift) * factor);
    }

    REGARD_INLINE void put_pair(int j, int v, V even, V odd) {
        if constexpr (K::pairs) {
            store(reinterpret_cast<Unit *>(scores) + j / 2 * LANES + v * W, pack_pairs(even, odd));
        } else {
            store(scores + j * LANES + v * W, even);
            store(scores + (j + 1) * LANES + v * W, odd);
        }
    }

    template <int low, int high>
    REGARD_INLINE V sixteen(int j, int v, V shift) {
        if constexpr (high - low == 2) {
            const V even = weight(j + low, v, shift), odd = weight(j + low + 1, v, shift);
            put_pair(j + low, v, even, odd);
            return even + odd;
        } else {
            constexpr int middle = (low + high) / 2;
            const V first = sixteen<low, middle>(j, v, shift);
            return first + sixteen<middle, high>(j, v, shift);
        }
    }

    // The end of the keys: what is missing weighs 0.
    V sixteen_at_most(int j, int high, int v, V shift) {
        V e[16];
        for (int i = 0; i < 16; ++i) e[i] = j + i < high ? weight(j + i, v, shift) : V{};
        for (int i = 0; i < 16; i += 2)
            if (j + i < high) put_pair(j + i, v, e[i], e[i + 1]);
        for (int n = 16; n > 1; n /= 2)
            for (int i = 0; i < n / 2; ++i) e[i] = e[2 * i] + e[2 * i + 1];
        return e[0];
    }

    // Weights of dropped pairs made 0, others larger.
    void drop(const Block &block, const Lanes &lanes, const Piece &p) {
        alignas(64) uint32_t row[LANES] = {};
        for (int lane = 0; lane < lanes.count; ++lane)
            row[lane] = dropout_row(c.seed, uint32_t(lanes.batch * c.heads + lanes.head_of(lane)),
                                    uint32_t(lanes.query_of(lane)));
        constexpr int step = K::pairs ? 2 : 1;
        for (int j = p.low / step * step; j < p.high; j += step) {
            const uint32_t column[2] = {dropout_column(uint32_t(block.first + j)),
                                        dropout_column(uint32_t(block.first + j + 1))};
            for (int v = p.first; v < p.last; ++v) drop_at(p, row + v * W, column, j, v);
        }
    }

    REGARD_INLINE void drop_at(const Piece &p, const uint32_t *row, const uint32_t *column, int j, int v) {
        if constexpr (K::pairs) {
            const U both = load(reinterpret_cast<const uint32_t *>(scores) + j / 2 * LANES + v * W);
            V even = V(both << 16), odd = V(both & 0xffff0000u);
            if (j >= p.low) even = dropped(even, row, column[0]);
            if (j + 1 < p.high) odd = dropped(odd, row, column[1]);
            put_pair(j, v, even, odd);
        } else {
            T *at = scores + j * LANES + v * W;
            store(at, dropped(load(at), row, column[0]));
        }
    }

    REGARD_INLINE V dropped(V weight, const uint32_t *row, uint32_t column) const {
        const uint32_t below = dropout_threshold(c.dropout);
        const V rest = broadcast(T(1 / (1 - c.dropout)));
        if constexpr (sizeof(T) == 4) {
            const I gone = dropout_bits(load(row), broadcast(column)) < below;
            return gone ? V{} : weight * rest;
        } else {
            for (int i = 0; i < W; ++i) weight[i] = dropout_bits(row[i], column) < below ? T(0) : weight[i] * rest[i];
            return weight;
        }
    }

    // A piece, in halves of its block where weights would fill the cache. A sum goes on where it was left, so its bits
    // are the same.
    template <typename Work>
    static REGARD_INLINE void in_steps(const Piece &p, Work work) {
        if constexpr (SMALL_CACHE) each_half(p, [&](const Piece &half, int) { work(half); });
        else work(p);
    }

    Rows paired_at(int64_t token) const { return {paired + token / 2 * c.v_dim * 4, c.v_dim * 4}; }

    // Whether some value of these tokens is NaN or infinite: of pairs, if there are, as they are what is in a cache.
    bool wild(const Tokens<K> &tokens, int64_t first, int count) const {
        if constexpr (K::pairs)
            if (paired) return wild_pairs(reinterpret_cast<const uint32_t *>(paired_at(first).data), count, c.v_dim);
        return tokens.wild(first, count);
    }

    // The values of a block as products read them, and whether some that a mask hides are not finite.
    struct Values {
        int low;
        Tokens<K> tokens;
        Rows rows;
        bool wild[2];

        Values(const Forward &f, const Block &block, int from, int to, const Source<K> &source) : low(from) {
            if (!f.paired) tokens = source.some(block.first + low, to - low, f.value_rows);
            rows = f.paired ? f.paired_at(block.first + low) : tokens.down(block.first + low, to - low, f.values);
            for (int i = 0; i < 2; ++i) {
                const int first = i ? most(low, TILE) : low, last = i ? to : least(to, TILE);
                wild[i] = block.half[i].bits && first < last && f.wild(tokens, block.first + first, last - first);
                if (f.paired && wild[i]) tokens = source.some(block.first + low, to - low, f.value_rows);
            }
        }
    };

    void mix(const Block &block, const Bits128 &bits, const Piece &p, const Values &v, bool fresh) {
        if (v.wild[p.low / TILE] || v.wild[(p.high - 1) / TILE]) return mix_wild(block, bits, p, v.tokens, fresh);
        const char *from = v.rows.data + (p.low - v.low) / P::pair * v.rows.stride;
        const Unit *by = reinterpret_cast<const Unit *>(scores) + p.low / P::pair * LANES;
        const int64_t steps = (p.high - p.low + P::pair - 1) / P::pair;
        if (fresh)
            multiply<P, Along::down, Start::zero>(from, v.rows.stride, c.v_dim, by, steps, span.out, p.first, p.last);
        else multiply<P, Along::down>(from, v.rows.stride, c.v_dim, by, steps, span.out, p.first, p.last);
    }

    // The same sums, where values that are not finite must not reach lanes that do not see them.
    void mix_wild(const Block &block, const Bits128 &bits, const Piece &p, const Tokens<K> &v, bool fresh) {
        for (int64_t d = 0; d < c.v_dim; ++d)
            for (int vector = p.first; vector < p.last; ++vector) {
                T *at = span.out + d * LANES + vector * W;
                V sum = fresh ? V{} : load(at);
                for (int j = p.low; j < p.high; j += P::pair) {
                    const V even = seen(block, bits, j, vector, v, d);
                    const typename P::Vector weight =
                        load(reinterpret_cast<const Unit *>(scores) + j / P::pair * LANES + vector * W);
                    if constexpr (K::pairs) {
                        const V odd = j + 1 < p.high ? seen(block, bits, j + 1, vector, v, d) : V{};
                        sum = P::madd(pack_pairs(even, odd), weight, sum);
                    } else {
                        sum = P::madd(even, weight, sum);
                    }
                }
                store(at, sum);
            }
    }

    V seen(const Block &block, const Bits128 &bits, int j, int vector, const Tokens<K> &v, int64_t d) const {
        const T value = widen(v.at(block.first + j)[d]);
        const V all = broadcast(value);
        if (value - value == 0 || !block.half[j / TILE].bits) return all;
        return select(bits.of[j] >> (vector * W), all, V{});
    }

    // whole = whole and span.
    void merge(const Lanes &lanes) {
        const int vectors = Forward::vectors(lanes);
        alignas(64) T mine[LANES], yours[LANES];
        for (int v = 0; v < vectors; ++v) {
            const V a = load(whole.top + v * W), b = load(span.top + v * W);
            const V top = a > b ? a : b;
            const V wa = a == top ? broadcast(T(1)) : exp2((a - top) * factor);
            const V wb = b == top ? broadcast(T(1)) : exp2((b - top) * factor);
            store(mine + v * W, wa);
            store(yours + v * W, wb);
            store(whole.top + v * W, top);
            store(whole.total + v * W, fma(load(span.total + v * W), wb, load(whole.total + v * W) * wa));
        }
        for (int64_t i = 0; i < c.v_dim; ++i)
            for (int v = 0; v < vectors; ++v) {
                T *at = whole.out + i * LANES + v * W;
                store(at, fma(load(span.out + i * LANES + v * W), load(yours + v * W), load(at) * load(mine + v * W)));
            }
    }

    void finish(const Lanes &lanes) {
        const int vectors = Forward::vectors(lanes);
        alignas(64) T share[LANES], lse[LANES];
        T *into = static_cast<T *>(c.lse) + lanes.batch * c.heads * c.queries;
        for (int v = 0; v < vectors; ++v)
            finished<T>(load(whole.top + v * W), load(whole.total + v * W), scoring.unit, lse + v * W, share + v * W);
        for (int lane = 0; lane < lanes.count; ++lane) {
            const int64_t h = lanes.head_of(lane);
            if (c.sink) share[lane] = sunk(lse[lane], share[lane], static_cast<const T *>(c.sink)[h]);
            into[h * c.queries + lanes.query_of(lane)] = lse[lane];
        }
        for (int64_t i = 0; i < c.v_dim; ++i)
            for (int v = 0; v < vectors; ++v) {
                T *at = whole.out + i * LANES + v * W;
                const V by = load(share + v * W);
                store(at, by == T(0) ? V{} : load(at) * by);
            }
        S *data = static_cast<S *>(c.out.data) + lanes.batch * c.out.batch;
        scatter_lanes<T, S>(
            [&](int lane) { return data + lanes.head_of(lane) * c.out.head + lanes.query_of(lane) * c.out.token; },
            lanes.count, c.v_dim, whole.out);
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
