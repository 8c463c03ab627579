// A forward pass, cut into units that any thread may do in any order.
//
// Many queries: a unit is a tile of 64 of one head, or two of them, against all keys. Up to 64: heads of a group share
// a unit, as lanes of a tile or as two tiles (forward.h) or, up to 16, as rows (decode.h); then keys are cut into spans
// as well, so that all threads have work, and the thread that is done with the last span of a unit merges them: no
// thread waits for another before the end. How a pass is cut follows from its shape and from the caches, and only
// whether two tiles share a unit from the number of threads; whichever way a row is computed, it gets the same bits.
//
// The first half of a pass prepares what threads share; the second does all else.
#pragma once

#include "decode.h"
#include "forward.h"

namespace regard {
namespace REGARD_ISA {

struct Cut {
    const regard_call &c;
    int64_t group, at_once;                // heads of a key head; of a tile
    bool rows;                             // few enough queries for decode.h
    int64_t spans;                         // that keys are cut into
    int64_t line, lines;                   // tiles that may share units: a head's, or one of each head; such of a group
    int64_t tiles, strips;                 // of a unit, which go through keys together; units of a line
    int64_t units;                         // in which all queries are
    static constexpr int64_t ENOUGH = 16;  // units for a thread, so that none waits long for the last

    // tiles_at_most: that had better share a unit.
    explicit Cut(const regard_call &call, int64_t tiles_at_most = 1)
        : c(call), group(c.heads / (c.kv_heads ? c.kv_heads : 1)) {
        const int64_t together = c.maps_head > 1 ? 1 : group;  // heads with one mask
        rows = together * c.queries <= FEW;
        at_once =
            c.queries && LANES / c.queries > 1 ? (together < LANES / c.queries ? together : LANES / c.queries) : 1;
        spans = c.by_query.rows == 1 ? (c.keys + SPAN - 1) / SPAN : 1;
        spans = spans ? spans : 1;
        const int64_t parts = (group + at_once - 1) / at_once;
        line = of_heads() ? parts : c.by_query.rows, lines = of_heads() ? 1 : parts;
        const int64_t all = c.heads ? c.batch * c.kv_heads * lines : 0;
        tiles = !rows && line > 1 && all * line * spans >= ENOUGH * tiles_at_most * c.threads ? tiles_at_most : 1;
        strips = (line + tiles - 1) / tiles;
        units = all * strips;
    }

    bool of_heads() const { return c.by_query.rows == 1; }

    // A unit's first tile, of a line from its last on: under a causal mask a head's last tile is the longest.
    int64_t tile(int64_t unit) const { return (strips - 1 - unit % strips) * tiles; }
    int64_t key_head(int64_t unit) const { return unit / strips / lines; }  // counted through the batch

    // Of a unit's tile `number`.
    Lanes lanes(int64_t unit, int64_t number = 0) const {
        const int64_t at = tile(unit) + number, of = unit / strips % lines, kv = key_head(unit);
        const int64_t part = of_heads() ? at : of, first = of_heads() ? 0 : at * TILE;
        const int64_t heads = group - part * at_once < at_once ? group - part * at_once : at_once;
        const int64_t queries = c.queries - first < TILE ? c.queries - first : TILE;
        return {kv / c.kv_heads, kv % c.kv_heads * group + part * at_once, first, at_once > 1 ? c.queries : TILE,
                int(heads * queries)};
    }

    int64_t row(const Lanes &lanes) const {
        const int64_t map = (c.maps_batch > 1 ? lanes.batch : 0) * c.maps_head + (c.maps_head > 1 ? lanes.head : 0);
        return map * c.by_query.rows + lanes.first / TILE;
    }
};

// few: only calls whose units are rows (Cut::rows); the code for others is left out.
template <typename K, bool few = false>
struct ForwardPass {
    using Strip = typename Forward<K>::Strip;
    using Rows = Decode<K>;
    static constexpr int64_t PAIRS_AT_MOST = int64_t(40) << 20;  // of memory; no cache is meant

    const regard_call &c;
    const int64_t pairs;  // bytes of values in pairs that threads share, where many tiles use them; else 0
    const Cut cut;

