// Attention for many queries: 64 queries in lanes, keys in blocks of 128.
//
// For each tile of queries: scores of a block [key][query] from keys read in place and queries transposed once
// (forward_scores.h); weights 2^(score - maximum) (forward_weights.h); the output [v_dim][query] gains weights x values
// (forward_values.h). Every sum is a chain of its own lane, so nothing is shuffled, and a row's bits depend on its own
// query and keys only: on their positions, since running sums (forward_sums.h) are rescaled at blocks (multiples of
// 128) and restarted at spans (multiples of 1,024; walk.h). decode.h makes the same sums in the same order.
//
// Blocking: scores 128 x 64 floats = 32 KiB and queries 64 x d floats = 16 KiB at d 64 are in L1 and L2. Keys and
// values stream, used 64 times each, or 128 times where two tiles go through them together. (Tiles: Dao et al. 2022,
// arXiv:2205.14135.)
#pragma once

#include "forward_scores.h"
#include "forward_values.h"
#include "forward_weights.h"

namespace regard {
namespace REGARD_ISA {

constexpr int TILES = 2;  // that go through keys and values together, at most

template <typename K>
struct Forward {
    using T = typename K::Wide;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W;
    static constexpr double NEVER = -INFINITE;

    struct Tile {
        Lanes lanes;
        Unit *queries;  // [units of qk_dim][64]
        Sums<K> whole, span;
        bool some;   // whether `whole` holds anything
        bool fresh;  // whether `span` holds nothing
    };

    const regard_call &c;
    Scores<K> scores;
    Weights<K> weights;
    Values<K> values;
    const bool halves;  // whether weights are computed for half a block at once
    Tile tiles[TILES];
    Ahead::Part later[2 * TILES] = {};  // what a unit's first block asks memory for besides

    static int64_t bytes(const regard_call &c, int64_t tiles) {
        return Scores<K>::bytes(c) + Values<K>::bytes(c) +
               tiles * (Scores<K>::queries_bytes(c) + 2 * Sums<K>::bytes(c.v_dim));
    }

    Forward(const regard_call &call, const PairedValues<K> &pairs, char *scratch, int64_t count = 1)
        : c(call),
          scores(call, scratch),
          weights{call, scores.factor, scores.scores},
          values(call, pairs, scratch + Scores<K>::bytes(c)),
          halves(BLOCK * LANES * int64_t(sizeof(T)) >= nearby()) {
        char *at = scratch + Scores<K>::bytes(c) + Values<K>::bytes(c);
        for (int64_t i = 0; i < count; ++i) {
            tiles[i].queries = reinterpret_cast<Unit *>(at);
            at += Scores<K>::queries_bytes(c);
            tiles[i].whole = Sums<K>(at, c.v_dim, scores.factor);
            tiles[i].span = Sums<K>(at + Sums<K>::bytes(c.v_dim), c.v_dim, scores.factor);
            at += 2 * Sums<K>::bytes(c.v_dim);
        }
    }

    // Rows that share keys and values: tiles of one head, one after the other, or of heads of a group.
    struct Strip {
        int count;
        Lanes lanes[TILES];
        int64_t row[TILES];  // of the schedule
    };

    // What a thread probably computes next: these rows, from this block of keys on.
    struct After {
        Strip strip;
        Block block;
    };

    // Rows against all keys.
    regard_status run(const Strip &strip, const After *after) {
        Blocks blocks[TILES] = {{c.by_query, strip.row[0], c.keys, 0, c.keys},
                                {c.by_query, strip.row[strip.count - 1], c.keys, 0, strip.count > 1 ? c.keys : 0}};
        for (int i = 0; i < strip.count; ++i) {
            enter(tiles[i], strip.lanes[i], blocks[i].next());
            later[2 * i] = rows_at(c.out, strip.lanes[i], c.v_dim);
            if (after && i < after->strip.count) later[2 * i + 1] = rows_at(c.q, after->strip.lanes[i], c.qk_dim);
        }
        while (first_of(blocks) != NONE) {
            sum(blocks, after);
            for (int i = 0; i < strip.count; ++i)
                if (!tiles[i].fresh) merge(tiles[i]);
        }
        for (const Blocks &some : blocks)
            if (some.bad()) return REGARD_BAD_SCHEDULE;
        for (int i = 0; i < strip.count; ++i) finish(tiles[i]);
        return REGARD_DONE;
    }

    // What is kept of a span until all are merged.
    struct Part {
        Sums<K> sums;
        int64_t *some;  // whether a key was listed
    };

    static int64_t part_bytes(const regard_call &c) { return Sums<K>::bytes(c.v_dim) + 64; }

