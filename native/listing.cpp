// See listing.h.
#include "listing.h"

#include <cstring>

namespace regard {
namespace {

constexpr int64_t TILE = 64, FAR = int64_t(1) << 60;
constexpr regard_interval EVERYWHERE = {-FAR, FAR, -FAR, FAR};

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t within(int64_t x, int64_t low, int64_t high) { return least(most(x, low), high); }
uint64_t first_bits(int64_t count) { return count >= TILE ? ~uint64_t(0) : (uint64_t(1) << count) - 1; }

bool is_listed(const regard_schedule &s) { return s.interval_count || s.table.data; }

// Rows of a table: up to 64 queries, which see bytes.
class Table {
  public:
    Table(const regard_call &c, int64_t map, int64_t first, int64_t queries)
        : table_(c.by_query.table),
          queries_(queries),
          data_(table_.data + map / c.maps_head * table_.batch + map % c.maps_head * table_.head + first * table_.row) {
    }

    // Writes the mask of `count` keys, up to 64, as 64 words: one word per key, one bit per query. The rest are 0.
    void draw(int64_t first, int64_t count, uint64_t *bits) const {
        std::memset(bits, 0, TILE * sizeof *bits);
        const int64_t rows = table_.row ? queries_ : 1;
        for (int64_t row = 0; row < rows; row += 8) {
            uint64_t eight[TILE / 8] = {};  // of each key a byte, which has a bit for each of 8 queries
            for (int64_t i = 0; i < 8 && row + i < rows; ++i) {
                uint64_t keys[TILE / 8];
                read(data_ + (row + i) * table_.row + first * table_.key, count, keys);
                for (int64_t j = 0; j < TILE / 8; ++j) eight[j] |= keys[j] << i;
            }
            for (int64_t j = 0; j < TILE; ++j) bits[j] |= (eight[j / 8] >> j % 8 * 8 & 0xff) << row;
        }
        if (!table_.row)
            for (int64_t j = 0; j < TILE; ++j) bits[j] *= first_bits(queries_);
    }

  private:
    // A byte 1 for each key that is seen, and 0 for others.
    void read(const uint8_t *from, int64_t count, uint64_t *keys) const {
        uint8_t near[TILE] = {};
        if (table_.key != 1 || count < TILE) {
            for (int64_t j = 0; j < count; ++j) near[j] = from[j * table_.key];
            from = near;
        }
        std::memcpy(keys, from, TILE);
        constexpr uint64_t low = 0x7f7f7f7f7f7f7f7f, ones = 0x0101010101010101;
        for (int64_t j = 0; j < TILE / 8; ++j) keys[j] = (((keys[j] & low) + low) | keys[j]) >> 7 & ones;
    }

    const regard_table &table_;
    const int64_t queries_;
    const uint8_t *const data_;
};

// A row of tiles: its queries, at positions q0 to q1, and what an interval reaches and covers of the tiles of keys.
class Row {
  public:
    Row(const regard_call &c, int64_t row)
        : schedule_(c.by_query),
          first_(row % schedule_.rows * TILE),
          queries_(least(c.queries - first_, TILE)),
          q0_(first_ + schedule_.offset),
          keys_(c.keys),
          across_((c.keys + TILE - 1) / TILE),
          count_(int(most(schedule_.interval_count, 1))),
          table_(c, row / schedule_.rows, first_, queries_) {
        const int64_t map = schedule_.table.data ? 0 : row / schedule_.rows;
        const regard_interval *const edges =
            schedule_.interval_count ? schedule_.intervals + map * count_ : &EVERYWHERE;
        const int64_t q1 = q0_ + queries_ - 1;
        for (int i = 0; i < count_; ++i) {
            const regard_interval &x = edges[i];
            const regard_interval &near = near_[i] = {within(x.left, -FAR, FAR), within(x.right, -FAR, FAR),
                                                      within(x.start, -FAR, FAR), within(x.stop, -FAR, FAR)};
            reached_[i] = {low(near, q0_) / TILE, (high(near, q1) + TILE - 1) / TILE};
            const int64_t stop = high(near, q0_);  // the last tile of keys may be cut
            covered_[i] = {(low(near, q1) + TILE - 1) / TILE, stop == keys_ ? across_ : stop / TILE};
        }
    }

    // Calls run(from, to) for FULL tiles and mixed(tile) for tiles that may keep some pairs, in ascending order.
    template <typename Run, typename Mixed>
    void each(Run run, Mixed mixed) const {
        for (int64_t t = 0; t < across_;) {
            int64_t to = t, next = across_;
            bool reached = false;
            for (int i = 0; i < count_; ++i) {
                if (covered_[i].first <= t) to = most(to, covered_[i].last);
                if (reached_[i].first >= reached_[i].last) continue;
                if (reached_[i].first > t) next = least(next, reached_[i].first);
                else reached |= t < reached_[i].last;
            }
            if (to > t && !schedule_.table.data) run(t, to), t = to;
            else if (reached) mixed(t), ++t;
            else t = next;
        }
    }

