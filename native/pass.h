// A forward pass, cut into units that any thread may do in any order.
//
// Many queries: a unit is a tile of 64 of one head, against all keys. Few: heads of a group share a unit, as lanes
// (forward.h) or, up to 16, as rows (decode.h); then keys are cut into spans as well, so that all threads have work,
// and the second half merges them. How a pass is cut follows from its shape, never from the number of threads; and
// whichever way a row is computed, it gets the same bits.
#pragma once

#include "decode.h"
#include "forward.h"

namespace regard {
namespace REGARD_ISA {

struct Cut {
    const regard_call &c;
    int64_t group, at_once, parts;  // heads of a key head; of a unit; units that a group makes
    bool rows;                      // few enough queries for decode.h
    int64_t spans;                  // that keys are cut into
    int64_t units;                  // in which all queries are

    explicit Cut(const regard_call &call) : c(call), group(c.heads / (c.kv_heads ? c.kv_heads : 1)) {
        const int64_t together = c.maps_head > 1 ? 1 : group;  // heads with one mask
        rows = together * c.queries <= FEW;
        at_once =
            c.queries && LANES / c.queries > 1 ? (together < LANES / c.queries ? together : LANES / c.queries) : 1;
        parts = (group + at_once - 1) / at_once;
        spans = c.by_query.rows == 1 ? (c.keys + SPAN - 1) / SPAN : 1;
        spans = spans ? spans : 1;
        units = c.heads ? c.batch * c.kv_heads * parts * c.by_query.rows : 0;
    }

    // Tiles of a head from its last on, which under a causal mask is the longest.
    int64_t tile(int64_t unit) const { return c.by_query.rows - 1 - unit % c.by_query.rows; }
    int64_t key_head(int64_t unit) const { return unit / c.by_query.rows / parts; }  // counted through the batch

    Lanes lanes(int64_t unit) const {
        const int64_t part = unit / c.by_query.rows % parts, kv = key_head(unit), first = tile(unit) * TILE;
        const int64_t heads = group - part * at_once < at_once ? group - part * at_once : at_once;
        const int64_t queries = c.queries - first < TILE ? c.queries - first : TILE;
        return {kv / c.kv_heads, kv % c.kv_heads * group + part * at_once, first, at_once > 1 ? c.queries : TILE,
                int(heads * queries)};
    }

    int64_t row(const Lanes &lanes, int64_t tile) const {
        const int64_t map = (c.maps_batch > 1 ? lanes.batch : 0) * c.maps_head + (c.maps_head > 1 ? lanes.head : 0);
        return map * c.by_query.rows + tile;
    }
};

// few: only calls whose units are rows (Cut::rows); the code for others is left out.
template <typename K, bool few = false>
struct ForwardPass {
    const Cut cut;
    const regard_call &c;
    int64_t pairs;  // bytes of all values in pairs, made once where many tiles use them; 0: made where they are used

    static constexpr int64_t PAIRS_AT_MOST = int64_t(40) << 20;

    explicit ForwardPass(const regard_call &call) : cut(call), c(call), pairs(0) {
        const int64_t all = c.batch * c.kv_heads * pairs_of_head();
        if (K::pairs && c.by_query.rows >= 4 && all <= PAIRS_AT_MOST) pairs = up(all, 64);
    }

    int64_t pairs_of_head() const { return (c.keys + 1) / 2 * c.v_dim * 4; }
    int64_t part_bytes() const { return cut.rows ? Decode<K>::part_bytes(c) : Forward<K>::part_bytes(c); }

    int64_t shared() const { return cut.spans > 1 ? cut.units * cut.spans * part_bytes() : pairs; }
    int64_t scratch() const { return cut.rows ? Decode<K>::bytes(c) : Forward<K>::bytes(c); }

    int64_t units(int half) const {
        if (cut.spans > 1) return half ? cut.units : cut.units * cut.spans;
        if (half) return cut.units;
        return pairs && cut.units ? c.batch * c.kv_heads * ((c.keys + SPAN - 1) / SPAN) : 0;
    }