    Part part(char *at) const {
        return {Sums<K>(at, c.v_dim, scores.factor), reinterpret_cast<int64_t *>(at + part_bytes(c) - 64)};
    }

    // Rows against one span: a part of each tile, side by side in memory.
    regard_status run_span(const Strip &strip, int64_t number, char *parts, const After *after) {
        const int64_t first = number * SPAN, end = first + SPAN;
        Blocks blocks[TILES] = {{c.by_query, strip.row[0], c.keys, first, end},
                                {c.by_query, strip.row[strip.count - 1], c.keys, first, strip.count > 1 ? end : first}};
        Part into[TILES];
        for (int i = 0; i < strip.count; ++i) {
            enter(tiles[i], strip.lanes[i], blocks[i].next());
            into[i] = part(parts + i * part_bytes(c));
            tiles[i].span = into[i].sums;
        }
        if (first_of(blocks) != NONE) sum(blocks, after);
        for (int i = 0; i < strip.count; ++i) *into[i].some = !tiles[i].fresh;
        for (const Blocks &some : blocks)
            if (some.bad()) return REGARD_BAD_SCHEDULE;
        return REGARD_DONE;
    }

    // All spans merged in order; they are `stride` bytes apart.
    void finish_spans(const Lanes &lanes, char *parts, int64_t stride, int64_t spans) {
        enter(tiles[0], lanes, nullptr);
        for (int64_t s = 0; s < spans; ++s) {
            const Part p = part(parts + s * stride);
            if (!*p.some) continue;
            tiles[0].span = p.sums;
            merge(tiles[0]);
        }
        finish(tiles[0]);
    }

  private:
    static constexpr int64_t NONE = INT64_MAX;

    // A tile and a block that it sees.
    struct Turn {
        Tile *tile;
        Block block;
        Bits128 bits;
        Piece pieces[8];
        int count;  // of pieces

        int low() const { return pieces[0].low; }
        int high() const { return pieces[count - 1].high; }
        int vectors() const { return tile->lanes.vectors(W); }
    };

    void enter(Tile &tile, const Lanes &lanes, const Block *first) const {
        tile.lanes = lanes, tile.some = false, tile.fresh = true;
        if (first) scores.transpose_queries(lanes, tile.queries);
    }

    // Where the next block starts that a tile lists.
    static int64_t first_of(const Blocks *blocks) {
        int64_t first = NONE;
        for (int i = 0; i < TILES; ++i)
            if (blocks[i].next() && blocks[i].next()->first < first) first = blocks[i].next()->first;
        return first;
    }

    // The sums of the next span that a tile lists keys of.
    void sum(Blocks *blocks, const After *after) {
        const Lanes &lanes = tiles[0].lanes;
        const Source<K> k(keys_of(c), c.k, lanes.batch, head_of(lanes), c.qk_dim);
        const Source<K> v(values_of(c), c.v, lanes.batch, head_of(lanes), c.v_dim);
        for (Tile &tile : tiles) tile.fresh = true;
        const int64_t number = first_of(blocks) / SPAN;
        for (int64_t first; (first = first_of(blocks)) / SPAN == number;) {
            Turn turns[TILES];
            int count = 0;
            for (int i = 0; i < TILES; ++i)
                if (blocks[i].next() && blocks[i].next()->first == first)
                    turns[count].tile = &tiles[i], turns[count++].block = blocks[i].take();
            Ahead ahead;
            ask(ahead, k, v, blocks, after);
            step(turns, count, k, v, ahead);
        }
    }

    int64_t head_of(const Lanes &lanes) const { return lanes.head / (c.heads / c.kv_heads); }

    // What the scores of the next block will be made of, or of the next unit's first one.
    void ask(Ahead &ahead, const Source<K> &k, const Source<K> &v, const Blocks *blocks, const After *after) const {
        const int64_t first = first_of(blocks);
        if (first == NONE) {
            if (!after) return;
            const Lanes &lanes = after->strip.lanes[0];
            ask_bias(ahead, lanes, after->block);
            if (!asks_keys(lanes.vectors(W))) return;
            const Source<K> next(keys_of(c), c.k, lanes.batch, head_of(lanes), c.qk_dim);
            ask_keys(ahead, next, after->block, after->block);
            if (K::tiled)
                ask_keys(ahead, Source<K>(values_of(c), c.v, lanes.batch, head_of(lanes), c.v_dim), after->block,
                         after->block);
            return;
        }
        const Block *seen[TILES];
        int count = 0;
        for (int i = 0; i < TILES; ++i)
            if (blocks[i].next() && blocks[i].next()->first == first) {
                seen[count++] = blocks[i].next();
                ask_bias(ahead, tiles[i].lanes, *blocks[i].next());
            }
        if (!asks_keys(tiles[0].lanes.vectors(W))) return;
        ask_keys(ahead, k, *seen[0], *seen[count - 1]);
        if (K::tiled) ask_keys(ahead, v, *seen[0], *seen[count - 1]);
    }

