// Attention for few queries (decoding): at most 16 rows that share a key head make one pass over its keys.
//
// Here lanes are keys for the scores, and dims for the output, so that no lane is idle: 16 keys are transposed in
// registers (decode_keys.h), and there meet every row. Each sum is made in the order in which
// forward.h makes it, so a row gets the same bits from either: scores dim after dim, outputs key after key (on AMX by
// 32: chains.h, decode_tiles.h), weights in trees of 16, running sums rescaled at blocks and restarted at spans. Spans
// are what threads share: the split depends on positions alone.
//
// Up to four rows (16 in tiles) go through all keys of a span before its values, where these are contiguous (on some
// machines also in pages) and no key is widened but for chains: memory is read as one stream, on AVX-512 mostly by
// loops of their own (decode_stream.h). All else goes block by block.
//
// Every line is prefetched once, a block ahead (or, at the end of a span, for the span that this thread probably gets
// next) and in the order of memory; source.h says into which cache.
#pragma once

#include "decode_stream.h"
#include "forward_sums.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct Decode {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W;
    static constexpr T NEVER = -T(INFINITE);
    // Spans whose keys and values are contiguous or in pages are streamed where keys are multiplied as they are stored;
    // with keys of bf16 that are widened it takes longer (1.06, Zen 4), but not on AMX's machines, by chains.
    static constexpr bool streams = K::pairs || K::chained || is_same<S, float>;
    static constexpr int STREAMED = DecodeStream<K>::AT_MOST;  // rows

    // What is kept of a span until all are merged: [rows][width] sums, then tops and totals.
    struct Part {
        T *out, *top, *total;
    };

    const regard_call &c;
    const Scoring<T> scoring;
    const T factor;
    const int64_t units, width;    // of a query; of an output row, whole vectors
    Unit *queries;                 // [16][units]; for tiles [units][16]
    T *scores;                     // [16][128]; where spans are streamed, of their blocks [8][rows][128]
    Unit *weights;                 // [16][128 / pair]
    Lines key_lines, value_lines;  // of the block that comes next
    char *key_rows, *value_rows;   // what DecodeScores and DecodeValues need

    static int64_t wide(const regard_call &c) { return up(c.v_dim, W); }
    static int64_t part_bytes(const regard_call &c) { return up(FEW * (wide(c) + 2) * int64_t(sizeof(T)), 64); }
    static int64_t bytes(const regard_call &c) {
        return up(FEW * Tokens<K>::units(c.qk_dim) * int64_t(sizeof(Unit)), 64) +
               (scored() + FEW * BLOCK) * int64_t(sizeof(T)) + DecodeScores<K>::bytes(c.qk_dim) +
               DecodeValues<K>::bytes(c.v_dim) + part_bytes(c);
    }
    static constexpr int64_t scored() { return streams ? STREAMED * SPAN : FEW * BLOCK; }  // scores at a time

    Decode(const regard_call &call, char *scratch)
        : c(call),
          scoring(call),
          factor(T(scoring.unit * LOG2E)),
          units(Tokens<K>::units(call.qk_dim)),
          width(wide(call)) {
        queries = reinterpret_cast<Unit *>(scratch);
        scratch += up(FEW * units * int64_t(sizeof(Unit)), 64);
        scores = reinterpret_cast<T *>(scratch);
        weights = reinterpret_cast<Unit *>(scores);
        if (K::pairs) weights = reinterpret_cast<Unit *>(scores + scored());
        key_rows = scratch + (scored() + FEW * BLOCK) * int64_t(sizeof(T));
        value_rows = key_rows + DecodeScores<K>::bytes(c.qk_dim);
    }

    static Part part(const regard_call &c, char *at) {
        T *out = reinterpret_cast<T *>(at);
        return {out, out + FEW * wide(c), out + FEW * (wide(c) + 1)};
    }

    // The sums of one span. `next`: rows and a span that come later, which are prefetched.
    regard_status run(const Lanes &lanes, int64_t row, int64_t span, const Part &into, const Lanes *next = nullptr,
                      int64_t next_span = 0) {
        for (int r = 0; r < lanes.count; ++r) into.top[r] = NEVER, into.total[r] = 0;
        Walk walk(c.by_query, row, c.keys, span * SPAN);
        const int64_t until = (span + 1) * SPAN, group = c.heads / c.kv_heads;
        const Source<K> k(keys_of(c), c.k, lanes.batch, lanes.head / group, c.qk_dim);
        const Source<K> v(values_of(c), c.v, lanes.batch, lanes.head / group, c.v_dim);
        if constexpr (streams)
            if (lanes.count <= STREAMED && sees_all(row, span * SPAN)) {
                const bool served = DecodeStream<K>::serves(lanes.count, c.qk_dim, c.v_dim);
                const bool one_page = !served || !DecodeStream<K>::reads_pages();
                Sixteens keys, values;
                if (keys.find(k, span * SPAN, one_page) && values.find(v, span * SPAN, one_page)) {
                    if constexpr (DecodeStream<K>::known)
                        if (served) return stream(lanes, span * SPAN, keys, values, into, next, next_span * SPAN);
                    return stream_lines(lanes, span * SPAN, keys.at[0], values.at[0], v, into, next, next_span * SPAN);
                }
            }
        Todo both[2], *now = both, *later = both + 1;
        if (!find(walk, until, lanes, k, v, *now)) return walk.bad ? REGARD_BAD_SCHEDULE : REGARD_DONE;
        take_queries(lanes);
        memset(into.out, 0, size_t(rows_of_sums(lanes) * width) * sizeof(T));
        for (bool more = true; more;) {
            key_lines.clear(), value_lines.clear();
            more = find(walk, until, lanes, k, v, *later);
            if (more) list(*later, lanes, k, v);
            else if (next) ask_for(*next, next_span * SPAN, *later, key_lines, true);
            step(*now, lanes, k, v, into);
            Todo *const done = now;
            now = later, later = done;
        }
        return walk.bad ? REGARD_BAD_SCHEDULE : REGARD_DONE;
    }

    // A block of keys to compute, and where they are stored.
    struct Todo {
        Block block;
        Bits128 bits;
        Piece pieces[8];
        int count;
        Stretch keys, values;

        int low() const { return pieces[0].low; }
        int high() const { return pieces[count - 1].high; }
    };

    // The next one; false if there is none.
    bool find(Walk &walk, int64_t until, const Lanes &lanes, const Source<K> &k, const Source<K> &v, Todo &todo) const {
        do {
            if (!walk.next(until, todo.block)) return false;
            const int tokens = least(BLOCK, c.keys - todo.block.first);
            lane_bits(todo.block, lanes, todo.bits);
            // whole rows: first and last do not matter
            todo.count = cut<LANES, K::by_32 ? 32 : 16>(todo.block, todo.bits, tokens, lanes.count, todo.pieces);
        } while (!todo.count);
        k.find(todo.block.first + todo.low(), todo.block.first + todo.high(), todo.keys);
        const int64_t low = todo.low() / 32 * 32, high = least(up(todo.high(), 32), c.keys - todo.block.first);
        v.find(todo.block.first + low, todo.block.first + high, todo.values);  // whole stretches: see coded_values.h
        return true;
    }

    // Lists the first block of other rows: its keys, and perhaps its values.
    void ask_for(const Lanes &lanes, int64_t first, Todo &room, Lines &lines_of_keys, bool values) {
        const int64_t kv = lanes.head / (c.heads / c.kv_heads), last = first + least(BLOCK, c.keys - first);
        const Source<K> k(keys_of(c), c.k, lanes.batch, kv, c.qk_dim), v(values_of(c), c.v, lanes.batch, kv, c.v_dim);
        k.find(first, last, room.keys);
        k.list(room.keys, lines_of_keys);
        if (!values) return;
        v.find(first, last, room.values);
        v.list(room.values, value_lines, DecodeValues<K>::in_order(c.v_dim, lanes.count));
    }

    // ---- whole spans -----------------------------------------------------------------------------------------------

    bool sees_all(int64_t row, int64_t first) const {
        if (first + SPAN > c.keys) return false;
        Walk walk(c.by_query, row, c.keys, first);
        Block block;
        for (int64_t at = first; at < first + SPAN; at += BLOCK) {
            if (!walk.next(first + SPAN, block) || block.first != at) return false;
            for (const Half &half : block.half)
                if (!half.listed || half.bits) return false;
        }
        return !walk.next(first + SPAN, block) && !walk.bad;
    }

    // All keys in one loop, so that memory is read as one stream; then each block's weights and values.
    regard_status stream(const Lanes &lanes, int64_t first, Sixteens &keys, Sixteens &values, const Part &into,
                         const Lanes *next, int64_t next_first) {
        const DecodeStream<K> span{c.qk_dim, units, c.v_dim, width, keys.in_one && values.in_one};
        take_queries(lanes);
        memset(into.out, 0, size_t(rows_of_sums(lanes) * width) * sizeof(T));
        const char *later[Sixteens::AFTER];
        const int ahead = span.of_values.sixteens,
                  count = 1 + int(least(Sixteens::AFTER - 1, ahead * values.bytes / keys.bytes));
        const int known = next ? find_keys(*next, next_first, count, later) : 0;
        keys.follow(span.of_keys.sixteens, values.at, values.bytes, Sixteens::COUNT);
        values.follow(ahead, later, keys.bytes, known);
        span.make(keys, queries, lanes.count, scores);
        Block block;
        block.half[0] = block.half[1] = {true, nullptr};
        T *const all = scores;
        for (int64_t at = 0; at < SPAN; at += BLOCK) {
            block.first = first + at;
            scores = all + at * lanes.count;
            if constexpr (!K::pairs) weights = scores;
            weigh_all(block, lanes, into, [&](int r) { span.ask(values, at, r, known > 0); });
            span.add(values, at, weights, lanes.count, into.out, value_rows + DecodeValues<K>::coded_at(c.v_dim));
        }
        scores = all;
        if constexpr (!K::pairs) weights = all;
        return REGARD_DONE;
    }

    // The addresses of up to `count` times 16 keys of other rows from a token on. How many are known.
    int find_keys(const Lanes &lanes, int64_t token, int count, const char **to) const {
        const Source<K> k(keys_of(c), c.k, lanes.batch, lanes.head / (c.heads / c.kv_heads), c.qk_dim);
        return Sixteens::found(k, token, count, to);
    }

    // Weights of a block that all rows see. `before(r)` is called before those of row r.
    template <typename Before>
    void weigh_all(const Block &block, const Lanes &lanes, const Part &into, Before before) {
        static const Bits128 none{};
        const Piece piece{0, int(BLOCK), 0, 1};
        for (int r = 0; r < lanes.count; ++r) before(r), weigh(block, lanes, none, &piece, 1, r, into);
    }

    // The same where values are not read in order, with every line asked for by a list.
    regard_status stream_lines(const Lanes &lanes, int64_t first, const char *keys, const char *values,
                               const Source<K> &v, const Part &into, const Lanes *next, int64_t next_first) {
        const int64_t key = c.qk_dim * int64_t(sizeof(S)), value = c.v_dim * int64_t(sizeof(S));
        const int step = Source<K>::step_of_lines(DecodeValues<K>::in_order(c.v_dim, lanes.count));
        Todo todo;
        take_queries(lanes);
        memset(into.out, 0, size_t(rows_of_sums(lanes) * width) * sizeof(T));
        key_lines.clear(), value_lines.clear();
        key_lines.add(keys + BLOCK * key, (SPAN - BLOCK) * key);
        key_lines.add(values, BLOCK * value, step);
        value_lines.add(values + BLOCK * value, (SPAN - BLOCK) * value, step);
        if (next) ask_for(*next, next_first, todo, value_lines, next_first + SPAN > c.keys);
        const int made =
            DecodeScores<K>{c.qk_dim, units, queries, scores, key_rows}.make_span(keys, lanes.count, key_lines);
        value_lines.share(DecodeValues<K>::asks(SPAN, c.v_dim, lanes.count));
        todo.block.half[0] = todo.block.half[1] = {true, nullptr};
        T *const all = scores;
        for (int64_t at = 0; at < SPAN; at += BLOCK) {
            todo.block.first = first + at;
            scores = all + at * made;
            if constexpr (!K::pairs) weights = scores;
            weigh_all(todo.block, lanes, into, [](int) {});
            v.find(first + at, first + at + BLOCK, todo.values);
            DecodeValues<K>(c.v_dim, width, weights, value_rows)
                .add(v, todo.values, first + at, 0, BLOCK, lanes.count, into.out, value_lines);
        }
        scores = all;
        if constexpr (!K::pairs) weights = all;
        return REGARD_DONE;
    }

    // ---- block by block --------------------------------------------------------------------------------------------

    void list(const Todo &todo, const Lanes &lanes, const Source<K> &k, const Source<K> &v) {
        k.list(todo.keys, key_lines);
        v.list(todo.values, value_lines, DecodeValues<K>::in_order(c.v_dim, lanes.count));
    }

    static int64_t rows_of_sums(const Lanes &lanes) { return K::tiled ? FEW : lanes.count; }

    void take_queries(const Lanes &lanes) {
        const S *data = static_cast<const S *>(c.q.data) + lanes.batch * c.q.batch;
        [[maybe_unused]] S *const as_lanes = reinterpret_cast<S *>(queries);  // [units][16 rows]
        if (K::tiled) memset(queries, 0, size_t(FEW * units) * sizeof(Unit));
        for (int r = 0; r < lanes.count; ++r) {
            const S *from = data + lanes.head_of(r) * c.q.head + lanes.query_of(r) * c.q.token;
            Unit *to = queries + r * units;
            if constexpr (K::tiled) {
                for (int64_t i = 0; i < c.qk_dim; ++i) as_lanes[(i / 2 * FEW + r) * 2 + i % 2] = from[i];
            } else if constexpr (K::pairs) {
                to[units - (units > 0)] = 0;
                memcpy(to, from, size_t(c.qk_dim) * 2);
            } else {
                for (int64_t i = 0; i < c.qk_dim; ++i) to[i] = widen(from[i]);
            }
        }
    }

    void step(const Todo &todo, const Lanes &lanes, const Source<K> &keys, const Source<K> &values, const Part &into) {
        const Block &block = todo.block;
        uint32_t listed = 0;  // groups of 16 keys
        for (int i = 0; i < todo.count; ++i)
            for (int j = todo.pieces[i].low; j < todo.pieces[i].high; j += 16) listed |= 1u << j / 16;
        DecodeScores<K>{c.qk_dim, units, queries, scores, key_rows}.make(keys, todo.keys, block.first, listed,
                                                                         lanes.count, key_lines);
        for (int r = 0; r < lanes.count; ++r) weigh(block, lanes, todo.bits, todo.pieces, todo.count, r, into);
        uint32_t plain = 0;  // groups of 16 values that are not multiplied as integers
        const int64_t asks = mix_coded(todo, listed, lanes, values, into, plain);
        if (!plain) return;
        if ((block.half[0].bits || block.half[1].bits) && mixed_wild(todo, plain, lanes, values, into)) return;
        DecodeValues<K> mix(c.v_dim, width, weights, value_rows);
        if (!asks) value_lines.share(DecodeValues<K>::asks(todo.high() - todo.low(), c.v_dim, lanes.count));
        each_plain(todo, plain, [&](int low, int high) {
            mix.add(values, todo.values, block.first, low, high, lanes.count, into.out, value_lines);
        });
    }

    // work(low, high) for tokens in pieces whose groups have a bit.
    template <typename Work>
    static void each_plain(const Todo &todo, uint32_t plain, Work work) {
        for (int i = 0; i < todo.count; ++i) {
            const Piece &p = todo.pieces[i];
            for (int low = p.low, high; low < p.high; low = high) {
                const uint32_t mine = plain >> low / 16 & 1;
                for (high = low + 16; high < p.high && (plain >> high / 16 & 1) == mine;) high += 16;
                if (high > p.high) high = p.high;
                if (mine) work(low, high);
            }
        }
    }

    // Adds what is multiplied as integers, and says what is not.
    int64_t mix_coded([[maybe_unused]] const Todo &todo, uint32_t listed, [[maybe_unused]] const Lanes &lanes,
                      [[maybe_unused]] const Source<K> &values, [[maybe_unused]] const Part &into, uint32_t &plain) {
        plain = listed;
        int64_t asks = 0;
#if defined(REGARD_INTEGERS)
        if constexpr (K::integers) {
            const Block &block = todo.block;
            Segment segments[4];
            const int count = CodedValues::segments(todo.values, block.first, c.v_dim, segments);
            if (!count) return 0;
            uint32_t of[4];
            for (int i = 0; i < count; ++i) {
                of[i] = plain & ((1u << (segments[i].high + 15) / 16) - (1u << segments[i].low / 16));
                plain &= ~of[i];
                asks += CodedValues::asks(*segments[i].part, __builtin_popcount(of[i]), c.v_dim, lanes.count);
            }
            value_lines.share(asks + DecodeValues<K>::asks(__builtin_popcount(plain) * 16, c.v_dim, lanes.count));
            CodedValues mix(c.v_dim, width, scores, into.out, value_rows + DecodeValues<K>::coded_at(c.v_dim));
            const auto kept = [&](int r, int token) { return kept_bits(block, todo.bits, r, token, 16); };
            for (int i = 0; i < count; ++i)
                mix.add(segments[i], todo.values, values.head, block.first, of[i], lanes.count, kept, value_lines);
        }
#endif
        return asks;
    }

    // Whether values that are hidden from some rows are not finite; then the sums have been made.
    bool mixed_wild(const Todo &todo, uint32_t plain, const Lanes &lanes, const Source<K> &values, const Part &into) {
        const Block &block = todo.block;
        const int low = todo.low(), high = todo.high();
        const Tokens<K> v = values.some(block.first + low, high - low, value_rows);
        bool wild = false;
        for (int i = 0; i < 2; ++i) {
            const int from = i ? most(low, TILE) : low, to = i ? high : least(high, TILE);
            if (block.half[i].bits && from < to) wild |= v.wild(block.first + from, to - from);
        }
        if (wild)
            each_plain(todo, plain, [&](int from, int to) { mix_wild(block, todo.bits, from, to, lanes, v, into); });
        return wild;
    }

    // Row r: scores whole, the maximum, weights and their sum.
    void weigh(const Block &block, const Lanes &lanes, const Bits128 &bits, const Piece *pieces, int n, int r,
               const Part &into) {
        T *s = scores + r * BLOCK;
        V most = broadcast(NEVER);
        for (int i = 0; i < n; ++i)
            for (int j = pieces[i].low; j < pieces[i].high; j += W) {
                const int count = pieces[i].high - j < W ? pieces[i].high - j : W;
                V x = load(s + j);
                if (scoring.whole)
                    x = scoring.template shaped<P::precision>(x, added(lanes, r, block.first + j, count));
                const uint64_t kept = kept_bits(block, bits, r, j, count);
                if (kept != (W == 64 ? ~uint64_t(0) : (uint64_t(1) << W) - 1)) x = select(kept, x, broadcast(NEVER));
                store(s + j, x);
                most = larger(x, most);
            }
        const T found = largest(most);
        T now = into.top[r];
        if ((found - now) * factor > T(8)) rescale(r, found, now, into);
        const V shift = broadcast(now == NEVER ? T(0) : now);
        T total = into.total[r];
        for (int i = 0; i < n; ++i) total = add_weights(lanes, block.first, r, pieces[i], shift, total);
        into.total[r] = total;
    }

    // The bits of tokens j to j + count in lane r.
    static REGARD_INLINE uint64_t kept_bits(const Block &block, const Bits128 &bits, int r, int j, int count) {
        const uint64_t all = (uint64_t(1) << count) - 1;
        if (!block.half[j / TILE].bits) return all;
        uint64_t kept = 0;
        for (int i = 0; i < count; ++i) kept |= (bits.of[j + i] >> r & 1) << i;
        return kept;
    }

    // What is added to the scores of row r and keys from `token` on.
    V added(const Lanes &lanes, int r, int64_t token, int count) const {
        V sum{};
        const int64_t h = lanes.head_of(r), i = lanes.query_of(r);
        if (c.bias) {
            const int64_t at = lanes.batch * c.bias_batch + h * c.bias_head + i * c.bias_row + token * c.bias_key;
            if (count == W && c.bias_key == 1 && c.bias_dtype == (sizeof(T) == 4 ? REGARD_F32 : REGARD_F64))
                sum = load(static_cast<const T *>(c.bias) + at);
            else
                for (int j = 0; j < count; ++j) sum[j] = any_number<T>(c.bias, c.bias_dtype, at + j * c.bias_key);
        }
        if (!c.distance) return sum;
        const T *from = static_cast<const T *>(c.distance) + h * c.distance_head + c.keys - 1 + i - token;
        V far{};
        for (int j = 0; j < count; ++j) far[j] = from[-j];
        return c.bias ? sum + far : far;
    }

    void rescale(int r, T found, T &now, const Part &into) {
        const T alpha = exp2<P::precision>(broadcast(T((now - found) * factor)))[0];
        now = into.top[r] = found;
        into.total[r] *= alpha;
        for (int64_t d = 0; d < width; d += W) store(into.out + r * width + d, load(into.out + r * width + d) * alpha);
    }

    // Weights of a piece. To the total their sums are added, those of 16 keys as a tree of neighbours.
    REGARD_INLINE T add_weights(const Lanes &lanes, int64_t first, int r, const Piece &p, V shift, T total) {
        constexpr int of_block = int(BLOCK) / W;
        V tree[of_block];
        int count = 0;
        for (int j = p.low; j < p.high; j += 16)
#pragma GCC unroll 8
            for (int g = 0; g < 16; g += W) tree[count++] = weights_at(first, r, j + g, shift);
        if (c.dropout > 0)
            for (int j = p.low; j < p.high; j += 16) drop(lanes, first, r, j);
        if constexpr (K::tiled) clear_weights(r, p.high);
        const int groups = count * W / 16;
        while (count < of_block) tree[count++] = V{};
        add_neighbours<of_block, 16>(tree);
        for (int i = 0; i < groups; ++i) total += tree[i / W][i % W];
        return total;
    }

    // 32 weights are multiplied at once: those from `high` on are 0.
    void clear_weights(int r, int high) {
        const int from = int(up(high, 16)), to = int(up(high, 32));
        memset(reinterpret_cast<bf16 *>(weights) + r * BLOCK + from, 0, size_t(to - from) * sizeof(bf16));
    }

    // Sums each `each` adjacent lanes of n vectors.
    template <int n, int each>
    static REGARD_INLINE void add_neighbours(V *x) {
        if constexpr (each > 1) {
#pragma GCC unroll 32
            for (int i = 0; i < n; i += 2) x[i / 2] = neighbours<T>(x[i], x[i + 1 < n ? i + 1 : i]);
            add_neighbours<(n + 1) / 2, each / 2>(x);
        }
    }

    // Of W keys.
    REGARD_INLINE V weights_at(int64_t first, int r, int j, V shift) {
        T *s = scores + r * BLOCK + j;
        V x = load(s);
        const int left = int(c.keys - first) - j;  // keys that there are
        if (left < W) x = select(left > 0 ? (uint64_t(1) << left) - 1 : 0, x, broadcast(NEVER));
        x = exp2<P::precision>((x - shift) * factor);
        if constexpr (K::pairs) store_narrow(reinterpret_cast<bf16 *>(weights) + r * BLOCK + j, x);
        store(s, multiplied(x));
        return x;
    }

    // Weights as they meet values.
    static REGARD_INLINE V multiplied(V weights) {
#if defined(REGARD_PAIRS)
        if constexpr (K::chained) return through_bf16(weights);
#endif
        return weights;
    }

    void drop(const Lanes &lanes, int64_t first, int r, int j) {
        const uint32_t below = dropout_threshold(c.dropout);
        const T rest = T(1 / (1 - c.dropout));
        const uint32_t row =
            dropout_row(c.seed, uint32_t(lanes.batch * c.heads + lanes.head_of(r)), uint32_t(lanes.query_of(r)));
        for (int i = j; i < j + 16; ++i) {
            const bool gone = dropout_bits(row, dropout_column(uint32_t(first + i))) < below;
            T *w = scores + r * BLOCK + i;
            *w = gone ? T(0) : multiplied(broadcast(*w * rest))[0];
            if constexpr (K::pairs) {
                bf16 *near = reinterpret_cast<bf16 *>(weights) + r * BLOCK + i;
                *near = gone ? bf16{0} : narrow<bf16>(widen(*near) * rest);
            }
        }
    }

    // The same sums, where values that are not finite must not reach rows that do not see them.
    void mix_wild(const Block &block, const Bits128 &bits, int low, int high, const Lanes &lanes, const Tokens<K> &v,
                  const Part &into) {
#if defined(REGARD_TILES)
        if constexpr (K::by_32) return mix_tamed(block, bits, low, high, lanes, v, into);
#endif
        for (int r = 0; r < lanes.count; ++r)
            for (int64_t d = 0; d < c.v_dim; ++d) {
                V sum = broadcast(into.out[r * width + d]);
                for (int j = low; j < high; j += P::pair) {
                    const typename P::Vector w =
                        P::repeat(reinterpret_cast<const char *>(weights + r * (BLOCK / P::pair) + j / P::pair));
                    const T even = seen(block, bits, r, j, v, d);
                    if constexpr (K::pairs) {
                        const T odd = j + 1 < high ? seen(block, bits, r, j + 1, v, d) : T(0);
                        sum = P::madd(pack_pairs(broadcast(even), broadcast(odd)), w, sum);
                    } else {
                        sum = P::madd(broadcast(even), w, sum);
                    }
                }
                into.out[r * width + d] = sum[0];
            }
    }