    explicit ForwardPass(const regard_call &call) : c(call), pairs(bytes_of_pairs()), cut(call, tiles_at_most()) {}

    int64_t bytes_of_pairs() const {
        const int64_t all = PairedValues<K>::bytes(c);
        return K::pairs && c.by_query.rows >= 4 && all <= PAIRS_AT_MOST ? all : 0;
    }

    // Two tiles share keys and values where those are converted, which is then done half as often: 0.97 to 0.98 of the
    // time on Zen 4, for bf16 on AVX2 and AVX-512. Also where they stream from a third level and products wait even for
    // the second (Cascade Lake), and always where products need not wait for it (0.95 to 1.00 on Zen 4) and on Intel's
    // cores with 2 MiB of it (0.93 to 0.98). With AMX's tiles from half of the second level on, as what is transposed
    // is written there besides: 0.95 to 0.99. What both need must fit the second level.
    int64_t tiles_at_most() const {
        const int64_t of_key = (c.qk_dim + c.v_dim) * int64_t(sizeof(typename K::Stored));
        if (few || Forward<K>::bytes(c, TILES) + 2 * BLOCK * of_key > caches().second) return 1;
        const bool converted = keys_of(c) || values_of(c) || (K::pairs ? !pairs : !K::in_place);
        const int64_t room = K::tiled ? caches().second / 2 : caches().second;
        const bool streams = c.keys * of_key > room && nearby() < caches().second;
        const bool in_place = !K::tiled && (caches().shares || nearby() == caches().second);
        return converted || streams || in_place ? TILES : 1;
    }

    // Whether threads make pairs as they need them: what several of them make at the same time at the beginning of a
    // head is then little beside all that its tiles compute.
    bool as_needed() const { return cut.lines * cut.strips >= 8 * c.threads; }

    int64_t part_bytes() const {
        if (cut.rows) return Rows::Sums::bytes(c);
        return Forward<K>::part_bytes(c);
    }

    int64_t shared() const {
        return cut.spans > 1 ? count_bytes() + cut.units * cut.spans * cut.tiles * part_bytes() : pairs;
    }
    // Of numbers that lie before the parts of units: how many spans of each are done.
    int64_t count_bytes() const { return up(cut.units * int64_t(sizeof(int64_t)), 64); }
    int64_t scratch() const {
        if (cut.rows) return Rows::bytes(c);
        return Forward<K>::bytes(c, cut.tiles);
    }

    int64_t units(int half) const {
        if (half) return cut.units * cut.spans;
        if (!cut.units) return 0;
        if (cut.spans > 1) return 1;
        if (!pairs) return 0;
        return as_needed() ? 1 : c.batch * c.kv_heads * ((c.keys + SPAN - 1) / SPAN);
    }

    regard_status run(int half, int64_t unit, char *shared, char *scratch) const {
        if (half && cut.spans > 1) return span(unit, shared, scratch);
        if (half) return whole(unit, shared, scratch);
        if (cut.spans > 1) memset(shared, 0, size_t(count_bytes()));
        else if (as_needed()) PairedValues<K>::forget(c, shared);
        else pair(unit, shared, scratch);
        return REGARD_DONE;
    }

    // The rows of a unit against all keys.
    regard_status whole(int64_t unit, char *shared, char *scratch) const {
        if constexpr (!few)
            if (!cut.rows) {
                PairedValues<K> values;
                if (pairs) values = PairedValues<K>(c, shared, cut.key_head(unit));
                typename Forward<K>::After after;
                const bool more = follows(unit + c.threads, after);
                return Forward<K>(c, values, scratch, cut.tiles).run(strip(unit), more ? &after : nullptr);
            }
        const Lanes lanes = cut.lanes(unit);
        Rows rows(c, scratch);
        char *part = scratch + Rows::bytes(c) - Rows::Sums::bytes(c);
        typename Rows::After after;
        const bool more = !is_near() && follows(unit + c.threads, after);
        const auto into = Rows::Sums::at(c, part);
        if (regard_status bad = rows.run(lanes, cut.row(lanes), 0, into, more ? &after : nullptr)) return bad;
        rows.finish(lanes, part, 0, 1);
        return REGARD_DONE;
    }

