// The lists of a schedule, from intervals: in closed form, as src/regard/plan/few_rows.py makes them. Or from a table
// of pairs, of which every tile is read that the intervals reach, if there are any.
//
// No edge of an interval moves to the left from a query to the next. So the first and the last query of a row of tiles
// determine which tiles an interval covers and which it only overlaps. The bits of the latter are written one by one.
// Patterns are not compared: each PARTIAL tile has its own, 512 bytes, which a decoding call writes in some 100 ns.
#pragma once

#include "abi.h"

namespace regard {

constexpr int64_t INTERVALS = 4;          // at most, as in src/regard/describe/interval.py
constexpr int64_t LISTED_ROWS = 1 << 16;  // at most, of all maps

// Bytes that the lists of a call take, a multiple of 64; 0 where they are given.
int64_t listing_bytes(const regard_call &c);

// Writes them to `memory`, and their addresses into the schedule. Returns their bytes.
int64_t list_tiles(regard_call &c, char *memory);

}  // namespace regard
