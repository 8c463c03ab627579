// How the backward pass is cut into units of work.
//
// A unit is a key head: all query tiles of its group, one after another, add to one dk and dv. So that few key heads
// occupy many threads, the tiles are cut into segments, whose sums are added in order. How many segments there are
// follows from the sizes of a head alone, so that the bits are the same whatever the batch and the threads; only
// where the sums are stored meanwhile does not.
#pragma once

#include "rows.h"

namespace regard {
namespace REGARD_ISA {

// Adding a segment's sums costs 0.6 % of the time of 16 causal tiles, less of more.
constexpr int64_t SEGMENT_TILES = 16, SEGMENTS_AT_MOST = 8;
// A key head with one tile of rows and few keys: then there may be no pair but such as largest.h sees to, and each tile
// of half precision is computed once more, for delta alone, with products of float32.
constexpr int64_t SMALL_KEYS = 512;
constexpr int64_t SUMS_AT_MOST = int64_t(1) << 30;  // bytes of dk and dv of all segments, stored side by side

// How the work is cut.
struct Division {
    int64_t group, at_once, parts, tiles;  // at_once heads of a group share a tile of lanes, in `parts` parts
    int64_t units;                         // key heads of all batch rows
    int64_t segments;                      // of each unit
    bool apart;                            // segments are units of their own, whose sums wait for the second half
    bool small;                            // so few rows and keys that each is computed twice
    bool single;                           // a unit is one tile, so sums of a block are whole when it was visited
    int64_t sum_keys;                      // whose sums are in memory at once: of a unit, or of a block
    int64_t sum_bytes;                     // of dk and dv: [groups of 64 dims][sum_keys][64] each
    int64_t distances;                     // values of a head's ddistance, and lanes that may hang over its end

    explicit Division(const regard_call &c) {
        group = c.kv_heads ? c.heads / c.kv_heads : 0;
        at_once = c.maps_head > 1 || c.queries * 2 > LANES || !c.queries ? 1 : least(LANES / c.queries, group);
        parts = at_once ? (group + at_once - 1) / at_once : 0;
        tiles = c.by_query.rows;
        units = c.batch * c.kv_heads;
        small = parts * tiles <= 1 && c.keys <= SMALL_KEYS;
        // What half precision lacks (largest.h) is added to sums when all blocks were visited.
        single = parts * tiles == 1 && (c.dtype == REGARD_F32 || c.dtype == REGARD_F64);
        sum_keys = single ? least(c.keys, BLOCK) : c.keys;
        const int64_t wide = c.dtype == REGARD_F64 ? 8 : 4;
        sum_bytes = (up(c.qk_dim, LANES) + up(c.v_dim, LANES)) * sum_keys * wide;
        distances = up(c.queries + c.keys - 1 + LANES, LANES);
        segments = least(parts * tiles / SEGMENT_TILES, SEGMENTS_AT_MOST);
        segments = segments < 1 ? 1 : segments;
        const bool enough = units % c.threads == 0 || units >= 4 * c.threads;  // whole units are shared out evenly
        apart = segments > 1 && !enough && units * segments <= SUMS_AT_MOST / (sum_bytes + 1);
    }

    static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
    int64_t key_tiles(const regard_call &c) const { return (c.keys + TILE - 1) / TILE; }
};

// From low to below high: keys, tiles, heads.
struct Range {
    int64_t low, high;
    bool has(int64_t token) const { return token >= low && token < high; }
    int64_t size() const { return high - low; }
};

// Whether pairs of several units add to one number of dbias. Then it is summed in a pass of its own.
REGARD_INLINE bool shares_bias(const regard_gradient &g) {
    const regard_call &c = g.call;
    const int64_t *n = g.bias_sizes;
    return g.dbias && ((n[0] == 1 && c.batch > 1) || (n[1] == 1 && c.heads > 1) || (n[2] == 1 && c.queries > 1));
}

// Units of the second half, besides tiles of keys: bias heads, or tiles of their rows, that units of the first half
// share; and heads of ddistance.
REGARD_INLINE int64_t bias_units(const regard_gradient &g) {
    return shares_bias(g) ? g.bias_sizes[0] * g.bias_sizes[1] * (g.bias_sizes[2] > 1 ? g.call.by_query.rows : 1) : 0;
}
REGARD_INLINE int64_t distance_units(const regard_gradient &g) {
    return !g.ddistance ? 0 : g.call.distance_head ? g.call.heads : 1;
}

REGARD_INLINE int64_t gradient_units(const regard_gradient &g, int half) {
    const Division d(g.call);
    if (!half) return d.apart ? d.units * d.segments : d.units;
    return bias_units(g) + distance_units(g) + (d.apart ? d.units * d.key_tiles(g.call) : 0);
}

}  // namespace REGARD_ISA
}  // namespace regard