    // Whether all keys and values may still be in the second cache from an earlier call: by an upper bound of their
    // size. With prefetches the whole call then takes up to 1.2 times as long, else 0.3 to 0.9 (Zen 4).
    bool is_near() const {
        const int64_t of_key = (c.qk_dim + c.v_dim) * int64_t(sizeof(typename K::Stored));
        return c.batch * c.kv_heads * c.keys * of_key <= caches().second;
    }

    // What a unit begins with, if there is one: probably this thread's next.
    bool follows(int64_t unit, typename Forward<K>::After &after) const {
        if (unit >= cut.units * cut.spans) return false;
        after.strip = strip(unit / cut.spans);
        return first_block(after.strip.row[0], unit, after.block);
    }
    bool follows(int64_t unit, typename Rows::After &after) const {
        if (unit >= cut.units * cut.spans) return false;
        after.lanes = cut.lanes(unit / cut.spans);
        return first_block(cut.row(after.lanes), unit, after.block);
    }
    bool first_block(int64_t row, int64_t unit, Block &block) const {
        return Walk(c.by_query, row, c.keys, unit % cut.spans * SPAN).next(c.keys, block);
    }

    // The tiles of a unit.
    Strip strip(int64_t unit) const {
        Strip found;
        found.count = least(cut.tiles, cut.line - cut.tile(unit));
        for (int i = 0; i < found.count; ++i) {
            found.lanes[i] = cut.lanes(unit, i);
            found.row[i] = cut.row(found.lanes[i]);
        }
        return found;
    }

    // The values of a span of one key head, in pairs.
    void pair(int64_t unit, char *shared, char *scratch) const {
        const int64_t spans = (c.keys + SPAN - 1) / SPAN, first = unit % spans * SPAN, kv = unit / spans;
        const Source<K> v(values_of(c), c.v, kv / c.kv_heads, kv % c.kv_heads, c.v_dim);
        const PairedValues<K> values(c, shared, kv);
        for (int64_t at = first; at < least(first + SPAN, c.keys); at += BLOCK) values.make(v, at, scratch);
    }

    // Rows against a span of keys: units are the spans of one key head after another.
    regard_status span(int64_t unit, char *shared, char *scratch) const {
        char *parts = shared + count_bytes() + (unit - unit % cut.spans) * cut.tiles * part_bytes();
        if (regard_status bad = part(unit, parts + unit % cut.spans * cut.tiles * part_bytes(), scratch)) return bad;
        const int64_t rows = unit / cut.spans;
        int64_t *const done = reinterpret_cast<int64_t *>(shared) + rows;
        if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) == cut.spans) merge(rows, parts, scratch);
        return REGARD_DONE;
    }

    regard_status part(int64_t unit, char *into, char *scratch) const {
        const Lanes lanes = cut.lanes(unit / cut.spans);
        const int64_t number = unit % cut.spans;
        if (few || cut.rows) {
            typename Rows::After after;
            const bool more = follows(unit + c.threads, after);
            return Rows(c, scratch)
                .run(lanes, cut.row(lanes), number, Rows::Sums::at(c, into), more ? &after : nullptr);
        }
        if constexpr (!few) {
            typename Forward<K>::After after;
            Forward<K> forward(c, {}, scratch, cut.tiles);
            return forward.run_span(strip(unit / cut.spans), number, into,
                                    follows(unit + c.threads, after) ? &after : nullptr);
        }
        return REGARD_DONE;
    }

    void merge(int64_t unit, char *parts, char *scratch) const {
        if (cut.rows) return Rows(c, scratch).finish(cut.lanes(unit), parts, part_bytes(), cut.spans);
        if constexpr (!few) {
            const Strip whole = strip(unit);
            Forward<K> forward(c, {}, scratch, cut.tiles);
            for (int i = 0; i < whole.count; ++i)
                forward.finish_spans(whole.lanes[i], parts + i * part_bytes(), cut.tiles * part_bytes(), cut.spans);
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