    // The first of the tokens that a block lists, and how many they are.
    int64_t begin(const Block &block) const { return block.first + (block.half[0].listed ? 0 : TILE); }
    int64_t end(const Block &block) const { return least(block.first + (block.half[1].listed ? BLOCK : TILE), c.keys); }

    // The keys (or values) of a block, which two tiles may list different halves of.
    void ask_keys(Ahead &ahead, const Source<K> &k, const Block &a, const Block &b) const {
        const int64_t first = begin(a) < begin(b) ? begin(a) : begin(b), last = end(a) > end(b) ? end(a) : end(b);
        ahead.add(k.ahead(first, last - first));
    }

    void ask_bias(Ahead &ahead, const Lanes &lanes, const Block &block) const {
        if (!c.bias || c.bias_key != 1) return;
        const int64_t item = c.bias_dtype == REGARD_F64 ? 8 : c.bias_dtype == REGARD_F32 ? 4 : 2;
        const int64_t first = begin(block), count = end(block) - first;
        const int64_t at = lanes.batch * c.bias_batch + lanes.head * c.bias_head + lanes.first * c.bias_row + first;
        const int64_t rows = c.bias_row ? least(lanes.per_head, lanes.count) : 1;
        ahead.add({static_cast<const char *>(c.bias) + at * item, c.bias_row * item, count * item, rows});
    }

    // The rows of a tile, of its first head if there are several.
    static Ahead::Part rows_at(const regard_tensor &t, const Lanes &lanes, int64_t dim) {
        const int64_t item = sizeof(S), at = lanes.batch * t.batch + lanes.head * t.head + lanes.first * t.token;
        return {static_cast<const char *>(t.data) + at * item, t.token * item, dim * item,
                least(lanes.per_head, lanes.count)};
    }

    // One block of keys and values, for each tile that sees it.
    void step(Turn *turns, int count, const Source<K> &k, const Source<K> &v, Ahead &ahead) {
        int low = BLOCK, high = 0, live = 0;
        bool partial[2] = {};
        const int64_t first = turns[0].block.first;
        for (int i = 0; i < count; ++i) {
            Turn &turn = turns[i];
            lane_bits(turn.block, turn.tile->lanes, turn.bits);
            turn.count = cut<W, K::tiled ? 32 : 16>(turn.block, turn.bits, least(BLOCK, c.keys - first),
                                                    turn.tile->lanes.count, turn.pieces);
            if (!turn.count) continue;
            low = least(low, turn.low()), high = most(high, turn.high());
            for (int half = 0; half < 2; ++half) partial[half] |= turn.block.half[half].bits != nullptr;
            if (live < i) turns[live] = turn;
            ++live;
        }
        if (!live) return;
        const Rows rows = scores.rows(k, first + low, high - low);
        if (!K::tiled) ahead.add(values.ahead(v, first + low, high - low));
        if (!asks_keys(turns[0].vectors())) ask_at_once(later);
        Ahead next;
        for (Ahead::Part &besides : later) (live > 1 ? next : ahead).add(besides), besides.rows = 0;
        for (int i = 0; i < live; ++i) {
            alignas(64) T top[LANES], shift[LANES];
            Ahead &own = i ? next : ahead;
            const int rows_here = rows_of(turns[i].pieces, turns[i].count), vectors = turns[i].vectors();
            const bool also_values = !i && asks_keys(vectors);
            if (K::tiled)
                own.share((rows_here + 31) / 32 * ((vectors + 1) / 2) + (also_values ? values.asks(high - low) : 0));
            else own.start(rows_here, Tokens<K>::units(c.qk_dim), vectors);
            score(turns[i], rows, low, top, &own);
            if (!i) values.read(v, first, low, high, partial, also_values ? &own : nullptr);
            const bool covers = begin(turns[i], top);
            turns[i].tile->span.raise(top, shift, turns[i].vectors());
            mix(turns[i], shift, covers);
        }
    }

    // Whether keys and values are prefetched. With many rows in tiles they are not: they then came later than by the
    // machine's own prefetching (1.1 to 1.2 times as long, Intel Xeon with AMX). That does not find the rows of biases,
    // each of which is in a page of its own, so these are prefetched in any case (0.81 to 0.93 of the time).
    static bool asks_keys(int vectors) { return !K::tiled || vectors == 1; }

