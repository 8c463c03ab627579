// What a schedule lists for one row of tiles, block by block of the other axis.
//
// A block is 128 tokens of the other axis (keys, in a forward pass) and starts at a multiple of 128, whatever is
// listed: so where running sums are rescaled depends on positions alone, and not on what else the schedule holds. A
// span is 1,024 tokens, a multiple of 1,024 on; spans are computed apart from each other and merged in order.
#pragma once

#include "abi.h"
#include "simd.h"

namespace regard {
namespace REGARD_ISA {

constexpr int64_t TILE = 64, BLOCK = 128, SPAN = 1024;

constexpr int least(int64_t a, int64_t b) { return int(a < b ? a : b); }
constexpr int most(int64_t a, int64_t b) { return int(a > b ? a : b); }

// The half of a block that a tile fills: not listed, all kept (bits null), or the bits of the lanes for each token.
struct Half {
    bool listed;
    const uint64_t *bits;
};

struct Block {
    int64_t first;  // its first token, a multiple of BLOCK
    Half half[2];
};

class Walk {
  public:
    // The row `row` of the schedule (counted through all maps), over `tokens` of the other axis; from token `from` on.
    Walk(const regard_schedule &s, int64_t row, int64_t tokens, int64_t from = 0)
        : s_(s),
          tiles_((tokens + TILE - 1) / TILE),
          run_(s.run_start[row]),
          run_end_(s.run_start[row + 1]),
          patch_(s.patch_start[row]),
          patch_end_(s.patch_start[row + 1]) {
        const int64_t tile = from / TILE;
        // the last run that starts at or before the tile may still cover it
        int64_t low = run_, high = run_end_;
        while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            if (s.run_tile[middle] + s.run_length[middle] <= tile) low = middle + 1;
            else high = middle;
        }
        run_ = low;
        low = patch_, high = patch_end_;
        while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            if (s.patch_tile[middle] < tile) low = middle + 1;
            else high = middle;
        }
        patch_ = low;
        at_ = tile;
    }

    // The next block with a listed tile that starts before token `until`; false if there is none, or a tile is bad.
    bool next(int64_t until, Block &block) {
        int64_t tile = tiles_;
        if (run_ < run_end_) {
            if (s_.run_tile[run_] < 0 || s_.run_length[run_] <= 0 || s_.run_tile[run_] > tiles_ - s_.run_length[run_])
                return wrong();
            tile = s_.run_tile[run_] > at_ ? s_.run_tile[run_] : at_;
        }
        if (patch_ < patch_end_) {
            if (s_.patch_tile[patch_] < at_ || s_.patch_tile[patch_] >= tiles_) return wrong();
            if (s_.patch_tile[patch_] < tile) tile = s_.patch_tile[patch_];
        }
        if (tile >= tiles_ || tile * TILE >= until) return false;
        const int64_t first = tile / 2 * 2;
        block.first = first * TILE;
        for (int i = 0; i < 2; ++i) block.half[i] = look(first + i);
        return !bad;
    }

    bool bad = false;

  private:
    bool wrong() {
        bad = true;
        return false;
    }

    Half look(int64_t tile) {
        at_ = tile + 1;
        while (run_ < run_end_ && s_.run_tile[run_] + s_.run_length[run_] <= tile) ++run_;
        if (patch_ < patch_end_ && s_.patch_tile[patch_] == tile) {
            const int64_t pattern = s_.patch_pattern[patch_++];
            if (pattern < 0 || pattern >= s_.pattern_count) {
                bad = true;
                return {};
            }
            return {true, s_.patterns + pattern * TILE};
        }
        if (run_ < run_end_ && s_.run_tile[run_] <= tile) {
            const bool last = s_.run_tile[run_] + s_.run_length[run_] == tile + 1;
            run_ += last;
            return {tile < tiles_, nullptr};
        }
        return {};
    }

    const regard_schedule &s_;
    const int64_t tiles_;
    int64_t run_, run_end_, patch_, patch_end_, at_;
};

// The same, one block ahead: what comes after a block is known while it is computed.
class Blocks {
  public:
    Blocks(const regard_schedule &s, int64_t row, int64_t tokens, int64_t from, int64_t until)
        : walk_(s, row, tokens, from), until_(until) {
        more_ = walk_.next(until_, next_);
    }

    // The block that `take` will give; null if there is none, or the schedule is bad.
    const Block *next() const { return more_ ? &next_ : nullptr; }
    Block take() {
        const Block now = next_;
        more_ = walk_.next(until_, next_);
        return now;
    }
    bool bad() const { return walk_.bad; }

  private:
    Walk walk_;
    const int64_t until_;
    Block next_;
    bool more_;
};

}  // namespace REGARD_ISA
}  // namespace regard