#if defined(REGARD_TILES)
    // As Values::mix_tamed: sums of values that are finite, and then what others add to the rows that see them.
    void mix_tamed(const Block &block, const Bits128 &bits, int low, int high, const Lanes &lanes, const Tokens<K> &v,
                   const Part &into) {
        for (int j = low; j < high; j += 32) {
            const int end = least(high, j + 32);
            if constexpr (K::tiled) {
                uint32_t *const pairs = reinterpret_cast<uint32_t *>(value_rows + DecodeValues<K>::coded_at(c.v_dim));
                const auto row = [&](int i) { return reinterpret_cast<const char *>(v.at(block.first + j + i)); };
                pair_tokens(row, end - j, c.v_dim, pairs, [] {}, [](int) {});
                tame_pairs(pairs, token_pairs_bytes(c.v_dim) / 4);
                add_tiles(reinterpret_cast<const char *>(weights) + j * 2, BLOCK * 2, pairs, c.v_dim, into.out, width);
            } else {
                const typename P::Mode mode{};
                add_chains(block.first, j, end, lanes.count, v, into.out);
            }
            for (int i = j; i < end; ++i) add_wild(block, bits, i, lanes, v, into);
        }
    }

    // What token i of the block adds where it is not finite.
    void add_wild(const Block &block, const Bits128 &bits, int i, const Lanes &lanes, const Tokens<K> &v,
                  const Part &into) const {
        for (int64_t d = 0; d < c.v_dim; ++d) {
            const T value = widen(v.at(block.first + i)[d]);
            if (value - value == 0) continue;
            for (int r = 0; r < lanes.count; ++r)
                if (!block.half[i / TILE].bits || bits.of[i] >> r & 1) into.out[r * width + d] += weight(r, i) * value;
        }
    }

    T weight(int r, int i) const {
        if constexpr (K::tiled) return widen(reinterpret_cast<const bf16 *>(weights)[r * BLOCK + i]);
        else return weights[r * BLOCK + i];
    }

    __attribute__((noinline)) void add_chains(int64_t first, int low, int high, int rows, const Tokens<K> &v,
                                              T *out) const {
        for (int r = 0; r < rows; ++r)
            for (int64_t d = 0; d < c.v_dim; ++d) {
                T chain[2] = {};
                for (int i = low; i < high; ++i) {
                    const T value = widen(v.at(first + i)[d]);
                    chain[i % 2] = fma(T(weights[r * BLOCK + i]), value - value == 0 ? value : T(0), chain[i % 2]);
                }
                out[r * width + d] += chain[0] + chain[1];
            }
    }