    enum Kept { nothing, some, all };

    // Writes the bits of a tile: a word for each key, a bit for each query.
    Kept draw(int64_t tile, uint64_t *bits) const {
        uint64_t any = 0, every = first_bits(queries_);
        const int64_t first = tile * TILE, count = least(keys_ - first, TILE);
        if (schedule_.table.data) table_.draw(first, count, bits);
        for (int64_t j = 0; j < count; ++j) {
            if (schedule_.interval_count) {
                uint64_t word = 0;
                for (int i = 0; i < count_; ++i) word |= seen(near_[i], first + j);
                bits[j] = schedule_.table.data ? bits[j] & word : word;
            }
            any |= bits[j], every &= bits[j];
        }
        for (int64_t j = count; j < TILE; ++j) bits[j] = 0;
        return !any ? nothing : every == first_bits(queries_) ? all : some;
    }

  private:
    struct Tiles {
        int64_t first, last;
    };

    int64_t low(const regard_interval &x, int64_t q) const { return within(most(q + x.left, x.start), 0, keys_); }
    int64_t high(const regard_interval &x, int64_t q) const { return within(least(q + x.right, x.stop), 0, keys_); }

    // The queries that see the key.
    uint64_t seen(const regard_interval &x, int64_t key) const {
        if (key < x.start || key >= x.stop) return 0;
        const int64_t at = key - q0_, from = most(at - x.right + 1, 0), to = least(at - x.left + 1, queries_);
        return from < to ? first_bits(to) & ~first_bits(from) : 0;
    }

    const regard_schedule &schedule_;
    const int64_t first_, queries_, q0_, keys_, across_;
    const int count_;
    const Table table_;
    regard_interval near_[INTERVALS];
    Tiles reached_[INTERVALS], covered_[INTERVALS];
};

// Runs and patches of all rows, at most: a drawn tile may be either.
struct Counts {
    int64_t rows = 0, runs = 0, patches = 0;

    explicit Counts(const regard_call &c) : rows(c.maps_batch * c.maps_head * c.by_query.rows) {
        for (int64_t row = 0; row < rows; ++row)
            Row(c, row).each([&](int64_t, int64_t) { ++runs; }, [&](int64_t) { ++runs, ++patches; });
    }

    int64_t bytes() const {
        const int64_t words = 2 * (rows + 1) + 2 * runs + 2 * patches;
        return (words * 8 + 63) / 64 * 64 + patches * TILE * 8;
    }
};

}  // namespace

int64_t listing_bytes(const regard_call &c) { return is_listed(c.by_query) ? Counts(c).bytes() : 0; }

int64_t list_tiles(regard_call &c, char *memory) {
    if (!is_listed(c.by_query)) return 0;
    const Counts most(c);
    uint64_t *const patterns = reinterpret_cast<uint64_t *>(memory);
    int64_t *const run_start = reinterpret_cast<int64_t *>(patterns + most.patches * TILE);
    int64_t *const patch_start = run_start + most.rows + 1, *const run_tile = patch_start + most.rows + 1;
    int64_t *const run_length = run_tile + most.runs, *const patch_tile = run_length + most.runs;
    int64_t *const patch_pattern = patch_tile + most.patches;
    int64_t runs = 0, patches = 0;
    for (int64_t number = 0; number < most.rows; ++number) {
        run_start[number] = runs, patch_start[number] = patches;
        const auto add = [&](int64_t from, int64_t to) {
            if (runs > run_start[number] && run_tile[runs - 1] + run_length[runs - 1] == from) {
                run_length[runs - 1] += to - from;
            } else {
                run_tile[runs] = from, run_length[runs] = to - from;
                ++runs;
            }
        };
        const Row row(c, number);
        row.each(add, [&](int64_t tile) {
            const Row::Kept kept = row.draw(tile, patterns + patches * TILE);
            if (kept == Row::all) add(tile, tile + 1);
            if (kept != Row::some) return;
            patch_tile[patches] = tile, patch_pattern[patches] = patches;
            ++patches;
        });
    }
    run_start[most.rows] = runs, patch_start[most.rows] = patches;
    regard_schedule &s = c.by_query;
    s.run_start = run_start, s.run_tile = run_tile, s.run_length = run_length;
    s.patch_start = patch_start, s.patch_tile = patch_tile, s.patch_pattern = patch_pattern;
    s.patterns = patterns, s.pattern_count = patches;
    return most.bytes();
}

}  // namespace regard
