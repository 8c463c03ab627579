// Blocks of a span, one after another, whose keys are all read: what decode.h streams.
#pragma once

#include "scores.h"

namespace regard {
namespace REGARD_ISA {

inline bool has_bits(const Block &block) { return block.half[0].bits || block.half[1].bits; }

constexpr int64_t MOST_OF = 96;  // tokens of a block

struct WholeBlocks {
    int64_t first, end;        // tokens
    Half halves[SPAN / TILE];  // from the first block on

    int64_t tokens() const { return end - first; }
    Block block_at(int64_t token) const {
        const Half *const half = halves + (token - first) / TILE;
        return {token, {half[0], half[1]}};
    }
    // Whether the last block had fewer tokens than others, and is left out now.
    bool drop_tail() {
        const int64_t behind = tokens() % BLOCK;
        end -= behind;
        return behind;
    }
    static Block all_of(int64_t token) { return {token, {{true, nullptr}, {true, nullptr}}}; }

    // Which blocks count as whole.
    struct Which {
        bool with_bits;  // also where keys are hidden
        int64_t least;   // tokens of the last one
    };

    // The first ones of the span from token `first` on; none if there are none, or the schedule is bad.
    static WholeBlocks find(const regard_call &c, const Lanes &lanes, int64_t row, int64_t first, Which which) {
        const int64_t until = first + SPAN, behind = c.keys % BLOCK, all = c.keys - (behind < which.least ? behind : 0);
        const int64_t end = until < all ? until : all;
        WholeBlocks found;
        found.first = found.end = first;
        if (end <= first) return found;
        Walk walk(c.by_query, row, c.keys, first);
        for (Block block; walk.next(end, block);) {
            const int tokens = least(BLOCK, c.keys - block.first);
            const bool whole = is_whole(block, tokens, lanes, which.with_bits);
            if (found.tokens() && (!whole || block.first != found.end)) return found;
            if (whole) found.add(block, tokens);
        }
        if (walk.bad) found.end = found.first;
        return found;
    }

  private:
    void add(const Block &block, int tokens) {
        if (first == end) first = end = block.first;
        for (int i = 0; i < 2; ++i) halves[(end - first) / TILE + i] = block.half[i];
        end += tokens;
    }

    // Whether all rows see all keys of a block; or, with bits, some row sees one of each 16 keys, of most sixteens. The
    // others are computed in vain, which takes less time than to go block by block.
    static bool is_whole(const Block &block, int tokens, const Lanes &lanes, bool with_bits) {
        if (!block.half[0].listed || (!block.half[1].listed && tokens > TILE)) return false;
        if (!has_bits(block)) return true;
        if (!with_bits) return false;
        Bits128 bits;
        Piece pieces[8];
        lane_bits(block, lanes, bits);
        return rows_of(pieces, cut<LANES>(block, bits, tokens, lanes.count, pieces)) * BLOCK >= MOST_OF * tokens;
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