#endif

    T seen(const Block &block, const Bits128 &bits, int r, int j, const Tokens<K> &v, int64_t d) const {
        const T value = widen(v.at(block.first + j)[d]);
        const bool hidden = block.half[j / TILE].bits && !(bits.of[j] >> r & 1);
        return hidden && !(value - value == 0) ? T(0) : value;
    }

    // All spans of some rows merged in order, and the result written. `parts` are `stride` bytes apart.
    void finish(const Lanes &lanes, char *parts, int64_t stride, int64_t spans) {
        alignas(64) T top[LANES], total[LANES], share[LANES], lse[LANES];
        for (int i = 0; i < LANES; ++i) top[i] = NEVER, total[i] = 0;
        const Part whole = part(c, parts);
        for (int r = 0; r < lanes.count; ++r) {
            bool first = true;
            for (int64_t s = 0; s < spans; ++s) {
                const Part p = part(c, parts + s * stride);
                if (p.total[r] == 0 && p.top[r] == NEVER) continue;
                if (first) take(r, p, whole, top[r], total[r]);
                else merge(r, p, whole, top[r], total[r]);
                first = false;
            }
        }
        for (int v = 0; v < FEW; v += W) finished<T>(load(top + v), load(total + v), scoring.unit, lse + v, share + v);
        for (int r = 0; r < lanes.count; ++r) write(lanes, r, whole.out + r * width, lse[r], share[r]);
    }

    void take(int r, const Part &from, const Part &to, T &top, T &total) {
        top = from.top[r], total = from.total[r];
        if (from.out != to.out) memcpy(to.out + r * width, from.out + r * width, size_t(width) * sizeof(T));
    }

    void merge(int r, const Part &from, const Part &to, T &top, T &total) {
        const T a = top, b = from.top[r];
        top = a > b ? a : b;
        const T wa = a == top ? T(1) : exp2(broadcast(T((a - top) * factor)))[0];
        const T wb = b == top ? T(1) : exp2(broadcast(T((b - top) * factor)))[0];
        total = fma(from.total[r], wb, T(total * wa));
        for (int64_t d = 0; d < width; d += W) {
            T *at = to.out + r * width + d;
            store(at, fma(load(from.out + r * width + d), broadcast(wb), load(at) * wa));
        }
    }

    void write(const Lanes &lanes, int r, const T *sums, T lse, T share) {
        const int64_t h = lanes.head_of(r), i = lanes.query_of(r);
        if (c.sink) share = sunk(lse, share, static_cast<const T *>(c.sink)[h]);
        static_cast<T *>(c.lse)[(lanes.batch * c.heads + h) * c.queries + i] = lse;
        S *out = static_cast<S *>(c.out.data) + lanes.batch * c.out.batch + h * c.out.head + i * c.out.token;
        for (int64_t d = 0; d < c.v_dim; d += W) {
            const V x = share == 0 ? V{} : load(sums + d) * share;
            if (d + W <= c.v_dim) {
                store_narrow(out + d, x);
                continue;
            }
            S last[W];  // by a vector as well: bf16 below the normal ones become 0 there
            store_narrow(last, x);
            memcpy(out + d, last, size_t(c.v_dim - d) * sizeof(S));
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