    regard_status run(int half, int64_t unit, char *shared, char *scratch) const {
        if (cut.spans > 1) return half ? merge(unit, shared, scratch) : span(unit, shared, scratch);
        return half ? whole(unit, shared, scratch) : pair(unit, shared, scratch);
    }

    // The rows of a unit against all keys.
    regard_status whole(int64_t unit, const char *shared, char *scratch) const {
        const Lanes lanes = cut.lanes(unit);
        const int64_t row = cut.row(lanes, cut.tile(unit));
        if constexpr (!few)
            if (!cut.rows) {
                const char *values = pairs ? shared + cut.key_head(unit) * pairs_of_head() : nullptr;
                typename Forward<K>::After after;
                const bool more = follows(unit + c.threads, after);
                return Forward<K>(c, values, scratch).run(lanes, row, more ? &after : nullptr);
            }
        Decode<K> decode(c, scratch);
        char *part = scratch + Decode<K>::bytes(c) - Decode<K>::part_bytes(c);
        if (regard_status bad = decode.run(lanes, row, 0, Decode<K>::part(c, part))) return bad;
        decode.finish(lanes, part, 0, 1);
        return REGARD_DONE;
    }

    // What a unit begins with, if there is one: probably this thread's next.
    bool follows(int64_t unit, typename Forward<K>::After &after) const {
        if (unit >= cut.units * cut.spans) return false;
        after.lanes = cut.lanes(unit / cut.spans);
        const int64_t from = unit % cut.spans * SPAN, row = cut.row(after.lanes, cut.tile(unit / cut.spans));
        return Walk(c.by_query, row, c.keys, from).next(c.keys, after.block);
    }

    // The values of a span of one key head, in pairs.
    regard_status pair(int64_t unit, char *shared, char *scratch) const {
        const int64_t spans = (c.keys + SPAN - 1) / SPAN, first = unit % spans * SPAN, kv = unit / spans;
        const int64_t count = c.keys - first < SPAN ? c.keys - first : SPAN;
        const Source<K> v(values_of(c), c.v, kv / c.kv_heads, kv % c.kv_heads, c.v_dim);
        char *const pairs_of_span = shared + kv * pairs_of_head() + first / 2 * c.v_dim * 4;
        for (int64_t at = 0; at < count; at += BLOCK) {
            const int64_t some = least(BLOCK, count - at);
            v.some(first + at, some, scratch).down(first + at, some, pairs_of_span + at / 2 * c.v_dim * 4);
        }
        return REGARD_DONE;
    }

    // Rows against a span of keys: units are the spans of one key head after another.
    regard_status span(int64_t unit, char *shared, char *scratch) const {
        const Lanes lanes = cut.lanes(unit / cut.spans);
        const int64_t number = unit % cut.spans;
        char *part = shared + unit * part_bytes();
        if (few || cut.rows) {
            const int64_t after = unit + c.threads;  // probably this thread's
            const bool more = after < cut.units * cut.spans;
            const Lanes next = cut.lanes(more ? after / cut.spans : 0);
            return Decode<K>(c, scratch)
                .run(lanes, cut.row(lanes, 0), number, Decode<K>::part(c, part), more ? &next : nullptr,
                     after % cut.spans);
        }
        if constexpr (!few) {
            typename Forward<K>::After after;
            return Forward<K>(c, nullptr, scratch)
                .run_span(lanes, cut.row(lanes, 0), number, Forward<K>::part(c, part),
                          follows(unit + c.threads, after) ? &after : nullptr);
        }
        return REGARD_DONE;
    }

    regard_status merge(int64_t unit, char *shared, char *scratch) const {
        char *parts = shared + unit * cut.spans * part_bytes();
        if (cut.rows) Decode<K>(c, scratch).finish(cut.lanes(unit), parts, part_bytes(), cut.spans);
        else if constexpr (!few)
            Forward<K>(c, nullptr, scratch).finish_spans(cut.lanes(unit), parts, part_bytes(), cut.spans);
        return REGARD_DONE;
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