    // Prefetches outputs and the next queries into the second level, all at once, where keys are not prefetched: 0.93
    // to 0.97 of the time where tiles see few keys. Between products, as biases are, 1.07.
    static void ask_at_once(Ahead::Part (&parts)[2 * TILES]) {
        Ahead all;
        for (Ahead::Part &part : parts) all.add(part), part.rows = 0;
        all.share(1);
        all.ask<false>();
    }

    // The scores of a block, and the largest of each lane. `rows` begin with token `from` of the block.
    void score(const Turn &turn, const Rows &rows, int from, T *top, Ahead *ahead) {
        for (int u = 0; u < turn.vectors(); ++u) store(top + u * W, broadcast(T(NEVER)));
        const bool capped = scores.scoring.capped;
        const Adds<T> adds = scores.whole_scores(turn.block, turn.tile->lanes, least(BLOCK, c.keys - turn.block.first));
        for (int i = 0; i < turn.count; ++i)
            scores.each_half(turn.pieces[i], [&](const Piece &p, int half) {
                const uint64_t *hidden = turn.block.half[half].bits ? turn.bits.of : nullptr;
                scores.score(p, turn.tile->queries, rows.data + (p.low - from) * rows.stride, rows.stride, adds,
                             capped || hidden ? nullptr : top, ahead);
                if (capped) scores.cap(p, hidden, adds, top);
                else if (hidden) scores.hide(p, hidden, top);
            });
    }

    // Begins a span, unless it has begun; true: the first product is to write its output.
    static bool begin(const Turn &turn, const T *top) {
        Tile &tile = *turn.tile;
        const int vectors = turn.vectors();
        const bool covers = tile.fresh && turn.pieces[0].first == 0 && turn.pieces[0].last == vectors;
        if (covers) tile.span.start(top, vectors);
        else if (tile.fresh) tile.span.clear(vectors);
        tile.fresh = false;
        return covers;
    }

    // Weights of a block by its values: a piece at a time, or its halves where weights would fill the first level
    // cache. A sum goes on where it was left, so its bits are the same.
    void mix(const Turn &turn, const T *shift, bool covers) {
        const Tile &tile = *turn.tile;
        const auto some = [&](const Piece &p, int) {
            weights.weigh(p, shift, tile.span.total);
            if (c.dropout > 0) weights.drop(turn.block, tile.lanes, p);
            values.mix(turn.block, turn.bits, p, scores.scores, tile.span.out, covers && p.low == turn.low());
        };
        for (int i = 0; i < turn.count; ++i)
            if (halves) scores.each_half(turn.pieces[i], some);
            else some(turn.pieces[i], 0);
    }

    // A span's sums joined with those of the spans before.
    static void merge(Tile &tile) {
        if (tile.some) return tile.whole.merge(tile.span, tile.lanes.vectors(W));
        const Sums<K> other = tile.whole;
        tile.whole = tile.span;
        tile.span = other;
        tile.some = true;
    }

    void finish(Tile &tile) const {
        const Lanes &lanes = tile.lanes;
        const Sums<K> &whole = tile.whole;
        const int vectors = lanes.vectors(W);
        if (!tile.some) tile.whole.clear(vectors);
        alignas(64) T share[LANES], lse[LANES];
        T *into = static_cast<T *>(c.lse) + lanes.batch * c.heads * c.queries;
        for (int v = 0; v < vectors; ++v)
            finished<T>(load(whole.top + v * W), load(whole.total + v * W), scores.scoring.unit, lse + v * W,
                        share + v * W);
        for (int lane = 0; lane < lanes.count; ++lane) {
            const int64_t h = lanes.head_of(lane);
            if (c.sink) share[lane] = sunk(lse[lane], share[lane], static_cast<const T *>(c.sink)[h]);
            into[h * c.queries + lanes.query_of(lane)] = lse[lane];
        }
        S *data = static_cast<S *>(c.out.data) + lanes.batch * c.out.batch;
        const auto row = [&](int lane) {
            return data + lanes.head_of(lane) * c.out.head + lanes.query_of(lane) * c.out.token;
        };
        const auto shared = [&](int64_t i, int lane) { return whole.shared(i, lane, share); };
#if defined(REGARD_PAIRS)
        if constexpr (K::pairs)
            if (c.v_dim % 2 == 0) return scatter_pairs(row, lanes.count, c.v_dim, shared);
#endif
        scatter_lanes<T, S>(row, lanes.count, c.v_dim, shared);
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
