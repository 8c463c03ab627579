// Attention for few queries (decoding): at most 16 rows that share a key head make one pass over its keys.
//
// Here lanes are keys for the scores, and dims for the output, so that no lane is idle: 16 keys are transposed in
// registers (decode_keys.h), and there meet every row. Each sum is made in the order in which
// forward.h makes it, so a row gets the same bits from either: scores dim after dim, outputs key after key (on AMX by
// 32: chains.h, decode_tiles.h), weights in trees of 16, running sums rescaled at blocks and restarted at spans. Spans
// are what threads share: the split depends on positions alone.
//
// Up to four rows (16 in tiles and on AVX2) go through all keys of a span before its values, as far as all rows see
// whole blocks (on AVX2 also most of them), and where these are contiguous (on some machines also in pages): memory is
// read as one stream, on AVX-512 and AVX2 mostly by loops of their own (decode_stream.h); not where keys are widened,
// except on AVX2 and by chains. On AVX2 the last block may have fewer tokens. All else goes block by block.
//
// Every line is prefetched once, a block ahead (or, at the end of a span, for the span that this thread probably gets
// next) and in the order of memory; source.h says into which cache.
#pragma once

#include "decode_queries.h"
#include "decode_stream.h"
#include "decode_wild.h"
#include "whole_blocks.h"

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
    // Blocks whose keys and values are contiguous or in pages are streamed where keys are multiplied as they are
    // stored; with keys of bf16 that are widened it takes longer on AVX-512 (1.06, Zen 4), but not on AMX's machines,
    // by chains.
    static constexpr bool streams = K::pairs || K::chained || is_same<S, float> || DecodeStream<K>::known;
    static constexpr int STREAMED = DecodeStream<K>::AT_MOST;  // rows
    // More blocks than whole ones are streamed (`streamed`).
    static constexpr bool tails = streams && DecodeStream<K>::known && W == 8;

    using Sums = DecodeSums<K>;

    const regard_call &c;
    const int64_t units, width;    // of a query; of an output row, whole vectors
    Unit *queries;                 // [16][units]; for tiles [units][16], for chains that are streamed [units][rows]
    T *scores;                     // [16][128]; of blocks that are streamed [blocks][rows][128], at most 8
    DecodeSoftmax<K> softmax;      // of a block's scores
    Lines key_lines, value_lines;  // of the block that comes next
    char *key_rows, *value_rows;   // what DecodeScores and DecodeValues need
    char *copies;                  // 16 keys and 16 values

    static int64_t bytes(const regard_call &c) {
        return up(FEW * Tokens<K>::units(c.qk_dim) * int64_t(sizeof(Unit)), 64) +
               (scored() + FEW * BLOCK) * int64_t(sizeof(T)) + DecodeScores<K>::bytes(c.qk_dim) +
               DecodeValues<K>::bytes(c.v_dim) + copied(c) + Sums::bytes(c);
    }
    // Of keys and values behind the last whole sixteen of a tensor.
    static int64_t copied(const regard_call &c) {
        return tails ? up(Sixteens::EACH * (c.qk_dim + c.v_dim) * int64_t(sizeof(S)), 64) : 0;
    }
    static constexpr int64_t scored() { return streams ? STREAMED * SPAN : FEW * BLOCK; }  // scores at a time

    Decode(const regard_call &call, char *scratch)
        : c(call), units(Tokens<K>::units(call.qk_dim)), width(Sums::wide(call)), softmax(call) {
        queries = reinterpret_cast<Unit *>(scratch);
        scratch += up(FEW * units * int64_t(sizeof(Unit)), 64);
        scores = reinterpret_cast<T *>(scratch);
        softmax.move_to(scores);
        if constexpr (K::pairs) softmax.weights = reinterpret_cast<Unit *>(scores + scored());
        key_rows = scratch + (scored() + FEW * BLOCK) * int64_t(sizeof(T));
        value_rows = key_rows + DecodeScores<K>::bytes(c.qk_dim);
        copies = value_rows + DecodeValues<K>::bytes(c.v_dim);
    }

    // The rows of a later unit, and the first block of keys in their schedule.
    struct After {
        Lanes lanes;
        Block block;

        int64_t low() const { return block.first + (block.half[0].listed ? 0 : TILE); }
        int64_t high() const { return block.first + (block.half[1].listed ? BLOCK : TILE); }
    };

    // A span to compute: for which rows, from what, into what.
    struct Span {
        const Lanes &lanes;
        const int64_t row, first;
        const Source<K> k, v;
        const Sums &into;
    };

    // The sums of one span. The first block of `after` is prefetched.
    regard_status run(const Lanes &lanes, int64_t row, int64_t number, const Sums &into, const After *after) {
        const int64_t kv = lanes.head / (c.heads / c.kv_heads);
        const Span span{lanes,
                        row,
                        number * SPAN,
                        Source<K>(keys_of(c), c.k, lanes.batch, kv, c.qk_dim),
                        Source<K>(values_of(c), c.v, lanes.batch, kv, c.v_dim),
                        into};
        into.clear(lanes.count);
        memset(into.out, 0, size_t(rows_of_sums(lanes) * width) * sizeof(T));
        const int64_t until = span.first + SPAN;
        if constexpr (streams)
            if (lanes.count <= STREAMED) {
                auto whole = WholeBlocks::find(c, lanes, row, span.first, streamed(span, !after));
                Sixteens keys, values;
                if (can_stream(span, whole, keys, values)) {
                    const After begin{lanes, WholeBlocks::all_of(whole.first)},
                        rest{lanes, WholeBlocks::all_of(whole.end)};
                    const regard_status before = step_through(span, span.first, whole.first, &begin);
                    if (before != REGARD_DONE) return before;
                    const bool ends = whole.end == until || whole.end == c.keys;
                    stream(span, whole, keys, values, ends ? after : &rest);
                    if (whole.end == c.keys) return REGARD_DONE;
                    return step_through(span, whole.end, until, after);
                }
            }
        return step_through(span, span.first, until, after);
    }

    // Tokens of a span, block by block.
    regard_status step_through(const Span &span, int64_t from, int64_t until, const After *after) {
        if (from == until) return REGARD_DONE;
        const Lanes &lanes = span.lanes;
        Walk walk(c.by_query, span.row, c.keys, from);
        Todo both[2], *now = both, *later = both + 1;
        if (!find(walk, until, span, *now)) return walk.bad ? REGARD_BAD_SCHEDULE : REGARD_DONE;
        DecodeQueries<K>{c, units, queries}.take(lanes);
        for (bool more = true; more;) {
            key_lines.clear(), value_lines.clear();
            more = find(walk, until, span, *later);
            if (more) list(*later, lanes, span.k, span.v);
            else if (after) ask_for(*after, *later, key_lines, true);
            step(*now, lanes, span.k, span.v, span.into);
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
    bool find(Walk &walk, int64_t until, const Span &span, Todo &todo) const {
        const Lanes &lanes = span.lanes;
        do {
            if (!walk.next(until, todo.block)) return false;
            const int tokens = least(BLOCK, c.keys - todo.block.first);
            lane_bits(todo.block, lanes, todo.bits);
            // whole rows: first and last do not matter
            todo.count = cut<LANES, K::by_32 ? 32 : 16>(todo.block, todo.bits, tokens, lanes.count, todo.pieces);
        } while (!todo.count);
        span.k.find(todo.block.first + todo.low(), todo.block.first + todo.high(), todo.keys);
        const int64_t low = todo.low() / 32 * 32, high = least(up(todo.high(), 32), c.keys - todo.block.first);
        span.v.find(todo.block.first + low, todo.block.first + high,
                    todo.values);  // whole stretches: see coded_segment.h
        return true;
    }

    // Lists the first block of other rows: its keys, and perhaps its values.
    void ask_for(const After &after, Todo &room, Lines &lines_of_keys, bool values) {
        const Lanes &lanes = after.lanes;
        const int64_t kv = lanes.head / (c.heads / c.kv_heads), first = after.low(), last = least(after.high(), c.keys);
        const Source<K> k(keys_of(c), c.k, lanes.batch, kv, c.qk_dim), v(values_of(c), c.v, lanes.batch, kv, c.v_dim);
        k.find(first, last, room.keys);
        if (lists(k, lanes)) k.list(room.keys, lines_of_keys);
        if (!values) return;
        v.find(first, last, room.values);
        if (lists(v, lanes)) v.list(room.values, value_lines, DecodeValues<K>::in_order(c.v_dim, lanes.count));
    }

    // Whether the next block is prefetched. With one row of queries it is not where that would evict the block that is
    // read from the second level cache: 0.73 to 0.82 of the time with data in the third level, 0.98 from memory (Intel,
    // 2 MiB). With two rows no prefetch takes 1.07 of the time from memory, with four 1.2.
    static bool lists(const Source<K> &tokens, const Lanes &lanes) { return lanes.count > 1 || !tokens.crowds(); }

    // ---- whole blocks ----------------------------------------------------------------------------------------------

    // Which blocks may be streamed besides those of 128 keys that all rows see. Blocks with hidden keys take 0.57 to
    // 0.78 of the time on AVX2 (Zen 4); their sums must fit into the memory of weights in pairs. A last block of fewer
    // keys takes 0.84 to 1.01 of the time in the caches (`near`: nothing is prefetched for a later unit). From memory
    // it must have 96 keys, 0.63 to 1.06: a shorter one prefetches too few lines of the next keys, which then took 1.1
    // to 1.5 of the time. Neither was tried on AVX-512.
    WholeBlocks::Which streamed(const Span &span, bool near) const {
        const bool more = tails && is_served(span);
        return {more && span.lanes.count * width <= FEW * BLOCK, more ? near ? 1 : MOST_OF : BLOCK};
    }

    // Whether they can be streamed, from where; perhaps without a last block of fewer keys, which may be on a page of
    // its own.
    bool can_stream(const Span &span, WholeBlocks &whole, Sixteens &keys, Sixteens &values) const {
        return finds(span, whole, keys, values) || (whole.drop_tail() && finds(span, whole, keys, values));
    }
    bool finds(const Span &span, const WholeBlocks &whole, Sixteens &keys, Sixteens &values) const {
        const bool served = is_served(span), one_page = !served || !DecodeStream<K>::reads_pages();
        char *const of_values = copies + Sixteens::EACH * c.qk_dim * int64_t(sizeof(S));
        return whole.tokens() && (served || K::tiled || span.lanes.count <= 4) &&
               keys.find(span.k, whole.first, whole.tokens(), one_page, copies) &&
               values.find(span.v, whole.first, whole.tokens(), one_page, of_values);
    }
    bool is_served(const Span &span) const { return DecodeStream<K>::serves(span.lanes.count, c.qk_dim, c.v_dim); }

    // All keys in one loop, so that memory is read as one stream; then each block's weights and values.
    void stream(const Span &span, const WholeBlocks &whole, Sixteens &keys, Sixteens &values, const After *after) {
        if constexpr (DecodeStream<K>::known)
            if (is_served(span)) return stream_sixteens(span, whole, keys, values, after);
        stream_lines(span, whole.first, keys, values.at[0], after);
    }

    void stream_sixteens(const Span &span, const WholeBlocks &whole, Sixteens &keys, Sixteens &values,
                         const After *after) {
        const Lanes &lanes = span.lanes;
        const bool in_one = keys.in_one && values.in_one;
        const DecodeStream<K> loops{c.qk_dim, units, c.v_dim, width, {c.qk_dim, c.v_dim, in_one}};
        if constexpr (K::chained) DecodeQueries<K>{c, units, queries}.interleave(lanes);
        else DecodeQueries<K>{c, units, queries}.take(lanes);
        const char *later[Sixteens::AFTER];
        const int known = after ? find_keys(*after, loops.asks.next_keys(values.bytes, keys.bytes), later) : 0;
        keys.follow(loops.asks.of_keys.sixteens, values.at, values.bytes, values.count);
        values.follow(loops.asks.of_values.sixteens, later, keys.bytes, known);
        loops.make(keys, queries, lanes.count, scores);
        for (int64_t at = 0; at < keys.tokens(); at += BLOCK) {
            softmax.move_to(scores + at * lanes.count);
            const auto before = [&](int r) { loops.asks.ask(values, at, r, known > 0); };
            if (at + BLOCK >= keys.tokens()) values.fill_last();
            const auto add = [&] {
                loops.add(values, at, softmax.weights, lanes.count, span.into.out,
                          value_rows + DecodeValues<K>::coded_at(c.v_dim));
            };
            const Block block = whole.block_at(whole.first + at);
            if (has_bits(block)) {
                add_with_bits(block, span, before, add);
            } else {
                weigh_all(block, none(), lanes, span.into, before);
                add();
            }
        }
        softmax.move_to(scores);
    }

    // Weights of a block of which some keys are hidden from some rows, and what they add. Hidden values have weight 0,
    // so that the sums are right unless there is one that is not finite: only then are they looked at.
    template <typename Before, typename Add>
    __attribute__((noinline)) void add_with_bits(const Block &block, const Span &span, Before before, Add add) {
        Bits128 bits;
        lane_bits(block, span.lanes, bits);
        weigh_all(block, bits, span.lanes, span.into, before);
        T *const out = span.into.out, *const kept = scores + scored();
        const int64_t n = span.lanes.count * width;
        memcpy(kept, out, size_t(n) * sizeof(T));
        add();
        V wild{};  // 0, or NaN
        for (int64_t i = 0; i < n; i += W) wild += load(out + i) - load(out + i);
        bool tame = true;
        for (int i = 0; i < W; ++i) tame &= wild[i] == 0;
        if (tame) return;
        memcpy(out, kept, size_t(n) * sizeof(T));
        const int tokens = least(BLOCK, c.keys - block.first);
        const Tokens<K> v = span.v.some(block.first, tokens, value_rows);
        char *const scratch = value_rows + DecodeValues<K>::coded_at(c.v_dim);
        DecodeWild<K>{block, bits, v, softmax, c.v_dim, width, span.lanes.count, out, scratch}.add(0, tokens);
    }

    // The addresses of up to `count` times 16 keys of other rows. How many are known.
    int find_keys(const After &after, int count, const char **to) const {
        const Source<K> k(keys_of(c), c.k, after.lanes.batch, after.lanes.head / (c.heads / c.kv_heads), c.qk_dim);
        return Sixteens::found(k, after.block.first, count, to);
    }

    static const Bits128 &none() {
        static constexpr Bits128 bits{};
        return bits;
    }

    // Weights of a whole block. `before(r)` is called before those of row r.
    template <typename Before>
    void weigh_all(const Block &block, const Bits128 &bits, const Lanes &lanes, const Sums &into, Before before) {
        const Piece piece{0, least(BLOCK, c.keys - block.first), 0, 1};
        for (int r = 0; r < lanes.count; ++r) before(r), softmax.weigh(block, lanes, bits, &piece, 1, r, into);
    }

    // The same where values are not read in order, with every line asked for by a list.
    void stream_lines(const Span &span, int64_t first, const Sixteens &keys, const char *values, const After *after) {
        const Lanes &lanes = span.lanes;
        const int tokens = keys.tokens();
        const int64_t key = c.qk_dim * int64_t(sizeof(S)), value = c.v_dim * int64_t(sizeof(S));
        const int step = Source<K>::step_of_lines(DecodeValues<K>::in_order(c.v_dim, lanes.count));
        Todo todo;
        DecodeQueries<K>{c, units, queries}.take(lanes);
        key_lines.clear(), value_lines.clear();
        key_lines.add(keys.at[0] + BLOCK * key, (tokens - BLOCK) * key);
        key_lines.add(values, BLOCK * value, step);
        value_lines.add(values + BLOCK * value, (tokens - BLOCK) * value, step);
        if (after) ask_for(*after, todo, value_lines, after->block.first + SPAN > c.keys);
        DecodeScores<K> of_keys{c.qk_dim, units, queries, scores, key_rows};
        const int made = of_keys.make_blocks(keys.at[0], tokens, lanes.count, key_lines);
        value_lines.share(DecodeValues<K>::asks(tokens, c.v_dim, lanes.count));
        for (int64_t at = 0; at < tokens; at += BLOCK) {
            softmax.move_to(scores + at * made);
            weigh_all(WholeBlocks::all_of(first + at), none(), lanes, span.into, [](int) {});
            span.v.find(first + at, first + at + BLOCK, todo.values);
            DecodeValues<K>(c.v_dim, width, softmax.weights, value_rows)
                .add(span.v, todo.values, first + at, 0, BLOCK, lanes.count, span.into.out, value_lines);
        }
        softmax.move_to(scores);
    }

    // ---- block by block --------------------------------------------------------------------------------------------

    void list(const Todo &todo, const Lanes &lanes, const Source<K> &k, const Source<K> &v) {
        if (lists(k, lanes)) k.list(todo.keys, key_lines);
        if (lists(v, lanes)) v.list(todo.values, value_lines, DecodeValues<K>::in_order(c.v_dim, lanes.count));
    }

    static int64_t rows_of_sums(const Lanes &lanes) { return K::tiled ? FEW : lanes.count; }

    void step(const Todo &todo, const Lanes &lanes, const Source<K> &keys, const Source<K> &values, const Sums &into) {
        const Block &block = todo.block;
        uint32_t listed = 0;  // groups of 16 keys
        for (int i = 0; i < todo.count; ++i)
            for (int j = todo.pieces[i].low; j < todo.pieces[i].high; j += 16) listed |= 1u << j / 16;
        DecodeScores<K>{c.qk_dim, units, queries, scores, key_rows}.make(keys, todo.keys, block.first, listed,
                                                                         lanes.count, key_lines);
        for (int r = 0; r < lanes.count; ++r) softmax.weigh(block, lanes, todo.bits, todo.pieces, todo.count, r, into);
        uint32_t plain = 0;  // groups of 16 values that are not multiplied as integers
        const int64_t asks = mix_coded(todo, listed, lanes, values, into, plain);
        if (!plain) return;
        if ((block.half[0].bits || block.half[1].bits) && mixed_wild(todo, plain, lanes, values, into)) return;
        DecodeValues<K> mix(c.v_dim, width, softmax.weights, value_rows);
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

    // Adds what is multiplied without being decoded, and says what is not. How often it asked for lines.
    int64_t mix_coded([[maybe_unused]] const Todo &todo, uint32_t listed, [[maybe_unused]] const Lanes &lanes,
                      [[maybe_unused]] const Source<K> &values, [[maybe_unused]] const Sums &into, uint32_t &plain) {
        plain = listed;
#if defined(REGARD_INTEGERS)
        if constexpr (K::integers) {
            const DecodeSegments mine(todo.values, todo.block.first, c.v_dim, listed);
            plain = mine.plain;
            if (!mine.count) return 0;
            const int64_t asks = mine.asks(lanes.count);
            value_lines.share(asks + DecodeValues<K>::asks(__builtin_popcount(plain) * 16, c.v_dim, lanes.count));
            const auto kept = [&](int r, int at) { return softmax.kept_bits(todo.block, todo.bits, r, at, 16); };
            char *const scratch = value_rows + DecodeValues<K>::coded_at(c.v_dim);
            mine.add(values.head, {softmax.scores, into.out, width, lanes.count}, kept, scratch, value_lines);
            return asks;
        }
#endif
        return 0;
    }

    // Whether values that are hidden from some rows are not finite; then the sums have been made.
    bool mixed_wild(const Todo &todo, uint32_t plain, const Lanes &lanes, const Source<K> &values, const Sums &into) {
        const Block &block = todo.block;
        const int low = todo.low(), high = todo.high();
        const Tokens<K> v = values.some(block.first + low, high - low, value_rows);
        bool wild = false;
        for (int i = 0; i < 2; ++i) {
            const int from = i ? most(low, TILE) : low, to = i ? high : least(high, TILE);
            if (block.half[i].bits && from < to) wild |= v.wild(block.first + from, to - from);
        }
        if (!wild) return false;
        char *const scratch = value_rows + DecodeValues<K>::coded_at(c.v_dim);
        const DecodeWild<K> some{block, todo.bits, v, softmax, c.v_dim, width, lanes.count, into.out, scratch};
        each_plain(todo, plain, [&](int from, int to) { some.add(from, to); });
        return true;
    }

    // All spans of some rows merged, and the result written. `parts` are `stride` bytes apart.
    void finish(const Lanes &lanes, char *parts, int64_t stride, int64_t spans) const {
        DecodeMerge<K>{c, softmax.scoring.unit, softmax.factor, width}.finish(lanes, parts, stride, spans);
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
